"""Deletions and renamings on the disks of hosts: messages that are lost, come twice or late, and disks that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.storage.host_changes import HostChange, HostChanges, HostReport
from aiockpt.storage.hosts import HostDisks
from tests.disks import HostDisk, disks_in, read, union_of, write

STEP = "/run/step-00000001"


@pytest.fixture
def changes() -> Iterator[HostChanges]:
    """Return the changes of rank 0, whose own disk is ``a``; a part there can't be changed if its mark is "bad"."""

    def change_own(change: HostChange, workers: Workers) -> None:
        if change.mark == "bad":
            raise OSError("it is bad")

    made = HostChanges(change_own)
    made.serve("a")
    yield made
    made.close(60)


def reported(changes: HostChanges, *disks: str, problem: str = "") -> None:
    """Report what these disks have done of what is to do."""
    changes.note([HostReport(change, problem) for change in changes.due() if change.disk in disks])


def test_disks_that_come_first_are_told_first(changes: HostChanges) -> None:
    changes.add("/1", {"a": "x", "b": "y", "c": "z"}, first={"b"})
    assert changes.due() == [HostChange("b", "/1", "y")]
    assert changes.due() == [HostChange("b", "/1", "y")]  # until it has reported
    reported(changes, "b")
    assert changes.due() == [HostChange("a", "/1", "x"), HostChange("c", "/1", "z")]
    reported(changes, "c")
    assert (changes.due(), changes.left(renames=False)) == ([HostChange("a", "/1", "x")], 1)
    reported(changes, "a")
    assert (changes.due(), changes.left(renames=False)) == ([], 0)


def test_disk_that_is_away_holds_up_none(changes: HostChanges) -> None:
    """The one that would come first is not in the job."""
    changes.add("/1", {"a": "x", "b": "y"}, first={"gone"})
    assert {change.disk for change in changes.due()} == {"a", "b"}


def test_order_is_kept_where_it_counts(changes: HostChanges) -> None:
    """What one disk makes no longer count goes in one message, in its order; other disks wait."""
    with changes.in_order():
        for path, first in (("/4", "b"), ("/3", "b"), ("/2", "a"), ("/1", "b")):
            changes.add(path, {"a": path, "b": path}, first={first})
    changes.add("/0", {"a": "0", "b": "0"}, first={"a"})  # of a policy
    assert [(change.disk, change.path) for change in changes.due()] == [
        ("b", "/4"),
        ("b", "/3"),
        ("b", "/1"),
        ("a", "/0"),
    ]
    reported(changes, "b")
    due = [(change.disk, change.path) for change in changes.due()]
    assert due == [("a", "/4"), ("a", "/3"), ("a", "/2"), ("a", "/1"), ("a", "/0")]


def test_report_of_something_else_counts_for_nothing(changes: HostChanges) -> None:
    """Of a part that was replaced since, of a disk that has none, of a path that is not changed, and a second one."""
    changes.add("/1", {"a": "new", "b": "new"})
    for stale in (HostChange("a", "/1", "old"), HostChange("c", "/1", "new"), HostChange("a", "/2", "new")):
        changes.note([HostReport(stale)])
    assert len(changes.due()) == 2
    for _ in range(2):
        changes.note([HostReport(HostChange("b", "/1", "new"))])
    assert changes.due() == [HostChange("a", "/1", "new")]


def test_deletion_that_fails_is_tried_again(changes: HostChanges) -> None:
    changes.add("/1", {"b": "x", "c": "x"})
    reported(changes, "b", problem="no")
    with pytest.raises(aiockpt.DeleteError, match="no"):
        changes.left(renames=False)
    assert changes.left(renames=True) == 0
    assert len(changes.due()) == 2
    reported(changes, "b", "c")
    assert changes.left(renames=False) == 0


def test_deletion_that_fails_first_holds_up_no_other(changes: HostChanges) -> None:
    with changes.in_order():
        changes.add("/2", {"a": "x", "b": "x"}, first={"b"})
        changes.add("/1", {"a": "x", "b": "x"}, first={"a"})
    reported(changes, "b", problem="no")
    assert [(change.disk, change.path) for change in changes.due()] == [("b", "/2"), ("a", "/1")]


def test_renaming_that_fails_is_given_up(changes: HostChanges) -> None:
    changes.add("/1", {"b": "x", "c": "x"}, first={"b"}, to="1.damaged")
    reported(changes, "b", problem="no")
    assert changes.due() == [HostChange("c", "/1", "x", "1.damaged")]
    reported(changes, "c", problem="no")
    assert changes.left(renames=True) == 0


def test_own_changes_are_reported_once(changes: HostChanges) -> None:
    changes.add("/1", {"a": "x"})
    changes.add("/2", {"a": "bad"})
    assert changes.accept([HostChange("b", "/1", "x")]) is None
    assert changes.accept(changes.due()) is not None
    changes.wait()
    assert [(report.change.path, report.problem) for report in changes.reports()] == [("/1", ""), ("/2", "it is bad")]
    assert changes.reports() == []
    with pytest.raises(aiockpt.DeleteError, match="bad"):
        changes.raise_problem("/2")  # which forgets it
    assert changes.due() == []


@pytest.mark.asyncio
async def test_nothing_is_changed_while_a_part_is_published(changes: HostChanges) -> None:
    workers = Workers(1, "tests")
    async with changes.held_off(workers):
        done = changes.accept([HostChange("a", "/1", "x")])
        assert done is not None
        assert not done.done()
    await workers.run(done.result)
    workers.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("to", ["", "aside"])
async def test_order_that_comes_late_changes_no_later_save(tmp_path: Path, to: str) -> None:
    """The part on the disk is of another save by now, which has the same path."""
    workers = Workers(2, "tests")
    disks = disks_in(tmp_path, "a", "b")
    await write(disks, ["a", "b"], STEP, "save 1", workers)
    marks, _ = union_of(disks, "a")._seen(STEP)
    files = await write(disks, ["a", "b"], STEP, "save 2", workers, overwrite=True)
    host = HostDisks([disks["b"]], "b")
    for path in (STEP, "/run/step-00000009"):  # where nothing is
        done = host.changes.accept([HostChange("b", path, marks["b"], to)])
        assert done is not None
        await workers.run(done.result)
    assert [report.problem for report in host.changes.reports()] == ["", ""]
    assert await read(union_of(disks, "a"), STEP, workers) == files
    assert not Path(cast("HostDisk", disks["b"].storage).place("/run/aside")).exists()
    host.changes.close(60)
    workers.close()
