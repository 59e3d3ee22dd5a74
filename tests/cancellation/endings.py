"""What holds after a save was called off, and after it was not: the same list for every cell of the matrix."""

from __future__ import annotations

import asyncio

import pytest

import aiockpt
from tests.cancellation.moments import MOMENTS, Held, state_of
from tests.cancellation.stops import WAIT_S
from tests.states import assert_same


async def let_go(ckpt: aiockpt.AsyncCheckpointer, held: Held) -> None:
    """Let everything go on; what stood before the save is written, whatever becomes of that."""
    held.stop.open()
    if held.front is not None:
        await asyncio.wait_for(held.front.written.settled(), WAIT_S)
        await held.front
        assert_same(held.front_state, await ckpt.load(held.path.parent / "front"))


async def assert_written(ckpt: aiockpt.AsyncCheckpointer, held: Held) -> None:
    """It goes on, whoever has gone, and is what was saved, to the bit; nothing is beside it."""
    await let_go(ckpt, held)
    await asyncio.wait_for(held.save.written.settled(), WAIT_S)
    result = await held.save
    assert result.tensors == len(held.state)
    assert held.save.staged.done()
    assert await held.save.cancel() is False
    assert_same(held.state, await ckpt.load(held.path))
    assert_nothing_else(held, {"c"})


async def assert_gone(ckpt: aiockpt.AsyncCheckpointer, held: Held, moment: str, old: object = None) -> None:
    """Nothing of it is left: its path is free, the next save has all staging memory, and nobody is told of it again.

    That no memory stays lent and no thread at work is looked at after every test, when the checkpointer is closed.

    Args:
        ckpt: what it was saved with.
        held: the save.
        moment: at which it was called off.
        old: what was at its path before, and is there still.
    """
    await let_go(ckpt, held)
    assert_nothing_else(held, set() if old is None else {"c"})
    if old is not None:
        assert_same(old, await ckpt.load(held.path))
    again = state_of(77)
    async with asyncio.timeout(WAIT_S):  # for memory that is not given back
        await ckpt.save(again, held.path, overwrite=old is not None)  # which does not raise what was called off
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
    """Look for unfinished checkpoints, hidden ones among them."""
    folder = held.path.parent
    assert {entry.name for entry in folder.iterdir()} == held.names | names if folder.exists() else not names
