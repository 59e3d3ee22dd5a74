"""Ranges of memory that have bytes in common."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from aiockpt.core.extent import overlapping, shared_among

ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: tuple(sorted(pair))), max_size=6)


def common(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return bool(set(range(*one)) & set(range(*other)))


@hypothesis.given(ranges, ranges)
@hypothesis.example([(2, 9)], [(5, 5)])
def test_which_ranges_overlap_others(extents: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    of_others = [any(common(one, other) for other in others) for one in extents]
    assert overlapping(extents, others) == of_others
    shared = [
        number
        for number, one in enumerate(extents)
        if of_others[number] or any(common(one, other) for other in extents[:number] + extents[number + 1 :])
    ]
    assert sorted(shared_among(extents, others)) == shared
