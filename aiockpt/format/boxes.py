"""Boxes, the hyper-rectangles of a tensor: which of them overlap, and whether together they cover it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from aiockpt.errors import CorruptCheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
INCOMPLETE = "are not all of"  # see `cover_error`
_LEAST_COMPARISONS = 1 << 24
_COMPARISONS_PER_CHUNK = 8192


def leaves_shape(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box, which has as many dimensions as the shape, lies partly outside of it."""
    return any(at < 0 or n < 0 or at + n > total for at, n, total in zip(*box, shape, strict=True))


def overlapping(chunks: Sequence[Box], *, bounded: bool = False) -> list[tuple[int, int]]:
    """Return the numbers of the chunks that overlap an earlier one, each with the number of one it overlaps.

    If ``bounded``, chunks of which very many are neighbours in every dimension raise `CorruptCheckpointError` instead.
    """
    first: dict[Box, int] = {}
    found: list[tuple[int, int]] = []
    for number, chunk in enumerate(chunks):
        if 0 not in chunk[1] and (one := first.setdefault(chunk, number)) != number:
            found.append((number, one))
    dims = len(next(iter(first))[0]) if first else 0
    # Chunks with another number of dimensions are refused elsewhere.
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
            f"its {len(chunks)} chunks are neighbours in so many dimensions that comparing them would take too long; "
            "its metadata is damaged, or hostile"
        )
    others = [(begins[dim][order], ends[dim][order]) for dim in range(len(begins)) if dim != along]
    reported = np.zeros(len(chunks), bool)
    found: list[tuple[int, int]] = []
    for at in np.flatnonzero(reach > np.arange(1, len(chunks) + 1)).tolist():
        beside = slice(at + 1, int(reach[at]))
        meet = ~reported[beside]
        for begin, end in others:
            meet &= (begin[beside] < end[at]) & (end[beside] > begin[at])
        for other in (np.flatnonzero(meet) + beside.start).tolist():
            one, two = sorted((numbers[order[at]], numbers[order[other]]))
            found.append((two, one))
            reported[other] = True
    return found


def cover_error(shape: tuple[int, ...], boxes: Sequence[Box], *, is_part: bool = False) -> str:
    """Return how the boxes fail to cover each element of a shape once, '' if they do; a part may lack elements."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return "have another number of dimensions than"
        if leaves_shape((offsets, sizes), shape):
            return "lie outside"
    boxes = [box for box in boxes if 0 not in box[1]]
    stored, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if stored > whole:
        return "overlap in"
    if stored < whole and not is_part:
        return INCOMPLETE
    # From here on, boxes that do not overlap cover everything, for they have as many elements.
    split = [dim for dim, total in enumerate(shape) if any(sizes[dim] != total for _, sizes in boxes)]
    if len(split) == 1:  # the most frequent case, and many times as fast without arrays
        cuts = sorted((offsets[split[0]], sizes[split[0]]) for offsets, sizes in boxes)
        overlaps = any(begin + size > after for (begin, size), (after, _) in pairwise(cuts))
    else:
        try:
            overlaps = bool(overlapping(boxes, bounded=True))
        except CorruptCheckpointError:
            return "are cut in too many ways to be those of"
    return "overlap in" if overlaps else ""
