"""Arithmetic of element ranges: which boxes of a tensor a run of its elements covers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor that is contiguous in row-major order.

    Attributes:
        index: what to index the tensor with to get it.
        count: how many elements it has.
    """

    index: tuple[int | slice, ...]
    count: int


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut the elements ``start`` to ``stop``, counted in row-major order, into boxes.

    The boxes follow each other in that order; there are at most two for each dimension, less one.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), 1)]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [Box((first, *box.index), box.count) for box in boxes(shape[1:], head, tail)]
    found: list[Box] = []
    if head:
        found += [Box((first, *box.index), box.count) for box in boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        found.append(Box((slice(first, last),), (last - first) * row))
    found += [Box((last, *box.index), box.count) for box in boxes(shape[1:], 0, tail)]
    return found
