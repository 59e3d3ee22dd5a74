"""Which items go to which file."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_BUCKET_BYTES = 8 << 20
"""Below this, another file costs more in opening and syncing than it gains in parallel writing."""


def bucket_count(total_bytes: int, most: int) -> int:
    """Choose how many files to write: one for each writing thread, fewer for small states."""
    return max(1, min(most, total_bytes // MIN_BUCKET_BYTES))


def assign_buckets(sizes: list[int], count: int) -> list[list[int]]:
    """Spread items over ``count`` buckets by size, the largest first into the least full.

    Returns:
        The positions of the items in each bucket, in their original order.
    """
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


def split_in_order(sizes: Mapping[int, int], most_bytes: int | None) -> list[list[int]]:
    """Fill one file after the other, each with items of ``most_bytes`` in all, or one that is larger alone.

    Args:
        sizes: the bytes of each item.
        most_bytes: None for one file.

    Returns:
        The items of each file; at least one file.
    """
    files: list[list[int]] = [[]]
    filled = 0
    for item, size in sizes.items():
        if most_bytes is not None and files[-1] and filled + size > most_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files
