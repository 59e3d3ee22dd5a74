"""Saves that come too fast or take too long: all ranks skip them or give up together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.ranks.failing import SMALL, state_of, whole_state
from tests.ranks.world import World
from tests.states import assert_same


async def save_too_fast(rank: int, size: int, folder: Path, options: dict[str, Any]) -> list[tuple[bool, str]]:
    """Save three times while rank 0 holds up the first; return for each whether it was skipped, and its error."""
    storage = GatedStorage(LocalStorage(), ["commit"] if rank == 0 else [])
    async with aiockpt.AsyncCheckpointer(drain_timeout=20, **options, **SMALL) as ckpt:
        saves = [ckpt.save(state_of(rank, size, number), folder / str(number), storage=storage) for number in range(3)]
        if rank == 0:
            await storage.reached["commit"]
            storage.open("commit")
        ends = []
        for save in saves:
            await save.staged
            await save.written.settled()
            ends.append((save.skipped, type(save.written.exception()).__name__))
        await ckpt.ready()
        await ckpt.save(state_of(rank, size, 7), folder / "next")
        statistics = ckpt.statistics()
        skipped = sum(was_skipped for was_skipped, _ in ends)
        assert (statistics.written, statistics.skipped) == (4 - skipped, skipped)
    return ends


@pytest.mark.parametrize(
    ("options", "skipped"),
    [({"on_busy": "skip"}, [1, 2]), ({"on_busy": "skip", "max_in_flight": 2}, [2]), ({"on_busy": "supersede"}, [1])],
    ids=str,
)
def test_rank_0_decides_which_saves_are_skipped(
    world2: World, tmp_path: Path, options: dict[str, Any], skipped: list[int]
) -> None:
    outcomes = world2.results(save_too_fast, tmp_path, options)
    expected = [(number in skipped, "SaveSkippedError" if number in skipped else "NoneType") for number in range(3)]
    assert outcomes == [expected, expected]
    written = [str(number) for number in range(3) if number not in skipped]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*written, "next"]
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        for name in written:
            assert_same(whole_state(2, int(name)), ckpt.load(tmp_path / name))


async def save_slowly(rank: int, size: int, folder: Path, slow: int) -> str:
    """Save while one rank is held up for longer than `save_timeout`."""
    storage = GatedStorage(LocalStorage(), ["write"] if rank == slow else [])
    timeout = 0.5 if rank == slow else 60.0
    async with aiockpt.AsyncCheckpointer(save_timeout=timeout, **SMALL) as ckpt:
        save = ckpt.save(state_of(rank, size, 1), folder / "c", storage=storage)
        await save.written.settled()
        kind = type(save.written.exception()).__name__
        if rank == slow:
            storage.open("write")
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return kind


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_that_times_out_on_one_rank_fails_on_all(world2: World, tmp_path: Path, slow: int) -> None:
    assert world2.results(save_slowly, tmp_path, slow) == ["SaveTimeoutError", "SaveTimeoutError"]
    assert not (tmp_path / "c").exists()


async def save_with_a_fallback(rank: int, size: int, folder: Path) -> str:
    async with aiockpt.AsyncCheckpointer(fallback_path=folder / "spare") as ckpt:
        try:
            ckpt.save(state_of(rank, size, 1), folder / "c")
        except aiockpt.SaveError as exc:
            return str(exc)
    return ""


def test_a_fallback_path_is_refused_with_several_ranks(world2: World, tmp_path: Path) -> None:
    for message in world2.results(save_with_a_fallback, tmp_path):
        assert "fallback_path is for one process" in message
    assert list(tmp_path.iterdir()) == []
