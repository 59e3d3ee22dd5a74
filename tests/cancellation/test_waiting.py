"""A save goes on when its waiter goes away, in any way and at any moment."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from tests.cancellation.endings import assert_written
from tests.cancellation.moments import MOMENTS, Held, hold, options_of
from tests.cancellation.ways import WAYS


async def _written(save: aiockpt.SaveHandle) -> None:
    await save


async def _staged(save: aiockpt.SaveHandle) -> None:
    stage, _ = save
    await stage


async def _follows(save: aiockpt.SaveHandle) -> None:
    async for _ in save.progress():
        pass


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_save_goes_on_without_its_waiter(moment: str, way: str, tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        stays = asyncio.ensure_future(held.save)
        kept = [await WAYS[way](partial(wait, held.save)) for wait in _waits(held)]
        await assert_written(ckpt, held)
        assert await stays is await held.save
        del kept


def _waits(held: Held) -> list[Any]:
    return [_written, _follows] if held.save.staged.done() else [_staged, _written, _follows]
