"""Shared reads over process groups of the caller's: who reads what, other formats, failures, and wrong groups."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.engine.facade import EngineAccess
from aiockpt.planning.collective.sharing import CELL_BYTES
from aiockpt.reading import group_reads
from tests.ranks.test_shared_reads import (
    WIDTH,
    Counting,
    Failing,
    equal,
    kill,
    load_replicated,
    logged,
    nbytes_of,
    raise_error,
    state_of,
)
from tests.ranks.test_shared_reads import saved as saved
from tests.ranks.world import RankFailure, World, mesh_of

Parts = tuple[tuple[int, ...], ...]
"""The ranks of some groups."""
ALL4: Parts = ((0, 1, 2, 3),)
PAIRS: Parts = ((0, 1), (2, 3))
NBYTES = nbytes_of(state_of(3.0))


@functools.cache
def group_of(parts: Parts) -> ProcessGroup:
    """Return this rank's group of some, the same for all runs."""
    groups = [dist.new_group(list(part), backend="gloo") for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)


def load_over(rank: int, world_size: int, path: Path, kind: str, parts: Parts) -> int:
    return load_replicated(rank, world_size, path, kind, {"share": group_of(parts)})


@pytest.mark.parametrize(
    "kind", ["filled", "new", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fresh", "converted"))]
)
def test_each_byte_is_read_once_in_a_group(kind: str, saved: Path, world4: World) -> None:
    nbytes = 3 * WIDTH * WIDTH * 4 if kind == "converted" else NBYTES
    read = world4.results(load_over, saved, kind, ALL4)
    assert 0.99 * nbytes <= sum(read) <= 1.1 * nbytes
    assert max(read) <= 0.25 * nbytes + CELL_BYTES


def test_groups_share_each_for_itself(saved: Path, world4: World) -> None:
    read = world4.results(load_over, saved, "filled", PAIRS)
    for pair in (read[:2], read[2:]):
        assert 0.99 * NBYTES <= sum(pair) <= 1.1 * NBYTES


def load_within(rank: int, world_size: int, path: Path) -> int:
    """Load on three ranks of four, of which the last two share over a group."""
    outer, group = (dist.new_group(ranks, backend="gloo") for ranks in ([1, 2, 3], [2, 3]))
    storage, state = Counting(), state_of(0.0)
    with aiockpt.SyncCheckpointer(storage=storage, process_group=outer if rank else None) as ckpt:
        ckpt.load(path, state, share=group if rank > 1 else rank == 1)
    assert equal(state, state_of(3.0))
    return storage.nbytes


@pytest.mark.slow
def test_groups_of_some_ranks_of_the_checkpointer(saved: Path, world4: World) -> None:
    """Ranks have other numbers in each group; one that shares with nobody reads alone."""
    read = world4.results(load_within, saved)
    assert min(read[:2]) >= NBYTES
    assert 0.99 * NBYTES <= sum(read[2:]) <= 1.1 * NBYTES


def load_parts(rank: int, world_size: int, path: Path, kind: str) -> int:
    """Load matrices as DTensors; return how many bytes this rank has read."""
    storage, expected = Counting(), state_of(3.0)["large"]
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    group = mesh.get_group("replicate") if kind == "hsdp" else group_of(ALL4)
    placements = [Replicate(), Shard(0 if kind == "hsdp" else 1)]
    wanted = {key: distribute_tensor(value, mesh, placements) for key, value in expected.items()}
    state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in wanted.items()}
    if kind == "partial":  # different needs: a whole matrix, columns, no matrix
        state = [{"0": torch.zeros(WIDTH, WIDTH), "1": state["1"]}, state, {"1": state["1"]}, {}][rank]
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt:
        ckpt.load(path, {"large": state} if state else {"step": 0}, share=group)
    for key, value in state.items():
        whole = isinstance(value, DTensor)
        assert torch.equal(value.to_local(), wanted[key].to_local()) if whole else torch.equal(value, expected[key])
    return storage.nbytes


@pytest.mark.parametrize("kind", ["hsdp", "columns", "partial"])
def test_parts_of_tensors_are_read_once_in_a_group(kind: str, saved: Path, world4: World) -> None:
    """Replicas of HSDP; columns, whose bytes lie between each other; and ranks that need different things."""
    read = world4.results(load_parts, saved, kind)
    matrix = WIDTH * WIDTH * 4
    assert 0.99 * (2.5 if kind == "partial" else 3) * matrix <= sum(read) <= 1.1 * 3 * matrix


def load_saved_as(rank: int, world_size: int, path: Path, stored: str) -> int:
    storage, expected = Counting(stored), state_of(3.0)["large"]
    state = {"large": {key: torch.zeros_like(value) for key, value in expected.items()}}
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt:
        ckpt.load(path, state, share=group_of(((0, 1),)))
    assert equal(state["large"], expected)
    return storage.nbytes


@pytest.mark.parametrize("kind", ["zstd", "safetensors"])
def test_other_files_are_read_once_in_a_group(kind: str, tmp_path: Path, world2: World) -> None:
    is_dcp = kind == "zstd"
    path = tmp_path / ("c" if is_dcp else "c.safetensors")
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"large": state_of(3.0)["large"]}, path, compress="zstd" if is_dcp else None)
    nbytes = sum(file.stat().st_size for file in (path.glob("*.distcp") if is_dcp else [path]))
    read = world2.results(load_saved_as, path, ".distcp" if is_dcp else ".safetensors")
    assert 0.99 * nbytes <= sum(read) <= 1.1 * nbytes
    assert max(read) <= 0.75 * nbytes


def load_in_phases(rank: int, world_size: int, path: Path) -> str:
    """Load new values in two phases on two ranks, and into tensors on the others, which read new ones in one."""
    options: dict[str, Any] = {"share": group_of(ALL4)} | ({"map_location": "cpu"} if rank < 2 else {})
    with logged() as text:
        load_replicated(rank, world_size, path, "new" if rank < 2 else "filled", options)
    return text.getvalue()


def test_ranks_whose_loads_have_other_phases(saved: Path, world4: World) -> None:
    """All take part in the broadcasts of all phases, each before it waits for the others in a round."""
    assert world4.results(load_in_phases, saved) == [""] * 4


def restore_over(rank: int, world_size: int, path: Path) -> int:
    """Restore a run over a group; return how many broadcasts there were."""
    run, count, state = group_reads.Broadcasts.run, 0, state_of(0.0)

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        run(*args)

    with pytest.MonkeyPatch.context() as patch, aiockpt.SyncCheckpointManager(path, mode="read") as manager:
        patch.setattr(group_reads.Broadcasts, "run", counted)
        restored = manager.restore(state, share=group_of(((0, 1),)))
    assert restored is not None
    assert equal(state, state_of(3.0))
    return count


def test_runs_are_restored_over_a_group(tmp_path: Path, world2: World) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "run", process_group=None) as manager:
        manager.save(1, state_of(3.0))
    first, second = world2.results(restore_over, tmp_path / "run")
    assert first == second > 3


# --- failures -------------------------------------------------------------------------------------------


def load_without_one(rank: int, world_size: int, path: Path, instead: bool) -> tuple[int, str]:
    """Load where one member does not give the group."""
    with logged() as text:
        read = load_replicated(rank, world_size, path, "filled", {"share": instead if rank == 1 else group_of(ALL4)})
    return read, text.getvalue()


@pytest.mark.parametrize("instead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_group_that_lacks_a_member_shares_nothing(instead: bool, saved: Path, world4: World) -> None:
    results = world4.results(load_without_one, saved, instead)
    for rank, (read, text) in enumerate(results):
        assert read >= NBYTES
        assert text.count("reads alone, for rank 1 did not come with the same process group") == (rank != 1)


def load_failing_once(rank: int, world_size: int, path: Path, victim: int) -> str:
    """Load where one rank's storage fails at its first read; then again, over the same group."""
    group, state = group_of(((0, 1, 2),)), state_of(0.0)
    storage = Failing(raise_error if rank == victim else None)
    with aiockpt.SyncCheckpointer(storage=storage, coordination_timeout=30) as ckpt, logged() as text:
        with pytest.raises(aiockpt.LoadError, match="the disk is gone"):
            ckpt.load(path, state, share=group)
        storage.nbytes = 0
        ckpt.load(path, state, share=group)
        assert equal(state, state_of(3.0))
        assert storage.nbytes <= 0.34 * NBYTES + CELL_BYTES
        return text.getvalue()


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rank_that_fails_ends_the_sharing_of_all(victim: int, saved: Path, world3: World) -> None:
    """All raise its error, nobody has waited for it, and the group can be used again."""
    for rank, text in enumerate(world3.results(load_failing_once, saved, victim)):
        assert text.count(f"reads the rest alone: rank {victim} has failed, or was cancelled") == (rank != victim)


def load_changed(rank: int, world_size: int, path: Path) -> tuple[int, str]:
    """Load where the first message is changed on its way to rank 1."""
    run, is_first = group_reads.Broadcasts.run, True

    def change(self: Any, message: torch.Tensor, sender: int, timeout_s: float) -> None:
        nonlocal is_first
        run(self, message, sender, timeout_s)
        if rank == 1 and sender != rank and is_first:
            is_first = False
            message[5] ^= 1

    with pytest.MonkeyPatch.context() as patch, logged() as text:
        patch.setattr(group_reads.Broadcasts, "run", change)
        return load_over(rank, world_size, path, "filled", ((0, 1),)), text.getvalue()


def test_what_was_changed_on_the_way_is_read_alone(saved: Path, world2: World) -> None:
    (first, silent), (second, text) = world2.results(load_changed, saved)
    assert text.count("what rank 0 has sent came changed") == 1
    assert "changed" not in silent
    assert NBYTES < first + second <= NBYTES + 2 * CELL_BYTES


def load_ending(rank: int, world_size: int, path: Path, how: str, note: Path) -> float:
    """Load where rank 1 is killed, or stopped, at its first read; return how long it took."""

    def stop() -> None:
        note.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    storage = Failing({"kill": kill, "stop": stop}[how] if rank == 1 else None)
    begun = time.monotonic()
    with (
        aiockpt.SyncCheckpointer(storage=storage, coordination_timeout=3) as ckpt,
        pytest.raises(aiockpt.CoordinationError, match="rank 1"),
    ):
        ckpt.load(path, state_of(0.0), share=group_of(((0, 1, 2),)))
    ended = time.monotonic() - begun
    if rank == 0 and how == "stop":
        os.kill(int(note.read_text()), signal.SIGKILL)  # the world waits for it
    return ended


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_rank_that_dies_or_hangs_is_the_error_of_all_in_time(how: str, saved: Path, tmp_path: Path) -> None:
    with World(3) as world:
        outcomes = world.run(load_ending, saved, how, tmp_path / "pid")
    assert outcomes.pop(1).killed
    assert all(isinstance(outcome, float) and outcome < 20 for outcome in outcomes), outcomes


def load_late(rank: int, world_size: int, path: Path, note: Path) -> tuple[int, str]:
    """Load where rank 1 reads nothing for as long as the others wait; and again, over the same group."""

    def wait() -> None:
        until = time.monotonic() + 60
        while not note.exists() and time.monotonic() < until:
            time.sleep(0.01)

    group, storage = dist.new_group(backend="gloo"), Failing(wait if rank == 1 else None)
    with (
        aiockpt.SyncCheckpointer(storage=storage, coordination_timeout=2) as ckpt,
        pytest.raises(aiockpt.CoordinationError, match=f"rank {1 - rank}"),  # which has left, for rank 1
    ):
        ckpt.load(path, state_of(0.0), share=group)
    if rank == 0:
        note.touch()
    with logged() as text:
        return load_replicated(rank, world_size, path, "filled", {"share": group}), text.getvalue()


def test_group_whose_broadcast_has_failed_is_not_used_again(saved: Path, tmp_path: Path, world2: World) -> None:
    for read, text in world2.results(load_late, saved, tmp_path / "note", timeout_s=40):
        assert read >= NBYTES
        assert text.count("a broadcast over this process group has failed before") == 1


async def load_cancelled(rank: int, world_size: int, path: Path) -> str:
    """Cancel the load of rank 1 while it reads, and load again over the same group; return the error."""
    reached, go = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go.wait(30)

    async def nothing(_: Any) -> None:
        pass

    storage, group = Failing(wait if rank == 1 else None), group_of(((0, 1, 2),))
    async with aiockpt.AsyncCheckpointer(storage=storage, coordination_timeout=30) as ckpt:
        state = state_of(0.0)
        loading = asyncio.ensure_future(ckpt.load(path, state, share=group))
        if rank == 1:
            await asyncio.to_thread(reached.wait, 30)
            loading.cancel()
            await asyncio.sleep(0)
            await EngineAccess(ckpt).call(nothing, "nothing").wait()  # by then the engine has cancelled it
            go.set()
        with pytest.raises((asyncio.CancelledError, aiockpt.AiockptError)) as raised:
            await loading
        storage.nbytes = 0
        await ckpt.load(path, state, share=group)
        assert equal(state, state_of(3.0))
        assert storage.nbytes <= 0.34 * NBYTES + CELL_BYTES  # over the group
        return f"{type(raised.value).__name__} {raised.value}"


def test_rank_that_is_cancelled_fails_all_and_the_group_can_be_used_again(saved: Path, world3: World) -> None:
    texts = world3.results(load_cancelled, saved)
    assert texts[1].startswith("CancelledError")
    assert all("LoadError rank 1: the load of" in text and "was cancelled" in text for text in (texts[0], texts[2]))


async def load_cancelled_in_turns(rank: int, world_size: int, path: Path) -> list[str]:
    """Cancel loads of rank 2 in each of its first turns, and load again each time; return the errors."""
    group, storage, errors = group_of(((0, 1, 2),)), Counting(), []
    run, loop = group_reads.Broadcasts.run, asyncio.get_running_loop()
    async with aiockpt.AsyncCheckpointer(storage=storage, coordination_timeout=30) as ckpt:
        for turn in range(8):
            left = iter(range(turn, -1, -1))

            def cancel(self: Any, message: torch.Tensor, sender: int, timeout_s: float) -> None:
                if rank == 2 and next(left, None) == 0:  # noqa: B023 - it is called in this turn of the loop
                    loop.call_soon_threadsafe(loading.cancel)  # noqa: B023
                run(self, message, sender, timeout_s)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group_reads.Broadcasts, "run", cancel)
                loading = asyncio.ensure_future(ckpt.load(path, None if turn % 2 else state_of(0.0), share=group))
                with pytest.raises((asyncio.CancelledError, aiockpt.LoadError)) as raised:
                    await loading
            errors.append(f"{type(raised.value).__name__} {raised.value}")
            state, storage.nbytes = state_of(0.0), 0
            await ckpt.load(path, state, share=group)
            assert equal(state, state_of(3.0))
            assert storage.nbytes <= 0.34 * NBYTES + CELL_BYTES  # over the group
    return errors


@pytest.mark.slow
def test_rank_may_be_cancelled_in_any_turn(saved: Path, world3: World) -> None:
    for rank, errors in enumerate(world3.results(load_cancelled_in_turns, saved)):
        assert all(error.startswith("Cancelled" if rank == 2 else "LoadError rank 2: ") for error in errors), errors


# --- wrong groups ---------------------------------------------------------------------------------------


def load_wrongly(rank: int, world_size: int, path: Path) -> list[str]:
    """Return the errors of the calls with groups that can't be used."""
    store = dist.HashStore()
    alone, every = (dist.new_group(ranks, backend="gloo") for ranks in ([0], [0, 1]))
    gone = dist.new_group([0, 1], backend="gloo")
    dist.destroy_process_group(gone)
    cases: list[tuple[Any, Any]] = [
        (None, every),
        (aiockpt.Ranks(0, 1, store), every),
        ("default", gone),
        ("default", "sometimes"),
    ]
    if rank == 0:
        cases.append((alone, every))
    errors = []
    for outer, group in cases:
        with aiockpt.SyncCheckpointer(process_group=outer) as ckpt, pytest.raises(ValueError, match="share") as raised:
            ckpt.load(path, share=group)
        errors.append(str(raised.value))
    return errors


def test_wrong_groups_are_refused_at_the_call(saved: Path, world2: World) -> None:
    first, second = world2.results(load_wrongly, saved)
    assert "not None: pass share=True" in first[0]
    assert "not Ranks(rank=0, size=1" in first[1]
    assert "was it destroyed?" in first[2]
    assert "not 'sometimes'" in first[3]
    assert first.pop() == "the group of share= has ranks outside of the checkpointer's process group: rank 1"
    assert first == second


def load_as_no_member(rank: int, world_size: int, path: Path) -> None:
    group = dist.new_group([0], backend="gloo")
    with aiockpt.SyncCheckpointer(coordination_timeout=30) as ckpt:
        ckpt.load(path, state_of(0.0), share=group)


def test_rank_that_is_not_in_the_group_fails_all(saved: Path, world2: World) -> None:
    first, second = world2.run(load_as_no_member, saved)
    for outcome, kind in ((first, "LoadError"), (second, "ValueError")):
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == kind
        assert "or a process group that this rank is in, not" in outcome.text
