"""Tests of storages: what is written is what is read, at once or not at all, whatever interrupts it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest
import torch
from isal.isal_zlib import crc32

from aiockpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    CorruptCheckpointError,
    DeleteError,
    LoadError,
    SaveError,
)
from aiockpt.format.manifest.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.storage.base import Transaction
from aiockpt.sync_checkpointer import SyncCheckpointer
from aiockpt.testing.conformance.suite import (
    BLOCK_BYTES,
    DATA,
    METADATA,
    MORE,
    ROUNDS,
    WHOLE,
    WRITE_BYTES,
    Interruption,
    StoragePath,
    Suite,
    aligned,
    blocking_calls,
    data_of,
    metadata_of,
    on_a_loop,
    race,
    read_all,
    write,
)
from aiockpt.testing.storages import FaultyStorage

T = TypeVar("T")

_SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, WRITE_BYTES, 3 * WRITE_BYTES + 17]


class FileTests(Suite):
    """Files that are written, read and deleted."""

    @pytest.mark.parametrize("announced", [True, False], ids=["announced", "open-ended"])
    @pytest.mark.parametrize("nbytes", _SIZES)
    @on_a_loop()
    async def test_a_file_is_read_as_it_was_written(self, nbytes: int, announced: bool, place: StoragePath) -> None:
        """Any size, announced or not."""
        data = data_of(nbytes)
        await place.save({DATA: data, METADATA: WHOLE}, announced=announced)
        assert await place.contents() == {DATA: data, METADATA: WHOLE}

    @pytest.mark.parametrize("ends", ["commit", "abort", "copy"])
    @on_a_loop("adopts")
    async def test_files_of_another_checkpoint_are_taken_over(self, ends: str, place: StoragePath) -> None:
        """They are files of both checkpoints: neither deleting nor aborting one changes the other."""
        files = {DATA: data_of(3 * WRITE_BYTES + 5), MORE: data_of(5000, seed=1), METADATA: WHOLE}
        base, facts = place.named("base"), {name: FileFacts(len(data), crc32(data)) for name, data in files.items()}
        whole = {**files, MANIFEST_NAME: encode_manifest(Manifest("", "", files=facts))}
        await base.save(whole)
        taken, other = "__0_7.distcp", FileFacts(5000, facts[MORE].crc ^ 1)
        wanted = {DATA: (taken, facts[DATA]), MORE: (MORE, other), "__9_9.distcp": ("__9_9.distcp", facts[DATA])}
        storage, path, workers = place.storage, place.path, place.workers
        save = storage.resume(path, "0123456789abcdef", workers=workers) if ends == "copy" else place.begin()
        transaction = await save
        assert [*await transaction.adopt(base.path, wanted)] == [DATA]
        assert not await transaction.adopt(place.path_for("absent"), {DATA: ("__0_8.distcp", facts[DATA])})
        await write(transaction, MORE, b"own")
        if ends == "abort":
            await transaction.abort()
            assert (await place.found(), await base.contents()) == (None, whole)
            return
        await transaction.vouch({taken: facts[DATA]})
        documents = {METADATA: metadata_of("new", taken)}
        await transaction.commit(documents)
        both = await place.contents(), await base.contents()
        assert both == ({taken: files[DATA], MORE: b"own", **documents}, whole)
        await base.delete()
        assert await place.contents() == both[0]

    @on_a_loop()
    async def test_files_are_written_at_the_same_time(self, place: StoragePath) -> None:
        """Several sinks of a transaction are open at once, and their writes are interleaved."""
        files = {f"__2_{number}.distcp": data_of(3 * WRITE_BYTES + number, seed=number) for number in range(8)}
        transaction = await place.begin()
        small: dict[str, bytes | bytearray | memoryview] = {
            MORE: bytearray(b"more"),
            "__1_2.distcp": memoryview(data_of(3 * WRITE_BYTES)),
            METADATA: b"",
        }
        await asyncio.gather(transaction.write_files(small), *(write(transaction, *each) for each in files.items()))
        await transaction.commit()
        assert await place.contents() == {**files, **{name: bytes(data) for name, data in small.items()}}

    @pytest.mark.parametrize("announced", [True, False], ids=["announced", "open-ended"])
    @on_a_loop()
    async def test_each_view_is_freed_once(self, announced: bool, place: StoragePath) -> None:
        """On the loop's thread, at the latest by `FileSink.finish`; the memory is used for other things at once."""
        files = {name: data_of(5 * WRITE_BYTES + 99, seed) for seed, name in enumerate((DATA, MORE))}
        transaction, freed = await place.begin(), list[tuple[str, int, int]]()

        async def send(name: str, data: bytes) -> None:
            sink = await transaction.create(name, len(data) if announced else None)
            for start in range(0, len(data), WRITE_BYTES):
                view = aligned(data[start : start + WRITE_BYTES])

                def free(view: memoryview = view, start: int = start) -> None:
                    view[:] = b"\xff" * len(view)
                    freed.append((name, start, threading.get_ident()))

                await sink.write(view, free)
            await sink.finish()
            assert len([each for each in freed if each[0] == name]) == 6, f"views of {name} are still in use"

        await asyncio.gather(*(send(name, data) for name, data in files.items()))
        await transaction.commit({METADATA: WHOLE})
        assert sorted(freed) == [
            (name, start * WRITE_BYTES, threading.get_ident()) for name in sorted(files) for start in range(6)
        ]
        assert await place.contents() == {**files, METADATA: WHOLE}

    @on_a_loop()
    async def test_saves_to_different_paths_do_not_meet(self, place: StoragePath) -> None:
        """Transactions that are open at the same time are independent of each other."""
        one, other = [await place.named(name).begin() for name in "ab"]
        await asyncio.gather(write(one, DATA, b"one"), write(other, DATA, b"other"))
        await other.abort()
        await one.commit({METADATA: WHOLE})
        assert await place.named("a").contents() == {DATA: b"one", METADATA: WHOLE}
        assert await place.named("b").found() is None

    @on_a_loop("single_files")
    async def test_a_checkpoint_may_be_one_file(self, place: StoragePath) -> None:
        """The empty name is the checkpoint itself."""
        place, data = place.named("c.safetensors"), b"\2\0\0\0\0\0\0\0{}"
        await place.save({"": data})
        assert list((await place.contents()).values()) == [data]

    @on_a_loop()
    async def test_what_others_put_into_the_folder_is_a_part(self, place: StoragePath) -> None:
        """If the storage has `Traits.folders`; else none is given."""
        transaction = await place.begin()
        await write(transaction, DATA, b"own")
        if not self.has(place.storage, "folders"):
            with pytest.raises(SaveError):
                await transaction.open_folder()
            await transaction.abort()
            return
        await place.call(Path(await transaction.open_folder(), MORE).write_bytes, b"other")
        facts = await transaction.seal_folder({DATA})
        assert {name: each.nbytes for name, each in facts.items()} == {MORE: 5}
        await transaction.commit({METADATA: WHOLE})
        assert await place.contents() == {DATA: b"own", MORE: b"other", METADATA: WHOLE}

    # --- reading ----------------------------------------------------------------------------------

    @on_a_loop()
    async def test_ranges_are_read(self, place: StoragePath) -> None:
        """Any offset and length, by several threads; ``read`` shows every byte in order, ``read_runs`` reads many."""
        files = {name: data_of(2 * WRITE_BYTES + 123, seed) for seed, name in enumerate((DATA, MORE))}
        await place.save({**files, METADATA: WHOLE})
        nbytes, draw = len(files[DATA]), random.Random(0)
        runs = [(0, 0), (0, nbytes), (nbytes - 1, 1), (BLOCK_BYTES, BLOCK_BYTES)]
        for most in (10, 5000, 1 << 20):
            offsets = [draw.randrange(nbytes) for _ in range(20)]
            runs += [(offset, draw.randint(0, min(most, nbytes - offset))) for offset in offsets]
        async with place.opened() as source:

            def check(name: str, offset: int, length: int) -> None:
                view, seen = memoryview(bytearray(length)), bytearray()
                source.read(name, offset, view, seen.extend)
                assert view == files[name][offset : offset + length], f"{length} bytes at {offset} are others"
                assert seen == view, f"seen was not called with all of {length} bytes at {offset}, in order"

            await asyncio.gather(*(place.call(check, name, *run) for name, run in itertools.product(files, runs)))
            source.share()
            with contextlib.suppress(LoadError), await place.call(source.map, MORE) as mapped:  # on a file system
                assert mapped[:] == files[MORE]
            together = memoryview(bytearray(sum(length for _, length in runs)))
            await place.call(source.read_runs, DATA, runs, together)
            assert together == b"".join(files[DATA][offset : offset + length] for offset, length in runs)

    @on_a_loop()
    async def test_what_is_not_there_is_an_error(self, place: StoragePath) -> None:
        """Bytes behind the end of a file, other files, and names that lead out of the checkpoint."""
        await place.save({DATA: data_of(5000), METADATA: WHOLE})
        async with place.opened() as source:
            outside = f"../{os.path.basename(place.path)}/{DATA}"
            for name, *run in ((DATA, 4000, 1001), (DATA, 5000, 1), (DATA, 1 << 40, 10), (MORE, 0, 1), (outside, 0, 1)):
                with pytest.raises(LoadError if name == outside else CorruptCheckpointError):
                    await place.call(source.read_bytes, name, *run)

    @on_a_loop()
    async def test_a_missing_path_is_an_error(self, place: StoragePath) -> None:
        """It can't be opened, and can't be deleted; it can be saved to."""
        for overwrite in (False, True):
            await place.call(place.storage.check, place.path, overwrite=overwrite)
        with pytest.raises(CheckpointNotFoundError):
            await place.contents()
        with pytest.raises(CheckpointNotFoundError if self.deletes else (CheckpointNotFoundError, DeleteError)):
            await place.delete()

    # --- the end of a checkpoint ------------------------------------------------------------------

    @on_a_loop()
    async def test_an_open_checkpoint_can_be_replaced(self, place: StoragePath) -> None:
        """A source that was opened before reads the old checkpoint."""
        old = {DATA: data_of(3 * WRITE_BYTES, seed=1), METADATA: WHOLE}
        await place.save(old)
        async with place.opened() as source:
            await place.save({DATA: b"new", METADATA: WHOLE}, overwrite=True)
            assert await place.call(read_all, source) == old

    @on_a_loop("deletes")
    async def test_a_checkpoint_is_deleted(self, place: StoragePath) -> None:
        """Only this one, and a source that was opened before goes on reading; its path is free."""
        files = {DATA: data_of(5000), METADATA: WHOLE}
        for each in (place, place.named("d")):
            await each.save(files)
        async with place.opened() as source:
            await place.delete()
            assert await place.found() is None
            assert await place.call(read_all, source) == files
        await place.save({METADATA: metadata_of("again")})
        assert await place.contents() == {METADATA: metadata_of("again")}
        assert await place.named("d").contents() == files

    @on_a_loop()
    async def test_what_is_being_written_is_not_cleaned(self, place: StoragePath) -> None:
        """However old it is: its process lives."""
        transaction = await place.begin()
        await write(transaction, DATA, b"x")
        above, _ = place.storage.split(place.path)
        for older_than_s in (None, 0.0):
            assert await place.storage.clean(above, older_than_s=older_than_s, workers=place.workers) == []
        await transaction.commit({METADATA: WHOLE})
        assert await place.contents() == {DATA: b"x", METADATA: WHOLE}


# --- the end of a transaction --------------------------------------------------------------------------

_SAVED = {DATA: data_of(2 * BLOCK_BYTES + 5, seed=1), MORE: data_of(700, seed=2), METADATA: metadata_of("the last")}
_OVER = pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
_STEPS = ("begin", "create", "write", "finish", "write_files", "commit", "abort")


class CommitTests(Suite):
    """The end of a transaction."""

    @_OVER
    @on_a_loop()
    async def test_the_commit_makes_everything_visible(self, overwrite: bool, place: StoragePath) -> None:
        """Before it the path is free, or has the old checkpoint; after it all files are there, and none of the old."""
        old = await place.save_old(overwrite)
        await place.call(place.storage.check, place.path, overwrite=overwrite)
        transaction = await place.begin(overwrite=overwrite)
        await transaction.write_files(_SAVED)
        assert await place.found() == old
        await transaction.commit({"__0_2.distcp": b"", "__0_3.distcp": bytearray(b"m")})
        assert await place.contents() == {**_SAVED, "__0_2.distcp": b"", "__0_3.distcp": b"m"}
        transaction.revoke()  # too late, as is an abort
        await transaction.abort()
        assert len(await place.contents()) == 5

    @on_a_loop()
    async def test_a_taken_path_is_refused(self, place: StoragePath) -> None:
        """Without overwrite=True, at the latest by the commit; the checkpoint stays as it is."""
        await place.save({DATA: b"old", METADATA: WHOLE})
        with contextlib.suppress(CheckpointExistsError):
            await place.call(place.storage.check, place.path, overwrite=False)
        with pytest.raises(CheckpointExistsError):
            await place.save({DATA: b"new", METADATA: WHOLE})
        assert await place.contents() == {DATA: b"old", METADATA: WHOLE}

    @_OVER
    @on_a_loop()
    async def test_one_of_two_publishers_wins(self, overwrite: bool, place: StoragePath) -> None:
        """Without overwrite=True the other one learns that it has not; with it, the last one wins, or refuses to."""
        for number in range(ROUNDS):
            here, whole = place.named(f"c-{number}"), [{DATA: b"%d" % each, METADATA: WHOLE} for each in range(2)]
            await here.save_old(overwrite)
            both = [await here.begin(overwrite=overwrite) for _ in range(2)]
            for each, files in zip(both, whole, strict=True):
                await each.write_files({DATA: files[DATA]})
            ends = await race(number, *(each.commit({METADATA: WHOLE}) for each in both))
            won = [files for end, files in zip(ends, whole, strict=True) if end is None]
            assert all(end is None or isinstance(end, CheckpointExistsError) for end in ends), ends
            assert len(won) in ((1, 2) if overwrite else (1,)), f"{len(won)} of two have published"
            for each in both:
                await each.abort()
            assert await here.contents() in won

    @_OVER
    @on_a_loop()
    async def test_a_suspended_copy_is_gone_on_with(self, overwrite: bool, place: StoragePath) -> None:
        """Whole files may be kept, never more than were finished; the path has the old checkpoint until the commit."""
        old = await place.save_old(overwrite)
        save_id, resume = "0123456789abcdef", place.storage.resume
        for number in range(3):  # the third time it is there already, and is replaced
            copy = await resume(place.path, save_id, workers=place.workers)
            whole = await copy.whole_files()
            assert set(whole.items()) <= ({(DATA, len(_SAVED[DATA]))} if number == 1 else set())
            if DATA not in whole:
                await write(copy, DATA, _SAVED[DATA])
            if number == 0:
                sink = await copy.create(MORE, len(_SAVED[MORE]))
                await sink.write(aligned(_SAVED[MORE])[:300])
                await copy.suspend()
                await copy.suspend()
                assert await place.found() == old
                continue
            await write(copy, MORE, _SAVED[MORE])
            await copy.commit({METADATA: _SAVED[METADATA]})
            assert await place.contents() == _SAVED
        copy = await resume(place.path, save_id, workers=place.workers)
        await copy.abort()
        assert await place.contents() == _SAVED

    @_OVER
    @on_a_loop()
    async def test_an_abort_leaves_nothing(self, overwrite: bool, place: StoragePath) -> None:
        """With one file finished and one not; again it does nothing. The path is free, or as it was before."""
        old = await place.save_old(overwrite)
        transaction = await place.begin(overwrite=overwrite)
        await write(transaction, DATA, data_of(5000))
        sink = await transaction.create(MORE, 2 * BLOCK_BYTES)
        await sink.write(aligned(data_of(BLOCK_BYTES)))
        await transaction.abort()
        assert not place.workers.busy
        await transaction.abort()
        assert await place.found() == old
        await place.save({DATA: b"x", METADATA: WHOLE}, overwrite=overwrite)

    @on_a_loop("revokes")
    async def test_a_revoked_commit_fails_unless_it_has_won(self, place: StoragePath) -> None:
        """Before the commit it prevents it; at each of its waits the checkpoint is there as a whole, or nothing is."""
        for nth in itertools.count(-1):
            here = place.named(f"c-{nth + 1}")
            transaction = await here.begin()
            interruption = Interruption(nth, transaction.revoke)
            if nth < 0:
                transaction.revoke()
            try:
                await interruption.during(transaction.commit(_SAVED))
            except CommitError:
                await transaction.abort()
                assert await here.found() is None
            else:
                assert nth >= 0, "it was revoked before"
                assert await here.contents() == _SAVED
                if not interruption.is_done:
                    break

    @pytest.mark.parametrize("how", ["waiting", "done", "by a scope"])
    @pytest.mark.parametrize("step", _STEPS)
    @_OVER
    @on_a_loop()
    async def test_a_cancelled_step_leaves_all_or_nothing(
        self, overwrite: bool, step: str, how: str, place: StoragePath
    ) -> None:
        """At each of its waits: after an abort everything is published, or nothing is left; no thread goes on."""
        for nth in itertools.count():
            here, scope, begun = place.named(f"c-{nth}"), anyio.CancelScope(), list[Transaction]()
            old = await here.save_old(overwrite)
            cut = Interruption(nth, lambda: None, is_late=how == "done")
            saving = asyncio.ensure_future(_save(here, begun, step, cut, scope, overwrite=overwrite))
            cut.act = scope.cancel if how == "by a scope" else saving.cancel
            with contextlib.suppress(asyncio.CancelledError):
                await saving
            for each in begun:
                await each.abort()
            assert not place.workers.busy, f"cancelled at wait {nth} of {step}, a thread goes on after the abort"
            found = await here.found()
            if not cut.is_done:
                assert found == (old if step == "abort" else _SAVED)
                return
            assert found == old or (step == "commit" and found == _SAVED), f"cancelled at wait {nth} of {step}"

    @on_a_loop()
    async def test_the_loop_is_not_blocked(self, place: StoragePath) -> None:
        """No coroutine calls the file system or a blocking socket, or sleeps, on the loop's thread."""
        with blocking_calls() as blocking:
            await place.save(_SAVED)
            await place.contents()
            transaction = await place.begin(overwrite=True)
            await write(transaction, DATA, data_of(3 * WRITE_BYTES + 5))
            await transaction.abort()
            await place.save(_SAVED, overwrite=True)
            if self.deletes:
                await place.delete()
            assert await place.found() == (None if self.deletes else _SAVED)
        assert blocking == [], "these belong into threads"


async def _save(
    place: StoragePath,
    begun: list[Transaction],
    step: str,
    cut: Interruption,
    scope: anyio.CancelScope,
    *,
    overwrite: bool,
) -> None:
    """Save what is cut at one step, and append the transaction to ``begun``."""

    def call(name: str, awaited: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return cut.during(awaited) if name == step else awaited

    with scope:
        begun.append(transaction := await call("begin", place.begin(overwrite=overwrite)))
        sink = await call("create", transaction.create(DATA, len(_SAVED[DATA])))
        for at in range(0, len(_SAVED[DATA]), BLOCK_BYTES):
            await call("write", sink.write(aligned(_SAVED[DATA][at : at + BLOCK_BYTES])))
        await call("finish", sink.finish())
        await call("write_files", transaction.write_files({MORE: _SAVED[MORE]}))
        await anyio.lowlevel.checkpoint_if_cancelled()  # what runs in threads is not ended by a scope
        if step == "abort":
            await call("abort", transaction.abort())
        else:
            await call("commit", transaction.commit({METADATA: _SAVED[METADATA]}))


# --- states --------------------------------------------------------------------------------------------


class StateTests(Suite):
    """States that a checkpointer saves and loads."""

    def test_a_state_comes_back_bit_for_bit(self, place: StoragePath) -> None:
        """Tensors of several dtypes and sizes, and other values."""
        state = _state(1)
        with SyncCheckpointer(storage=place.storage) as checkpointer:
            checkpointer.save(state, place.path)
            _assert_same(checkpointer.load(place.path), state)
            report = checkpointer.verify(place.path)
        assert report.ok, f"verify found {report}"

    def test_a_state_is_overwritten(self, place: StoragePath) -> None:
        """Only where the caller says so."""
        with SyncCheckpointer(storage=place.storage) as checkpointer:
            checkpointer.save(_state(1), place.path)
            with pytest.raises(CheckpointExistsError):
                checkpointer.save(_state(2), place.path)
            _assert_same(checkpointer.load(place.path), _state(1))
            checkpointer.save(_state(2), place.path, overwrite=True)
            _assert_same(checkpointer.load(place.path), _state(2))

    @pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
    @pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
    def test_a_failed_save_leaves_nothing(self, step: str, overwrite: bool, place: StoragePath) -> None:
        """Wherever it fails, the path shows what was there before; the next save succeeds."""
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with SyncCheckpointer(storage=place.storage) as checkpointer:
            if overwrite:
                checkpointer.save(_state(1), place.path)
            with pytest.raises(SaveError):
                checkpointer.save(
                    _state(2), place.path, storage=FaultyStorage(place.storage, step, error), overwrite=overwrite
                )
            if overwrite:
                _assert_same(checkpointer.load(place.path), _state(1))
            else:
                with pytest.raises(CheckpointNotFoundError):
                    checkpointer.load(place.path)
            checkpointer.save(_state(3), place.path, overwrite=overwrite)
            _assert_same(checkpointer.load(place.path), _state(3))


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8, generator=generator)
    return {
        "model": {
            "weight": torch.randn(1000, 777, generator=generator),
            "half": torch.randn(333, generator=generator).to(torch.bfloat16),
            "transposed": torch.randn(30, 40, generator=generator).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(seed, dtype=torch.int64),
            "large": large,
        },
        "step": seed,
        "notes": ["text", 1.5, None, (True, b"bytes")],
    }


def _assert_same(found: Any, expected: Any) -> None:
    assert _plain(found) == _plain(expected)


def _plain(value: Any) -> Any:
    """Return a value that is equal only to one of the same types, keys in the same order, and bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return type(value), [_plain(each) for each in inner] if isinstance(value, dict | list | tuple) else value
