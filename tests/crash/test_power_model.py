"""The disk model, compared with a real file system and with a brute-force oracle."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.crash.lab.calls import FileCall
from tests.crash.lab.disk import Disk
from tests.crash.lab.disk_files import block_borders
from tests.crash.lab.disk_names import Folder, read_content, write_content
from tests.crash.lab.power_choices import choose, covering, permitted
from tests.crash.lab.power_promises import GONE, Promises
from tests.crash.power_histories import every_byte, histories, perform, plain, states
from tests.crash.power_oracle import left_by_brute_force
from tests.crash.power_recordings import scratch
from tests.examples import examples

# --- compared with a real file system and with brute force --------------------------------------------------


@examples(150)
@given(histories(25))
def test_the_live_content_equals_a_real_file_system(operations) -> None:
    disk = Disk()
    with scratch() as root:
        for operation in operations:
            disk.apply(perform(root, operation), root)
            assert plain(disk.live()) == plain(read_content(root))


@examples(250)
@given(histories(12), st.booleans())
def test_the_states_after_a_power_cut_equal_those_of_brute_force(operations, ordered) -> None:
    disk = Disk(ordered, borders=every_byte)
    calls = []
    with scratch() as root:
        for operation in operations:
            call = perform(root, operation)
            if call.result >= 0:
                calls.append(call)
                disk.apply(call, root)
            if len([each for each in calls if each.name != "sync"]) == 7:  # brute force is exponential
                break
    assert states(disk) == left_by_brute_force(calls, root, ordered=ordered)


@examples(60)
@given(histories(10))
def test_the_strict_mode_permits_every_state_of_the_ordered_mode(operations) -> None:
    strict, ordered = Disk(borders=every_byte), Disk(ordered=True, borders=every_byte)
    with scratch() as root:
        for operation in operations:
            call = perform(root, operation)
            strict.apply(call, root)
            ordered.apply(call, root)
    assert states(ordered) <= states(strict)


@examples(60)
@given(histories(12), st.integers(0, 99))
def test_chosen_states_are_permitted(operations, seed) -> None:
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


# --- the effect of each sync --------------------------------------------------------------------------------


@dataclass
class Script:
    """A disk and the calls on it, in a short form, below the directory "/r"."""

    disk: Disk

    def __call__(self, name: Any, path: str, to: str = "", offset: int = 0, data: bytes = b"") -> Script:
        nbytes = len(data) if data else offset
        call = FileCall(name, f"/r/{path}".rstrip("/"), f"/r/{to}", offset, data, nbytes, result=len(data))
        self.disk.apply(call, "/r")
        return self

    @property
    def left(self) -> set[Any]:
        return states(self.disk)


@pytest.fixture
def script() -> Script:
    return Script(Disk(borders=every_byte))


def test_a_synced_file_may_lack_its_name(script: Script) -> None:
    script("create", "f")("write", "f", data=b"xy")("sync", "f")
    assert script.left == {(), (("f", b"xy"),)}


def test_a_synced_name_may_lack_the_bytes(script: Script) -> None:
    script("create", "f")("sync", "")("write", "f", data=b"xy")
    assert {dict(state)["f"] for state in script.left} == {b"", b"\0\0", b"x", b"x\0", b"\0y", b"xy"}


def test_a_synced_file_with_a_synced_name_is_durable(script: Script) -> None:
    script("create", "f")("write", "f", data=b"xy")("sync", "f")("sync", "")
    assert script.left == {(("f", b"xy"),)}


def test_old_bytes_may_be_left(script: Script) -> None:
    script("create", "f")("write", "f", data=b"xy")("sync", "f")("sync", "")("write", "f", offset=1, data=b"z")
    assert script.left == {(("f", b"xy"),), (("f", b"xz"),)}


def test_a_write_is_torn_at_block_boundaries(script: Script) -> None:
    script.disk.borders = block_borders
    script("create", "f")("sync", "")("write", "f", data=b"x" * 9000)
    found = {dict(state)["f"] for state in script.left}
    for border in (512, 4608, 4096, 8192, 8704):
        assert {b"x" * border, (b"x" * border).ljust(9000, b"\0"), (b"x" * (9000 - border)).rjust(9000, b"\0")} <= found
    assert len(found) == 3 + 3 * 5


def test_a_directory_keeps_the_names_that_were_synced_in_it(script: Script) -> None:
    script("mkdir", "d")("create", "d/f")("create", "d/g")("sync", "")
    assert {frozenset(name for name, _ in dict(state)["d"]) for state in script.left} == {
        frozenset(each) for each in ((), ("f",), ("g",), ("f", "g"))
    }
    script("sync", "d")
    assert script.left == {(("d", (("f", b""), ("g", b""))),)}


def test_an_exchange_is_atomic(script: Script) -> None:
    script("create", "f")("create", "g")("write", "g", data=b"x")("sync", "g")("sync", "")("exchange", "f", "g")
    assert script.left == {(("f", b""), ("g", b"x")), (("f", b"x"), ("g", b""))}


def test_a_rename_between_directories_may_be_half_done(script: Script) -> None:
    script("mkdir", "d")("create", "d/f")("sync", "d")("sync", "")("rename", "d/f", "g")
    nowhere, below, above = (("d", ()),), (("d", (("f", b""),)),), (("d", ()), ("g", b""))
    assert script.left == {nowhere, below, above, (("d", (("f", b""),)), ("g", b""))}
    script("sync", "")
    assert script.left == {above, (("d", (("f", b""),)), ("g", b""))}
    script("sync", "d")
    assert script.left == {above}


def test_a_rename_to_another_name_of_the_same_file_does_nothing(script: Script) -> None:
    script("create", "f")("link", "f", "g")("sync", "")("rename", "f", "g")
    assert script.left == {(("f", b""), ("g", b""))}


def test_in_ordered_mode_a_rename_between_directories_is_atomic() -> None:
    script = Script(Disk(ordered=True))
    script("mkdir", "d")("create", "d/f")("sync", "d")("sync", "")("rename", "d/f", "g")
    assert script.left == {(("d", (("f", b""),)),), (("d", ()), ("g", b""))}
    script("sync", "d")
    assert script.left == {(("d", ()), ("g", b""))}


def test_in_ordered_mode_a_sync_makes_earlier_but_not_later_changes_durable() -> None:
    script = Script(Disk(ordered=True))
    script("mkdir", "d")("create", "d/e")("create", "f")("create", "d/g")("sync", "")
    before, after = (("e", b""),), (("e", b""), ("g", b""))
    assert script.left == {(("d", before), ("f", b"")), (("d", after), ("f", b""))}


def test_the_removal_of_an_old_file_may_reach_the_disk_before_the_exchange(script: Script) -> None:
    script("mkdir", "c")("create", "c/f")("mkdir", "h")("sync", "c")("sync", "")
    script("exchange", "h", "c")("unlink", "h/f")
    assert (("c", ()), ("h", ())) in script.left
    script("sync", "")
    assert script.left == {(("c", ()), ("h", ())), (("c", ()), ("h", (("f", b""),)))}


def test_a_failed_sync_makes_nothing_durable(script: Script) -> None:
    script("create", "f")
    script.disk.apply(FileCall("sync", "/r", result=-5), "/r")
    assert script.left == {(), (("f", b""),)}


def test_hidden_changes_are_left_out_unless_a_shown_one_needs_them(script: Script) -> None:
    script("mkdir", ".h")("create", ".h/f")("mkdir", ".i")("rename", ".h", "c")
    pending = script.disk.pending(lambda name: not name.startswith("."))
    assert [each.what for each in pending] == ["the directory .h", "the name .h/f", "the rename of .h to c"]
    assert pending[2].needs == (0,)


def test_a_reused_inode_is_another_file() -> None:
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
def test_unsupported_calls_are_refused(call: FileCall) -> None:
    with pytest.raises(ValueError, match=r"model|recorded without"):
        Disk().apply(call, "/r")


def test_content_is_written_to_a_real_file_system_and_read_back(tmp_path) -> None:
    disk = Disk()
    for call in (
        FileCall("mkdir", "/r/d"),
        FileCall("create", "/r/d/f"),
        FileCall("write", "/r/d/f", data=b"xyz", result=3),
        FileCall("symlink", "/r/l", "d/f"),
    ):
        disk.apply(call, "/r")
    write_content(disk.live(), str(tmp_path / "there"))
    content = read_content(str(tmp_path / "there"))
    assert isinstance(content, Folder)
    assert content.digest == disk.live().digest
    again = Disk.holding(content)
    assert (again.pending(), again.live().digest) == ([], content.digest)


# --- promises -----------------------------------------------------------------------------------------------


def promises_after(*marks: str, **before: str) -> dict[str, tuple[str, ...]]:
    promises = Promises(before)
    for mark in marks:
        promises.apply(FileCall("mark", "", data=mark.encode()))
    return dict(promises.names)


def test_promises_follow_from_the_marks() -> None:
    assert promises_after(c="1") == {"c": ("1",)}
    assert promises_after("begin c 1") == {"c": (GONE, "1")}
    assert promises_after("begin c 1\nwritten c 1\n", "staged c 1") == {"c": ("1",)}
    assert promises_after("begin c 2", "begin c 3", "written c 2", c="1") == {"c": ("2", "3")}
    assert promises_after("deleting c", c="1") == {"c": ("1", GONE)}
    assert promises_after("deleting c", "deleted c", "begin c 2", c="1") == {"c": (GONE, "2")}


@pytest.mark.parametrize("mark", ["written c 1", "deleted c", "promised c", "begin c"])
def test_a_mark_without_meaning_is_refused(mark: str) -> None:
    with pytest.raises(ValueError, match=r"has no meaning|no mark has said"):
        promises_after(mark)
