"""Range arithmetic, compared with indexed tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.planning.ranges import Selection, as_stream, boxes, overlap, select

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def indexed(draw):
    """Draw a shape and an index that fits it."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4).map(tuple))
    parts = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if size and draw(st.booleans()):
            parts.append(draw(st.integers(-size, size - 1)))
        else:
            parts.append(
                slice(
                    draw(st.none() | st.integers(-8, 8)),
                    draw(st.none() | st.integers(-8, 8)),
                    draw(st.none() | st.integers(1, 3)),
                )
            )
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), ...)
        if parts[-1] is not ... and len(parts) - 1 < len(shape):
            # Parts behind the ellipsis would index the last dimensions: take those dimensions whole.
            where = parts.index(...)
            parts = parts[: where + 1]
    return shape, tuple(parts)


@given(indexed())
def test_select_equals_indexing_of_tensors(case) -> None:
    shape, index = case
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    selections, result, dropped = select(shape, index)
    taken = tensor
    for dim, part in enumerate(selections):
        taken = taken.index_select(dim, part.start + part.step * torch.arange(part.count))
    assert torch.equal(taken.reshape(result), tensor[index])
    assert [taken.shape[dim] for dim in dropped] == [1] * len(dropped)
    assert [size for dim, size in enumerate(taken.shape) if dim not in dropped] == list(result)


def test_ellipsis_in_the_middle() -> None:
    assert select((2, 3, 4), (0, ..., 1)) == ((Selection(0, 1), Selection(0, 3), Selection(1, 1)), (3,), (0, 2))
    assert select((2, 3), ...) == ((Selection(0, 2), Selection(0, 3)), (2, 3), ())
    assert select((), ()) == ((), (), ())


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, IndexError, "index 5 is outside of dimension 0, which has the size 4"),
        ((0, -6), IndexError, "index -6 is outside of dimension 1"),
        ((0, 0, 0), IndexError, "3 indices are too many for the 2 dimensions"),
        ((..., ...), IndexError, "only one ellipsis"),
        (slice(None, None, -1), IndexError, "must be positive, not -1"),
        (None, TypeError, "NoneType can't index"),
        (True, TypeError, "bool can't index"),
        ([0, 1], TypeError, "list can't index"),
    ],
)
def test_bad_indices(index, error, message) -> None:
    with pytest.raises(error, match=message):
        select((4, 5), index)


@given(SHAPES, st.randoms(use_true_random=False))
def test_packed_streams_are_the_view_in_stored_order(shape, random) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim] + random.choice([0, 0, 2])
        if random.random() < 0.1:
            stride[dim] = 0
    stored = torch.arange(step + 7)
    view = stored.as_strided(shape, stride, 5)
    packed = as_stream(shape, stride, 5)
    stream = view.permute((*packed.order, *(d for d in range(len(shape)) if d not in packed.order)))
    stream = stream.reshape(*packed.shape, -1)[..., 0].reshape(-1) if packed.count else stream.reshape(-1)
    assert packed.count == stream.numel()
    start = random.randint(0, packed.count)
    stop = random.randint(start, packed.count)
    runs = packed.runs(start, stop)
    found = [int(value) for at, count in runs for value in stored[at : at + count]]
    assert found == stream[start:stop].tolist()
    assert all(a + n != b for (a, n), (b, _) in pairwise(runs))  # adjacent runs are merged


def test_rows_are_one_run_and_columns_one_for_each_row() -> None:
    assert as_stream((10, 7), (7, 1), 0).runs(0, 70) == [(0, 70)]
    assert as_stream((3, 7), (7, 1), 14).runs(0, 21) == [(14, 21)]
    assert as_stream((3, 2), (7, 1), 4).runs(0, 6) == [(4, 2), (11, 2), (18, 2)]
    assert as_stream((3, 2), (7, 1), 4).runs(1, 5) == [(5, 1), (11, 2), (18, 1)]
    assert as_stream((), (), 3).runs(0, 1) == [(3, 1)]


@st.composite
def pieces(draw):
    """Draw a shape, a chunk of it, and selections."""
    shape = draw(st.lists(st.integers(1, 8), max_size=3).map(tuple))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for offset, size in zip(offsets, shape, strict=True))
    wanted = []
    for size in shape:
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 4))
        wanted.append(Selection(start, draw(st.integers(1, (size - 1 - start) // step + 1)), step))
    return shape, offsets, sizes, wanted


@given(pieces())
def test_overlaps_are_the_common_elements(case) -> None:
    shape, offsets, sizes, wanted = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunk = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    view = whole[tuple(slice(s.start, s.start + s.count * s.step, s.step) for s in wanted)]
    found = overlap(offsets, sizes, wanted)
    both = sorted(set(chunk.reshape(-1).tolist()) & set(view.reshape(-1).tolist()))
    if found is None:
        assert both == []
        return
    taken = chunk[tuple(slice(s.start, s.start + s.count * s.step, s.step) for s in found.chunk)]
    assert torch.equal(taken, view[found.target])
    assert sorted(taken.reshape(-1).tolist()) == both


def test_boxes_cover_every_range_in_order() -> None:
    tensor = torch.arange(2 * 3 * 4).view(2, 3, 4)
    for start in range(25):
        for stop in range(start, 25):
            parts = [tensor[box.index].reshape(-1) for box in boxes((2, 3, 4), start, stop)]
            assert [int(v) for part in parts for v in part] == list(range(start, stop))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.randoms(use_true_random=False))
def test_positions_in_a_stream_are_those_of_its_runs(shape, random) -> None:
    whole = torch.empty([size + random.randint(0, 2) for size in shape])
    view = whole[tuple(slice(0, size) for size in shape)].permute(random.sample(range(len(shape)), len(shape)))
    stream = as_stream(tuple(view.shape), view.stride(), 7)
    places = [at + n for at, count in stream.runs(0, stream.count) for n in range(count)]
    assert stream.is_increasing
    assert [stream.at(number) for number in range(stream.count)] == places
    for offset in range(places[-1] + 3):
        assert stream.before(offset) == sum(place < offset for place in places)


def test_stream_of_shared_elements_is_not_increasing() -> None:
    assert not as_stream((4, 3), (2, 1), 0).is_increasing
    assert not as_stream((2, 2, 2), (3, 2, 1), 0).is_increasing
    assert as_stream((4, 3), (0, 1), 0).is_increasing
