"""Rank 0's work for ``dcp.save``: torch's own planner and writer, with the messages of simulated ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.harness.measure import Sample
from benchmarks.ranks.clock import Clock
from benchmarks.ranks.imagined import DTYPE, Imagined, file_name, item_bytes


def local_plan(world: Imagined, rank: int) -> SavePlan:
    """Return the local plan that torch would make on a rank."""
    items, paths = [], {}
    properties = TensorProperties(dtype=DTYPE)
    for name, path, rows in world.of_rank(rank):
        shape, begin, sizes = (torch.Size(each) for each in world.part(rank, rows))
        data = TensorWriteData(ChunkStorageMetadata(begin, sizes), properties, shape)
        items.append(WriteItem(MetadataIndex(name, begin), WriteItemType.SHARD, tensor_data=data))
        paths[name] = path
    for name, path in world.objects():
        if rank == 0:  # DCP saves objects from rank 0
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        paths[name] = path
    return SavePlan(items, planner_data=paths)


def results_of(plan: SavePlan, rank: int) -> list[WriteResult]:
    """Return the write results that a rank would send."""
    results, at = [], 0
    for item in plan.items:
        rows = item.tensor_data.chunk.sizes[0] if item.tensor_data is not None else 0
        nbytes = item_bytes(rows)
        results.append(WriteResult(item.index, nbytes, _StorageInfo(file_name(rank, 0), at, nbytes)))
        at += nbytes
    return results


class TorchCoordinator:
    """Rank 0 of a simulated world, over several saves, with cached plans.

    Args:
        world: the simulated ranks.
        directory: the directory for the index.

    Attributes:
        index_bytes: the size of the last index.
    """

    def __init__(self, world: Imagined, directory: Path) -> None:
        self._world = world
        self._writer = dcp.FileSystemWriter(directory, sync_files=False)
        self._kind = type(f"Planner{id(self)}", (DefaultSavePlanner,), {})  # plans are cached by class name
        self._plans: Sequence[SavePlan] = ()
        self._directory = directory
        self.index_bytes = 0

    def save(self, _step: int) -> Sample:
        """Run rank 0's work of a save; return the seconds of each kind of work."""
        clock, world, writer = Clock(), self._world, self._writer
        planner: Any = self._kind(enable_plan_caching=True)
        planner.set_up_planner({}, is_coordinator=True)
        writer.set_up_storage_writer(True)
        first = not self._plans
        unchanged = SavePlan([], usable=False)
        local = self._received(clock, (local_plan(world, rank) if first else unchanged for rank in range(world.ranks)))
        replies, metadata = clock("plan", planner.create_global_plan, local)
        replies = clock("plan", writer.prepare_global_plan, replies)
        for reply in replies[1:]:
            clock("tell", pickle.dumps, reply)
        self._plans = self._plans or planner.global_plan
        results = self._received(clock, (results_of(plan, rank) for rank, plan in enumerate(self._plans)))
        clock("metadata", self._finish, metadata, results)
        self.index_bytes = (self._directory / ".metadata").stat().st_size
        return clock.spent

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._writer.finish(metadata, results)

    @staticmethod
    def _received(clock: Clock, values: Iterable[Any]) -> list[Any]:
        heard = []
        for rank, value in enumerate(values):
            message = pickle.dumps(value)
            heard.append(clock("hear", pickle.loads, message) if rank else value)
        return heard
