"""Mirrors of runs of several ranks: rank 0 copies what all have written, and all restore the same step."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.manager.scan import scan
from tests.manager.runs import flip
from tests.manager.test_ranks import LIMITS, state_of, step_in
from tests.ranks.world import World


async def trains(rank: int, size: int, here: Path, there: Any) -> Any:
    async with aiockpt.CheckpointManager(here, mirror=there, keep=aiockpt.KeepLatest(2), **LIMITS) as run:
        for step in (1, 2, 3):
            save = await run.save(step, state_of(rank, step))
            await save.written
            if rank == 0:
                await save.mirrored
            else:
                with pytest.raises(aiockpt.AiockptError, match="only rank 0"):
                    save.mirrored  # noqa: B018
        return None if run.mirror_backlog is None else run.mirror_backlog.newest


def restores(rank: int, size: int, here: Path, there: Any, verify: Any = "auto") -> Any:
    state = state_of(rank, 0)
    with (
        aiockpt.SyncCheckpointManager(here, mirror=there, **LIMITS) as run,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        start = run.restore(state, verify_when=verify)
    assert start is not None
    heard = [each for each in caught if each.category is aiockpt.DamagedCheckpointWarning]
    return start.step, step_in(state, rank), start.path, start.repaired, len(heard)


def test_mirror_of_two_ranks(world2: World, tmp_path: Path, anywhere: Path) -> None:
    here, there = tmp_path / "here", anywhere / "there"
    assert world2.results(trains, here, there) == [3, None]
    assert [info.step for info in scan(here)] == [info.step for info in scan(there)] == [2, 3]
    shutil.rmtree(here)
    found = (3, 3, str(there / "step-00000003"), (), 0)
    assert world2.results(restores, here, there) == [found, found]


@pytest.mark.parametrize("verify", ["auto", "while"])
def test_flipped_byte_of_one_rank_is_repaired_on_all(
    world2: World, tmp_path: Path, anywhere: Path, verify: str
) -> None:
    here, there = tmp_path / "here", anywhere / "there"
    world2.results(trains, here, there)
    file = max((here / "step-00000003").glob("__1_*"), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = [
        (step, in_state, repaired) for step, in_state, _, repaired, _ in world2.results(restores, here, there, verify)
    ]
    assert found == [(3, 3, ("own1",))] * 2
    flip(there, 3)
    found = [
        (step, in_state, repaired) for step, in_state, _, repaired, _ in world2.results(restores, here, there, verify)
    ]
    assert found == [(2, 2, ())] * 2
