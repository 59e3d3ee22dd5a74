"""Tests of storages: a checkpoint appears at once or not at all, whatever interrupts it and whoever else writes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

from aiockpt.errors import CheckpointExistsError, CommitError
from aiockpt.storage.base import Transaction
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
    write,
)

T = TypeVar("T")

_FILES = {DATA: data_of(2 * BLOCK_BYTES + 5, seed=1), MORE: data_of(700, seed=2), METADATA: metadata_of("the last")}
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
        await transaction.write_files(_FILES)
        assert await place.found() == old
        await transaction.commit({"__0_2.distcp": b"", "__0_3.distcp": bytearray(b"m")})
        assert await place.contents() == {**_FILES, "__0_2.distcp": b"", "__0_3.distcp": b"m"}
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
            assert set(whole.items()) <= ({(DATA, len(_FILES[DATA]))} if number == 1 else set())
            if DATA not in whole:
                await write(copy, DATA, _FILES[DATA])
            if number == 0:
                sink = await copy.create(MORE, len(_FILES[MORE]))
                await sink.write(aligned(_FILES[MORE])[:300])
                await copy.suspend()
                await copy.suspend()
                assert await place.found() == old
                continue
            await write(copy, MORE, _FILES[MORE])
            await copy.commit({METADATA: _FILES[METADATA]})
            assert await place.contents() == _FILES
        copy = await resume(place.path, save_id, workers=place.workers)
        await copy.abort()
        assert await place.contents() == _FILES

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
                await interruption.during(transaction.commit(_FILES))
            except CommitError:
                await transaction.abort()
                assert await here.found() is None
            else:
                assert nth >= 0, "it was revoked before"
                assert await here.contents() == _FILES
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
                assert found == (old if step == "abort" else _FILES)
                return
            assert found == old or (step == "commit" and found == _FILES), f"cancelled at wait {nth} of {step}"

    @on_a_loop()
    async def test_the_loop_is_not_blocked(self, place: StoragePath) -> None:
        """No coroutine calls the file system or a blocking socket, or sleeps, on the loop's thread."""
        with blocking_calls() as blocking:
            await place.save(_FILES)
            await place.contents()
            transaction = await place.begin(overwrite=True)
            await write(transaction, DATA, data_of(3 * WRITE_BYTES + 5))
            await transaction.abort()
            await place.save(_FILES, overwrite=True)
            if self.deletes:
                await place.delete()
            assert await place.found() == (None if self.deletes else _FILES)
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
        sink = await call("create", transaction.create(DATA, len(_FILES[DATA])))
        for at in range(0, len(_FILES[DATA]), BLOCK_BYTES):
            await call("write", sink.write(aligned(_FILES[DATA][at : at + BLOCK_BYTES])))
        await call("finish", sink.finish())
        await call("write_files", transaction.write_files({MORE: _FILES[MORE]}))
        await anyio.lowlevel.checkpoint_if_cancelled()  # what runs in threads is not ended by a scope
        if step == "abort":
            await call("abort", transaction.abort())
        else:
            await call("commit", transaction.commit({METADATA: _FILES[METADATA]}))
