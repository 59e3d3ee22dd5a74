"""Assignment of items to files, and file images: the offset of every byte before any tensor is copied."""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from isal.isal_zlib import crc32, crc32_combine

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.machine import BLOCK_BYTES

if TYPE_CHECKING:
    from aiockpt.format.hashes import NewHash, PayloadHash
    from aiockpt.format.item.ziparchive import Framing


T = TypeVar("T")

# Below this, another file costs more in opening and syncing than it gains in parallel writing.
MIN_BUCKET_BYTES = 8 << 20


def bucket_count(total_bytes: int, most: int) -> int:
    """Return how many files to write: one for each writing thread, fewer for small states."""
    return max(1, min(most, total_bytes // MIN_BUCKET_BYTES))


def assign_buckets(sizes: list[int], count: int) -> list[list[int]]:
    """Distribute items over ``count`` buckets, the largest first into the least full; return their positions."""
    if count == 1:
        return [list(range(len(sizes)))]
    heap = [(0, number) for number in range(count)]
    buckets: list[list[int]] = [[] for _ in range(count)]
    for position in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        filled, number = heap[0]
        buckets[number].append(position)
        heapq.heapreplace(heap, (filled + sizes[position], number))
    for bucket in buckets:
        bucket.sort()
    return buckets


def split_in_order(sizes: Mapping[T, int], most_bytes: int | None) -> list[list[T]]:
    """Fill one file after the other with up to ``most_bytes`` (None: no limit) of items, or one larger item alone."""
    files: list[list[T]] = [[]]
    filled = 0
    for item, size in sizes.items():
        if most_bytes is not None and files[-1] and filled + size > most_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files


# --- file images ------------------------------------------------------------------------------------


# Payloads of this size and more start at a multiple of `BLOCK_BYTES` in their file, so that O_DIRECT can read them
# straight into page-aligned memory.
ALIGNED_PAYLOAD_BYTES = 1 << 20
ITEM_ALIGNMENT = 64  # items start at multiples of this, so that their payloads are aligned for every dtype
_SEPARATE_CRC_BYTES = 64 << 10  # below this, a second pass over cached bytes costs less than the calls that avoid it
_HASH_STEP_BYTES = 256 << 10
_ZEROS = bytes(ITEM_ALIGNMENT)
_CRC = struct.Struct("<I")


def align_up(value: int, unit: int) -> int:
    """Round up to a multiple of ``unit``."""
    return -(-value // unit) * unit


class Slot(NamedTuple):
    """A tensor item in a file image, with its framing: the constant bytes around the payload."""

    leaf: int
    offset: int
    framing: Framing
    payload_offset: int
    payload_end: int


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a leaf's payload, which belong at ``at`` of a chunk."""

    leaf: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class FileImage:
    """The plan of one file: ``head_bytes`` for objects or a header, then tensor items, then a tail."""

    name: str
    head_bytes: int  # padded with zeros
    slots: Sequence[Slot]  # by offset
    nbytes: int
    ends: Sequence[int] = field(repr=False, default=())  # of each slot's item
    tail: bytes = field(repr=False, default=b"")  # as the directory of an archive
    crc_at: Sequence[tuple[int, int]] = field(repr=False, default=())  # offsets in the tail of CRCs, by number of slot

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of payload within the bytes ``start`` to ``stop`` of the file."""
        found: list[Piece] = []
        for i in range(bisect_right(self.ends, start), len(self.slots)):
            leaf, offset, _, begin, end = self.slots[i]
            if offset >= stop:
                break
            low = max(start, begin)
            high = min(stop, end)
            if low < high:
                found.append(Piece(leaf, low - begin, high - begin, low - start))
        return found


def lay_out(name: str, head_bytes: int, items: Sequence[tuple[int, Framing]], *, aligned: bool = True) -> FileImage:
    """Lay out items, given as leaf and framing, one after the other; without gaps unless ``aligned``."""
    slots: list[Slot] = []
    offset = head_bytes
    for leaf, framing in items:
        before = len(framing.prefix)
        if aligned:
            offset = align_up(offset, ITEM_ALIGNMENT)
            if framing.nbytes >= ALIGNED_PAYLOAD_BYTES:
                offset = align_up(offset + before, BLOCK_BYTES) - before
        begin = offset + before
        slots.append(Slot(leaf, offset, framing, begin, begin + framing.nbytes))
        offset += framing.length
    ends = [slot.payload_end + len(slot.framing.suffix) for slot in slots]
    return FileImage(name, head_bytes, slots, offset, ends)


class Hashing(NamedTuple):
    """The items whose payloads are hashed when they are sealed: all others than those of some leaves."""

    new_hash: NewHash
    besides: Container[int] = ()


class Sealer:
    """Completes the chunks of one file image, in order, once their payload is staged.

    Fills in head, gaps and framing; computes the CRC-32 of every payload, which goes into its item, and of the file.
    Touches staged memory only, never the tensors.
    """

    def __init__(self, image: FileImage, head: bytes, hashing: Hashing | None = None) -> None:
        self._image = image
        self._head = head
        self._hashing = hashing
        self._hash: PayloadHash | None = None  # of the payload that is being sealed
        self.hashes: list[str | None] = []  # of each payload, in hexadecimal digits, if it is to be hashed
        self._done = 0
        self._next = 0
        self._payload_crc = 0
        self._tail: bytearray | None = None
        self.crcs: list[int] = []
        self.file_crc = 0

    def seal(self, chunk: memoryview, start: int, stop: int) -> None:
        """Complete bytes ``start`` to ``stop`` of the file, which begin ``chunk``; zero the rest of its last block."""
        self._done = 0  # how much of the chunk the file's CRC covers
        filled = self._fill_head(chunk, start, stop)
        slots, ends = self._image.slots, self._image.ends
        while self._next < len(slots) and slots[self._next].offset < stop:
            slot = slots[self._next]
            end = ends[self._next]
            filled = self._zero(chunk, filled, slot.offset - start)
            if self._hashing is not None and slot.offset >= start:
                self._hash = None if slot.leaf in self._hashing.besides else self._hashing.new_hash()
            if slot.offset >= start and end <= stop and slot.framing.nbytes < _SEPARATE_CRC_BYTES:
                filled = _seal_whole(chunk, start, slot, self.crcs)
                if self._hash is not None:
                    self._hash.update(chunk[slot.payload_offset - start : slot.payload_end - start])
                self._end_slot()
                continue
            filled = self._seal_slot(chunk, start, stop, slot, filled)
            if end > stop:
                break
            self.crcs.append(self._payload_crc)
            self._payload_crc = 0
            self._end_slot()
        filled = self._fill_tail(chunk, start, stop, filled)
        self._zero(chunk, filled, stop - start)
        self._cover(chunk, stop - start)
        # Direct I/O writes whole blocks; the file is cut to its size afterwards.
        self._zero(chunk, stop - start, align_up(stop - start, BLOCK_BYTES))

    def _end_slot(self) -> None:
        self._next += 1
        if self._hashing is not None:
            self.hashes.append(None if self._hash is None else self._hash.hexdigest())

    def _fill_head(self, chunk: memoryview, start: int, stop: int) -> int:
        end = min(self._image.head_bytes, stop)
        if start >= end:
            return 0
        data = self._head[start:end]
        chunk[: len(data)] = data
        return self._zero(chunk, len(data), end - start)

    def _fill_tail(self, chunk: memoryview, start: int, stop: int, filled: int) -> int:
        begin = self._image.nbytes - len(self._image.tail)
        low = max(begin, start)
        if low >= stop:
            return filled
        if self._tail is None:  # every payload was before it, so all CRCs are known
            self._tail = bytearray(self._image.tail)
            for at, number in self._image.crc_at:
                _CRC.pack_into(self._tail, at, self.crcs[number])
        chunk[low - start : stop - start] = self._tail[low - begin : stop - begin]
        return stop - start

    def _seal_slot(self, chunk: memoryview, start: int, stop: int, slot: Slot, filled: int) -> int:
        _, offset, framing, begin, end = slot
        low, high = max(offset, start), min(begin, stop)
        if low < high:
            chunk[low - start : high - start] = framing.prefix[low - offset : high - offset]
            filled = high - start
        low, high = max(begin, start), min(end, stop)
        if low < high:
            self._payload(chunk, low - start, high - start)
            filled = high - start
        low, high = max(end, start), min(end + len(framing.suffix), stop)
        if low < high:
            suffix = framing.sealed_suffix(self._payload_crc)
            chunk[low - start : high - start] = suffix[low - end : high - end]
            filled = high - start
        return filled

    def _payload(self, chunk: memoryview, low: int, high: int) -> None:
        if high - low < _SEPARATE_CRC_BYTES:
            self._payload_crc = crc32(chunk[low:high], self._payload_crc)
            if self._hash is not None:
                self._hash.update(chunk[low:high])
            return
        # A long run is summed once, for the item and the file both.
        self._cover(chunk, low)
        crc = crc32(chunk[low:high]) if self._hash is None else _crc_and_hash(chunk[low:high], self._hash)
        self._payload_crc = crc32_combine(self._payload_crc, crc, high - low)
        self.file_crc = crc32_combine(self.file_crc, crc, high - low)
        self._done = high

    def _cover(self, chunk: memoryview, upto: int) -> None:
        if upto > self._done:
            self.file_crc = crc32(chunk[self._done : upto], self.file_crc)
            self._done = upto

    @staticmethod
    def _zero(chunk: memoryview, low: int, high: int) -> int:
        if low < high:
            chunk[low:high] = _ZEROS[: high - low] if high - low <= ITEM_ALIGNMENT else bytes(high - low)
            return high
        return low


def _crc_and_hash(data: memoryview, payload_hash: PayloadHash) -> int:
    """Return the CRC-32, and add to the hash, piece by piece, so that the second finds each in the cache."""
    crc = 0
    for at in range(0, len(data), _HASH_STEP_BYTES):
        piece = data[at : at + _HASH_STEP_BYTES]
        crc = crc32(piece, crc)
        payload_hash.update(piece)
    return crc


def _seal_whole(chunk: memoryview, start: int, slot: Slot, crcs: list[int]) -> int:
    """Complete a small item that lies within a chunk, and append its CRC; return the offset of its end."""
    _, offset, framing, begin, end = slot
    end -= start
    after = end + len(framing.suffix)
    chunk[offset - start : begin - start] = framing.prefix
    chunk[end:after] = framing.suffix
    crc = crc32(chunk[begin - start : end])
    for at in framing.crc_at:
        _CRC.pack_into(chunk, end + at, crc)
    crcs.append(crc)
    return after
