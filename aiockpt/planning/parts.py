"""One process's part of a file that several write: where each of its bytes belongs, and the CRC of it.

A part is staged like a file of its own, its pieces one behind the other. Each piece then goes to its own offset of the
shared file. Large pieces are staged at an offset that is congruent to that one modulo a block, for direct I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from isal.isal_zlib import crc32, crc32_combine

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.strides import row_strides
from aiockpt.planning.layout import ALIGNED_PAYLOAD_BYTES, FileImage, Slot
from aiockpt.planning.ranges import StoredStream, as_stream

if TYPE_CHECKING:
    from aiockpt.format.item.ziparchive import Framing

RUNS_AT_ONCE = 4096  # held in memory
_NO_CRC = 0xFFFFFFFF  # the value that starts, and ends, a CRC-32 without its inversions


class Run(NamedTuple):
    """Bytes of a chunk that belong together in the shared file."""

    offset: int  # in the shared file
    at: int  # in the chunk
    nbytes: int


class PartItem(NamedTuple):
    """A tensor, or a part of it, in a shared file."""

    leaf: int
    framing: Framing
    stream: StoredStream  # its bytes in the shared file


@dataclass(frozen=True, slots=True)
class PartImage(FileImage):
    """The plan of one process's part of a file; offsets of slots are those in the part."""

    file_bytes: int = 0  # of the shared file
    streams: Sequence[StoredStream] = field(repr=False, default=())  # for each slot: its bytes in the shared file

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield where the bytes ``start`` to ``stop`` of the part belong; what is adjacent is one run."""
        last = Run(start, 0, max(0, min(stop, self.head_bytes) - start))
        for run in self._pieces(start, stop):
            if last.nbytes and (last.offset + last.nbytes, last.at + last.nbytes) == (run.offset, run.at):
                last = Run(last.offset, last.at, last.nbytes + run.nbytes)
            else:
                if last.nbytes:
                    yield last
                last = run
        if last.nbytes:
            yield last

    def _pieces(self, start: int, stop: int) -> Iterator[Run]:
        for i in range(bisect_right(self.ends, start), len(self.slots)):
            _, offset, _, begin, end = self.slots[i]
            if offset >= stop:
                break
            stream = self.streams[i]
            low, high = max(start, begin), min(stop, end)
            step = stream.run * RUNS_AT_ONCE  # there may be millions of them
            for first in range(low, high, step):
                at = first - start
                for where, nbytes in stream.runs(first - begin, min(first + step, high) - begin):
                    yield Run(where, at, nbytes)
                    at += nbytes


def stream_in_file(
    offset: int, itemsize: int, shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> StoredStream:
    """Return the bytes of a part of a tensor in a file, where the whole tensor begins at ``offset``, row by row."""
    if 0 in sizes:
        return StoredStream((), (), (), 1, offset, 0)
    strides = [stride * itemsize for stride in row_strides(shape)]
    begin = offset + sum(at * stride for at, stride in zip(offsets, strides, strict=True))
    return as_stream([*sizes, itemsize], [*strides, 1], begin)


def lay_out_part(name: str, head_bytes: int, file_bytes: int, items: Sequence[PartItem]) -> PartImage:
    """Lay out a process's part of a file: its items in the order of the file."""
    slots: list[Slot] = []
    streams: list[StoredStream] = []
    at = head_bytes
    for leaf, framing, stream in sorted(items, key=lambda item: item.stream.offset):
        if not slots or framing.nbytes >= ALIGNED_PAYLOAD_BYTES:
            at += (stream.offset - at) % BLOCK_BYTES
        slots.append(Slot(leaf, at, framing, at, at + framing.nbytes))
        streams.append(stream)
        at += framing.nbytes
    ends = [slot.payload_end for slot in slots]
    return PartImage(name, head_bytes, slots, at, ends, file_bytes=file_bytes, streams=streams)


class PartSealer:
    """Completes the chunks of a part, in order, once their payload is staged; computes its share of the file's CRC."""

    def __init__(self, image: PartImage, head: bytes) -> None:
        self._image = image
        self._head = head
        self._crc = 0  # of the runs so far, each at its place and with zeros around them, without inversions
        self._end = 0  # the offset up to which it counts
        self.crcs: list[int] = []  # of no use for a part

    def seal(self, chunk: memoryview, start: int, stop: int) -> None:
        """Fill in the head, and count the bytes ``start`` to ``stop`` for the CRC."""
        head = self._head[start:stop]
        chunk[: len(head)] = head
        for offset, at, nbytes in self._image.runs(start, stop):
            self._cover(offset, chunk[at : at + nbytes])

    def _cover(self, offset: int, data: memoryview) -> None:
        crc = crc32(data, _NO_CRC) ^ _NO_CRC
        end = offset + len(data)
        if end >= self._end:
            self._crc = crc32_combine(self._crc, crc, end - self._end)
            self._end = end
        else:  # the run lies before one that was counted: parts of one tensor may interleave
            self._crc ^= crc32_combine(crc, 0, self._end - end)

    @property
    def file_crc(self) -> int:
        """This part's share of the CRC of the file; see `crc_of_parts`."""
        return crc32_combine(self._crc, 0, self._image.file_bytes - self._end)


def crc_of_parts(shares: Sequence[int], nbytes: int) -> int:
    """Return the CRC-32 of a file from the shares of all parts: without its inversions, a CRC is linear."""
    crc = crc32_combine(_NO_CRC, _NO_CRC, nbytes)
    for share in shares:
        crc ^= share
    return crc
