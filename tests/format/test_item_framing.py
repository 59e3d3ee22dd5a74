"""Framing: the same bytes as torch.save's, CRCs filled in, and 64-bit fields where they are needed."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.item.item_framing import tensor_framing
from aiockpt.format.item.tensor_item import ItemParser, parse_tensor_item
from aiockpt.format.item.ziparchive import FramingError, read_archive
from tests.examples import examples
from tests.states import random_tensor, raw_bytes, storable_dtypes
from tests.stock import PAYLOAD_OFFSET


def image_of(tensor: torch.Tensor) -> bytes:
    framing = tensor_framing(tensor.dtype, tuple(tensor.shape), tensor.stride())
    payload = raw_bytes(tensor)
    return framing.prefix + payload + framing.sealed_suffix(zlib.crc32(payload))


def parse(blob: bytes):
    return parse_tensor_item(len(blob), lambda offset, size: blob[offset : offset + size])


@pytest.mark.parametrize("dtype", storable_dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4)], ids=str)
def test_an_image_equals_a_file_of_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape, 1)
    image = image_of(tensor)
    sink = io.BytesIO()
    torch.save(tensor, sink)
    theirs = sink.getvalue()
    # The files are equal up to the ID that torch derives from the CRCs.
    marker = b"serialization_id"
    assert len(image) == len(theirs)
    assert image[: image.find(marker)] == theirs[: theirs.find(marker)]
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        assert archive.testzip() is None
    loaded = torch.load(io.BytesIO(image), weights_only=True)
    assert raw_bytes(loaded) == raw_bytes(tensor)
    parsed = parse(image)
    assert (parsed.dtype, parsed.shape, parsed.stride) == (dtype, shape, tensor.stride())
    assert image[parsed.payload_offset :][: parsed.nbytes] == raw_bytes(tensor)
    assert parsed.crc == zlib.crc32(raw_bytes(tensor))


@pytest.mark.parametrize("gib", [1, 4, 5, 300])
def test_framing_beyond_four_gib(gib: int) -> None:
    """Check the 64-bit fields against the zip format, without a payload in memory."""
    count = gib << 30
    framing = tensor_framing(torch.uint8, (count,), (1,))
    assert framing.nbytes == count
    crc = 0xDEADBEEF
    suffix = framing.sealed_suffix(crc)
    assert suffix[:4] == b"PK\7\x08"
    wide = gib >= 4
    fields = struct.unpack_from("<IQQ" if wide else "<III", suffix, 4)
    assert fields == (crc, count, count)

    def fetch(offset: int, size: int) -> bytes:
        if offset < len(framing.prefix):
            return framing.prefix[offset : offset + size]
        assert offset >= len(framing.prefix) + count
        return suffix[offset - len(framing.prefix) - count :][:size]

    parsed = parse_tensor_item(framing.length, fetch)
    assert (parsed.shape, parsed.nbytes, parsed.crc, parsed.payload_offset) == ((count,), count, crc, PAYLOAD_OFFSET)


def test_crcs_are_written_even_if_torch_omits_them() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        tensor_framing.cache_clear()
        image = image_of(torch.arange(5))
    finally:
        torch.serialization.set_crc32_options(True)
        tensor_framing.cache_clear()
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        assert archive.testzip() is None


def test_items_without_crcs_are_read_unchecked() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        sink = io.BytesIO()
        torch.save(torch.arange(5), sink)
    finally:
        torch.serialization.set_crc32_options(True)
    assert parse(sink.getvalue()).crc is None
    assert "archive/data/0" in read_archive(sink.getvalue())


def test_the_parser_reuses_framings_but_not_crcs() -> None:
    parser = ItemParser()
    for start in range(3):
        tensor = torch.arange(start, start + 10)
        parsed = parser.parse(memoryview(image_of(tensor)))
        assert parsed.crc == zlib.crc32(raw_bytes(tensor))
    other = parser.parse(memoryview(image_of(torch.arange(10).reshape(2, 5))))
    assert other.shape == (2, 5)
    assert parser.parse(memoryview(image_of(torch.arange(10)))).shape == (10,)


@examples(300)
@given(cut=st.integers(0, 1600), flips=st.lists(st.tuples(st.integers(0, 1600), st.integers(1, 255)), max_size=4))
def test_damaged_items_raise_framing_errors_only(cut: int, flips: list[tuple[int, int]]) -> None:
    blob = bytearray(image_of(torch.arange(12.0).reshape(3, 4)))
    for at, mask in flips:
        blob[at % len(blob)] ^= mask
    damaged = bytes(blob[: len(blob) - cut] if cut < len(blob) else b"")
    try:
        parsed = parse(damaged)
    except FramingError:
        return
    assert parsed.payload_offset + parsed.nbytes <= len(damaged)


def test_other_globals_in_data_pkl_are_refused() -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    sink = io.BytesIO()
    torch.save(Evil(), sink)
    with pytest.raises(FramingError, match=r"names builtins\.print|names __builtin__\.print"):
        parse(sink.getvalue())
