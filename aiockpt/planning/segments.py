"""Reading a file from end to end: extents that belong together, and the segments to read them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
