"""zstd frames: anything but one whole frame of the expected size is refused before it fills the memory."""

from __future__ import annotations

import io
import os
import tracemalloc

import pytest
import zstandard

from aiockpt import Zstd
from aiockpt.format.transforms.zstd import MOST_RATIO, FrameError
from aiockpt.reading.decoded import TransformFailedError, decode_item

RAW = {
    "nothing": b"",
    "a byte": b"x",
    "text": b"".join(b"row %d " % n for n in range(60_000)),
    "zeros": bytes(3 << 20),
    "random": os.urandom(300_001),
}


def ours(raw: bytes) -> bytes:
    encoder = Zstd(level=1).encoder(len(raw))
    return encoder.update(memoryview(raw)) + encoder.finish()


def as_torch(raw: bytes) -> bytes:
    file = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as writer:
        writer.write(raw)
    return file.getvalue()


def decoded(stored: bytes, most: int, step: int = 1 << 20) -> bytes:
    decoder = Zstd().decoder()
    pieces = [memoryview(stored)[at : at + step] for at in range(0, len(stored), step)]
    return b"".join([part for piece in pieces for part in decoder.parts(piece)]) + decoder.finish(most)


@pytest.mark.parametrize("encode", [ours, as_torch])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_frames_are_whole_or_refused(raw: bytes, encode) -> None:
    stored = encode(raw)
    assert decoded(stored, len(raw)) == decoded(stored, len(raw), 997) == raw
    if len(stored) < 100:
        assert decoded(stored, len(raw), 1) == raw
    for wrong, why in (
        (stored[:-1], "cut short"),
        (stored[: len(stored) // 2], "cut short"),
        (stored + b"\0", "follow"),
        (stored + stored, "follow"),
        (b"\0" + stored, "no zstd frame"),
    ):
        with pytest.raises(FrameError, match=why):
            decoded(wrong, len(raw))


def test_frames_of_aiockpt_have_size_and_checksum() -> None:
    stored = ours(RAW["text"])
    parameters = zstandard.get_frame_parameters(stored)
    assert (parameters.content_size, parameters.has_checksum) == (len(RAW["text"]), True)
    damaged = bytearray(stored)
    damaged[-1] ^= 1
    with pytest.raises(FrameError):
        decoded(bytes(damaged), len(RAW["text"]))


def test_a_bomb_is_stopped_before_it_fills_the_memory() -> None:
    block = int.to_bytes(128 << 10 << 3 | 1 << 1, 3, "little") + b"\0"  # one byte, 128 Ki times
    bomb = b"\x28\xb5\x2f\xfd\x00\x58" + block * (1 << 14)  # 2 GiB
    assert MOST_RATIO * len(bomb) >= 1 << 31
    tracemalloc.start()
    try:
        with pytest.raises(TransformFailedError, match="more than the expected 1048576"):
            list(decode_item([Zstd()], [memoryview(bomb)], len(bomb), 1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("level", [23, -8, 1.5, "3", True])
def test_wrong_levels_are_refused(level: object) -> None:
    with pytest.raises(ValueError, match="level of zstd must be -7 to 22"):
        Zstd(level=level)  # type: ignore[arg-type]
