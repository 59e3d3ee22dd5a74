"""Arithmetic of element ranges: boxes, runs, and overlaps of stored chunks with wanted parts of a tensor."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiockpt.core.dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowBox:
    """A hyper-rectangle of a tensor that is contiguous in row-major order."""

    index: tuple[int | slice, ...]  # to index the tensor with
    count: int  # of elements


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[RowBox]:
    """Cut the elements ``start`` to ``stop``, counted in row-major order, into boxes.

    The boxes follow each other in that order; there are at most two for each dimension, less one.
    """
    if start >= stop:
        return []
    if not shape:
        return [RowBox((), 1)]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [RowBox((first, *box.index), box.count) for box in boxes(shape[1:], head, tail)]
    found: list[RowBox] = []
    if head:
        found += [RowBox((first, *box.index), box.count) for box in boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        found.append(RowBox((slice(first, last),), (last - first) * row))
    found += [RowBox((last, *box.index), box.count) for box in boxes(shape[1:], 0, tail)]
    return found


@dataclass(frozen=True, slots=True)
class Selection:
    """Evenly spaced positions along one dimension: ``start``, ``start + step``, ...; ``count`` of them."""

    start: int
    count: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of a stored chunk and a wanted part of a tensor."""

    chunk: tuple[Selection, ...]  # per dimension the positions to take from the chunk
    target: tuple[slice, ...]  # per dimension the positions of the wanted part that they fill


def overlap(offsets: Sequence[int], sizes: Sequence[int], wanted: Sequence[Selection]) -> Overlap | None:
    """Return the overlap of a chunk and the ``wanted`` positions of each dimension of its tensor; None if empty."""
    chunk: list[Selection] = []
    target: list[slice] = []
    for offset, size, want in zip(offsets, sizes, wanted, strict=True):
        skipped = max(0, -(-(offset - want.start) // want.step))
        first = want.start + skipped * want.step
        count = min(want.count - skipped, -(-(offset + size - first) // want.step))
        if count <= 0:
            return None
        chunk.append(Selection(first - offset, count, want.step))
        target.append(slice(skipped, skipped + count))
    return Overlap(tuple(chunk), tuple(target))


@dataclass(frozen=True, slots=True)
class StoredStream:
    """A strided view as a stream: its elements in stored order, without those between.

    Dimensions along which all positions are one element (stride 0) are not part of the stream.
    """

    order: tuple[int, ...]  # dimensions of the view that the stream runs over, the outermost first
    shape: tuple[int, ...]  # sizes of those dimensions
    outer: tuple[tuple[int, int], ...]  # sizes and strides of the dimensions that are not within a run
    run: int  # number of neighbouring elements
    offset: int  # of the first element
    count: int  # of elements

    @property
    def is_increasing(self) -> bool:
        """Whether each element is stored behind the one before, as no elements share memory."""
        reach = self.run
        for size, stride in reversed(self.outer):
            if stride < reach:
                return False
            reach += (size - 1) * stride
        return True

    def at(self, number: int) -> int:
        """Return the offset of an element."""
        row, skip = divmod(number, self.run)
        digits = _digits(row, [size for size, _ in self.outer])
        return self.offset + skip + sum(digit * stride for digit, (_, stride) in zip(digits, self.outer, strict=True))

    def before(self, offset: int) -> int:
        """Return the number of elements that are stored before an offset, of a stream that `is_increasing`."""
        return bisect.bisect_left(range(self.count), offset, key=self.at)

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return offset and count of each stored run of the elements ``start`` to ``stop``; adjacent runs merge."""
        found: list[tuple[int, int]] = []
        sizes = [size for size, _ in self.outer]
        number, skip = divmod(start, self.run)
        position = list(_digits(number, sizes))
        at = self.offset + sum(p * stride for p, (_, stride) in zip(position, self.outer, strict=True))
        while start < stop:
            count = min(self.run - skip, stop - start)
            if found and found[-1][0] + found[-1][1] == at + skip:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((at + skip, count))
            start += count
            skip = 0
            for dim in range(len(position) - 1, -1, -1):
                size, stride = self.outer[dim]
                position[dim] += 1
                at += stride
                if position[dim] < size:
                    break
                at -= size * stride
                position[dim] = 0
        return found


def _digits(number: int, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the digits of a number in the mixed base of ``sizes``."""
    weight = math.prod(sizes)
    for size in sizes:
        weight //= size
        digit, number = divmod(number, weight)
        yield digit


def as_stream(shape: Sequence[int], stride: Sequence[int], offset: int) -> StoredStream:
    """Return a strided view, none of whose sizes is zero, as a stream in stored order."""
    dims = [dim for dim, size in enumerate(shape) if size > 1 and stride[dim] != 0]
    dims.sort(key=lambda dim: (-stride[dim], dim))
    run = 1
    inner = len(dims)
    while inner and stride[dims[inner - 1]] == run:
        inner -= 1
        run *= shape[dims[inner]]
    sizes = tuple(shape[dim] for dim in dims)
    outer = tuple((shape[dim], stride[dim]) for dim in dims[:inner])
    return StoredStream(tuple(dims), sizes, outer, run, offset, math.prod(sizes))


class Selected(NamedTuple):
    """The meaning of an index for a tensor of a certain shape."""

    selections: tuple[Selection, ...]  # along each dimension
    shape: tuple[int, ...]  # of the result, without the dimensions that integers remove
    taken: tuple[int, ...]  # the removed dimensions


def select(shape: Sequence[int], index: object) -> Selected:
    """Translate a tensor index: slices with positive steps, integers, an Ellipsis, or a tuple of these."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    at = dots[0] if dots else len(parts)
    given = len(parts) - len(dots)
    if given > len(shape):
        raise IndexError(f"{given} indices are too many for the {len(shape)} dimensions of {tuple(shape)}")
    parts[at : at + len(dots)] = [slice(None)] * (len(shape) - given)
    selections: list[Selection] = []
    result: list[int] = []
    taken: list[int] = []
    for dim, (size, part) in enumerate(zip(shape, parts, strict=True)):
        if isinstance(part, slice):
            if part.step is not None and operator.index(part.step) < 1:
                raise IndexError(f"the step of a slice must be positive, not {part.step}")
            chosen = range(size)[part]
            selections.append(Selection(chosen.start, len(chosen), chosen.step))
            result.append(len(chosen))
            continue
        selections.append(Selection(_position(part, dim, size), 1))
        taken.append(dim)
    return Selected(tuple(selections), tuple(result), tuple(taken))


def _position(part: object, dim: int, size: int) -> int:
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise TypeError(f"{type(part).__name__} can't index a stored tensor: use slices, integers, '...' and tuples")
    number = operator.index(part)
    if not -size <= number < size:
        raise IndexError(f"index {number} is outside of dimension {dim}, which has the size {size}")
    return number % size
