"""Arithmetic of what covers what: chunks of tensors, items of files, and how to read files from end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

_MAX_GAP_BYTES = 64 << 10  # read and thrown away, where that spares a read


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
