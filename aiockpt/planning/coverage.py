"""Arithmetic of what covers what: chunks of tensors, items of files, and how to read files from end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from aiockpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""
_MAX_GAP_BYTES = 64 << 10  # read and thrown away, where that spares a read
_LEAST_COMPARISONS = 1 << 24
_COMPARISONS_PER_CHUNK = 8192


def overlapping(chunks: Sequence[Box], *, bounded: bool = False) -> list[tuple[int, int]]:
    """Find chunks of a tensor that hold elements which an earlier chunk holds as well.

    Args:
        chunks: offsets and sizes of each.
        bounded: give up rather than compare chunks of which very many lie beside each other in every dimension.

    Returns:
        The numbers of such chunks, each with that of one that it overlaps.

    Raises:
        CorruptCheckpointError: it was given up.
    """
    first: dict[Box, int] = {}
    found: list[tuple[int, int]] = []
    for number, chunk in enumerate(chunks):
        if 0 not in chunk[1] and (one := first.setdefault(chunk, number)) != number:
            found.append((number, one))
    dims = len(next(iter(first))[0]) if first else 0
    # What has another number of dimensions is refused elsewhere.
    numbers = [number for (offsets, sizes), number in first.items() if len(offsets) == len(sizes) == dims]
    numbers = [number for number in numbers if 0 not in chunks[number][1]]
    if dims and len(numbers) > 1:
        found += _swept([chunks[number] for number in numbers], numbers, bounded=bounded)
    return sorted(found)


def _swept(chunks: Sequence[Box], numbers: Sequence[int], *, bounded: bool) -> list[tuple[int, int]]:
    """Compare each chunk with those that begin before it ends, along the dimension where these are the fewest."""
    begins = [np.array(column, np.int64) for column in zip(*(offsets for offsets, _ in chunks), strict=True)]
    counts = [np.array(column, np.int64) for column in zip(*(sizes for _, sizes in chunks), strict=True)]
    ends = list(map(np.add, begins, counts))
    orders = [np.argsort(at, kind="stable") for at in begins]
    reaches = [np.searchsorted(a[order], z[order]) for a, z, order in zip(begins, ends, orders, strict=True)]
    along = min(range(len(begins)), key=lambda dim: int(reaches[dim].sum()))
    order, reach = orders[along], reaches[along]
    comparisons = (int(reach.sum()) - len(chunks) * (len(chunks) + 1) // 2) * len(begins)
    if bounded and comparisons > _LEAST_COMPARISONS + _COMPARISONS_PER_CHUNK * len(chunks):
        raise CorruptCheckpointError(
            f"its {len(chunks)} chunks lie beside each other in so many ways that it would take too long to find out "
            "whether they overlap; its metadata is damaged, or was made to harm"
        )
    others = [(begins[dim][order], ends[dim][order]) for dim in range(len(begins)) if dim != along]
    told = np.zeros(len(chunks), bool)
    found: list[tuple[int, int]] = []
    for at in np.flatnonzero(reach > np.arange(1, len(chunks) + 1)).tolist():
        beside = slice(at + 1, int(reach[at]))
        meet = ~told[beside]
        for begin, end in others:
            meet &= (begin[beside] < end[at]) & (end[beside] > begin[at])
        for other in (np.flatnonzero(meet) + beside.start).tolist():
            one, two = sorted((numbers[order[at]], numbers[order[other]]))
            found.append((two, one))
            told[other] = True
    return found


@dataclass(frozen=True, slots=True)
class Extent(Generic[T]):
    """Bytes ``start`` to ``stop`` of a file that belong together.

    Attributes:
        start: the first byte.
        stop: the byte behind the last.
        owner: what they are.
        streamed: they may be read piece by piece; else all of them must be in memory at once.
    """

    start: int
    stop: int
    owner: T
    streamed: bool


@dataclass(frozen=True, slots=True)
class Segment(Generic[T]):
    """Bytes ``start`` to ``stop`` of a file, to be read in one go.

    Attributes:
        start: the first byte.
        stop: the byte behind the last.
        extents: those that lie within, or the streamed one of which this is a piece.
    """

    start: int
    stop: int
    extents: Sequence[Extent[T]]


def part_overlaps(extents: Sequence[Extent[T]]) -> tuple[list[Extent[T]], list[tuple[Extent[T], Extent[T]]]]:
    """Separate the extents that share bytes with one before them.

    Returns:
        Those that follow each other without overlap, in the order of the file, and the others, each with the one
        that it overlaps.
    """
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
    """Cut a file for reading.

    Args:
        extents: what to read, in order and without overlaps.
        nbytes: read the whole file, which has so many bytes; None: only the extents.
        step_bytes: the most bytes of a segment whose extents must be in memory, unless one alone has more.
        range_bytes: the most bytes of any other segment.
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
    """Put segments that follow each other together, up to ``range_bytes`` bytes."""
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
