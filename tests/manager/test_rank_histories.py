"""Random histories of runs of two ranks: real processes, compared with the model of `histories`."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import aiockpt
from tests.manager.faulty import Keep, Stored, open_run
from tests.manager.histories import HARMS, KEEPS, LOSSES, Model
from tests.manager.runs import empty, names, path_of, state_of, step_in
from tests.places import ServerPath
from tests.ranks.world import World

Event = tuple[Any, ...]

FATES = st.one_of(
    st.just((-1, "", 1)),  # the rank that fails, the storage call that fails, and which of its calls
    st.tuples(
        st.integers(0, 1), st.sampled_from(["begin", "join", "create", "write", "finish", "commit"]), st.integers(1, 2)
    ),
)


def events_of(harms: set[str]) -> st.SearchStrategy[Event]:
    return st.one_of(
        st.tuples(st.just("save"), LOSSES, FATES),
        st.tuples(st.just("save"), LOSSES, st.just((-1, "", 1))),
        st.tuples(st.just("harm"), st.sampled_from(sorted(harms))),
        st.tuples(st.just("restore")),
        st.tuples(st.just("reopen"), KEEPS),
    )


def run_events(rank: int, size: int, folder: Path, keep: Keep, events: list[Event]) -> list[Any]:
    """Run the events on one rank; return the outcome of each, and the steps in the directory after it."""
    outcomes = []
    harmed: set[int] = set()
    run, saving, _ = open_run(str(folder), keep, coordination_timeout=60)
    for number, event in enumerate(events, 1):
        outcome: Any = None
        if event[0] == "save":
            _, loss, (failing, where, nth) = event
            saving.arm(where if rank == failing else "", nth)
            state = state_of(number) | {f"own{rank}": torch.full((3000,), 10.0 * number + rank)}
            try:
                run.submit(number, state, {} if loss is None else {"loss": loss}).written.result()
                outcome = True
            except aiockpt.AiockptError as exc:
                outcome = str(exc) == ""  # False: the message is never empty
            saving.arm("")
            run._retention.finished().result()
        elif event[0] == "harm":
            dist.barrier()
            there = steps_of(folder)
            dist.barrier()
            outcome = [step for step in there[-1:] if step not in harmed]  # flipping a bit twice would repair it
            harmed.update(outcome)
            if outcome and rank == 0:
                HARMS[event[1]](folder, there[-1])
        elif event[0] == "reopen":
            run.close()
            dist.barrier()
            run, saving, _ = open_run(str(folder), event[1], coordination_timeout=60)
        else:
            outcome = restore(run, rank)
        dist.barrier()
        outcomes.append((outcome, steps_of(folder)))
        dist.barrier()
    run.close()
    return outcomes


def restore(run: aiockpt.SyncCheckpointManager, rank: int) -> Any:
    state = empty() | {f"own{rank}": torch.zeros(3000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", aiockpt.DamagedCheckpointWarning)
        try:
            start = run.restore(state)
        except aiockpt.CorruptCheckpointError:
            return "damaged"
    if start is None:
        return None
    assert state[f"own{rank}"].unique().tolist() == [10.0 * step_in(state) + rank]
    return start.step, step_in(state), [each.step for each in start.skipped]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(name[5:]) for name in names(folder) if re.fullmatch(r"step-[0-9]{8}", name))


def check(world: World, folder: Path, keep: Keep, events: list[Event]) -> None:
    """Compare the outcomes of the ranks with each other and with the model."""
    one, other = world.results(run_events, folder, keep, events)
    assert one == other
    model = Model(keep=keep)
    for number, (event, (outcome, there)) in enumerate(zip(events, one, strict=True), 1):
        if event[0] == "save":
            assert outcome or event[2][0] >= 0
            if outcome:
                model.written(number, Stored(number, event[1]))
        elif event[0] == "harm":
            for step in outcome:
                stored = model.steps.pop(step)
                if event[1] != "delete":
                    model.steps[step] = Stored(stored.version, stored.loss, event[1])
        elif event[0] == "reopen":
            model.keep, model.last = event[1], None
        else:
            candidates = sorted(model.steps, reverse=True)
            good = next((step for step in candidates if not model.steps[step].harm), None)
            if good is None:
                assert outcome == ("damaged" if candidates else None)
            else:
                skipped = candidates[: candidates.index(good)]
                assert outcome == (good, good, skipped)
                model.set_aside(skipped)
                model.last = good
        assert there == sorted(model.steps), event
    assert not [name for name in names(folder) if name.startswith(".aiockpt")]
    assert all(path_of(folder, step).exists() for step in model.steps)


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.full)])
def test_two_ranks_match_the_model(world2: World, tmp_path_factory: pytest.TempPathFactory, count: int) -> None:
    match(world2, count, set(HARMS), lambda: tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_two_ranks_match_the_model_on_a_server(world2: World, server_url: str) -> None:
    match(world2, 8, {"flip", "delete"}, lambda: ServerPath(f"{server_url}/{uuid.uuid4().hex}"))


def match(world2: World, count: int, harms: set[str], make_folder: Callable[[], Path]) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # no shrinking: after a failure, the world of ranks is unusable
        suppress_health_check=list(HealthCheck),
    )
    @given(keep=KEEPS, events=st.lists(events_of(harms), min_size=4, max_size=12))
    def run(keep: Keep, events: list[Event]) -> None:
        check(world2, make_folder(), keep, events)

    run()
