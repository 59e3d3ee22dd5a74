"""Checks of an index: places, chunks, shared bytes and views."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.core.strides import view_fits
from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError
from aiockpt.format.checks import check_index
from aiockpt.format.index import Entry, Index, InlineEntry, ItemRange, ObjectEntry, StoredChunk, TensorEntry, TensorItem
from tests.examples import examples

FILES = {"a": 1000, "b": 10**15}
Box = tuple[tuple[int, ...], tuple[int, ...]]


def check(**entries: Entry) -> None:
    check_index("/c", Index(entries, {name: (name,) for name in entries}), FILES)


def tensor(
    shape: tuple[int, ...], boxes: list[Box], file: str = "b", dtype: torch.dtype = torch.float32
) -> TensorEntry:
    """Return a tensor whose chunks follow each other in a file, with gaps between them."""
    chunks, at = [], 7
    for offsets, sizes in boxes:
        length = math.prod(sizes) * 4 + 5
        chunks.append(StoredChunk(offsets, sizes, ItemRange("b", at, length)))
        at += length + 3
    return TensorEntry(torch.float32, shape, tuple(chunks))


def whole(shape: tuple[int, ...], place: ItemRange, dtype: torch.dtype = torch.float32) -> TensorEntry:
    return TensorEntry(dtype, shape, (StoredChunk((0,) * len(shape), shape, place),))


def viewed(place: ItemRange, *args: object, chunk: tuple[int, ...] | None = None) -> TensorEntry:
    shape, stride, offset, payload, nbytes = args
    item = TensorItem(torch.float32, shape, stride, offset, payload, nbytes, None)  # type: ignore[arg-type]
    return TensorEntry(
        torch.float32, item.shape, (StoredChunk((0,) * len(item.shape), chunk or item.shape, place, item),)
    )


def test_valid_entries_pass() -> None:
    place = ItemRange("a", 100, 500)
    check(
        w=whole((5, 5), ItemRange("a", 0, 100)),
        v=whole((), ItemRange("a", 96 + 4, 4), torch.int8),
        o=ObjectEntry(ItemRange("a", 104, 896)),
        i=InlineEntry([1]),
    )
    check(w=whole((5, 5), place), tied=whole((5, 5), place))
    check(none=TensorEntry(torch.float32, (0, 3), ()), empty=whole((0, 3), ItemRange("a", 1000, 0)))
    check(w=tensor((4,), [((2,), (2,)), ((4,), (0,)), ((0,), (2,))]), o=ObjectEntry(ItemRange("a", 0, 1000)))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (ItemRange("a", 0, 1001), r"/c/a ends at byte 1000, but k is at bytes 0 to 1001"),
        (ItemRange("a", 1000, 1), r"/c/a ends at byte 1000, but k is at bytes 1000 to 1001"),
        (ItemRange("a", 2**70, 0), r"/c/a ends at byte 1000"),
        (ItemRange("a", -1, 1), r"/c/a ends at byte 1000"),
        (ItemRange("a", 5, -1), r"/c/a ends at byte 1000"),
        (ItemRange("c", 0, 1), r"/c lacks the file c, which holds k"),
        (ItemRange("x..", 0, 1), r"/c lacks the file x\.\., which holds k"),
    ],
)
def test_places_outside_of_files_are_corrupt(place: ItemRange, message: str) -> None:
    for entry in (ObjectEntry(place), whole((0,), place)):
        with pytest.raises(CorruptCheckpointError, match=message):
            check(k=entry)


@pytest.mark.parametrize("name", ["/a", "../a", "b/../../a", ".."])
def test_files_outside_of_the_checkpoint_are_unsafe(name: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"k refers to .*, outside the checkpoint"):
        check(k=ObjectEntry(ItemRange(name, 0, 1)))


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ((4,), [], "are not all of"),
        ((4,), [((0,), (3,))], "are not all of"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "overlap in"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "overlap in"),
        ((4,), [((0,), (5,))], "lie outside"),
        ((4,), [((-1,), (4,))], "lie outside"),
        ((4,), [((2,), (4,))], "lie outside"),
        ((0,), [((1,), (0,))], "lie outside"),
        ((4,), [((0, 0), (4, 1))], "have another number of dimensions than"),
        ((4,), [((0,), (4, 1))], "have another number of dimensions than"),
        ((), [((), ()), ((), ())], "overlap in"),
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))], "overlap in"),
        ((2, 2), [((0, 0), (2, 2)), ((0, 0), (1, 1))], "overlap in"),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((1, 2), (2, 2))], "overlap in"),
    ],
)
def test_chunks_that_are_no_tiling_are_corrupt(shape: tuple[int, ...], boxes: list[Box], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=rf"/c: the chunks of k {message}"):
        check(k=tensor(shape, boxes))


def _cut(draw: random.Random, box: Box, times: int) -> list[Box]:
    """Cut a box, and then one of its parts each time, in two at random."""
    boxes = [box]
    for _ in range(times):
        offsets, sizes = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(sizes))
        at = draw.randint(0, sizes[dim])
        left, right = [*sizes], [*sizes]
        left[dim], right[dim] = at, sizes[dim] - at
        moved = [*offsets]
        moved[dim] += at
        boxes += [(offsets, tuple(left)), (tuple(moved), tuple(right))]
    return boxes


def _covered_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = torch.zeros(shape, dtype=torch.int32)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


@examples(400)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), st.randoms(use_true_random=False), st.data())
def test_any_tiling_passes_and_nothing_else(shape: tuple[int, ...], draw: random.Random, data: st.DataObject) -> None:
    boxes = _cut(draw, ((0,) * len(shape), shape), data.draw(st.integers(0, 8)))
    draw.shuffle(boxes)
    check(k=tensor(shape, boxes))
    if data.draw(st.booleans()):
        n = draw.randrange(len(boxes))
        sizes = boxes[n][1]
        moved = tuple(draw.randint(0, total - size) for total, size in zip(shape, sizes, strict=True))
        boxes[n] = (moved, sizes)
    if _covered_once(shape, boxes):
        check(k=tensor(shape, boxes))
    else:
        with pytest.raises(CorruptCheckpointError, match="the chunks of k"):
            check(k=tensor(shape, boxes))


@pytest.mark.full
def test_a_hundred_thousand_chunks_in_two_dimensions() -> None:
    boxes = [((3 * a, 5 * b), (3, 5)) for a, b in product(range(400), range(250))]
    check(k=tensor((1200, 1250), boxes))
    boxes[77_777] = ((boxes[77_777][0][0] - 1, boxes[77_777][0][1]), (3, 5))
    with pytest.raises(CorruptCheckpointError, match="the chunks of k overlap"):
        check(k=tensor((1200, 1250), boxes))


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**61, 1), (0, 2**62, 2), (1,) * 65])
def test_impossible_shapes_are_corrupt(shape: tuple[int, ...]) -> None:
    with pytest.raises(CorruptCheckpointError, match="k can't have the shape"):
        check(k=whole(shape, ItemRange("b", 0, 10**15)))


def test_cuts_in_very_many_dimensions() -> None:
    boxes: list[Box] = [((1,) * n + (0,) * (25 - n), (1,) * (n + 1) + (2,) * (24 - n)) for n in range(25)]
    boxes.append(((1,) * 25, (1,) * 25))
    check(k=tensor((2,) * 25, boxes))
    boxes[-1] = ((0,) * 25, (1,) * 25)
    with pytest.raises(CorruptCheckpointError, match="the chunks of k overlap in"):
        check(k=tensor((2,) * 25, boxes))


@pytest.mark.parametrize("is_part", [False, True])
def test_chunks_that_would_take_too_long_to_compare_are_refused(is_part: bool) -> None:
    count = 20_000  # rows above columns: along each dimension half of them cover the same range
    rows: list[Box] = [((row, 0), (1, count)) for row in range(count)]
    columns: list[Box] = [((count, column), (count, 1)) for column in range(count)]
    entry = tensor((2 * count, count), rows + columns)
    index = Index({"k": entry}, {"k": ("k",)}, (), {}, "dcp")
    with pytest.raises(CorruptCheckpointError, match="/c: the chunks of k are cut in too many ways to be those of"):
        check_index("/c", index, FILES, is_part=is_part)


def test_items_too_short_for_their_chunks_are_corrupt() -> None:
    check(k=whole((5, 5), ItemRange("a", 0, 25)))  # its values may be stored in a smaller dtype
    with pytest.raises(CorruptCheckpointError, match=r"/c/a: the item of k at offset 3 has 24 bytes, too few"):
        check(k=whole((5, 5), ItemRange("a", 3, 24)))


@pytest.mark.parametrize(
    "entries",
    [
        {"k": ObjectEntry(ItemRange("a", 0, 100)), "l": ObjectEntry(ItemRange("a", 99, 100))},
        {"k": ObjectEntry(ItemRange("a", 0, 100)), "l": ObjectEntry(ItemRange("a", 0, 101))},
        {"k": ObjectEntry(ItemRange("a", 0, 900)), "l": ObjectEntry(ItemRange("a", 5, 5))},
        {"k": ObjectEntry(ItemRange("a", 0, 100)), "l": ObjectEntry(ItemRange("a", 0, 100))},
        {"k": whole((5, 5), ItemRange("a", 0, 100)), "l": ObjectEntry(ItemRange("a", 0, 100))},
        {"k": whole((5, 5), ItemRange("a", 0, 100)), "l": whole((5, 5), ItemRange("a", 0, 100), torch.int32)},
        {"k": whole((5, 5), ItemRange("a", 0, 100)), "l": whole((25,), ItemRange("a", 0, 100))},
        {"k": viewed(ItemRange("a", 0, 100), (25,), (1,), 0, 0, 100), "l": ObjectEntry(ItemRange("a", 0, 100))},
    ],
)
def test_bytes_that_are_claimed_twice_are_corrupt(entries: dict[str, Entry]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"/c/a: .*(overlap|the same bytes).* damaged"):
        check(**entries)


def test_chunks_of_a_tensor_that_share_bytes_are_corrupt() -> None:
    one, other = tensor((4,), [((0,), (2,)), ((2,), (2,))]).chunks
    twice = TensorEntry(torch.float32, (4,), (one, StoredChunk(other.offsets, other.sizes, one.place)))
    with pytest.raises(CorruptCheckpointError, match="k and k share the same bytes"):
        check(k=twice)


def test_tied_tensors_in_several_chunks() -> None:
    entry = tensor((4,), [((0,), (2,)), ((2,), (2,))])
    check(k=entry, tied=entry, third=tensor((4,), [((0,), (2,)), ((2,), (2,))]))
    (one, other), shape = entry.chunks, (2,)
    swapped = (StoredChunk((0,), shape, other.place), StoredChunk((2,), shape, one.place))
    with pytest.raises(CorruptCheckpointError, match="not the same tensor"):
        check(k=entry, l=TensorEntry(torch.float32, (4,), swapped))


PLACE = ItemRange("a", 100, 200)


@pytest.mark.parametrize(
    "args",
    [
        ((50,), (1,), 0, 0, 200),
        ((25,), (2,), 1, 0, 200),
        ((2, 25), (0, 2), 1, 0, 200),
        ((10, 5), (1, 10), 0, 0, 200),
        ((24,), (2,), 1, 4, 196),
        ((0, 7), (99, 99), 99, 0, 200),
        ((), (), 49, 0, 200),
    ],
)
def test_views_inside_their_payload_may_share_it(args: tuple[object, ...]) -> None:
    check(k=viewed(PLACE, *args), l=viewed(PLACE, (50,), (1,), 0, 0, 200))


@pytest.mark.parametrize(
    "args",
    [
        ((51,), (1,), 0, 0, 200),
        ((50,), (1,), 1, 0, 200),
        ((25,), (2,), 2, 0, 200),
        ((50,), (1,), 0, 0, 199),
        ((10,), (1,), 0, 1, 200),
        ((10,), (1,), 0, -1, 200),
        ((10,), (-1,), 20, 0, 200),
        ((10,), (1,), -1, 0, 200),
        ((10,), (1, 1), 0, 0, 200),
        ((2,), (2**62,), 0, 0, 200),
        ((), (), 50, 0, 200),
    ],
)
def test_views_beyond_their_payload_are_corrupt(args: tuple[object, ...]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"/c/a: k reaches beyond its 200 bytes at offset 100"):
        check(k=viewed(PLACE, *args))


def test_a_view_must_have_the_sizes_of_its_chunk() -> None:
    with pytest.raises(CorruptCheckpointError):
        check(k=viewed(PLACE, (6,), (1,), 0, 0, 200, chunk=(5,)))


@examples(200)
@given(
    st.integers(0, 9), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3), st.sampled_from([1, 2, 4])
)
def test_views_fit_as_in_torch(offset: int, dims: list[tuple[int, int]], itemsize: int) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(step for _, step in dims)
    storage = torch.empty(40 // itemsize, dtype={1: torch.int8, 2: torch.int16, 4: torch.int32}[itemsize])
    try:
        storage.as_strided(shape, stride, offset)
        fits = True
    except RuntimeError:
        fits = False
    assert view_fits(offset, shape, stride, itemsize, 40) == fits
