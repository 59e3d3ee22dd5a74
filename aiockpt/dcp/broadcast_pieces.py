"""Pieces of a tensor on their way to all ranks, and the places on each rank that take from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from aiockpt.errors import ShapeMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import ReadItem

    from aiockpt.planning.ranges import Box

_PIECE_BYTES = 32 << 20
"""How much of a tensor is broadcast at a time."""


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """A part of a tensor that is wanted here.

    Attributes:
        item: what asks for it.
        starts: where it begins in the whole tensor.
        lengths: its sizes.
        target: where it goes.
    """

    item: ReadItem
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor

    def take(self, origin: tuple[int, ...], values: torch.Tensor) -> None:
        """Take what is wanted of values that begin at ``origin`` of the whole tensor."""
        ours: list[slice] = []
        theirs: list[slice] = []
        for begin, count, at, size in zip(self.starts, self.lengths, origin, values.shape, strict=True):
            first, last = max(begin, at), min(begin + count, at + size)
            if first >= last:
                return
            ours.append(slice(first - begin, last - begin))
            theirs.append(slice(first - at, last - at))
        with torch.no_grad():
            (self.target[tuple(ours)] if ours else self.target).copy_(values[tuple(theirs)] if theirs else values)


def region(item: ReadItem, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give where in the whole tensor the item's part begins, and its sizes.

    Raises:
        ShapeMismatchError: the file's tensor has no such part.
    """
    if item.type == LoadItemType.BYTE_IO:
        raise ShapeMismatchError(f"{item.storage_index.fqn} is a tensor in the file but an object in the state dict")
    begin = item.storage_index.offset or (0,) * len(item.storage_offsets)
    starts = tuple(o + at for o, at in zip(begin, item.storage_offsets, strict=True))
    lengths = tuple(item.lengths)
    if len(starts) != len(shape) or any(s + n > size for s, n, size in zip(starts, lengths, shape, strict=True)):
        raise ShapeMismatchError(
            f"{item.storage_index.fqn} has the shape {shape} in the file, which has no {lengths} at {starts}"
        )
    return starts, lengths


def pieces(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Cut the elements of a tensor into ranges, at the ends of rows where that is possible."""
    count = math.prod(shape)
    most = max(1, _PIECE_BYTES // dtype.itemsize)
    row = math.prod(shape[1:])
    step = most - most % row if 0 < row <= most else most
    for start in range(0, count, step):
        yield start, min(start + step, count)


def box_origin(box: Box, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give where a box begins in its tensor."""
    begun = tuple(part.start if isinstance(part, slice) else part for part in box.index)
    return begun + (0,) * (len(shape) - len(begun))


def box_sizes(box: Box, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the sizes of a box, as many as its tensor has."""
    taken = tuple(part.stop - part.start if isinstance(part, slice) else 1 for part in box.index)
    return taken + shape[len(taken) :]
