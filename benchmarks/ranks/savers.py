"""Contenders that save and load together with other ranks; they run in the processes of a `World`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.options import SaveFormat
from benchmarks.harness.measure import Sample
from benchmarks.harness.states import State, random_tensor, same_bits, size_of, small_state, transformer_state
from benchmarks.limits import raw
from benchmarks.peers.contenders import dcp_writer
from benchmarks.ranks.world import Rank

_COLUMNS = 256


def local(state: State) -> State:
    """Return this rank's shards."""
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in state.items()}


def sharded_state(nbytes: int, tensors: int, size: int) -> State:
    """Return a state of about ``nbytes`` in all, sharded as by FSDP2: matrices by rows, norms replicated."""
    mesh = init_device_mesh("cpu", (size,))
    parts = transformer_state(nbytes // size, tensors)
    state = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts.items()}
    generator = torch.Generator().manual_seed(size)  # the same on every rank
    for number in range(max(1, tensors // 7)):
        norm = torch.randn(_COLUMNS, generator=generator)
        state[f"layers.{number}.norm.weight"] = DTensor.from_local(norm, mesh, [Replicate()], run_check=False)
    return state


def tiny_state(count: int, size: int) -> State:
    """Return very small tensors, each sharded over all ranks."""
    mesh = init_device_mesh("cpu", (size,))
    return {
        f"table.{number}": DTensor.from_local(random_tensor(2, 4), mesh, [Shard(0)], run_check=False)
        for number in range(count)
    }


@dataclass(frozen=True, slots=True)
class Member:
    """A contender, as the parent process knows it."""

    name: str
    note: str
    loads: bool


class RankSaver(ABC):
    """One rank of a contender; `save` returns moments in seconds since the call."""

    name: str
    note: str = ""
    loads = True

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def save(self, state: State, path: Path) -> Sample:
        """Save together with the other ranks."""

    def load(self, target: State, path: Path) -> None:
        """Load a checkpoint into a target."""

    def close(self) -> None:
        """Release what is kept between saves."""


class RawRanks(RankSaver):
    """The limit: every rank writes the same number of bytes into files of its own, past the page cache."""

    note = "no copy, no CRC, no format"

    def __init__(self, rank: Rank, threads: int, nbytes: int) -> None:
        super().__init__(rank)
        self.name = f"raw O_DIRECT, {threads} thread{'s' * (threads > 1)} each"
        self.loads = threads == 1
        self._threads, self._arena = threads, raw.Arena(nbytes)

    def save(self, state: State, path: Path) -> Sample:
        path.mkdir(exist_ok=True)
        raw.write_direct(path / f"{self.rank.rank}", self._arena, size_of(local(state)), self._threads)
        return {}

    def load(self, target: State, path: Path) -> None:
        raw.read_into(path / f"{self.rank.rank}" / raw.FIRST_FILE, self._arena, 1, direct=True)


class AiockptRanks(RankSaver):
    """This package; with ``alone``, one rank saves the whole state."""

    name, note = "aiockpt", "CRC"

    def __init__(self, rank: Rank, *, alone: bool = False, format: SaveFormat = "dcp") -> None:
        super().__init__(rank)
        self._format = format
        if alone:
            self.name, self.note = "aiockpt, alone", "one rank saves all"
        self._checkpointer = aiockpt.AsyncCheckpointer(process_group=None if alone else "default")
        self._alone = alone

    def save(self, state: State, path: Path) -> Sample:
        if self._alone and self.rank.rank:
            return {}
        return self.rank.runner.run(self._save(state, path))

    async def _save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        handle = self._checkpointer.save(state, path, format=self._format)
        blocked = time.perf_counter() - started
        await handle.staged
        staged = time.perf_counter() - started
        await handle.written
        at = {event.phase: event.elapsed_s async for event in handle.progress()}
        return {
            "blocked_s": blocked,
            "staged_s": staged,
            "planned_s": at["planned"],
            "ended_s": at["committed"] - at["written"],
            "rounds_s": at["planned"] - blocked + at["committed"] - at["written"],
        }

    def load(self, target: State, path: Path) -> None:
        self.rank.runner.run(self._checkpointer.load(path, target))

    def close(self) -> None:
        self.rank.runner.run(self._checkpointer.aclose())


class DcpRanks(RankSaver):
    """``dcp.save`` and ``dcp.load``.

    Args:
        rank: this rank.
        threads: the number of threads that write.
        cache: keep plans between saves.
        alone: one rank saves the whole state.
    """

    def __init__(self, rank: Rank, threads: int, *, cache: bool = False, alone: bool = False) -> None:
        super().__init__(rank)
        self.name = f"dcp.save, thread_count={threads}{', plans cached' * cache}{', alone' * alone}"
        self.note = "one rank saves all" if alone else ""
        self.loads = threads == 1 and not alone
        self._threads, self._cache, self._alone = threads, cache, alone

    def save(self, state: State, path: Path) -> Sample:
        if self._alone and self.rank.rank:
            return {}
        started = time.perf_counter()
        dcp.save(state, storage_writer=dcp_writer(path, self._threads), planner=self.planner(), no_dist=self._alone)
        took = time.perf_counter() - started
        return {"blocked_s": took, "staged_s": took}

    def planner(self) -> DefaultSavePlanner:
        """Return a planner whose class is named for this contender: DCP caches plans by class name."""
        kind = type(f"{type(self).__name__}{id(self)}", (DefaultSavePlanner,), {})
        return kind(enable_plan_caching=self._cache)

    def load(self, target: State, path: Path) -> None:
        dcp.load(target, checkpoint_id=path)


class DcpAsyncRanks(DcpRanks):
    """``dcp.async_save`` with one stager for all saves."""

    def __init__(self, rank: Rank, *, cache: bool) -> None:
        super().__init__(rank, 2, cache=cache)
        self.name = f"dcp.async_save{', plans cached' * cache}"
        self.note, self.loads = "thread_count=2, stager kept", False
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        answer = dcp.async_save(
            state, storage_writer=dcp_writer(path, self._threads), async_stager=self._stager, planner=self.planner()
        )
        blocked = time.perf_counter() - started
        (answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer).result()
        return {"blocked_s": blocked, "staged_s": blocked}

    def close(self) -> None:
        self._stager.close()


# --- what the parent asks for ----------------------------------------------------------------------------


def prepare(rank: Rank, nbytes: int, tensors: int) -> list[tuple[str, str, bool]]:
    """Create the state and the contenders; return what `introduce` returns."""
    rank.kept["state"] = state = sharded_state(nbytes, tensors, rank.size)
    share = size_of(local(state))
    return introduce(
        rank,
        [
            RawRanks(rank, 1, share),
            RawRanks(rank, 2, share),
            AiockptRanks(rank),
            DcpRanks(rank, 1),
            DcpRanks(rank, 2),
            DcpRanks(rank, 2, cache=True),
            DcpAsyncRanks(rank, cache=False),
            DcpAsyncRanks(rank, cache=True),
        ],
    )


def prepare_tiny(rank: Rank, count: int) -> list[tuple[str, str, bool]]:
    """Create a state of small tensors and the contenders, some of which save alone."""
    rank.kept["state"] = tiny_state(count, rank.size)
    rank.kept["whole"] = {name: random_tensor(2 * rank.size, 4) for name in rank.kept["state"]}
    return introduce(
        rank,
        [
            AiockptRanks(rank, alone=True),
            AiockptRanks(rank),
            DcpRanks(rank, 1, alone=True),
            DcpRanks(rank, 1),
            DcpRanks(rank, 1, cache=True),
        ],
    )


def save_parts(rank: Rank, count: int, nbytes: int, path: Path) -> None:
    """Save small tensors in ``count`` parts of ``nbytes`` each, one of each tensor on every rank."""
    mesh = init_device_mesh("cpu", (rank.size,))
    state = small_state(count // rank.size, nbytes * rank.size)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}, path)


def introduce(rank: Rank, savers: list[RankSaver]) -> list[tuple[str, str, bool]]:
    """Keep the contenders; return for each the arguments of a `Member`: its name, its note, and whether it loads."""
    rank.kept["savers"] = {saver.name: saver for saver in savers}
    return [(saver.name, saver.note, saver.loads) for saver in savers]


def save_once(rank: Rank, name: str, path: Path) -> Sample:
    """Save with one contender on all ranks; ``begun`` and ``over`` are `time.monotonic`, to compare between ranks."""
    saver: RankSaver = rank.kept["savers"][name]
    state = rank.kept["whole" if name.endswith("alone") else "state"]
    return _timed(lambda: saver.save(state, path))


def load_once(rank: Rank, name: str, path: Path) -> Sample:
    """Load with one contender into the kept target; raise ValueError if it differs from the saved state."""
    saver: RankSaver = rank.kept["savers"][name]
    target = _empty_target(rank)
    sample = _timed(lambda: saver.load(target, path) or {})
    if not isinstance(saver, RawRanks):
        _compare(target, rank.kept["state"])
    return sample


def check(rank: Rank, name: str, path: Path) -> None:
    """Load a contender's checkpoint with aiockpt; raise ValueError if it differs from the saved state."""
    saver: RankSaver = rank.kept["savers"][name]
    if isinstance(saver, RawRanks):
        return
    if not name.endswith("alone"):
        target = _empty_target(rank)
        with aiockpt.SyncCheckpointer() as checkpointer:
            checkpointer.load(path, target)
        _compare(target, rank.kept["state"])
    elif rank.rank == 0:
        with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
            _compare(checkpointer.load(path), rank.kept["whole"])


def _empty_target(rank: Rank) -> State:
    """Return the kept target, filled with zeros."""
    target = rank.kept.get("target")
    if target is None:
        target = rank.kept["target"] = {key: torch.zeros_like(each) for key, each in rank.kept["state"].items()}
    for each in local(target).values():
        each.zero_()
    return target


def _compare(loaded: State, state: State) -> None:
    if not same_bits(local(loaded), local(state)):
        raise ValueError("what was loaded differs from what was saved")


def close_all(rank: Rank) -> list[str]:
    """Close all contenders."""
    for saver in rank.kept.pop("savers").values():
        saver.close()
    rank.kept.clear()
    return []


def _timed(work: Callable[[], Any]) -> Sample:
    dist.barrier()
    begun = time.monotonic()
    sample = work()
    return {**sample, "begun": begun, "over": time.monotonic()}
