"""Compression with zstd, as torch's `ZStandard` extension of DCP does it: one frame for each item.

The frames carry the size and a checksum of what they stand for, which torch's do not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError
from aiockpt.format.transforms.frames import FrameError, FrameWalker

if TYPE_CHECKING:
    from collections.abc import Iterator

ZSTD_NAME = "stream.zstd"
ZSTD_DESCRIPTOR = f"{ZSTD_NAME}/1"
DEFAULT_LEVEL = 3
_STEP_BYTES = 1 << 20
_STEP_BLOCKS = 32  # at a time: 4 MiB of what they stand for
_LEVELS = range(-7, 23)


@functools.cache
def _library() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise AiockptError("zstd needs the package zstandard, which is missing: pip install 'aiockpt[zstd]'") from exc
    return zstandard


def require_zstd() -> None:
    """Make sure that compression is possible.

    Raises:
        AiockptError: a package is missing; the message says which.
    """
    _library()


@dataclass(frozen=True, slots=True)
class Zstd:
    """Compression with zstd.

    Attributes:
        level: -7 to 22; higher levels take longer for fewer bytes.
    """

    level: int = DEFAULT_LEVEL

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in _LEVELS:
            raise ValueError(f"the level of zstd must be {_LEVELS.start} to {_LEVELS.stop - 1}, not {self.level!r}")

    @property
    def descriptor(self) -> str:
        """What torch calls it."""
        return ZSTD_DESCRIPTOR

    def encoder(self, nbytes: int = -1) -> ZstdEncoder:
        """Begin to compress an item of so many bytes; -1 where that is not known."""
        return ZstdEncoder(self.level, nbytes)

    def decoder(self) -> ZstdDecoder:
        """Begin to decompress an item, of whatever level."""
        return ZstdDecoder()

    def compressed_bytes(self, data: memoryview) -> int:
        """Tell what some bytes come to. Lets other threads run."""
        return len(_library().ZstdCompressor(level=self.level).compress(data))


class ZstdEncoder:
    """Compresses one item."""

    def __init__(self, level: int, nbytes: int) -> None:
        compressor = _library().ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        self._frame = compressor.compressobj(size=nbytes)

    def update(self, data: memoryview) -> bytes:
        """See `aiockpt.format.transforms.base.Encoder`."""
        if len(data) <= _STEP_BYTES:
            return bytes(self._frame.compress(data))
        return b"".join(self._frame.compress(data[at : at + _STEP_BYTES]) for at in range(0, len(data), _STEP_BYTES))

    def finish(self) -> bytes:
        """See `aiockpt.format.transforms.base.Encoder`."""
        return bytes(self._frame.flush())


class ZstdDecoder:
    """Decompresses one item, a few blocks at a time, so that few bytes can't fill the memory."""

    def __init__(self) -> None:
        zstandard = _library()
        self._errors = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj(write_size=_STEP_BYTES)
        self._walker = FrameWalker()

    def parts(self, data: memoryview) -> Iterator[bytes]:
        """Take the next stored bytes; give what they stand for, a few MiB at a time.

        Raises:
            FrameError: they are damaged.
        """
        for part in self._walker.cut(data, _STEP_BLOCKS):
            try:
                made = self._frame.decompress(part)
            except self._errors as exc:
                raise FrameError(str(exc)) from exc
            if made:
                yield made

    def update(self, data: memoryview, most: int) -> bytes:
        """See `aiockpt.format.transforms.base.Decoder`."""
        made: list[bytes] = []
        for part in self.parts(data):
            most -= len(part)
            if most < 0:
                raise FrameError("they stand for more bytes than they should")
            made.append(part)
        return b"".join(made)

    def finish(self, most: int) -> bytes:
        """Make sure that the frame is whole."""
        if not self._walker.over:
            raise FrameError("the zstd frame is cut short")
        return b""
