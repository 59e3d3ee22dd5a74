"""Each group of tests of the conformance suite fails for a storage that is broken in that respect."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from aiockpt.storage import LocalStorage
from aiockpt.storage.base import LeaseFacts, RunLease, Storage
from aiockpt.storage.local import storage as local_storage
from aiockpt.storage.local import transaction as local_transaction
from aiockpt.storage.local.belonging import remove
from aiockpt.storage.local.entries import LocalListing
from aiockpt.storage.local.sink import LocalPartSink, LocalSink
from aiockpt.storage.local.temp_dir import sweep
from aiockpt.storage.local.transaction import JoinedTransaction, LocalTransaction, ResumableTransaction
from aiockpt.testing import StorageConformance
from tests.storage import memory_storage
from tests.storage.memory_storage import MemoryStorage

GATE = threading.Event()  # of threads that a broken storage leaves behind

Sink, Source, Transaction = memory_storage._MemorySink, memory_storage._MemorySource, memory_storage._MemoryTransaction


class StampingStorage(LocalStorage):
    """Gives the stamps of a directory's checkpoints all at once."""

    def stamps(self, directory: str, count: int) -> dict[str, str]:
        found = {name: self.stamp(self.below(directory, name)) for name in os.listdir(directory) if name[0] != "."}
        return {name: stamp for name, stamp in found.items() if stamp is not None}


# --- files ----------------------------------------------------------------------------------------------


async def copies_late(self, view, free=lambda: None):
    asyncio.get_running_loop().call_soon(self._data.extend, view)
    free()


async def frees_twice(self, view, free=lambda: None):
    self._data += view
    free(), free()


async def never_frees(self, view, free=lambda: None):
    self._data += view


async def frees_in_a_thread(self, view, free=lambda: None):
    self._data += view
    await asyncio.to_thread(free)


async def loses_a_byte(self):
    self._files[self._name] = bytes(self._data[:-1])


def reads_the_beginning(self, name, offset, view, seen=None):
    view[:] = self._files[name][: len(view)]


def sees_nothing(self, name, offset, view, seen=None):
    view[:] = self._files[name][offset : offset + len(view)]


async def deletes_all(self, path, *, workers):
    self.checkpoints.clear()


async def cleans_the_living(self, directory, *, older_than_s=None, workers):
    for name in os.listdir(directory):
        remove(os.path.join(directory, name))
    return []


def moves_the_file(source, target, *_: Any, **__: Any) -> bool:
    if found := os.path.exists(source):
        os.rename(source, target)
    return found


def anything_goes(*_: Any, **__: Any) -> None:
    pass


async def nothing(*_: Any, **__: Any) -> None:
    pass


# --- the end of a transaction ---------------------------------------------------------------------------


async def shows_files_early(self, name, nbytes):
    self._storage.checkpoints[self._path] = self.files
    return Sink(self.files, name, nbytes)


async def publishes_in_two_steps(self, documents=MappingProxyType({})):
    self._storage.check(self._path, overwrite=self._overwrite)
    self._storage.checkpoints[self._path] = self.files
    await asyncio.sleep(0)
    await self.write_files(documents)


async def publishes_after_a_pause(self, documents=MappingProxyType({})):
    await self.write_files(documents)
    self._storage.check(self._path, overwrite=self._overwrite)
    await asyncio.sleep(0)
    self._storage.checkpoints[self._path] = self.files


async def changes_what_is_read(self, documents=MappingProxyType({})):
    await self.write_files(documents)
    checkpoint = self._storage.checkpoints.setdefault(self._path, {})
    checkpoint.clear()
    checkpoint.update(self.files)


async def publishes_though_aborted(self):
    self._storage.checkpoints[self._path] = self.files


async def sleeps_on_the_loop(self, documents=MappingProxyType({})):
    time.sleep(0)  # noqa: ASYNC251
    await self.write_files(documents)
    self._storage.checkpoints[self._path] = self.files


async def leaves_a_thread(self, view, free=lambda: None):
    asyncio.get_running_loop().run_in_executor(self._workers, GATE.wait)
    os.pwrite(self._file.fileno(), view, self._written)
    self._written += len(view)
    await asyncio.sleep(0)
    free()


# --- several processes ----------------------------------------------------------------------------------


async def removes_all(self):
    for sink in self._sinks:
        await sink.close()
    remove(self._hidden)
    remove(self._path)


async def discards_in_two_steps(self):
    for file in self._files:
        await self._workers.run(remove, file.path)
    await self._workers.run(sweep, self._hidden, self._identity)


async def writes_backwards(self, files):
    for name in reversed(files):
        await self._workers.run(Path(self._hidden, name).write_bytes, files[name])


async def is_always_open(self):
    return "open"


def writes_whole_blocks(self, view, runs):
    for offset, at, nbytes in runs:
        block = bytes(offset % 4096) + view[at : at + nbytes]
        os.pwrite(self._fd, block, offset - offset % 4096)


# --- directories ----------------------------------------------------------------------------------------


def looks_above(self, path, budget=None):
    return LocalListing(os.path.dirname(path))


def lists_everything(self):
    for name in self.folders:
        for file in os.listdir(os.path.join(self.path, name)):
            self.files[f"{name}/{file}"] = os.path.getsize(os.path.join(self.path, name, file))


def fetches_the_beginning(self, name, offset, length):
    return Path(self.path, name).read_bytes()[:length]


def copies_aside(self, path, names):
    aside = os.path.join(os.path.dirname(path), names[0])
    shutil.copytree(path, aside)
    return aside


def replaces_aside(self, path, names):
    aside = os.path.join(os.path.dirname(path), names[0])
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


class Leased(RunLease):
    def check(self) -> None:
        pass

    def release(self) -> None:
        pass


def leases_to_all(self, directory):
    return Leased()


def names_another_owner(self, directory):
    return LeaseFacts("elsewhere", 1, time.time())


# --- the tests that find it ------------------------------------------------------------------------------

CANCELLED = "a_cancelled_step_leaves_all_or_nothing"
CUT = {"how": "waiting", "overwrite": False}
FREED = "each_view_is_freed_once"
OWNER_DIES = "what_a_dead_owner_has_begun_is_removed"
STAMP = "a_stamp_of_another_transaction_takes_nothing_over"
RACE = "one_of_a_publisher_and_a_discarder_wins"
LEASE = "a_lease_has_one_owner"
STAMPS = "stamps_of_all_change_with_each"
FINISHING = "a_live_manager_does_not_finish_for_a_dead_one"


async def takes_parts_for_whole(self):
    return await self.sizes()


BROKEN: list[tuple[Any, str, Any, str, dict[str, Any]]] = [
    (Sink, "finish", loses_a_byte, "a_file_is_read_as_it_was_written", {"nbytes": 1, "announced": True}),
    (Transaction, "write_files", nothing, "files_are_written_at_the_same_time", {}),
    (Sink, "write", copies_late, FREED, {"announced": False}),
    (Sink, "write", frees_twice, FREED, {"announced": True}),
    (Sink, "write", never_frees, FREED, {"announced": True}),
    (Sink, "write", frees_in_a_thread, FREED, {"announced": False}),
    (Transaction, "abort", publishes_though_aborted, "saves_to_different_paths_do_not_meet", {}),
    (Sink, "finish", loses_a_byte, "a_checkpoint_may_be_one_file", {}),
    (LocalTransaction, "seal_folder", nothing, "what_others_put_into_the_folder_is_a_part", {}),
    (Source, "read", reads_the_beginning, "ranges_are_read", {}),
    (Source, "read", sees_nothing, "ranges_are_read", {}),
    (Source, "read", sees_nothing, "what_is_not_there_is_an_error", {}),
    (MemoryStorage, "delete", nothing, "a_missing_path_is_an_error", {}),
    (Transaction, "commit", changes_what_is_read, "an_open_checkpoint_can_be_replaced", {}),
    (MemoryStorage, "delete", deletes_all, "a_checkpoint_is_deleted", {}),
    (LocalStorage, "clean", cleans_the_living, "what_is_being_written_is_not_cleaned", {}),
    (Transaction, "create", shows_files_early, "the_commit_makes_everything_visible", {"overwrite": False}),
    (MemoryStorage, "check", anything_goes, "a_taken_path_is_refused", {}),
    (Transaction, "commit", publishes_after_a_pause, "one_of_two_publishers_wins", {"overwrite": False}),
    (Transaction, "abort", publishes_though_aborted, "an_abort_leaves_nothing", {"overwrite": False}),
    (
        ResumableTransaction,
        "whole_files",
        takes_parts_for_whole,
        "a_suspended_copy_is_gone_on_with",
        {"overwrite": False},
    ),
    (LocalTransaction, "revoke", anything_goes, "a_revoked_commit_fails_unless_it_has_won", {}),
    (Transaction, "commit", publishes_in_two_steps, CANCELLED, {**CUT, "step": "commit"}),
    (local_transaction, "adopt", moves_the_file, "files_of_another_checkpoint_are_taken_over", {"ends": "commit"}),
    (local_transaction, "remove_own", anything_goes, CANCELLED, {**CUT, "step": "create"}),
    (LocalSink, "write", leaves_a_thread, CANCELLED, {**CUT, "step": "write"}),
    (Transaction, "commit", sleeps_on_the_loop, "the_loop_is_not_blocked", {}),
    (JoinedTransaction, "release", removes_all, "the_files_of_all_are_published", {}),
    (LocalTransaction, "finalize", removes_all, "the_files_of_all_are_published", {}),
    (JoinedTransaction, "status", is_always_open, "what_all_have_written_is_removed", {}),
    (local_transaction, "remove_own", anything_goes, "what_all_have_written_is_removed", {}),
    (local_storage, "new_ticket", lambda: ".the-same", "a_ticket_is_chosen_before", {}),
    (LocalTransaction, "write_files", writes_backwards, "documents_are_written_in_order", {}),
    (LocalStorage, "__reduce__", lambda self: (MemoryStorage, ()), "pickled_it_is_the_same_storage", {}),
    (LocalTransaction, "_remove", nothing, "what_a_dead_owner_has_begun_is_published", {"overwrite": False}),
    (local_transaction, "remove_own", anything_goes, OWNER_DIES, {"by": "abort"}),
    (JoinedTransaction, "discard_all", nothing, OWNER_DIES, {"by": "discard_all"}),
    (LocalTransaction, "status", is_always_open, "what_the_dead_owner_has_ended_stays_so", {"published": True}),
    (local_transaction, "check_own", anything_goes, STAMP, {"by": "commit"}),
    (JoinedTransaction, "discard_all", discards_in_two_steps, RACE, {"owner_lives": True}),
    (
        LocalPartSink,
        "_write",
        writes_whole_blocks,
        "several_processes_write_parts_of_a_file",
        {"is_single_file": False},
    ),
    (LocalStorage, "split", lambda self, path: (path, ""), "names_are_canonical", {}),
    (MemoryStorage, "look", anything_goes, "what_an_attribute_excludes_is_refused", {}),
    (LocalListing, "fetch", fetches_the_beginning, "a_checkpoint_is_looked_at", {}),
    (LocalStorage, "look", looks_above, "a_file_is_looked_at", {}),
    (LocalListing, "list_below", lists_everything, "a_run_is_looked_at", {}),
    (LocalStorage, "stamp", lambda self, path: "the same", "a_stamp_changes_with_the_contents", {}),
    (
        StampingStorage,
        "stamps",
        lambda self, directory, count: dict.fromkeys(os.listdir(directory), "the same"),
        STAMPS,
        {},
    ),
    (LocalStorage, "set_aside", copies_aside, "a_damaged_checkpoint_is_set_aside", {}),
    (LocalStorage, "set_aside", replaces_aside, "a_damaged_checkpoint_is_set_aside", {}),
    (LocalStorage, "lease", leases_to_all, LEASE, {}),
    (LocalStorage, "lease", leases_to_all, "one_of_several_gets_the_lease", {}),
    (LocalStorage, "owner_of", names_another_owner, LEASE, {}),
    (LocalStorage, "is_finishing", lambda self, directory: True, FINISHING, {}),
    (Source, "read", reads_the_beginning, "a_state_comes_back_bit_for_bit", {}),
    (MemoryStorage, "check", anything_goes, "a_state_is_overwritten", {}),
    (
        Transaction,
        "abort",
        publishes_though_aborted,
        "a_failed_save_leaves_nothing",
        {"step": "write", "overwrite": False},
    ),
]


class Conformance(StorageConformance):
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.revokes = self.shares = self.looks = self.sets_aside = self.leases = isinstance(storage, LocalStorage)

    def make_storage(self, tmp_path: Path) -> Storage:
        return self._storage


def fails(suite: Conformance, test: str, parameters: dict[str, Any], path: Path) -> bool:
    """Run one test; return whether it has failed."""
    GATE.clear()
    path.mkdir()
    try:
        with suite.free_place(path) as place:
            try:
                getattr(suite, f"test_{test}")(place=place, **parameters)
            finally:
                GATE.set()
                place.workers.close()
    except (Exception, pytest.fail.Exception):
        return True
    finally:
        shutil.rmtree(path)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "broken", "test", "parameters"),
    BROKEN,
    ids=[f"{case[0].__name__.rpartition('.')[2]}-{case[1]}-{case[3]}" for case in BROKEN],
)
def test_a_broken_storage_is_found(
    owner: Any, name: str, broken: Any, test: str, parameters: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_memory = owner in (MemoryStorage, Sink, Source, Transaction)
    suite = Conformance(MemoryStorage() if in_memory else StampingStorage())
    assert not fails(suite, test, parameters, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        assert fails(suite, test, parameters, tmp_path / "broken")


def test_each_test_can_fail() -> None:
    tests = {name for name in dir(StorageConformance) if name.startswith("test_")}
    assert tests == {f"test_{case[3]}" for case in BROKEN}
