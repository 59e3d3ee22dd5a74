"""Ranks that follow a run: together, by the choice of rank 0, and what several ranks have saved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import Source
from tests.ranks.world import World, mesh_of

POLL_S = 0.01
STEPS = 6


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "frozen": torch.arange(1000.0), "n": step}


def target() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "frozen": torch.zeros(1000), "n": -1}


@contextlib.contextmanager
def together(path: Path, **options: Any) -> Iterator[Iterator[aiockpt.SyncVersion]]:
    with aiockpt.watch_sync(path, poll_s=POLL_S, process_group="default", coordination_timeout=60, **options) as watch:
        versions = iter(watch)
        try:
            yield versions
        finally:
            versions.close()  # type: ignore[attr-defined]


def follow(rank: int, world_size: int, path: Path) -> list[tuple[int, str, bool]]:
    """Follow, while the last rank saves the next step in each body, or two, of which it replaces one."""
    into, seen, last = target(), list[tuple[int, str, bool]](), 1
    saves = rank == world_size - 1
    run = aiockpt.SyncCheckpointManager(path, process_group=None, read_only=not saves)
    with run, together(path, until=(path.parent / "done").exists) as versions:
        for number, version in enumerate(versions):
            version.load(into)
            seen.append((version.step, version.info.save_id, torch.equal(into["w"], state_of(into["n"])["w"])))
            assert into["n"] == version.step
            if saves and number < STEPS:
                last += 1 + number % 2  # rank 0 may look at any moment
                for step in range(last - number % 2, last + 1):
                    run.save(step, state_of(step), hashes=True)
                if number % 2:
                    run.save(last, state_of(last), hashes=True, overwrite=True)
            elif saves:
                (path.parent / "done").touch()
    return seen


def check_same_versions(world: World, path: Path) -> None:
    with aiockpt.SyncCheckpointManager(path) as run:
        run.save(1, state_of(1), hashes=True)
    seen, *others = world.results(follow, path)
    assert all(each == seen for each in others)
    assert all(is_same for _, _, is_same in seen)
    assert STEPS < len({save_id for _, save_id, _ in seen}) == len(seen)


def test_both_ranks_have_the_same_versions(world2: World, tmp_path: Path) -> None:
    check_same_versions(world2, tmp_path / "run")


def test_all_ranks_have_the_same_versions(world4: World, tmp_path: Path) -> None:
    check_same_versions(world4, tmp_path / "run")


async def follow_as_tasks(rank: int, world_size: int, path: Path) -> list[int]:
    into, steps = target(), []
    options: dict[str, Any] = {"poll_s": POLL_S, "process_group": "default", "coordination_timeout": 60}
    async with aiockpt.watch(path, until=(path.parent / "done").exists, **options) as versions:
        async for version in versions:
            await version.load(into)
            assert into["n"] == version.step
            steps.append(version.step)
            if rank == world_size - 1:
                if len(steps) < 3:
                    async with aiockpt.CheckpointManager(path, process_group=None) as run:
                        await (await run.save(version.step + 1, state_of(version.step + 1))).written
                else:
                    (path.parent / "done").touch()
    return steps


def test_tasks_of_all_ranks_have_the_same_versions(world2: World, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
        run.save(1, state_of(1))
    assert world2.results(follow_as_tasks, tmp_path / "run") == [[1, 2, 3]] * 2


# --- ranks that leave ---------------------------------------------------------------------------------------


def leave(rank: int, world_size: int, path: Path, leaver: int, how: str) -> int:
    """Follow until another rank has left: by closing, by an error, or by its death."""
    with together(path) as versions:
        for version in versions:
            assert version.step == 1
            if rank == leaver:
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raises":
                    raise ValueError("of the loop's body")
                break
    return 1


@pytest.mark.parametrize("how", ["closes", "raises", "dies"])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_ends_the_others_with_an_error(how: str, leaver: int, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
        run.save(1, state_of(1))
    with World(2) as world:
        outcomes = world.run(leave, tmp_path / "run", leaver, how)
    other = outcomes[1 - leaver]
    assert other.kind == "CoordinationError"
    assert f"rank {leaver}" in other.text
    assert (
        outcomes[leaver] == 1
        if how == "closes"
        else outcomes[leaver].kind == {"raises": "ValueError"}.get(how, "killed")
    )


async def cancel(rank: int, world_size: int, path: Path, leaver: int, is_early: bool) -> str:
    """Follow a run; one rank is cancelled at once, or as it waits for a second version."""
    has_begun = asyncio.Event()

    async def wait() -> None:
        async with aiockpt.watch(path, poll_s=POLL_S, process_group="default", coordination_timeout=500) as versions:
            has_begun.set()
            async for _ in versions:
                has_begun.set()

    task = asyncio.create_task(wait())
    if rank == leaver:
        await has_begun.wait()
        if not is_early:
            has_begun.clear()
            await has_begun.wait()
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    except aiockpt.CoordinationError as exc:
        return str(exc)
    return "ended"


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_is_cancelled_does_not_wait_for_the_others(leaver: int, is_early: bool, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
        run.save(1, state_of(1))
    with World(2) as world:
        outcomes = world.results(cancel, tmp_path / "run", leaver, is_early)
    assert outcomes[leaver] == "cancelled"
    assert f"rank {leaver}" in outcomes[1 - leaver]


class Unreadable(LocalStorage):
    """A storage of which no checkpoint can be opened."""

    async def open(self, path: str, *, workers: Any) -> Source:
        raise OSError(5, f"can't be read: {path}")


def open_nothing(rank: int, world_size: int, path: Path) -> str:
    with together(path, storage=Unreadable() if rank == 1 else None) as versions:
        try:
            next(versions)
        except (OSError, aiockpt.AiockptError) as exc:
            return str(exc)
    return "opened"


def test_a_version_that_one_rank_cannot_open_is_an_error_on_all(world2: World, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
        run.save(1, state_of(1))
    for text in world2.results(open_nothing, tmp_path / "run"):
        assert "can't be read" in text


# --- what several ranks have saved ----------------------------------------------------------------------------


def sharded(value: float, placement: Any) -> dict[str, Any]:
    mesh = mesh_of(torch.distributed.get_world_size())
    tensors = {"w": torch.full((64, 3), value), "frozen": torch.arange(192.0).view(64, 3), "odd": torch.arange(7.0)}
    return {key: distribute_tensor(tensor, mesh, [placement]) for key, tensor in tensors.items()}


def save_sharded(rank: int, world_size: int, path: Path, step: int) -> None:
    with aiockpt.SyncCheckpointManager(path) as run:
        run.save(step, {"model": sharded(float(step), Shard(0))})


_kept: dict[str, Any] = {}  # of a rank, from one call to the next


def begin(rank: int, world_size: int, path: Path) -> None:
    _kept["watch"] = aiockpt.watch_sync(path, poll_s=POLL_S, process_group="default", coordination_timeout=60)
    _kept["versions"] = iter(_kept["watch"])
    _kept["into"] = {key: {"model": sharded(0.0, each)} for key, each in (("rows", Shard(0)), ("all", Replicate()))}


def load_sharded(rank: int, world_size: int, key: str) -> tuple[list[str], bool]:
    _kept["version"] = next(_kept["versions"])
    into = _kept["into"][key]
    changed = _kept["version"].load(into)
    whole = {name: each.full_tensor() for name, each in into["model"].items() if isinstance(each, DTensor)}
    expected = torch.full((64, 3), float(_kept["version"].step))
    return sorted(changed), torch.equal(whole["w"], expected) and torch.equal(whole["odd"], torch.arange(7.0))


def end(rank: int, world_size: int) -> None:
    _kept["versions"].close()
    _kept.clear()


@pytest.mark.parametrize("key", ["rows", "all"])
def test_what_ranks_have_saved_is_followed_by_other_ranks_and_by_one_process(
    key: str, world2: World, world4: World, tmp_path: Path
) -> None:
    path, into = tmp_path / "run", {"model": {"w": torch.zeros(64, 3), "frozen": torch.zeros(64, 3)}}
    with aiockpt.watch_sync(path, poll_s=POLL_S) as watch:
        versions = iter(watch)
        for step in (1, 2):
            world4.results(save_sharded, path, step)
            if step == 1:
                world2.results(begin, path)
            version = next(versions)
            changed = version.load(into)
            assert sorted(changed) == ["model.frozen", "model.w"]  # saves of several ranks keep no hashes
            assert torch.equal(into["model"]["w"], torch.full((64, 3), float(step)))
            for names, is_same in world2.results(load_sharded, key):
                assert is_same
                assert names == ["model.frozen", "model.odd", "model.w"]
        versions.close()  # type: ignore[attr-defined]
    world2.results(end)
