"""Parts of files that several ranks write: each byte has one place, and the parts' CRCs give the file's CRC."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import pytest

from aiockpt.format.item.ziparchive import Framing
from aiockpt.planning.parts import PartImage, PartItem, PartSealer, crc_of_parts, lay_out_part, stream_in_file

SHAPE = (6, 50, 9)
CUTS = {
    "rows": [((at, 0, 0), (2, 50, 9)) for at in (0, 2, 4)],
    "columns": [((0, at, 0), (6, n, 9)) for at, n in ((0, 20), (20, 29), (49, 1))],
    "blocks": [((r, 0, c), (3, 50, n)) for r in (0, 3) for c, n in ((0, 4), (4, 5))],
}


def framing(nbytes: int) -> Framing:
    return Framing(b"", b"", (), nbytes)


def part(items: list[tuple[int, tuple[int, ...], tuple[int, ...]]], file_bytes: int, head: int = 0) -> PartImage:
    """Lay out parts of 2-byte tensors of `SHAPE`: for each the tensor's offset in the file, and the part's box."""
    found = []
    for leaf, (offset, at, sizes) in enumerate(items):
        nbytes = 2 * sizes[0] * sizes[1] * sizes[2]
        found.append(PartItem(leaf, framing(nbytes), stream_in_file(offset, 2, SHAPE, sizes, at)))
    return lay_out_part("m", head, file_bytes, found)


@pytest.mark.parametrize("step", [64, 1000, 1 << 20])
@pytest.mark.parametrize("cut", list(CUTS))
def test_every_byte_has_one_place(cut: str, step: int) -> None:
    draw, head, one = random.Random(1), b"h" * 24, 2 * 6 * 50 * 9
    file = bytearray(head + draw.randbytes(2 * one))
    written, shares = bytearray(len(file)), []
    for rank, (at, sizes) in enumerate(CUTS[cut]):
        items = [(24, at, sizes), (24 + one, at, sizes)]
        image = part(items, len(file), 0 if rank else len(head))
        sealer = PartSealer(image, b"" if rank else head)
        for start in range(0, image.nbytes, step):
            stop = min(start + step, image.nbytes)
            chunk = memoryview(bytearray(stop - start))
            for offset, begin, nbytes in image.runs(start, stop):  # as staging fills the chunk
                chunk[begin : begin + nbytes] = file[offset : offset + nbytes]
            sealer.seal(chunk, start, stop)
            for offset, begin, nbytes in image.runs(start, stop):
                written[offset : offset + nbytes] = chunk[begin : begin + nbytes]
        shares.append(sealer.file_crc)
    assert written == file
    assert crc_of_parts(shares, len(file)) == zlib.crc32(file)


def test_whole_neighbours_are_one_run() -> None:
    image = part([(24 + 5400 * n, (0, 0, 0), SHAPE) for n in range(3)], 24 + 3 * 5400, head=24)
    assert list(image.runs(0, image.nbytes)) == [(0, 0, image.file_bytes)]


@pytest.mark.full
def test_very_many_runs_take_little_memory() -> None:
    count = 200_000
    stream = stream_in_file(8, 4, (count, 2), (count, 1), (0, 1))
    image = lay_out_part("m", 0, 8 + 8 * count, [PartItem(0, framing(4 * count), stream)])
    tracemalloc.start()
    try:
        runs = sum(1 for _ in image.runs(0, image.nbytes))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert runs == count
