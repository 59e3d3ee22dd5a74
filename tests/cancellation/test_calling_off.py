"""`handle.cancel()` at every moment: nothing is left of the save, or it was too late, and all of it is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiockpt
from tests.cancellation.endings import assert_gone, assert_written
from tests.cancellation.moments import MOMENTS, Held, hold, options_of, state_of
from tests.cancellation.ways import WAYS


async def ends(
    ckpt: aiockpt.AsyncCheckpointer, held: Held, moment: str, asked: aiockpt.Completion[bool], old: object = None
) -> None:
    """Look at the end of a save that was called off, and at what it leaves."""
    if MOMENTS[moment].published:
        await ckpt.prewarm({})  # so that the engine has heard of it before the gate is opened
        held.stop.open()
        assert await asked is False
        await assert_written(ckpt, held)
        return
    if held.stop.holds_a_thread:
        held.stop.open()
    assert await asked is True  # before anything else is let go on
    await assert_gone(ckpt, held, moment, old)


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_save_that_is_called_off_leaves_nothing(moment: str, tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        await ends(ckpt, held, moment, held.save.cancel())


@pytest.mark.parametrize("moment", MOMENTS)
def test_so_does_one_by_a_writer_process(moment: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "process")) as ckpt:
            held = await hold(ckpt.save, moment, tmp_path / "runs", "process")
            await ends(ckpt, held, moment, held.save.cancel())

    asyncio.run(main())


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_old_checkpoint_stays_when_an_overwrite_is_called_off(moment: str, tmp_path: Path) -> None:
    old = state_of(9)
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        await ckpt.save(old, tmp_path / "runs" / "c")
        held = await hold(ckpt.save, moment, tmp_path / "runs", overwrite=True)
        await ends(ckpt, held, moment, held.save.cancel(), old)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
async def test_who_waits_for_the_calling_off_may_go_too(way: str, tmp_path: Path) -> None:
    """The save is called off all the same."""
    moment = "inside a write"  # when it takes until the thread comes back
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        asked = held.save.cancel()

        async def waits() -> None:
            await asked

        kept = await WAYS[way](waits)
        await ends(ckpt, held, moment, asked)
        del kept
