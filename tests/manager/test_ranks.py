"""Several ranks that manage one run: rank 0 decides, and all ranks get the same answers."""

from __future__ import annotations

import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.manager.runs import LOCK_NAME, SIZE, names
from tests.ranks.world import World

LIMITS: dict[str, Any] = {"coordination_timeout": 60, "drain_timeout": 60}


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Return a state with a tensor of this rank alone and values that all ranks have."""
    return {
        f"own{rank}": torch.full((SIZE,), 10.0 * step + rank),
        "both": torch.full((1000,), float(step)),
        "step": step,
    }


def step_in(state: dict[str, Any], rank: int) -> int:
    found = {*((state[f"own{rank}"] - rank) / 10).unique().tolist(), *state["both"].unique().tolist(), state["step"]}
    assert len(found) == 1, found
    return int(found.pop())


# --- runs -----------------------------------------------------------------------------------------------------


async def trains(rank: int, size: int, folder: Path, last: int) -> Any:
    """Train up to a step, from the run's latest one."""
    policies: dict[str, Any] = {"keep": [aiockpt.KeepLatest(2)], "save": aiockpt.EverySteps(2)}
    async with aiockpt.CheckpointManager(folder, **policies, **LIMITS) as run:
        state = state_of(rank, 0)
        start = await run.restore(state)
        if start is not None:
            assert step_in(state, rank) == start.step
        for step in range(start.step + 1 if start else 0, last + 1):
            if run.due(step):
                save = await run.save(step, state_of(rank, step), metrics={"loss": step + 100 * rank})
                await save.staged
        await save.written
        facts = [(info.step, info.metrics["loss"]) for info in await run.ainfos()]
        latest, best = await run.alatest(), await run.abest("loss", "max")
        assert latest is not None
        assert best is not None
        return None if start is None else start.step, latest.step, best.step, facts[-1]


@pytest.mark.main
def test_run_of_two_ranks(world2: World, anywhere: Path) -> None:
    assert world2.results(trains, anywhere, 7) == [(None, 6, 6, (6, 6.0))] * 2
    assert world2.results(trains, anywhere, 11) == [(6, 10, 10, (10, 10.0))] * 2
    assert names(anywhere) == ["step-00000008", "step-00000010"]


def goes_back(rank: int, size: int, folder: Path, verify: str) -> Any:
    heard = []
    with aiockpt.SyncCheckpointManager(folder, **LIMITS) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = state_of(rank, 0)
        start = run.restore(state, verify_when=verify)  # type: ignore[arg-type]
        heard = [each for each in caught if each.category is aiockpt.DamagedCheckpointWarning]
        assert start is not None
        return start.step, step_in(state, rank), [each.path for each in start.skipped], len(heard)


@pytest.mark.parametrize("verify", ["auto", "before", "while"])
def test_all_ranks_go_back_to_the_same_step(world2: World, anywhere: Path, verify: str) -> None:
    world2.results(trains, anywhere, 8)
    file = max((anywhere / "step-00000008").glob("__1_*"), key=lambda each: each.stat().st_size)  # a file of rank 1
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    aside = [str(anywhere / "step-00000008.damaged")]
    assert world2.results(goes_back, anywhere, verify) == [(6, 6, aside, 1), (6, 6, aside, 0)]
    assert names(anywhere) == ["step-00000006", "step-00000008.damaged"]


def discards(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder, **LIMITS) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.restore(state_of(rank, 0), 6)
        before = run.steps()
        run.restore(state_of(rank, 0), 6, discard_later=True)
        return before, run.steps(), len(caught)


def test_rank_0_discards_the_later_steps(world2: World, anywhere: Path) -> None:
    world2.results(trains, anywhere, 8)
    assert world2.results(discards, anywhere) == [([6, 8], [6], 1), ([6, 8], [6], 0)]


def is_refused(rank: int, size: int, folder: Path) -> list[str]:
    kinds = []
    with aiockpt.SyncCheckpointManager(folder, **LIMITS) as run:
        more = {**state_of(rank, 0), "more": torch.ones(1)}
        for state, step in ((state_of(rank, 0), 77), (more, 6), (state_of(rank, 0), 8), (state_of(rank, 0), "latest")):
            with pytest.raises(aiockpt.LoadError) as caught:
                run.restore(state, step)  # type: ignore[arg-type]
            kinds.append(type(caught.value).__name__)
    return kinds


def test_all_ranks_raise_the_same_errors(world2: World, anywhere: Path) -> None:
    world2.results(trains, anywhere, 8)
    for step in (6, 8):
        for file in (anywhere / f"step-{step:08d}").glob("__1_*"):
            file.write_bytes(b"")
    kinds = ["CheckpointNotFoundError", *["CorruptCheckpointError"] * 3]
    assert world2.results(is_refused, anywhere) == [kinds, kinds]
    assert names(anywhere) == ["step-00000006", "step-00000008"]


def does_not_fit(rank: int, size: int, folder: Path) -> None:
    with aiockpt.SyncCheckpointManager(folder, **LIMITS) as run:
        state = {**state_of(rank, 0), **({"more": torch.ones(1)} if rank == 1 else {})}
        with pytest.raises(aiockpt.MissingKeysError):
            run.restore(state)


def test_mismatching_state_of_one_rank_marks_no_step_damaged(world2: World, anywhere: Path) -> None:
    world2.results(trains, anywhere, 8)
    world2.results(does_not_fit, anywhere)
    assert names(anywhere) == ["step-00000006", "step-00000008"]


def is_locked_out(rank: int, size: int, folder: Path) -> str:
    with pytest.raises(aiockpt.RunLockedError) as caught, aiockpt.SyncCheckpointManager(folder, **LIMITS):
        pass
    return str(caught.value)


def test_all_ranks_raise_if_the_run_has_an_owner(world2: World, anywhere: Path) -> None:
    with aiockpt.SyncCheckpointManager(anywhere):
        outcomes = world2.results(is_locked_out, anywhere)
    assert all(f"process {os.getpid()} on host" in text for text in outcomes)
    world2.results(trains, anywhere, 2)  # a second attempt succeeds


# --- due --------------------------------------------------------------------------------------------------------


def is_preempted(rank: int, size: int, folder: Path, asked: int, grace_s: float | None) -> Any:
    saved = []
    with aiockpt.SyncCheckpointManager(folder, save=aiockpt.EverySteps(10), **LIMITS) as run:
        run.on_signal(signal.SIGTERM, grace_s=grace_s)
        for step in range(40):
            if step == 13 and rank == asked:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.due(step):
                run.save(step, state_of(rank, step))
                saved.append(step)
            if run.stopping:
                break
    return saved, step


@pytest.mark.parametrize("asked", [0, 1])
def test_signal_on_one_rank_leads_to_the_same_last_step_on_all(world2: World, anywhere: Path, asked: int) -> None:
    (saved, last), other = world2.results(is_preempted, anywhere, asked, None)
    assert other == (saved, last)
    assert saved[0] == 10
    assert saved[-1] == last
    assert 13 <= last < 13 + 16
    assert names(anywhere)[-1] == f"step-{last:08d}"


@pytest.mark.parametrize("asked", [0, 1])
def test_last_save_that_exceeds_the_grace_period_is_begun_on_no_rank(world2: World, anywhere: Path, asked: int) -> None:
    (saved, last), other = world2.results(is_preempted, anywhere, asked, 1e-9)
    assert other == (saved, last)
    assert all(step % 10 == 0 for step in saved)
    assert last < 40


def asks_by_time(rank: int, size: int, folder: Path) -> Any:
    answers = []
    policy = aiockpt.EverySeconds(1000 if rank == 0 else 0.001)  # rank 0's clock decides
    with aiockpt.SyncCheckpointManager(folder, save=policy, **LIMITS) as run:
        answers += [run.due(step) for step in range(5)]
        run._last_began -= 2000 if rank == 0 else 0
        while not run.due(len(answers)):
            answers.append(False)
        answers.append(True)
    return answers


def test_clock_of_rank_0_decides(world2: World, anywhere: Path) -> None:
    mine, theirs = world2.results(asks_by_time, anywhere)
    assert mine == theirs
    assert mine.count(True) == 1
    assert mine[-1] is True


def is_idle(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder, save=aiockpt.WhenIdle(), **LIMITS) as run:
        return run.due(1)


def test_rank_0_decides_when_idle(world2: World, anywhere: Path) -> None:
    assert world2.results(is_idle, anywhere) == [True, True]


def is_out_of_step(rank: int, size: int, folder: Path) -> str:
    with aiockpt.SyncCheckpointManager(folder, **LIMITS) as run:
        with pytest.raises(aiockpt.CoordinationError) as caught:
            run.due(5 + rank)
        return str(caught.value)


def test_due_with_different_steps_raises(world2: World, anywhere: Path) -> None:
    outcomes = world2.results(is_out_of_step, anywhere)
    assert all("different steps (5, 6)" in text for text in outcomes)


def counts_exchanges(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder, save=aiockpt.EverySteps(7), **LIMITS) as run:
        real, exchanges = run._due._exchange, []
        run._due._exchange = lambda *args, **more: exchanges.append(args) or real(*args, **more)  # type: ignore[method-assign,func-returns-value]
        due = [step for step in range(200) if run.due(step)]
        return due, len(exchanges) <= 100, math.isfinite(run._due._pace._cost_s) == (rank == 0)


def test_short_steps_exchange_messages_less_often(world2: World, anywhere: Path) -> None:
    assert world2.results(counts_exchanges, anywhere) == [(list(range(7, 200, 7)), True, True)] * 2


def ends(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder, save=aiockpt.EverySteps(100), **LIMITS) as run:
        for step in range(250):
            if run.due(step, last=step == 249):
                run.save(step, state_of(rank, step))
        again = run.save(step, state_of(rank, step))
        assert run.due(step, last=True)
        return run.steps(), again == run.save(step, state_of(rank, step))


def test_last_step_is_saved_once_by_all_ranks(world2: World, anywhere: Path) -> None:
    assert world2.results(ends, anywhere) == [([100, 200, 249], True)] * 2


def fails_at_the_end(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder, **LIMITS) as run:
        assert run.due(5, last=True)
        state = state_of(rank, 5)
        with pytest.raises(aiockpt.SaveError, match="sockets"):
            run.save(5, {**state, "sockets": lambda: None} if rank == 1 else state)
        run.save(5, state)
        return run.steps()


def test_last_step_that_one_rank_could_not_save_is_saved_again_by_all(world2: World, anywhere: Path) -> None:
    assert world2.results(fails_at_the_end, anywhere) == [[5], [5]]


def saves_alone(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder / str(rank), process_group=None, save=aiockpt.EverySteps(1)) as run:
        for step in range(1, 4 + rank):
            if run.due(step):
                run.save(step, {"x": torch.full((3,), float(rank))})
        return run.steps()


def test_ranks_with_separate_runs_do_not_communicate(world2: World, anywhere: Path) -> None:
    assert world2.results(saves_alone, anywhere) == [[1, 2, 3], [1, 2, 3, 4]]


# --- a lock that is lost --------------------------------------------------------------------------------------


async def loses_its_lock(rank: int, size: int, folder: Path) -> list[str]:
    async with aiockpt.CheckpointManager(folder, **LIMITS) as run:
        await (await run.save(1, state_of(rank, 1))).written
        if rank == 0:
            os.unlink(folder / LOCK_NAME)
        with pytest.raises(aiockpt.RunLockedError) as caught:
            await (await run.save(2, state_of(rank, 2))).written
        return [str(caught.value), *names(folder)]


def test_lost_lock_fails_the_save_on_all_ranks(world2: World, tmp_path: Path) -> None:
    for rank, (text, *found) in enumerate(world2.results(loses_its_lock, tmp_path)):
        assert "was removed" in text
        assert text.startswith("rank 0: ") == (rank > 0)
        assert found == ["step-00000001"]
