"""The last save: before preemption, and at the last step of a run."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.manager.preemption import Answer, Asked, LastSaveRequests, Pace, decide
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.manager.runs import names

STATE = {"x": torch.arange(10.0)}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_signal_leads_to_one_last_save(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySteps(100)) as run:
        run.on_signal(signal.SIGTERM, grace_s=60)
        saved = []
        for step in range(50):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
                assert not run.stopping  # only due() sets it, where the ranks agree
            if run.due(step):
                run.save(step, STATE)
                saved.append(step)
            if run.stopping:
                break
        assert saved == [7]
        assert not run.due(8)
        assert run.stopping
    assert names(tmp_path) == ["step-00000007"]


@pytest.mark.asyncio
@pytest.mark.both_loops
async def test_signal_during_a_wait_in_an_event_loop(tmp_path: Path) -> None:
    async with aiockpt.CheckpointManager(tmp_path) as run:
        run.on_signal(signal.SIGTERM)
        assert not run.due(1)
        asyncio.get_running_loop().call_later(0, os.kill, os.getpid(), signal.SIGTERM)
        while not run.due(2):  # noqa: ASYNC110 - the usage under test
            await asyncio.sleep(0)
        await (await run.save(2, STATE))
    assert names(tmp_path) == ["step-00000002"]


def test_last_save_is_begun_although_an_earlier_save_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("refused")

    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        failing = run.submit(1, STATE, pre_commit=refuse)
        failing.written.ended(60)
        run.request_last_save()
        assert run.due(2)
        run.save(2, STATE)
    assert names(tmp_path) == ["step-00000002"]
    assert "refused" in caplog.text


def test_request_from_another_thread(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        assert not run.due(1)
        thread = threading.Thread(target=run.request_last_save)
        thread.start()
        thread.join()
        assert run.due(2)
        assert run.stopping


def test_last_save_that_exceeds_the_grace_period_is_not_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySteps(1)) as run:
        assert run.due(1)
        run.save(1, STATE)
        run._retention.finished().result()
        run.request_last_save(grace_s=1e-9)
        assert not run.due(2)
        assert run.stopping
        assert "is not begun" in caplog.text


def test_first_save_of_unknown_duration_is_begun(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.request_last_save(grace_s=30)
        assert run.due(1)


def test_previous_handlers_are_called_and_restored(tmp_path: Path) -> None:
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        run = aiockpt.SyncCheckpointManager(tmp_path)
        run.on_signal(signal.SIGTERM, signal.SIGUSR1, grace_s=5)
        run.on_signal(signal.SIGTERM, grace_s=6)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [signal.SIGTERM] * 2
        run.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_installed_later_is_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    later = lambda number, frame: None  # noqa: E731
    run = aiockpt.SyncCheckpointManager(tmp_path)
    run.on_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, later)
    run.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)


def test_second_interrupt_ends_the_program(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.on_signal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert run.due(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_asyncio_handler_is_called_too(tmp_path: Path) -> None:
    async def main() -> None:
        called = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, called.set)
        async with aiockpt.CheckpointManager(tmp_path) as run:
            run.on_signal(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(called.wait(), 60)
            assert run.due(1)
        loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(main())


def test_handler_forwards_signals_after_close_in_another_thread() -> None:
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        requests = LastSaveRequests()
        requests.listen([signal.SIGTERM], None)
        thread = threading.Thread(target=requests.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [signal.SIGTERM]
        assert requests.remaining_s() is None
    finally:
        signal.signal(signal.SIGTERM, before)


def spin_forever(started: Any) -> None:
    started.set()
    while True:
        os.sched_yield()


def test_forked_child_dies_from_a_signal(tmp_path: Path) -> None:
    """Pools and data loaders end their workers with SIGTERM, and would wait forever if a worker ignored it."""
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.on_signal(signal.SIGTERM)
        context = multiprocessing.get_context("fork")
        started = context.Event()
        child = context.Process(target=spin_forever, args=(started,))
        child.start()
        started.wait(60)
        child.terminate()
        child.join(60)
        try:
            assert child.exitcode == -signal.SIGTERM
        finally:
            child.kill()
            child.join()
        assert not run.due(1)


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    run = aiockpt.SyncCheckpointManager(tmp_path)
    for wrong in ("5", True, math.nan):
        with pytest.raises(TypeError, match="grace_s"):
            run.request_last_save(wrong)  # type: ignore[arg-type]
    assert not run.due(1)
    with pytest.raises(TypeError):
        run.on_signal()
    for grace_s in (0, -1, "5"):
        with pytest.raises(ValueError, match="grace_s"):
            run.on_signal(signal.SIGTERM, grace_s=grace_s)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="signal"):
        run.on_signal(12345)
    caught: list[Any] = []

    def elsewhere() -> None:
        with pytest.raises(ValueError, match="main thread"):
            run.on_signal(signal.SIGTERM)
        caught.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert caught == [True]


# --- due, in a manager ------------------------------------------------------------------------------------


def test_due_by_steps(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySteps(3)) as run:
        assert [step for step in range(10) if run.due(step)] == [3, 6, 9]
        run.save(6, STATE)
    with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySteps(3)) as run:
        run.restore(dict(STATE))
        assert [step for step in (8, 10, 11, 14) if run.due(step)] == [10, 14]
    run = aiockpt.SyncCheckpointManager(tmp_path)
    assert not run.due(1)
    for wrong in (-1, 1.5, None):
        with pytest.raises((TypeError, ValueError)):
            run.due(wrong)  # type: ignore[arg-type]


def test_due_by_seconds_since_the_last_save(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySeconds(3600)) as run:
        assert not run.due(1)
        run._last_began -= 3601
        assert run.due(2)
        assert run.due(3)  # stays due until a save
        run.save(3, STATE)
        assert not run.due(4)


def test_skipped_save_stays_due(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointManager(tmp_path / "run", save=aiockpt.EverySeconds(3600), on_busy="skip") as run:
        other = run.checkpointer.submit(STATE, tmp_path / "other", storage=storage)
        run._last_began -= 3601
        assert run.due(1)
        assert run.submit(1, STATE).skipped
        assert run.due(2)
        storage.open("commit")
        other.written.result()
        run.checkpointer.ready()
        assert not run.submit(2, STATE).skipped
        assert not run.due(3)


@pytest.mark.asyncio
async def test_due_when_idle(tmp_path: Path) -> None:
    held: Future[None] = Future()

    async def hold(_: str) -> None:
        await asyncio.wrap_future(held)

    async with aiockpt.CheckpointManager(tmp_path, save=aiockpt.WhenIdle()) as run:
        assert run.due(1)
        save = await run.save(1, STATE, pre_commit=hold)
        assert not run.due(2)
        held.set_result(None)
        await save
        await run.checkpointer.ready()
        assert run.due(3)


# --- the last step ----------------------------------------------------------------------------------------


def test_last_step_is_saved_whatever_the_policy_says(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySteps(100)) as run:
        for step in range(250):
            if run.due(step, last=step == 249):
                run.save(step, STATE)
        assert run.steps() == [100, 200, 249]
        assert not run.stopping


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["in the loop", "after the loop"])
async def test_second_save_of_the_last_step_is_the_first_one(tmp_path: Path, when: str) -> None:
    async with aiockpt.CheckpointManager(tmp_path, save=aiockpt.EverySteps(2), max_in_flight=2) as run:
        for step in range(5):
            if run.due(step, last=when == "in the loop" and step == 4):
                save = await run.save(step, STATE)
        if when == "after the loop":
            assert run.due(step, last=True)
        again = await run.save(step, STATE)
        assert again is save
        assert run.steps() == [2, 4]
        replaced = await run.save(step, STATE, overwrite=True)
        assert replaced is not save
        await replaced
        assert await (await run.save(step, STATE)) == await replaced
        with pytest.raises(aiockpt.CheckpointExistsError):
            await run.save(2, STATE)


def test_second_save_of_a_step_that_is_not_the_last_is_refused(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(4, STATE)
        with pytest.raises(aiockpt.CheckpointExistsError):
            run.save(4, STATE)


def test_last_step_is_saved_again_if_its_first_save_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("refused")

    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        assert run.due(4, last=True)
        run.submit(4, STATE, pre_commit=refuse)
        assert run.save(4, STATE).path.endswith("step-00000004")
        assert "refused" in caplog.text
        assert run.steps() == [4]


def test_last_step_waits_for_its_turn(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointManager(tmp_path / "run", on_busy="skip") as run:
        other = run.checkpointer.submit(STATE, tmp_path / "other", storage=storage)
        assert run.submit(1, STATE).skipped
        assert run.due(2, last=True)
        ready, waited = run.checkpointer.ready, []

        def opened(*args: Any) -> None:
            waited.append(other.written.done())
            storage.open("commit")
            ready(*args)

        run.checkpointer.ready = opened  # type: ignore[method-assign]
        run.save(2, STATE)
        assert waited == [False]
        assert run.steps() == [2]


def test_step_that_was_restored_is_not_saved_as_the_last_one(tmp_path: Path) -> None:
    for _ in range(2):  # the second time, the run is complete already
        with aiockpt.SyncCheckpointManager(tmp_path, save=aiockpt.EverySteps(2)) as run:
            start = run.restore(dict(STATE))
            step = 4
            for step in range(start.step + 1 if start else 0, 5):
                if run.due(step):
                    run.save(step, STATE)
            if run.due(step, last=True):
                run.save(step, STATE)
            assert run.steps() == [2, 4]


def test_last_step_within_a_notice_that_is_too_short_is_not_saved(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, STATE)
        run._retention.finished().result()
        run.request_last_save(grace_s=1e-9)
        assert not run.due(2, last=True)
        assert run.stopping


# --- decisions --------------------------------------------------------------------------------------------

REMAINING = st.one_of(st.none(), st.just(math.inf), st.floats(-10, 100))


@given(st.lists(REMAINING, min_size=1, max_size=8), st.booleans(), st.floats(0, 120), st.integers(1, 9))
def test_all_ranks_stop_if_one_has_a_request(
    remaining: list[float | None], is_due: bool, expected_s: float, calls: int
) -> None:
    answer = decide([Asked(5, each) for each in remaining], is_due=is_due, expected_s=expected_s, calls=calls)
    asked = [each for each in remaining if each is not None]
    if not asked:
        assert answer == Answer(is_due, calls=calls)
    else:
        fits = all(expected_s <= each for each in asked)
        assert (answer.is_due, answer.is_stopping, answer.is_late) == (fits, True, not fits)


def test_ranks_at_different_steps_raise() -> None:
    with pytest.raises(aiockpt.CoordinationError, match=r"different steps \(5, 6\)"):
        decide([Asked(5, None), Asked(6, None)], is_due=False, expected_s=0.0)
    with pytest.raises(aiockpt.CoordinationError, match="step 5 is the last one for some ranks only"):
        decide([Asked(5, None, is_last=True), Asked(5, None)], is_due=False, expected_s=0.0)


@pytest.mark.parametrize(
    ("cost_s", "step_s", "calls"),
    [(0.001, 10.0, 1), (0.001, 0.2, 1), (0.001, 0.06, 2), (0.001, 0.001, 16), (1.0, 0.5, 16)],
)
def test_exchanges_cost_at_most_one_percent_of_the_time(cost_s: float, step_s: float, calls: int) -> None:
    pace = Pace()
    now, apart = 0.0, pace.begin(0.0)
    assert apart == 1
    for seconds in (cost_s * 5, cost_s, cost_s * 3):
        pace.end(seconds)
        now += apart * step_s
        apart = pace.begin(now)
    assert apart == calls


@pytest.mark.asyncio
async def test_manager_whose_closing_is_cancelled_at_once_passes_signals_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        run = aiockpt.CheckpointManager(tmp_path)
        run.on_signal(signal.SIGUSR1)
        task = asyncio.create_task(run.aclose())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wrap_future(run._close_behind())
        signal.raise_signal(signal.SIGUSR1)
        assert (heard, run.stopping) == ([signal.SIGUSR1], False)
    finally:
        signal.signal(signal.SIGUSR1, before)
