"""Overlaps between chunks, and files that are cut into segments."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.format.checks import Box, overlap_in
from aiockpt.format.index import Index, ItemRange, StoredChunk, TensorEntry
from aiockpt.reading.verify.inventory import Extent, Inventory, cut_segments, split_overlaps
from aiockpt.telemetry.verification import Findings

chunk = st.tuples(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.tuples(st.integers(0, 3), st.integers(0, 3)))


def cells(one: tuple[tuple[int, ...], tuple[int, ...]]) -> set[tuple[int, ...]]:
    offsets, sizes = one
    return set(itertools.product(*(range(o, o + n) for o, n in zip(offsets, sizes, strict=True))))


@given(st.lists(chunk, max_size=7))
def test_an_overlap_agrees_with_brute_force_in_2d(chunks) -> None:
    found = overlap_in(chunks)
    if found is not None:
        number, other = found
        assert other < number
        assert cells(chunks[number]) & cells(chunks[other])
    distinct = len(set().union(*map(cells, chunks)))
    assert bool(found) == (sum(len(cells(one)) for one in chunks) > distinct)


def test_an_overlap_scalars() -> None:
    assert overlap_in([((), ())]) is None
    assert overlap_in([((), ()), ((), ()), ((), ())]) == (1, 0)


def test_large_grid_has_no_overlap() -> None:
    grid = [((i * 7, j * 3), (7, 3)) for i in range(60) for j in range(60)]
    assert overlap_in(grid) is None
    assert overlap_in([*grid, ((8, 4), (1, 1))]) == (3600, 61)


@given(st.lists(st.tuples(*[st.tuples(*[st.integers(0, 3)] * 3)] * 2), max_size=7))
def test_an_overlap_agrees_with_brute_force_in_3d(chunks) -> None:
    found = overlap_in(chunks)
    if found is not None:
        number, other = found
        assert other < number
        assert cells(chunks[number]) & cells(chunks[other])
    held = sum(len(cells(one)) for one in chunks)
    assert bool(found) == (held > len(set().union(*map(cells, chunks))))


def side_by_side(count: int) -> list[Box]:
    """Return rows above columns: none overlap, but along each dimension half of them cover the same range."""
    return [
        *(((row, 0), (1, 2 * count)) for row in range(count)),
        *(((count, column), (2 * count, 1)) for column in range(count)),
    ]


def test_comparisons_of_neighbouring_chunks_are_bounded() -> None:
    assert overlap_in(side_by_side(1000)) is None
    assert overlap_in([*side_by_side(1000), ((999, 5), (2, 1))]) in ((2000, 999), (2000, 1005))
    assert overlap_in([((i, j, k), (1, 1, 1)) for i in range(16) for j in range(16) for k in range(16)]) is None
    with pytest.raises(aiockpt.CorruptCheckpointError, match="its 60000 chunks are neighbours in so many dimensions"):
        overlap_in(side_by_side(30_000))


def test_verify_reports_chunks_that_it_does_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.format.checks._LEAST_COMPARISONS", -1 << 20)
    chunks = [
        StoredChunk(offsets, sizes, ItemRange("f", 64 * number, 64), None)
        for number, (offsets, sizes) in enumerate(side_by_side(3))
    ]
    findings = Findings()
    entry = TensorEntry(torch.float32, (9, 6), tuple(chunks))
    Inventory({"f": 1000}, {}, findings).add(Index({"w": entry}, {"w": ("w",)}, (), {}, "dcp"), None)
    reported = [(problem.kind, problem.file, problem.key, problem.message[:13]) for problem in findings.problems]
    assert reported[0] == ("coverage", "f", "w", "its 6 chunks ")


def test_many_identical_chunks() -> None:
    assert overlap_in([((3, 1), (2, 2))] * 20_000) == (1, 0)


extents = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 60), st.booleans()).map(
        lambda t: Extent(t[0], t[0] + t[1], object(), t[2])
    ),
    max_size=12,
)


@given(extents)
def test_split_overlaps(wanted) -> None:
    clear, others = split_overlaps(wanted)
    assert len(clear) + len(others) == len(wanted)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(clear))
    assert all(extent.start < beside.stop for extent, beside in others)
    assert {id(beside) for _, beside in others} <= set(map(id, clear))


@given(extents, st.booleans(), st.integers(1, 80))
def test_segments_cover_each_extent_once(wanted, whole: bool, most: int) -> None:
    clear, _ = split_overlaps([extent for extent in wanted if extent.stop > extent.start])
    end = max((extent.stop for extent in clear), default=0)
    nbytes = end + 9 if whole else None
    segments = list(cut_segments(clear, nbytes, most))
    assert all(one.stop <= other.start for one, other in itertools.pairwise(segments))
    if whole:
        assert segments[0].start == 0
        assert segments[-1].stop == end + 9
        assert all(one.stop == other.start for one, other in itertools.pairwise(segments))
    seen: dict[int, int] = {}
    for segment in segments:
        alone = len(segment.extents) == 1 and segment.extents[0].start == segment.start
        assert 0 < segment.stop - segment.start <= most or alone
        for extent in segment.extents:
            low, high = max(segment.start, extent.start), min(segment.stop, extent.stop)
            assert low < high
            assert extent.streamed or (low, high) == (extent.start, extent.stop)
            if extent.streamed:
                assert (low, high) == (segment.start, segment.stop)
            seen[id(extent)] = seen.get(id(extent), 0) + high - low
    assert seen == {id(extent): extent.stop - extent.start for extent in clear}
