"""Assertions about a save after it was cancelled, and after it was not; the same for every cell of the matrix."""

from __future__ import annotations

import asyncio

import pytest

import aiockpt
from tests.cancellation.moments import MOMENTS, Held, state_of
from tests.cancellation.stops import WAIT_S
from tests.states import assert_same


async def release(ckpt: aiockpt.AsyncCheckpointer, held: Held) -> None:
    """Release everything; the save ahead of the held one is written in any case."""
    held.stop.open()
    if held.front is not None:
        await asyncio.wait_for(held.front.written.settled(), WAIT_S)
        await held.front
        assert_same(held.front_state, await ckpt.load(held.path.parent / "front"))


async def assert_written(ckpt: aiockpt.AsyncCheckpointer, held: Held) -> None:
    """Assert that the save goes on, is written bit for bit, and leaves nothing else."""
    await release(ckpt, held)
    await asyncio.wait_for(held.save.written.settled(), WAIT_S)
    result = await held.save
    assert result.tensors == len(held.state)
    assert held.save.staged.done()
    assert await held.save.cancel() is False
    assert_same(held.state, await ckpt.load(held.path))
    assert_nothing_else(held, {"c"})


async def assert_gone(ckpt: aiockpt.AsyncCheckpointer, held: Held, moment: str, old: object = None) -> None:
    """Assert that nothing is left of a save: path and staging memory are free, and no later call raises its error.

    After every test, when the checkpointer is closed, a fixture checks for leased memory and running threads.

    Args:
        ckpt: checkpointer of the save.
        held: the save.
        moment: moment at which it was cancelled.
        old: state at its path before, which must still be there.
    """
    await release(ckpt, held)
    assert_nothing_else(held, set() if old is None else {"c"})
    if old is not None:
        assert_same(old, await ckpt.load(held.path))
    again = state_of(77)
    async with asyncio.timeout(WAIT_S):  # in case memory is not returned
        await ckpt.save(again, held.path, overwrite=old is not None)  # does not raise the error of the cancelled save
    assert_same(again, await ckpt.load(held.path))
    assert_nothing_else(held, {"c"})
    with pytest.raises(aiockpt.SaveCancelledError, match="nothing of it is left"):
        await held.save
    if MOMENTS[moment].staged:
        await held.save.staged
    else:
        with pytest.raises(aiockpt.SaveCancelledError):
            await held.save.staged
    assert [event.phase async for event in held.save.progress()][-1:] != ["committed"]


def assert_nothing_else(held: Held, names: set[str]) -> None:
    """Assert that no other checkpoint is left, unfinished and hidden ones included."""
    folder = held.path.parent
    assert {entry.name for entry in folder.iterdir()} == held.names | names if folder.exists() else not names
