"""Which items go to which file."""

from __future__ import annotations

import heapq

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
