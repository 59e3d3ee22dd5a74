"""Pure decisions: ranges, buckets, images, trees."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiockpt.format.item.item_framing import tensor_framing
from aiockpt.format.item.ziparchive import Framing
from aiockpt.planning.flatten import NameMemo, StructureError, flatten, unflatten
from aiockpt.planning.layout import (
    MIN_BUCKET_BYTES,
    Sealer,
    align_up,
    assign_buckets,
    bucket_count,
    lay_out,
    split_in_order,
)
from aiockpt.planning.ranges import boxes
from aiockpt.planning.specs import describe
from tests.examples import examples


@settings(deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_boxes_cover_a_range_in_order(shape: tuple[int, ...], data) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    tensor = torch.arange(total).reshape(shape)
    found = boxes(shape, start, stop)
    parts = [tensor[box.index].reshape(-1) for box in found]
    assert [len(part) for part in parts] == [box.count for box in found]
    covered = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert covered.tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(sizes=st.lists(st.integers(0, 1 << 40), max_size=200), count=st.integers(1, 9))
def test_buckets_are_complete_and_even(sizes: list[int], count: int) -> None:
    buckets = assign_buckets(sizes, count)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    assert all(bucket == sorted(bucket) for bucket in buckets)
    filled = [sum(sizes[i] for i in bucket) for bucket in buckets]
    if sizes:
        assert max(filled) - min(filled) <= max(sizes)


def test_small_states_go_to_one_file() -> None:
    assert bucket_count(0, 4) == 1
    assert bucket_count(MIN_BUCKET_BYTES * 2, 4) == 2
    assert bucket_count(1 << 40, 4) == 4


def _image(sizes: list[int], head: bytes, room: int):
    return lay_out("f", room, [(i, tensor_framing(torch.uint8, (n,), (1,))) for i, n in enumerate(sizes)])


@examples(60)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 3000), st.sampled_from([1 << 20, (1 << 20) + 1])), max_size=6),
    head=st.binary(max_size=5000),
    blocks=st.integers(1, 40),
)
def test_an_image_does_not_depend_on_the_chunk_size(sizes: list[int], head: bytes, blocks: int) -> None:
    """Chunks sealed over stale memory have the same bytes and CRCs as a file that is built by hand."""
    image = _image(sizes, head, align_up(len(head), 4096))
    payloads = [(bytes(range(i, 251)) * (n // 200 + 1))[:n] for i, n in enumerate(sizes)]
    expected = bytearray(image.nbytes)
    expected[: len(head)] = head
    for slot in image.slots:
        if slot.framing.nbytes >= 1 << 20:
            assert slot.payload_offset % 4096 == 0
        whole = slot.framing.prefix + payloads[slot.leaf] + slot.framing.sealed_suffix(zlib.crc32(payloads[slot.leaf]))
        expected[slot.offset : slot.offset + len(whole)] = whole
    step = blocks * 4096
    sealer = Sealer(image, head)
    written = b""
    for start in range(0, max(image.nbytes, 1), step):
        stop = min(start + step, image.nbytes)
        chunk = memoryview(bytearray(b"\xaa" * step))
        for leaf, low, high, at in image.pieces(start, stop):
            chunk[at : at + high - low] = payloads[leaf][low:high]
        sealer.seal(chunk, start, stop)
        assert not any(chunk[stop - start : align_up(stop - start, 4096)])
        written += bytes(chunk[: stop - start])
    assert written == bytes(expected)
    assert sealer.file_crc == zlib.crc32(expected)
    assert sealer.crcs == [zlib.crc32(payload) for payload in payloads]


@pytest.mark.slow
@examples(60)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 3000), st.sampled_from([1 << 20, (1 << 20) + 1])), max_size=6),
    head=st.binary(min_size=8, max_size=9000),
    blocks=st.integers(1, 40),
)
def test_a_packed_image_has_no_gaps_with_any_chunk_size(sizes: list[int], head: bytes, blocks: int) -> None:
    image = lay_out("f", len(head), [(i, Framing(b"", b"", (), n)) for i, n in enumerate(sizes)], aligned=False)
    payloads = [(bytes(range(i, 251)) * (n // 200 + 1))[:n] for i, n in enumerate(sizes)]
    expected = head + b"".join(payloads)
    assert image.nbytes == len(expected)
    step = blocks * 4096
    sealer = Sealer(image, head)
    written = b""
    for start in range(0, image.nbytes, step):
        stop = min(start + step, image.nbytes)
        chunk = memoryview(bytearray(b"\xaa" * step))
        for leaf, low, high, at in image.pieces(start, stop):
            chunk[at : at + high - low] = payloads[leaf][low:high]
        sealer.seal(chunk, start, stop)
        assert not any(chunk[stop - start : align_up(stop - start, 4096)])
        written += bytes(chunk[: stop - start])
    assert written == expected
    assert sealer.file_crc == zlib.crc32(expected)


@given(sizes=st.lists(st.integers(0, 100), max_size=50), most=st.one_of(st.none(), st.integers(1, 300)))
def test_files_are_filled_in_order(sizes: list[int], most: int | None) -> None:
    files = split_in_order(dict(enumerate(sizes)), most)
    assert [item for file in files for item in file] == list(range(len(sizes)))
    if most is None:
        assert len(files) == 1
        return
    filled = [sum(sizes[i] for i in file) for file in files]
    assert all(total <= most or len(file) == 1 for total, file in zip(filled, files, strict=True))
    # No file had room for the first item of the next one.
    assert all(total + sizes[after[0]] > most for total, after in zip(filled, files[1:], strict=False))


def test_pieces_of_a_tensor_over_four_gib() -> None:
    image = _image([5 << 30, 100], b"", 0)
    step = 1 << 30
    pieces = [p for start in range(0, image.nbytes, step) for p in image.pieces(start, min(start + step, image.nbytes))]
    assert sum(p.stop - p.start for p in pieces) == (5 << 30) + 100
    assert [p.start for p in pieces[1:6]] == [p.stop for p in pieces[:5]]
    assert image.nbytes > 5 << 30


@pytest.mark.parametrize(
    ("tensor", "raw", "stride"),
    [
        (torch.zeros(3, 4), True, (4, 1)),
        (torch.zeros(3, 4).t(), True, (1, 4)),
        (torch.zeros(3, 4)[1:], True, (4, 1)),
        (torch.zeros(3, 4)[:, 1:], False, (3, 1)),
        (torch.zeros(1, 4).expand(5, 4), False, (4, 1)),
        (torch.zeros(4, 6).t()[::2], False, (1, 3)),
        (torch.zeros(2, dtype=torch.complex64).conj(), False, (1,)),
        (torch.zeros(0, 5), True, (5, 1)),
        (torch.zeros(()), True, ()),
    ],
)
def test_a_tensor_is_stored_with_the_strides_of_its_clone(
    tensor: torch.Tensor, raw: bool, stride: tuple[int, ...]
) -> None:
    spec = describe(tensor)
    assert spec is not None
    assert (spec.is_raw, spec.saved_stride) == (raw, stride)
    assert spec.saved_stride == tensor.clone().stride()
    assert spec.describes(tensor)
    assert not spec.describes(torch.zeros(9))


@pytest.mark.parametrize(
    ("tensor", "raw"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(3, 4)[1:], True),
        (torch.zeros(3, 4)[:, 1:], False),
        (torch.zeros(1, 4).expand(5, 4), False),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), False),
        (torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
        (torch.zeros(2, dtype=torch.complex64).conj(), False),
        (torch.zeros(3, 0).t(), True),
        (torch.zeros(()), True),
    ],
)
def test_tensors_that_are_stored_by_rows(tensor: torch.Tensor, raw: bool) -> None:
    spec = describe(tensor, by_rows=True)
    assert spec is not None
    assert spec.is_raw is raw
    stored = torch.empty_strided(spec.shape, spec.saved_stride, dtype=spec.dtype)
    assert stored.is_contiguous()
    assert spec.describes(tensor)
    assert not spec.describes(torch.zeros(9))


def test_sparse_and_quantized_are_not_plain() -> None:
    assert describe(torch.eye(2).to_sparse()) is None
    assert describe(torch.eye(2).to_sparse(), by_rows=True) is None


def test_names_and_paths_equal_those_of_dcp() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    x = torch.zeros(1)
    state = {
        "a": {1: x, "b": {"c": [1, 2], "d": [x, {"e": 5}], "t": (1, 2)}},
        "l": [[x], [1]],
        "g": [{"params": [0, 1], "lr": 0.1}],
        "o": OrderedDict(z=x, y=None),
        "s": "text",
    }
    flat = flatten(state)
    theirs, paths = flatten_state_dict(state)
    assert flat.names == list(theirs)
    assert dict(zip(flat.names, flat.paths, strict=True)) == paths


def test_damaged_structures_raise_structure_errors() -> None:
    x = 1
    for paths, records in (
        ([("a",), ("a", "b")], []),
        ([("a", 10**9)], []),
        ([("a", "b")], [{"path": ["a", "b", "c"], "type": "dict", "at": 5}]),
    ):
        with pytest.raises((StructureError, TypeError)):
            unflatten(paths, [x] * len(paths), records)


def test_names_of_changing_keys_do_not_accumulate() -> None:
    memo = NameMemo()
    x = torch.zeros(1)
    keys = [f"k{n}" for n in range(1000)]
    for step in range(10):
        flat = flatten({f"step-{step}": dict.fromkeys(keys, x), "always": dict.fromkeys(keys, x)}, memo=memo)
        assert flat.names[:1] == [f"step-{step}.k0"]
        assert len(memo) <= 3
    for _ in range(3):  # two alternating structures both stay in the memo
        one, other = (flatten({name: dict.fromkeys(keys, x)}, memo=memo).names for name in "ab")
    assert memo.find(("a",))[1] == one
    assert memo.find(("b",))[1] == other
    assert len(memo) == 2
