"""The harness itself: `World` returns results and reports failures, deaths and timeouts."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks.world import RankFailure, World


def sums(rank: int, world_size: int, factor: int) -> tuple[int, int]:
    total = torch.tensor([(rank + 3) * factor])
    dist.all_reduce(total)
    return rank, int(total)


async def fails(rank: int, world_size: int, kind: str) -> str:
    if rank != 1:
        return kind
    if kind == "warns":
        warnings.warn("careful", stacklevel=1)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "unpicklable":
        return threading.Lock()  # type: ignore[return-value]
    try:
        raise KeyError("inner")
    except KeyError as exc:
        raise ValueError("outer") from exc


def hangs(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def test_every_rank_runs_in_one_group(world4: World) -> None:
    assert world4.results(sums, 10) == [(rank, 180) for rank in range(4)]
    assert world4.results(sums, 7) == [(rank, 126) for rank in range(4)]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_failures_are_reported(world2: World, loop) -> None:
    assert world2.run(fails, "raises", loop=loop) == [
        "raises",
        RankFailure(1, "ValueError", "outer", "KeyError: 'inner'"),
    ]
    assert world2.run(fails, "warns", loop=loop) == ["warns", RankFailure(1, "UserWarning", "careful")]
    assert world2.run(fails, "unpicklable", loop=loop)[1].kind == "TypeError"
    with pytest.raises(AssertionError, match=r"rank 1: ValueError: outer\nTraceback"):
        world2.results(fails, "raises", loop=loop)


def test_deaths_are_reported() -> None:
    with World(2, store="file") as world:
        pids = world.pids
        assert world.run(fails, "dies") == ["dies", RankFailure(1, "killed", "exit code -9")]
        assert world.run(sums, 1)[1] == RankFailure(1, "killed", "exit code -9")
        world.kill(0)
        assert [failure.rank for failure in world.run(fails, "raises") if failure.killed] == [0, 1]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_timeouts_show_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.world._GRACE_S", 2.5)
    world = World(2)
    with world, pytest.raises(AssertionError, match=r"ranks \[1\] did not end within 0\.5 s(.|\n)*in hangs"):
        world.run(hangs, timeout_s=0.5)
