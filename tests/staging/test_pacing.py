"""Throttled staging: windows, rates, and everything that ends the throttling."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt import StagingWindow
from aiockpt.staging.throttle import Budget, Throttle
from tests.states import assert_same, large_state

CHUNK = 64 << 10
TWO_CHUNKS = StagingWindow(bytes_per_window=2 * CHUNK)


def test_a_budget_is_overdrawn_by_at_most_one_copy_and_keeps_no_credit() -> None:
    budget = Budget(StagingWindow(bytes_per_window=100))
    assert budget.wait_s(0) == math.inf
    budget.open()
    budget.open()
    budget.take(60, 0)
    assert budget.wait_s(0) == 0
    budget.take(250, 0)
    assert budget.wait_s(0) == math.inf  # 210 overdrawn
    budget.open()
    budget.open()
    assert budget.wait_s(0) == math.inf
    budget.open()
    assert budget.wait_s(0) == 0


def test_a_rate_holds_for_copies_of_any_size_and_pauses_earn_no_credit() -> None:
    budget = Budget(StagingWindow(bytes_per_s=100))
    assert budget.wait_s(5.0) == 0
    budget.take(50, 5.0)
    assert budget.wait_s(5.0) == 0.5
    budget.take(100, 5.25)  # taken early, which adds no extra debt
    assert budget.wait_s(5.5) == 0.75
    assert budget.wait_s(100.0) == 0
    budget.take(10, 100.0)
    assert budget.wait_s(100.0) == pytest.approx(0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize("window", [TWO_CHUNKS, StagingWindow(bytes_per_s=CHUNK)])
async def test_an_unthrottled_save_leaves_no_debt(window) -> None:
    throttle = Throttle(window, lambda function: function())
    first, second = throttle.for_next_save(), throttle.for_next_save()
    first.unthrottle()
    for _ in range(200):
        await first.acquire(CHUNK)
    throttle.open()
    assert not second.is_held
    await second.acquire(CHUNK)


@pytest.mark.parametrize(
    "arguments", [{}, {"bytes_per_s": 0}, {"bytes_per_s": math.inf}, {"bytes_per_window": True}, {"patience_s": 5}]
)
def test_invalid_windows_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match="StagingWindow"):
        StagingWindow(**arguments)


def test_a_plain_number_is_refused() -> None:
    with pytest.raises(TypeError, match="bytes_per_s for a rate"):
        aiockpt.SyncCheckpointer(staging_window=1 << 30)  # type: ignore[arg-type]


def _paced(kind=aiockpt.SyncCheckpointer, window: StagingWindow = TWO_CHUNKS):
    return kind(chunk_bytes=CHUNK, staging_window=window)


@pytest.mark.asyncio
async def test_each_window_admits_its_bytes_and_no_more(tmp_path: Path) -> None:
    state = large_state(2)
    async with _paced(aiockpt.AsyncCheckpointer) as ckpt:
        await ckpt.window()  # with nothing to do
        save = ckpt.save(state, tmp_path / "c")
        opened = 1
        async for event in save.progress():
            assert event.staged_bytes <= opened * 2 * CHUNK
            if event.staged_bytes == opened * 2 * CHUNK:
                await ckpt.window()
                opened += 1
        assert opened > 8
        await save
        assert_same(state, await ckpt.load(tmp_path / "c"))


def _fence(ckpt, save) -> None:
    ckpt.fence(timeout=60)


def _wait_for_staged(ckpt, save) -> None:
    save.staged.result(timeout=60)


def _block_until_written(ckpt, save) -> None:
    save.written.result(timeout=60)


def _step_with_a_guard(ckpt, save) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with ckpt.guard(optimizer, timeout=60):
        optimizer.step()


def _save_another(ckpt, save) -> None:
    ckpt.save({"x": torch.ones(50_000)}, save.path + "-next")


def _close(ckpt, save) -> None:
    ckpt.close()


@pytest.mark.parametrize(
    "act", [_fence, _wait_for_staged, _block_until_written, _step_with_a_guard, _save_another, _close]
)
def test_a_waiter_ends_the_throttling(act, tmp_path: Path) -> None:
    state = large_state(2)
    with _paced() as ckpt:
        save = ckpt.submit(state, tmp_path / "c")
        assert not save.staged.done()
        act(ckpt, save)
    save.written.result()
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(state, ckpt.load(tmp_path / "c"))


@pytest.mark.asyncio
async def test_awaiting_staged_ends_the_throttling(tmp_path: Path) -> None:
    async with _paced(aiockpt.AsyncCheckpointer) as ckpt:
        save = ckpt.save(large_state(2), tmp_path / "c")
        assert not save.staged.done()
        await save.staged
        await save


@pytest.mark.asyncio
async def test_a_throttled_save_can_be_cancelled(tmp_path: Path) -> None:
    async with _paced(aiockpt.AsyncCheckpointer) as ckpt:
        save = ckpt.save(large_state(2), tmp_path / "c")
        await ckpt.window()
        async for event in save.progress():
            if event.staged_bytes:
                break
        assert await save.cancel()
        after = ckpt.save({"x": torch.ones(2)}, tmp_path / "d")
        await after.staged
        await after
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.asyncio
async def test_staging_goes_on_if_no_window_comes(tmp_path: Path, caplog) -> None:
    window = StagingWindow(bytes_per_window=1, patience_s=0.02)
    async with _paced(aiockpt.AsyncCheckpointer, window) as ckpt:
        with caplog.at_level(logging.WARNING, "aiockpt"):
            await ckpt.save(large_state(2), tmp_path / "c")
    assert [record.message for record in caplog.records] == ["no window() for 0.02 s: staging goes on without"]


@pytest.mark.asyncio
async def test_a_rate_limits_staging(tmp_path: Path) -> None:
    state = large_state(2)
    window = StagingWindow(bytes_per_s=16 << 20)
    async with _paced(aiockpt.AsyncCheckpointer, window) as ckpt:
        result = await ckpt.save(state, tmp_path / "c")
        assert result.staged_s >= (result.nbytes - CHUNK) / window.bytes_per_s
        assert_same(state, await ckpt.load(tmp_path / "c"))
