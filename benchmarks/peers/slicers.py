"""Contenders that read a part of every tensor: aiockpt, its peers, and the machine's limits."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import aiockpt
from benchmarks.harness.states import State
from benchmarks.limits import raw
from benchmarks.limits.machine import files_under

Index = tuple[slice, slice]
"""A range of rows and a range of columns."""


class Slicer(ABC):
    """A contender that reads one part of every tensor of a checkpoint.

    Attributes:
        path: the file or directory it reads.
        asks: whether it gets all bytes by read calls, which can be counted; mapped pages cannot.
    """

    name: str
    note: str = ""
    asks = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """Return the files that are read."""
        return files_under(self.path)

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the checkpoint, to be closed by the stack; this is not measured."""

    @abstractmethod
    async def read(self, index: Index) -> State | None:
        """Read this part of every tensor into memory of its own; return None if only bytes are read."""

    async def close(self) -> None:
        """Release what is kept between rounds."""


class Aiockpt(Slicer):
    """This package."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.name = name
        self._checkpointer = aiockpt.AsyncCheckpointer()

    async def open(self, stack: AsyncExitStack) -> None:
        self._reader = await stack.enter_async_context(self._checkpointer.open(self.path))

    async def read(self, index: Index) -> State:
        names = list(self._reader.keys())
        parts = await asyncio.gather(*(self._reader.read(name, index) for name in names))
        return dict(zip(names, parts, strict=True))

    async def close(self) -> None:
        await self._checkpointer.aclose()


class PartPlanner(DefaultLoadPlanner):
    """A load planner that asks for a part of every tensor, as DCP's own planner does for the shards of a DTensor."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self._index = index

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name in self.state_dict:
            for number, chunk in enumerate(self.metadata.state_dict_metadata[name].chunks):
                items += self._overlap(MetadataIndex(name, chunk.offsets, number), chunk)
        return LoadPlan(items)

    def _overlap(self, stored: MetadataIndex, chunk: ChunkStorageMetadata) -> list[ReadItem]:
        wanted = [part.start for part in self._index]
        begins = [max(start, offset) for start, offset in zip(wanted, chunk.offsets, strict=True)]
        ends = [min(a.stop, b + n) for a, b, n in zip(self._index, chunk.offsets, chunk.sizes, strict=True)]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            return []
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(stored.fqn),
                dest_offsets=_less(begins, wanted),
                storage_index=stored,
                storage_offsets=_less(begins, chunk.offsets),
                lengths=_less(ends, begins),
            )
        ]


def _less(left: Sequence[int], right: Sequence[int]) -> torch.Size:
    return torch.Size([a - b for a, b in zip(left, right, strict=True)])


class DcpLoad(Slicer):
    """``dcp.load`` with a planner that asks for the part alone."""

    name = "dcp.load, a plan of the part"
    note = "reads .metadata meanwhile"

    def __init__(self, path: Path, state: State) -> None:
        super().__init__(path)
        self._names = list(state)

    async def read(self, index: Index) -> State:
        rows, columns = (part.stop - part.start for part in index)
        target = {name: torch.empty(rows, columns) for name in self._names}
        dcp.load(target, checkpoint_id=self.path, planner=PartPlanner(index), no_dist=True)
        return target


class TorchMap(Slicer):
    """``torch.load(mmap=True)``, and a copy of the part."""

    name = "torch.load mmap, part cloned"
    note = "maps"
    asks = False

    async def open(self, stack: AsyncExitStack) -> None:
        self._state: dict[str, Any] = torch.load(self.path, mmap=True)
        stack.callback(self._state.clear)

    async def read(self, index: Index) -> State:
        return {name: tensor[index].clone() for name, tensor in self._state.items()}


class Safetensors(Slicer):
    """``safe_open`` and ``get_slice``."""

    name = "safetensors get_slice"
    note = "maps"
    asks = False

    async def open(self, stack: AsyncExitStack) -> None:
        from safetensors import safe_open

        self._file = stack.enter_context(safe_open(self.path, "pt"))

    async def read(self, index: Index) -> State:
        names = self._file.keys()
        # get_slice returns a view of the mapped file.
        return {name: self._file.get_slice(name)[index].clone() for name in names}


class RawRead(Slicer):
    """The limit: the bytes of the part, or with ``span`` all from its first to its last, read into touched memory."""

    def __init__(self, path: Path, state: State, arena: raw.Arena, *, span: bool) -> None:
        super().__init__(path)
        self.name = "raw, first to last byte" if span else "raw, each run of bytes"
        self.note = "2 threads, touched memory; " + ("one read for each tensor" if span else "a read for each run")
        self._state, self._arena, self._span = state, arena, span

    async def read(self, index: Index) -> None:
        runs = [run for begin, tensor in _placed(self._state) for run in runs_of(tensor, index, begin)]
        if self._span:
            each = len(runs) // len(self._state)
            runs = [_span(runs[at : at + each]) for at in range(0, len(runs), each)]
        raw.read_runs(self.path / raw.FIRST_FILE, self._arena, runs, threads=2)


def _placed(state: Mapping[str, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Return every tensor with its offset, as if the tensors lay one after the other."""
    placed, begin = [], 0
    for tensor in state.values():
        placed.append((begin, tensor))
        begin += tensor.nbytes
    return placed


def runs_of(tensor: torch.Tensor, index: Index, begin: int) -> list[tuple[int, int]]:
    """Return offset and length of each contiguous run of bytes of a part of a tensor."""
    rows, columns = index
    length, row_bytes = (columns.stop - columns.start) * tensor.itemsize, tensor.shape[1] * tensor.itemsize
    if length == row_bytes:
        return [(begin + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)]
    first = begin + columns.start * tensor.itemsize
    return [(first + row * row_bytes, length) for row in range(rows.start, rows.stop)]


def _span(runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return offset and length of the blocks from the first byte of the first run to the last byte of the last run."""
    begin = runs[0][0] // raw.BLOCK_BYTES * raw.BLOCK_BYTES
    return begin, raw.whole_blocks(sum(runs[-1]) - begin)
