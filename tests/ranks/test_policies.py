"""Saves that come too fast or take too long: all ranks skip them or give up together."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import Storage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.ranks.failing import SMALL, state_of, whole_state
from tests.ranks.world import World
from tests.states import assert_same
from tests.writing.gates import BrokenStorage


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


@pytest.mark.main
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


# --- fallback_path ----------------------------------------------------------------------------------


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


ROOMY: dict[str, Any] = {"chunk_bytes": 1 << 18, "staging_bytes": 1 << 24, "io_threads": 1}
"""Options with memory for a rank's share, which is kept for the fallback."""


async def save_to_a_fallback(
    rank: int, size: int, folder: Path, step: str, failing: int, given: dict[str, Any], writer: str
) -> tuple[str, str, str]:
    """Save while the storage of one rank fails; return the path of the save, its error, and the next save's path."""
    state = state_of(rank, size, 1)
    if given.get("format") == "safetensors":
        state = {"cut": state["cut"], "both": state["model"]["both"]}
    storage: Storage = LocalStorage()
    if rank == failing:  # that of a process is copied, and would fail once in each copy
        path = str(folder / "c")
        storage = FaultyStorage(storage, step, full()) if writer == "thread" else BrokenStorage(step, path)
    options = {"fallback_path": folder / ("spare" if rank == 0 else "other"), "writer": writer}
    async with aiockpt.AsyncCheckpointer(**options, **ROOMY) as ckpt:
        result = await ckpt.save(state, folder / "c", storage=storage, **given)
        later = await ckpt.save(state, folder / "d", **given)
    return result.path, str(result.fallback_error), later.path


@pytest.mark.parametrize(
    ("step", "failing", "given", "writer"),
    [
        *((step, 0, {}, "thread") for step in ("begin", "create", "write", "finish", "commit")),
        *((step, 1, {}, "thread") for step in ("join", "create", "write", "finish", "commit")),
        *(
            (step, rank, {"format": "safetensors"}, "thread")
            for step, rank in (("begin", 0), ("join", 1), ("commit", 0))
        ),
        *((step, rank, {"compress": "zstd"}, "thread") for step, rank in (("create", 1), ("commit", 0))),
        *((step, rank, {}, "process") for step, rank in (("begin", 0), ("join", 1), ("commit", 0), ("commit", 1))),
    ],
)
def test_all_ranks_go_to_the_fallback_of_rank_0(
    world2: World, tmp_path: Path, step: str, failing: int, given: dict[str, Any], writer: str
) -> None:
    for path, error, later in world2.results(save_to_a_fallback, tmp_path, step, failing, given, writer):
        assert path == str(tmp_path / "spare" / "c")
        assert "no space" in error.lower()
        assert later == str(tmp_path / "d")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["d", "spare"]
    expected = whole_state(2, 1)
    if given.get("format") == "safetensors":
        expected = {"both": expected["model"]["both"], "cut": expected["cut"]}  # sorted by name
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in (tmp_path / "spare" / "c", tmp_path / "d"):
            assert ckpt.verify(path).ok
            assert_same(expected, ckpt.load(path))


async def save_with_little_memory(rank: int, size: int, folder: Path, poor: int) -> tuple[str, list[str]]:
    """Save while rank 0 can't publish, and one rank has not kept what it has staged; then save again."""
    storage = FaultyStorage(LocalStorage(), "commit", full()) if rank == 0 else LocalStorage()
    async with aiockpt.AsyncCheckpointer(fallback_path=folder / "spare", **(SMALL if rank == poor else ROOMY)) as ckpt:
        with pytest.raises(aiockpt.SaveError) as caught:
            await ckpt.save(state_of(rank, size, 1), folder / "c", storage=storage)
        await ckpt.save(state_of(rank, size, 2), folder / "d")
    return str(caught.value), caught.value.__notes__


@pytest.mark.parametrize("poor", [0, 1])
def test_no_rank_goes_to_the_fallback_if_one_can_not(world2: World, tmp_path: Path, poor: int) -> None:
    for error, notes in world2.results(save_with_little_memory, tmp_path, poor):
        assert "No space left on device" in error
        assert any(f"rank {poor}: it was too late to save it to {tmp_path / 'spare' / 'c'}" in note for note in notes)
    assert [each.name for each in tmp_path.iterdir()] == ["d"]


async def save_where_nothing_works(rank: int, size: int, folder: Path) -> list[str]:
    """Save while rank 1 can't write anywhere, then where it can."""
    storage = FaultyStorage(LocalStorage(), "write", full(), times=100)
    async with aiockpt.AsyncCheckpointer(fallback_path=folder / "spare", **ROOMY) as ckpt:
        with pytest.raises(aiockpt.WriteError) as caught:
            await ckpt.save(state_of(rank, size, 1), folder / "c", storage=storage if rank else None)
        await ckpt.save(state_of(rank, size, 2), folder / "d")
    return caught.value.__notes__


def test_both_errors_are_told_if_the_fallback_fails_too(world2: World, tmp_path: Path) -> None:
    for notes in world2.results(save_where_nothing_works, tmp_path):
        assert any("nor could it be saved to" in note for note in notes)
    assert sorted(each.name for each in tmp_path.iterdir()) in (["d"], ["d", "spare"])
    assert not list(tmp_path.glob("spare/*"))


async def save_with_one_fallback(rank: int, size: int, folder: Path) -> str:
    async with aiockpt.AsyncCheckpointer(fallback_path=folder / "spare" if rank else None) as ckpt:
        with pytest.raises(aiockpt.SaveError) as caught:
            await ckpt.save(state_of(rank, size, 1), folder / "c")
    return str(caught.value)


def test_all_ranks_have_a_fallback_or_none(world2: World, tmp_path: Path) -> None:
    for message in world2.results(save_with_one_fallback, tmp_path):
        assert "the use of fallback_path is False on rank 0 but True on rank 1" in message
    assert list(tmp_path.iterdir()) == []


async def save_after_a_failure(rank: int, size: int, folder: Path) -> list[str]:
    """Save where one rank learns only at its next call that the save before has failed."""
    told = []
    async with aiockpt.AsyncCheckpointer(fallback_path=folder / "spare", coordination_timeout=20, **ROOMY) as ckpt:
        storage = FaultyStorage(LocalStorage(), "begin", full(), times=100)
        first = ckpt.save(state_of(rank, size, 1), folder / "0", storage=storage)
        await first.written.settled()
        if rank:  # the other rank's next call is refused, as this error was not seen there
            told.append(type(first.written.exception()).__name__)
        try:
            await ckpt.save(state_of(rank, size, 2), folder / "1")
        except aiockpt.AiockptError as exc:
            told.append(type(exc).__name__)
        await ckpt.save(state_of(rank, size, 3), folder / "2")
    return told


def test_a_refused_save_sends_nobody_to_the_fallback(world2: World, tmp_path: Path) -> None:
    assert world2.results(save_after_a_failure, tmp_path) == [["WriteError"], ["WriteError", "WriteError"]]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "spare") == ["2"]
    assert not list(tmp_path.glob("spare/*"))
