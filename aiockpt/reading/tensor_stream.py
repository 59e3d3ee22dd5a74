"""One stored chunk on its way: its bytes as a stream, cut in parts, each read and put where it belongs."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch
from isal.isal_zlib import crc32, crc32_combine

from aiockpt.planning.ranges import StoredStream, as_stream, boxes
from aiockpt.staging.scatter import Placement

if TYPE_CHECKING:
    from aiockpt.format.index import TensorItem
    from aiockpt.reading.read_plan import TensorRead
    from aiockpt.storage.base import Source

_MOST_RUNS = 16_384  # that one part consists of

_ALIGNMENT = 4096


class ChunkRead:
    """The wanted elements of one stored chunk, in stored order.

    Attributes:
        nbytes: how many bytes they are.
        is_direct: they go to their target's memory as they are; else they are placed from a buffer.

    Args:
        read: what is wanted.
        item: what stands in the chunk's item.
        memory: memory for the whole payload, where the read has no target.
        part_bytes: the most bytes of a part, a multiple of 4096.
    """

    def __init__(self, read: TensorRead, item: TensorItem, memory: memoryview | None, part_bytes: int) -> None:
        self.read = read
        self._item = item
        self._file = read.chunk.place.file
        self._base = read.chunk.place.offset + item.payload_offset
        if memory is not None:
            self._size = 1
            self._packed: StoredStream = as_stream((item.nbytes,), (1,), 0)
        else:
            self._size = item.dtype.itemsize
            self._packed = _selected(read, item)
        self.nbytes = self._packed.count * self._size
        self._memory = memory if memory is not None else self._target_memory()
        self.is_direct = self._memory is not None
        self._part_bytes = min(part_bytes, max(_ALIGNMENT, self._packed.run * self._size * _MOST_RUNS))
        self._part_bytes -= self._part_bytes % _ALIGNMENT
        # Only a payload that comes as one run, and whole, can be held against its CRC.
        self._checked = self._packed.run == self._packed.count and self.nbytes == item.nbytes and item.crc is not None
        self._crcs = [0] * self.parts

    @property
    def parts(self) -> int:
        """How many parts the stream is cut in."""
        return -(-self.nbytes // self._part_bytes)

    def read_direct(self, source: Source, number: int, *, verify: bool) -> None:
        """Read a part straight to where it belongs. Blocks."""
        if self._memory is not None:
            start, stop = self._range(number)
            self._fill(source, number, start, stop, self._memory[start:stop], verify)

    def read_buffered(self, source: Source, number: int, buffer: memoryview, *, verify: bool) -> list[Placement]:
        """Read a part into a buffer, of a page more than a part if it has room; say what goes where. Blocks."""
        start, stop = self._range(number)
        skip = self._at(start) % _ALIGNMENT  # where in a page it is, so that the disk may write there
        if skip + stop - start > len(buffer) or skip % self._size:  # values at odd addresses crash vector instructions
            skip = 0
        view = buffer[skip : skip + stop - start]
        self._fill(source, number, start, stop, view, verify)
        return self._placements(start // self._size, torch.frombuffer(view, dtype=torch.uint8))

    def crc_matches(self, *, verify: bool) -> bool:
        """Tell whether the bytes that were read are those that were written, as far as that can be known."""
        if not (verify and self._checked):
            return True
        crc = 0
        for number, part in enumerate(self._crcs):
            start, stop = self._range(number)
            crc = crc32_combine(crc, part, stop - start)
        return crc == self._item.crc

    def _range(self, number: int) -> tuple[int, int]:
        start = number * self._part_bytes
        return start, min(start + self._part_bytes, self.nbytes)

    def _at(self, start: int) -> int:
        """Give where a byte of the stream is in the file, if it is one run."""
        return self._base + self._packed.offset * self._size + start

    def _fill(self, source: Source, number: int, start: int, stop: int, view: memoryview, verify: bool) -> None:
        if self._packed.run == self._packed.count:
            if not (verify and self._checked):
                source.read(self._file, self._at(start), view)
                return
            crc = 0

            def seen(part: memoryview) -> None:
                nonlocal crc
                crc = crc32(part, crc)

            source.read(self._file, self._at(start), view, seen)
            self._crcs[number] = crc
            return
        size = self._size
        runs = self._packed.runs(start // size, stop // size)
        source.read_runs(self._file, [(self._base + at * size, count * size) for at, count in runs], view)

    def _placements(self, start: int, data: torch.Tensor) -> list[Placement]:
        """Say which boxes of the target the elements from ``start`` on belong to."""
        target, item, packed = self.read.target, self._item, self._packed
        if target is None:
            return []
        values = data.view(item.dtype)
        rest = [dim for dim in range(target.dim()) if dim not in packed.order]
        ordered = target.permute((*packed.order, *rest))
        found: list[Placement] = []
        at = 0
        for box in boxes(packed.shape, start, start + len(values)):
            region = ordered[box.index]
            lead = region.dim() - len(rest)
            part = values[at : at + box.count].view((*region.shape[:lead], *(1,) * len(rest)))
            found.append(Placement(region, part, item.conj, item.neg))
            at += box.count
        return found

    def _target_memory(self) -> memoryview | None:
        """Give the memory of the target, if the stream is, byte for byte, what it should be."""
        target, packed, item = self.read.target, self._packed, self._item
        if (
            target is None
            or target.device.type != "cpu"
            or type(target) is not torch.Tensor
            or target.dtype != item.dtype
            or (item.conj or item.neg or target.is_conj() or target.is_neg())
        ):
            return None
        expected = 1
        for dim in reversed(packed.order):
            if target.stride(dim) != expected:
                return None
            expected *= target.shape[dim]
        return memory_of(target) if target.numel() == packed.count else None


def _selected(read: TensorRead, item: TensorItem) -> StoredStream:
    """See what is wanted of the chunk as a strided view of its payload."""
    if read.selections is None:
        return as_stream(item.shape, item.stride, item.storage_offset)
    offset = item.storage_offset + sum(s.start * d for s, d in zip(read.selections, item.stride, strict=True))
    shape = [selection.count for selection in read.selections]
    return as_stream(shape, [s.step * d for s, d in zip(read.selections, item.stride, strict=True)], offset)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Give the memory of a dense host tensor as bytes."""
    nbytes = math.prod(tensor.shape) * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
