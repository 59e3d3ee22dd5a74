"""The model of a disk: compared with a real file system, and with every state that brute force finds."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.crash.lab.calls import FileCall
from tests.crash.lab.disk import Disk
from tests.crash.lab.disk_files import block_borders
from tests.crash.lab.disk_names import Folder, put, taken
from tests.crash.lab.power_choices import choose, covering, permitted
from tests.crash.lab.power_promises import GONE, Promises
from tests.crash.power_histories import every_byte, histories, perform, plain, states
from tests.crash.power_oracle import left_by_brute_force
from tests.crash.power_recordings import scratch

# --- against a real file system, and against brute force ----------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(histories(25))
def test_a_running_program_sees_what_a_real_file_system_shows(operations) -> None:
    disk = Disk()
    with scratch() as root:
        for operation in operations:
            disk.apply(perform(root, operation), root)
            assert plain(disk.live()) == plain(taken(root))


@settings(deadline=None, max_examples=250)
@given(histories(12), st.booleans())
def test_what_may_be_left_is_what_brute_force_finds(operations, ordered) -> None:
    disk = Disk(ordered, borders=every_byte)
    calls = []
    with scratch() as root:
        for operation in operations:
            call = perform(root, operation)
            if call.result >= 0:
                calls.append(call)
                disk.apply(call, root)
            if len([each for each in calls if each.name != "sync"]) == 7:  # brute force tries all subsets
                break
    assert states(disk) == left_by_brute_force(calls, root, ordered=ordered)


@settings(deadline=None, max_examples=60)
@given(histories(10))
def test_what_ordered_file_systems_leave_the_strict_reading_permits(operations) -> None:
    strict, ordered = Disk(borders=every_byte), Disk(ordered=True, borders=every_byte)
    with scratch() as root:
        for operation in operations:
            call = perform(root, operation)
            strict.apply(call, root)
            ordered.apply(call, root)
    assert states(ordered) <= states(strict)


@settings(deadline=None, max_examples=60)
@given(histories(12), st.integers(0, 99))
def test_what_is_chosen_is_permitted(operations, seed) -> None:
    disk = Disk(borders=every_byte)
    with scratch() as root:
        for operation in operations:
            disk.apply(perform(root, operation), root)
    pending = disk.pending()
    every = set(itertools.islice(permitted(pending), 20_000))
    few = choose(pending, bound=max(1, len(every) // 2), source=random.Random(seed))
    if len(every) < 20_000:
        assert set(few.chosen) <= every
        assert set(covering(pending)) <= every
        assert few.complete == (len(every) == 1)
        assert set(choose(pending, bound=len(every), source=random.Random(seed)).chosen) == every


# --- what each sync is for ----------------------------------------------------------------------------------


@dataclass
class Asked:
    """A disk with a directory "/r", and short words for calls."""

    disk: Disk

    def __call__(self, name: Any, path: str, to: str = "", offset: int = 0, data: bytes = b"") -> Asked:
        nbytes = len(data) if data else offset
        call = FileCall(name, f"/r/{path}".rstrip("/"), f"/r/{to}", offset, data, nbytes, result=len(data))
        self.disk.apply(call, "/r")
        return self

    @property
    def left(self) -> set[Any]:
        return states(self.disk)


@pytest.fixture
def asked() -> Asked:
    return Asked(Disk(borders=every_byte))


def test_a_synced_file_may_lack_its_name(asked: Asked) -> None:
    asked("create", "f")("write", "f", data=b"xy")("sync", "f")
    assert asked.left == {(), (("f", b"xy"),)}


def test_a_synced_name_may_lack_the_bytes(asked: Asked) -> None:
    asked("create", "f")("sync", "")("write", "f", data=b"xy")
    assert {dict(state)["f"] for state in asked.left} == {b"", b"\0\0", b"x", b"x\0", b"\0y", b"xy"}


def test_both_synced_is_durable(asked: Asked) -> None:
    asked("create", "f")("write", "f", data=b"xy")("sync", "f")("sync", "")
    assert asked.left == {(("f", b"xy"),)}


def test_old_bytes_may_be_left(asked: Asked) -> None:
    asked("create", "f")("write", "f", data=b"xy")("sync", "f")("sync", "")("write", "f", offset=1, data=b"z")
    assert asked.left == {(("f", b"xy"),), (("f", b"xz"),)}


def test_a_write_is_torn_at_borders_of_blocks(asked: Asked) -> None:
    asked.disk.borders = block_borders
    asked("create", "f")("sync", "")("write", "f", data=b"x" * 9000)
    found = {dict(state)["f"] for state in asked.left}
    for border in (512, 4608, 4096, 8192, 8704):
        assert {b"x" * border, (b"x" * border).ljust(9000, b"\0"), (b"x" * (9000 - border)).rjust(9000, b"\0")} <= found
    assert len(found) == 3 + 3 * 5


def test_a_directory_is_left_with_what_was_synced_in_it(asked: Asked) -> None:
    asked("mkdir", "d")("create", "d/f")("create", "d/g")("sync", "")
    assert {frozenset(name for name, _ in dict(state)["d"]) for state in asked.left} == {
        frozenset(each) for each in ((), ("f",), ("g",), ("f", "g"))
    }
    asked("sync", "d")
    assert asked.left == {(("d", (("f", b""), ("g", b""))),)}


def test_an_exchange_is_done_or_not(asked: Asked) -> None:
    asked("create", "f")("create", "g")("write", "g", data=b"x")("sync", "g")("sync", "")("exchange", "f", "g")
    assert asked.left == {(("f", b""), ("g", b"x")), (("f", b"x"), ("g", b""))}


def test_a_rename_between_directories_may_be_done_in_one_of_them(asked: Asked) -> None:
    asked("mkdir", "d")("create", "d/f")("sync", "d")("sync", "")("rename", "d/f", "g")
    nowhere, below, above = (("d", ()),), (("d", (("f", b""),)),), (("d", ()), ("g", b""))
    assert asked.left == {nowhere, below, above, (("d", (("f", b""),)), ("g", b""))}
    asked("sync", "")
    assert asked.left == {above, (("d", (("f", b""),)), ("g", b""))}
    asked("sync", "d")
    assert asked.left == {above}


def test_a_rename_to_another_name_of_the_same_file_does_nothing(asked: Asked) -> None:
    asked("create", "f")("link", "f", "g")("sync", "")("rename", "f", "g")
    assert asked.left == {(("f", b""), ("g", b""))}


def test_with_ordered_a_rename_between_directories_is_done_or_not() -> None:
    asked = Asked(Disk(ordered=True))
    asked("mkdir", "d")("create", "d/f")("sync", "d")("sync", "")("rename", "d/f", "g")
    assert asked.left == {(("d", (("f", b""),)),), (("d", ()), ("g", b""))}
    asked("sync", "d")
    assert asked.left == {(("d", ()), ("g", b""))}


def test_with_ordered_a_sync_takes_along_what_was_done_before_and_not_what_was_done_after() -> None:
    asked = Asked(Disk(ordered=True))
    asked("mkdir", "d")("create", "d/e")("create", "f")("create", "d/g")("sync", "")
    before, after = (("e", b""),), (("e", b""), ("g", b""))
    assert asked.left == {(("d", before), ("f", b"")), (("d", after), ("f", b""))}


def test_what_was_replaced_may_be_removed_before_it_was_replaced(asked: Asked) -> None:
    asked("mkdir", "c")("create", "c/f")("mkdir", "h")("sync", "c")("sync", "")
    asked("exchange", "h", "c")("unlink", "h/f")
    assert (("c", ()), ("h", ())) in asked.left
    asked("sync", "")
    assert asked.left == {(("c", ()), ("h", ())), (("c", ()), ("h", (("f", b""),)))}


def test_a_sync_that_failed_makes_nothing_durable(asked: Asked) -> None:
    asked("create", "f")
    asked.disk.apply(FileCall("sync", "/r", result=-5), "/r")
    assert asked.left == {(), (("f", b""),)}


def test_what_is_hidden_is_left_out_unless_it_is_needed(asked: Asked) -> None:
    asked("mkdir", ".h")("create", ".h/f")("mkdir", ".i")("rename", ".h", "c")
    pending = asked.disk.pending(lambda name: not name.startswith("."))
    assert [each.what for each in pending] == ["the directory .h", "the name .h/f", "the rename of .h to c"]
    assert pending[2].needs == (0,)


def test_an_inode_that_is_used_again_is_another_file() -> None:
    disk = Disk()
    for call in (
        FileCall("create", "/r/f", inode=7),
        FileCall("unlink", "/r/f"),
        FileCall("create", "/r/g", inode=7),
        FileCall("write", "/r/elsewhere", data=b"x", result=1, inode=7),
    ):
        disk.apply(call, "/r")
    assert plain(disk.live()) == (("g", b"x"),)


@pytest.mark.parametrize(
    "call",
    [
        FileCall("create", "/elsewhere"),
        FileCall("write", "/r/f", nbytes=1, result=1),
        FileCall("sync", "/r/f"),
        FileCall("rename", "/r/f", "/r/g"),
        FileCall("create", "/r/d/f"),
        FileCall("create", "/r", flags=os.O_TMPFILE),
    ],
)
def test_what_the_model_does_not_know_is_refused(call: FileCall) -> None:
    with pytest.raises(ValueError, match=r"model|recorded without"):
        Disk().apply(call, "/r")


def test_what_is_left_can_be_put_on_a_real_file_system_and_taken_from_it(tmp_path) -> None:
    disk = Disk()
    for call in (
        FileCall("mkdir", "/r/d"),
        FileCall("create", "/r/d/f"),
        FileCall("write", "/r/d/f", data=b"xyz", result=3),
        FileCall("symlink", "/r/l", "d/f"),
    ):
        disk.apply(call, "/r")
    put(disk.live(), str(tmp_path / "there"))
    content = taken(str(tmp_path / "there"))
    assert isinstance(content, Folder)
    assert content.digest == disk.live().digest
    again = Disk.holding(content)
    assert (again.pending(), again.live().digest) == ([], content.digest)


# --- promises -----------------------------------------------------------------------------------------------


def heard(*marks: str, **before: str) -> dict[str, tuple[str, ...]]:
    promises = Promises(before)
    for mark in marks:
        promises.hear(FileCall("mark", "", data=mark.encode()))
    return dict(promises.names)


def test_promises() -> None:
    assert heard(c="1") == {"c": ("1",)}
    assert heard("begin c 1") == {"c": (GONE, "1")}
    assert heard("begin c 1\nwritten c 1\n", "staged c 1") == {"c": ("1",)}
    assert heard("begin c 2", "begin c 3", "written c 2", c="1") == {"c": ("2", "3")}
    assert heard("deleting c", c="1") == {"c": ("1", GONE)}
    assert heard("deleting c", "deleted c", "begin c 2", c="1") == {"c": (GONE, "2")}


@pytest.mark.parametrize("mark", ["written c 1", "deleted c", "promised c", "begin c"])
def test_a_mark_without_meaning_is_refused(mark: str) -> None:
    with pytest.raises(ValueError, match=r"has no meaning|no mark has said"):
        heard(mark)
