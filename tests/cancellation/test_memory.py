"""Staging memory is not reused while a thread holds it, even if the save or its waiter was cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import aiockpt
from tests.cancellation.moments import CHUNK, state_of
from tests.cancellation.stops import ThreadStop
from tests.states import assert_same


@pytest.mark.asyncio
async def test_a_writing_thread_keeps_its_memory_and_the_next_save_uses_another_chunk(tmp_path: Path) -> None:
    """The pool has one more chunk, which the next save fills while the thread is blocked."""
    stop = ThreadStop()
    first, second = (torch.full((CHUNK // 4 - 1024,), value, dtype=torch.int32) for value in (0x11111111, 0x22222222))
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK, io_threads=2) as ckpt:
        save = ckpt.save({"w": first}, tmp_path / "1", storage=stop.storage)
        await stop.reached()
        assert first.numpy().tobytes()[:4096] in stop.before
        asked = save.cancel()
        following = ckpt.save({"w": second}, tmp_path / "2")
        waiter = asyncio.ensure_future(following.staged.settled())
        # An unstaged save blocks the queue until its thread is done. The first is staged, so the second is copied
        # meanwhile, to the other chunk.
        await waiter
        assert not asked.done()
        stop.open()
        assert await asked
        assert_same({"w": second}, await ckpt.load((await following).path))
    assert stop.after == stop.before
    assert {entry.name for entry in tmp_path.iterdir()} == {"2"}


@pytest.mark.asyncio
async def test_the_next_save_waits_when_the_thread_holds_the_only_chunk(tmp_path: Path) -> None:
    stop = ThreadStop()
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, io_threads=2) as ckpt:
        save = ckpt.save(state_of(1), tmp_path / "1", storage=stop.storage)
        await stop.reached()
        asked = save.cancel()
        following = ckpt.save(state_of(2), tmp_path / "2")
        async for event in following.progress():
            assert (event.phase, event.staged_bytes) == ("planned", 0)
            break
        assert not asked.done()
        assert not save.written.done()  # when it is done, no thread is at work any more
        stop.open()
        assert await asked
        assert_same(state_of(2), await ckpt.load((await following).path))
    assert stop.after == stop.before
    assert {entry.name for entry in tmp_path.iterdir()} == {"2"}
