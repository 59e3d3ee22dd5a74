"""Closing goes on without its waiter, and saves in flight are written until the drain timeout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aiockpt
from tests.cancellation.moments import MOMENTS, Held, Moment, hold, options_of, state_of
from tests.cancellation.stops import stop_before
from tests.cancellation.ways import WAYS
from tests.polling import until
from tests.states import assert_same


def _assert_all_written(held: Held, *more: str) -> None:
    assert {entry.name for entry in held.path.parent.iterdir()} == {"c", *held.names, *more}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(held.state, ckpt.load(held.path))


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
async def test_closing_goes_on_without_its_waiter(way: str, tmp_path: Path) -> None:
    ckpt = aiockpt.AsyncCheckpointer(**options_of(MOMENTS["staging"], "thread"))
    held = await hold(ckpt.save, "staging", tmp_path / "runs")
    second = ckpt.save(state_of(2), tmp_path / "runs" / "d")
    kept = await WAYS[way](ckpt.aclose)
    with pytest.raises(aiockpt.CheckpointerClosedError):
        ckpt.save(state_of(4), tmp_path / "runs" / "late")
    assert not second.written.done()
    held.stop.open()
    await ckpt.aclose()  # idempotent
    await ckpt.aclose()
    assert (await second).path == str(tmp_path / "runs" / "d")
    _assert_all_written(held, "d")
    del kept


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", ["captured", "staging", "inside a write", "committing"])
@pytest.mark.parametrize("way", ["task_cancelled", "sibling_failed", "scope_cancelled"])
async def test_a_task_cancelled_within_the_block_leaves_it_when_all_is_written(
    way: str, moment: str, tmp_path: Path
) -> None:
    ckpt = aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread"))
    held = await hold(ckpt.save, moment, tmp_path / "runs")

    async def body() -> None:
        async with ckpt:
            loop = asyncio.get_running_loop()
            try:
                await held.save
            finally:
                loop.call_soon(held.stop.open)  # runs when the end of the block waits

    await WAYS[way](body)
    assert held.save.written.done()
    _assert_all_written(held)


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", [name for name in MOMENTS if name != "inside a write"])
async def test_saves_left_after_the_drain_timeout_are_cancelled(moment: str, tmp_path: Path) -> None:
    """Saves already written stay; closing waits for one that is being published."""
    options = options_of(MOMENTS[moment], "thread")
    ckpt = aiockpt.AsyncCheckpointer(**{**options, "drain_timeout": 0.05})
    await ckpt.save(state_of(5), tmp_path / "runs" / "early")
    held = await hold(ckpt.save, moment, tmp_path / "runs")
    closing = asyncio.ensure_future(ckpt.aclose())
    if MOMENTS[moment].published:
        while not held.save._job.cancel_asked:
            await asyncio.to_thread(os.sched_yield)
        held.stop.open()
        with contextlib.suppress(aiockpt.SaveCancelledError):
            await closing
        assert (await held.save).tensors == len(held.state)
        _assert_all_written(held, "early")
        return
    with pytest.raises(aiockpt.SaveCancelledError, match=r"drain_timeout = 0.05 s .* nothing of it is left"):
        await closing
    for save in (held.save, held.front or held.save):
        with pytest.raises(aiockpt.SaveCancelledError):
            await save
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"early"}


@pytest.mark.asyncio
async def test_closing_waits_for_the_thread_of_a_cancelled_save_and_raises_nothing(tmp_path: Path) -> None:
    stop = stop_before("a thread", "thread", tmp_path)
    ckpt = aiockpt.AsyncCheckpointer(**options_of(Moment(chunks=16), "thread"))
    save = ckpt.save(state_of(1), tmp_path / "runs" / "c", storage=stop.storage)
    await stop.reached()
    save.cancel()
    closing = asyncio.ensure_future(ckpt.aclose())
    for _ in range(100):  # ample time for a close that has nothing to wait for
        await asyncio.to_thread(int)
    assert not closing.done()
    stop.open()
    await closing
    assert list((tmp_path / "runs").iterdir()) == []


def _engines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("aiockpt-")}


@pytest.mark.parametrize("kind", ["checkpointer", "manager", "mirror"])
def test_a_task_that_is_cancelled_before_its_first_step_closes(kind: str, tmp_path: Path) -> None:
    """As by `asyncio.wait_for(run.aclose(), 0)`; nobody closes again, and the object lives on."""
    makers: dict[str, Callable[[], aiockpt.AsyncCheckpointer | aiockpt.CheckpointManager]] = {
        "checkpointer": aiockpt.AsyncCheckpointer,
        "manager": lambda: aiockpt.CheckpointManager(tmp_path / "run"),
        "mirror": lambda: aiockpt.CheckpointManager(tmp_path / "run", mirror=tmp_path / "mirror"),
    }
    before = _engines()

    async def main() -> object:
        made = makers[kind]()
        if isinstance(made, aiockpt.CheckpointManager):
            await made.save(1, {"x": torch.ones(1)})
        else:
            await made.save({"x": torch.ones(1)}, tmp_path / "c")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.aclose(), 0)
        return made

    kept = asyncio.run(main())
    until(lambda: not _engines() - before)
    if kind != "checkpointer":
        with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
            assert run.save(2, {"x": torch.ones(1)}) is not None
    del kept
