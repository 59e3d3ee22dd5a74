"""Ranks and plans stay in step: with saves in flight, after failed saves, and if a rank never calls."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiockpt
from aiockpt.coordination import coordinator
from tests.ranks.world import World


def fails(_path: str) -> None:
    raise ValueError("boom")


async def outcome(save: aiockpt.SaveHandle) -> str:
    try:
        await save
    except aiockpt.AiockptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "written"


def pair(rank: int, one: int, other: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return {
        f"x{rank}": torch.randn(one, generator=generator),
        f"y{rank}": torch.randn(other, generator=generator),
    }


async def save_unlike(rank: int, world_size: int, path: Path) -> list[str]:
    """Have A and B, of different forms, in flight, of which B fails; then save C like B and D like A."""
    async with aiockpt.AsyncCheckpointer(coordination_timeout=30) as ckpt:
        first = ckpt.save(pair(rank, 50_000, 60_000, 0), path / "a")
        second = ckpt.save(pair(rank, 60_000, 50_000, 1), path / "b", pre_commit=fails if rank == 1 else None)
        told = [await outcome(first), await outcome(second)]
        told.append(await outcome(ckpt.save(pair(rank, 60_000, 50_000, 2), path / "c")))
        told.append(await outcome(ckpt.save(pair(rank, 50_000, 60_000, 3), path / "d")))
    return told


@pytest.mark.slow
def test_plans_of_saves_in_flight_and_of_failed_ones_are_not_mixed_up(world2: World, tmp_path: Path) -> None:
    for told in world2.results(save_unlike, tmp_path):
        assert [each.partition(":")[0] for each in told] == ["written", "SaveError", "written", "written"]
    with aiockpt.SyncCheckpointer() as ckpt:
        for name, sizes, seed in (("a", (50_000, 60_000), 0), ("c", (60_000, 50_000), 2), ("d", (50_000, 60_000), 3)):
            assert ckpt.verify(tmp_path / name).ok
            state = ckpt.load(tmp_path / name)
            expected = pair(0, *sizes, seed) | pair(1, *sizes, seed)
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], expected[key]) for key in expected)


async def save_alike(rank: int, world_size: int, path: Path) -> list[str]:
    """Fail once, then have three saves of one form in flight."""
    async with aiockpt.AsyncCheckpointer(coordination_timeout=30) as ckpt:
        told = [await outcome(ckpt.save(pair(rank, 9, 7, 0), path / "0", pre_commit=fails if rank == 1 else None))]
        saves = [ckpt.save(pair(rank, 9, 7, number), path / str(number)) for number in (1, 2, 3)]
        return told + [await outcome(save) for save in saves]


def test_saves_go_on_after_a_failure(world2: World, tmp_path: Path) -> None:
    for told in world2.results(save_alike, tmp_path):
        assert [each.partition(":")[0] for each in told] == ["SaveError", "written", "written", "written"]
    with aiockpt.SyncCheckpointer() as ckpt:
        for number in (1, 2, 3):
            state = ckpt.load(tmp_path / str(number))
            assert torch.equal(state["y1"], pair(1, 9, 7, number)["y1"])


async def save_hinted(rank: int, world_size: int, path: Path) -> list[str]:
    """Save with a hint, without one, with one on rank 0 alone, and with one again."""
    async with aiockpt.AsyncCheckpointer(coordination_timeout=30) as ckpt:
        hints = ["x", None, "x" if rank == 0 else None, "x"]
        state = pair(rank, 500, 300, 0)
        return [
            await outcome(ckpt.save(state, path / str(number), separation_hint=hint))
            for number, hint in enumerate(hints)
        ]


def test_forms_that_differ_between_ranks_are_refused(world2: World, tmp_path: Path) -> None:
    for told in world2.results(save_hinted, tmp_path):
        assert [each.partition(":")[0] for each in told] == ["written", "written", "SaveError", "written"]
        assert "the file format (io_threads, hints, division into files) is" in told[2]
        assert "but" in told[2]
        assert "on rank 1" in told[2]


def save_tree(rank: int, world_size: int, path: Path, kind: str) -> None:
    states: dict[str, list[dict[Any, Any]]] = {
        "within": [{"a": torch.ones(3)}, {"a": {"b": torch.ones(3)}}],
        "around": [{"a": {"b": torch.ones(3)}}, {"a": 5}],
        "dots": [{"a.b": torch.ones(3)}, {"a": {"b": torch.ones(3)}}],
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(states[kind][rank], path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("within", "a.b is within a, which is a value of its own on another rank"),
        ("around", "a.b is within a, which is a value of its own on another rank"),
        ("dots", "a.b is at ('a', 'b') of the state dict on rank 1 but at ('a.b',) on another"),
    ],
)
def test_trees_that_contradict_each_other_are_refused(world2: World, tmp_path: Path, kind: str, said: str) -> None:
    failures = world2.run(save_tree, tmp_path / "c", kind)
    assert [failure.kind for failure in failures] == ["SaveError", "SaveError"]
    assert all(said in failure.text for failure in failures)
    assert not list(tmp_path.iterdir())


async def load_alone(rank: int, world_size: int, path: Path) -> str:
    """Cancel a load of rank 0 before rank 1 has called, then load on both ranks."""
    state = {"w": torch.full((50_000,), -1.0)}
    async with aiockpt.AsyncCheckpointer(coordination_timeout=600) as ckpt:
        await ckpt.save({"w": torch.arange(50_000.0)}, path / "c")
        if rank == 0:
            task = asyncio.create_task(ckpt.load(path / "c", state))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # at once: rank 1 calls only after this
            await asyncio.to_thread(dist.barrier)
        else:
            await asyncio.to_thread(dist.barrier)
            with pytest.raises(aiockpt.LoadError, match=r"rank 0: the load of .* was cancelled") as caught:
                await ckpt.load(path / "c", state)
            # If rank 0 agreed to begin before it was cancelled, this rank has filled its tensor, and `placed` names it.
            filled = torch.arange(50_000.0) if caught.value.placed else torch.full((50_000,), -1.0)
            assert caught.value.placed in ((), ("w",))
            assert torch.equal(state["w"], filled)
            state["w"].fill_(-1.0)
        assert torch.equal(state["w"], torch.full((50_000,), -1.0))
        await ckpt.load(path / "c", state)
    return "loaded" if torch.equal(state["w"], torch.arange(50_000.0)) else "other values"


def test_a_load_that_waits_for_other_ranks_can_be_cancelled(world2: World, tmp_path: Path) -> None:
    assert world2.results(load_alone, tmp_path) == ["loaded", "loaded"]


def close_while_waiting(rank: int, world_size: int, path: Path) -> str:
    """Close a checkpointer during a save that the other rank does not join."""
    ckpt = aiockpt.SyncCheckpointer(coordination_timeout=600, drain_timeout=0.2)
    ckpt.save({"w": torch.arange(50_000.0)}, path / "c")
    dist.barrier()
    told = ""
    if rank == 1:
        aiockpt.engine.engine.CANCEL_GRACE_S = 3.0
        coordinator._END_S = 0.5  # close() waits this long for a thread that waits for rank 0
        ckpt.submit({"w": torch.ones(5)}, path / "d")
        with pytest.raises(aiockpt.SaveCancelledError, match="nothing of it is left"):
            ckpt.close()
        told = "closed"
    dist.barrier()
    if rank == 0:
        ckpt.close()
    return told


@pytest.mark.slow
def test_close_does_not_wait_for_ranks_that_never_call(tmp_path: Path) -> None:
    with World(2) as world:
        assert world.results(close_while_waiting, tmp_path, timeout_s=60) == ["", "closed"]


_LEAVES = """
import sys, torch, torch.distributed as dist, aiockpt, aiockpt.coordination.coordinator
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
ckpt = aiockpt.SyncCheckpointer(coordination_timeout=600, drain_timeout=0.2)
aiockpt.engine.engine.CANCEL_GRACE_S = 3.0
aiockpt.coordination.coordinator._END_S = 0.5
ckpt.save({"w": torch.arange(50_000.0)}, f"{path}/a")
if rank == 1:
    ckpt.submit({"w": torch.ones(5)}, f"{path}/b")
    try:
        ckpt.close()
    except aiockpt.SaveCancelledError:
        print("left", flush=True)
else:
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_process_exits_although_another_rank_never_calls(python: list[str], tmp_path: Path) -> None:
    stays, leaves = (
        subprocess.Popen(
            [*python, "-c", _LEAVES, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    )
    try:
        assert leaves.communicate(timeout=120)[0] == "left\n"
        assert leaves.returncode == 0
    finally:
        leaves.kill()
        stays.communicate(timeout=60)


def save_after_the_end(rank: int, world_size: int, path: Path) -> list[str]:
    told = []
    group = dist.group.WORLD
    ckpts = [aiockpt.SyncCheckpointer(process_group=group), aiockpt.SyncCheckpointer()]
    dist.destroy_process_group()
    for ckpt in ckpts:
        with ckpt, pytest.raises(aiockpt.CoordinationError, match="destroyed before the checkpointer's first use"):
            ckpt.save({f"w{rank}": torch.ones(3)}, path / "c")
        told.append("refused")
    with aiockpt.SyncCheckpointer() as alone:
        told.append(str(alone.save({f"w{rank}": torch.ones(3)}, path / f"alone{rank}").tensors))
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world_size)
    return told


def test_a_destroyed_group_is_not_mistaken_for_one_process(tmp_path: Path) -> None:
    with World(2) as world:
        assert world.results(save_after_the_end, tmp_path) == [["refused", "refused", "1"]] * 2
