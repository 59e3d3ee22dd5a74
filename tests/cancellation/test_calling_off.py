"""`handle.cancel()` at every moment: nothing is left of the save, or it was too late and the save is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from types import MappingProxyType
from typing import Any

import pytest

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import Document, Transaction
from aiockpt.storage.wrapper import WrapperTransaction
from tests.cancellation.endings import assert_gone, assert_written
from tests.cancellation.moments import MOMENTS, Held, hold, options_of, state_of
from tests.cancellation.ways import WAYS


async def check_end(
    ckpt: aiockpt.AsyncCheckpointer, held: Held, moment: str, asked: aiockpt.Completion[bool], old: object = None
) -> None:
    """Check the end of a save that was cancelled, and what it leaves."""
    if MOMENTS[moment].published:
        await ckpt.prewarm({})  # a round trip: the engine has the request before the gate opens
        held.stop.open()
        assert await asked is False
        await assert_written(ckpt, held)
        return
    if held.stop.holds_a_thread:
        held.stop.open()
    assert await asked is True  # before anything else is released
    await assert_gone(ckpt, held, moment, old)


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_cancelled_save_leaves_nothing(moment: str, tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        await check_end(ckpt, held, moment, held.save.cancel())


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancelled_save_of_a_writer_process_leaves_nothing(moment: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "process")) as ckpt:
            held = await hold(ckpt.save, moment, tmp_path / "runs", "process")
            await check_end(ckpt, held, moment, held.save.cancel())

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_cancelled_overwrite_keeps_the_old_checkpoint(moment: str, tmp_path: Path) -> None:
    old = state_of(9)
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        await ckpt.save(old, tmp_path / "runs" / "c")
        held = await hold(ckpt.save, moment, tmp_path / "runs", overwrite=True)
        await check_end(ckpt, held, moment, held.save.cancel(), old)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
async def test_a_cancellation_goes_on_without_its_waiter(way: str, tmp_path: Path) -> None:
    moment = "inside a write"  # cancelling takes until the thread returns
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        asked = held.save.cancel()

        async def waits() -> None:
            await asked

        kept = await WAYS[way](waits)
        await check_end(ckpt, held, moment, asked)
        del kept


class _CancelledAtTheEnd(WrapperStorage):
    """Cancels the save that it publishes, and lets the engine's loop turn a few times before the commit returns."""

    def __init__(self) -> None:
        super().__init__(LocalStorage())
        self.saves: Queue[aiockpt.SaveHandle] = Queue()
        self.turns = 0

    async def begin(self, path: str, **options: Any) -> Transaction:
        return _Late(self, await self.inner.begin(path, **options), path)


class _Late(WrapperTransaction):
    async def commit(self, documents: Mapping[str, Document] = MappingProxyType({})) -> None:
        await super().commit(documents)
        assert isinstance(self._storage, _CancelledAtTheEnd)
        self._storage.saves.get(timeout=60).cancel()
        for _ in range(self._storage.turns):
            await asyncio.sleep(0)


def test_a_save_that_was_published_is_never_said_to_be_cancelled(tmp_path: Path) -> None:
    storage, failures = _CancelledAtTheEnd(), []
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt:
        for storage.turns in range(12):
            save = ckpt.submit({"n": storage.turns}, tmp_path / str(storage.turns))
            storage.saves.put(save)
            failures.append(save.written.exception(60))
            assert ckpt.load(tmp_path / str(storage.turns)) == {"n": storage.turns}
    assert failures == [None] * 12
