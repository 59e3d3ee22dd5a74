"""Work items of a verification: files, the items in them, and the keys that refer to these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from isal.isal_zlib import crc32_combine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from aiockpt.format.index import TensorItem

# --- extents that belong together, and the segments to read them in -------------------------------


T = TypeVar("T")

_MAX_GAP_BYTES = 64 << 10  # read and thrown away, where that spares a read


@dataclass(frozen=True, slots=True)
class Extent(Generic[T]):
    """Bytes ``start`` to ``stop`` (exclusive) of a file that belong together."""

    start: int
    stop: int
    owner: T  # what the bytes are
    streamed: bool  # they may be read piece by piece; else all of them must be in memory at once


@dataclass(frozen=True, slots=True)
class Segment(Generic[T]):
    """Bytes ``start`` to ``stop`` (exclusive) of a file, to be read in one go."""

    start: int
    stop: int
    extents: Sequence[Extent[T]]  # those that lie within, or the streamed one of which this is a piece


def split_overlaps(extents: Sequence[Extent[T]]) -> tuple[list[Extent[T]], list[tuple[Extent[T], Extent[T]]]]:
    """Return the extents that follow each other without overlap, and each other one with the one it overlaps."""
    clear: list[Extent[T]] = []
    others: list[tuple[Extent[T], Extent[T]]] = []
    for extent in sorted(extents, key=lambda extent: (extent.start, extent.stop)):
        if clear and extent.start < clear[-1].stop:
            others.append((extent, clear[-1]))
        else:
            clear.append(extent)
    return clear, others


def cut_segments(
    extents: Sequence[Extent[T]], nbytes: int | None, *, step_bytes: int, range_bytes: int
) -> Iterator[Segment[T]]:
    """Cut a file into segments to read: all of its ``nbytes``, or only the extents if that is None.

    Extents come in order and without overlaps. A segment whose extents must be in memory has at most ``step_bytes``,
    unless one extent alone is larger; any other has at most ``range_bytes``.
    """
    begin = end = 0
    held: list[Extent[T]] = []
    for extent in extents:
        joins = nbytes is not None or (bool(held) and extent.start - end <= _MAX_GAP_BYTES)
        if joins and not extent.streamed and extent.stop - begin <= step_bytes:
            held.append(extent)
            end = extent.stop
            continue
        if held:
            yield Segment(begin, end, held)
        if nbytes is not None:
            yield from _pieces(end, extent.start, (), range_bytes)
        begin, end, held = extent.start, extent.stop, [extent]
        if extent.streamed:
            yield from _pieces(begin, end, held, range_bytes)
            begin, held = end, []
    if held:
        yield Segment(begin, end, held)
    if nbytes is not None:
        yield from _pieces(end, nbytes, (), range_bytes)


def _pieces(start: int, stop: int, extents: Sequence[Extent[T]], most: int) -> Iterator[Segment[T]]:
    for at in range(start, stop, most):
        yield Segment(at, min(at + most, stop), extents)


def group_segments(segments: Iterator[Segment[T]], range_bytes: int) -> Iterator[list[Segment[T]]]:
    """Group consecutive segments, up to ``range_bytes`` bytes."""
    group: list[Segment[T]] = []
    room = range_bytes
    for segment in segments:
        if group and segment.stop - segment.start > room:
            yield group
            group, room = [], range_bytes
        group.append(segment)
        room -= segment.stop - segment.start
    if group:
        yield group


# --- files and items ------------------------------------------------------------------------------


_LARGE_BYTES = 1 << 20  # items of this size and more are streamed


class KeyRef(NamedTuple):
    """A key that is stored in an item, and what the item should hold."""

    key: str | None  # None where it is unknown
    dtype: torch.dtype | None = None  # None for objects
    sizes: tuple[int, ...] = ()  # of the chunk
    given: TensorItem | None = None  # the manifest's facts about the item


@dataclass(eq=False, slots=True)
class CheckedRange:
    """Bytes of an item that are read in pieces and checked against one CRC."""

    item: StoredItem
    name: str  # of the zip record; empty where the item has only one
    start: int  # in the item
    stop: int
    crc: int | None  # expected; None where it is unknown
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset, length and CRC-32 of each piece read


@dataclass(eq=False, slots=True)
class StoredItem:
    """An item of a file."""

    file: str
    start: int
    length: int
    kind: Literal["tensor", "object", "raw"]  # in a zip archive of its own, or the bare bytes of a tensor
    crc: int | None = None  # of raw bytes, if it is known
    covered: bool = False  # by a CRC of the whole file
    owners: list[KeyRef] = field(default_factory=list)
    inner: dict[int, list[KeyRef]] = field(default_factory=dict)  # torch.save file: the keys of each record's offset
    streams: list[CheckedRange] = field(default_factory=list)  # of a large item

    @property
    def is_large(self) -> bool:
        """Whether it is streamed instead of read into memory whole."""
        return self.length >= _LARGE_BYTES

    def extents(self) -> list[Extent[StoredItem | CheckedRange]]:
        """Return the byte ranges to read."""
        if not self.is_large:
            return [Extent(self.start, self.start + self.length, self, streamed=False)]
        return [
            Extent(self.start + stream.start, self.start + stream.stop, stream, streamed=True)
            for stream in self.streams
            if stream.start < stream.stop
        ]


@dataclass(eq=False, slots=True)
class StoredFile:
    """A file to check."""

    name: str
    nbytes: int
    crc: int | None  # of the whole file; None: unknown, so only its items are read
    items: list[StoredItem] = field(default_factory=list)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # CRC-32 and length of each range, by its number
    unread: bool = False  # some of it could not be read


def combined(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Combine the CRC-32s and lengths of parts that follow each other."""
    crc = length = 0
    for part, count in parts:
        crc, length = crc32_combine(crc, part, count), length + count
    return crc, length
