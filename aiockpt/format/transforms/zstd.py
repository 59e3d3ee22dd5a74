"""Compression with zstd, compatible with torch's `ZStandard` extension of DCP: one frame for each item.

The frames carry the size and a checksum of their content, which torch's do not. The rules choose what is compressed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiockpt.errors import AiockptError, SaveError

if TYPE_CHECKING:
    import torch

# --- frame structure --------------------------------------------------------------------------------


MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES = 128 << 10  # the most content of one block
MOST_RATIO = 32_768  # the most content of one stored byte: a block of `BLOCK_BYTES` takes at least four
_RLE = 1
_HEADER_BYTES = 18
_SINGLE_SEGMENT_FLAG = 32
_DICTIONARY_BYTES = (0, 1, 2, 4)
_SIZE_BYTES = (0, 2, 4, 8)


class FrameError(ValueError):
    """The bytes are not one whole zstd frame."""


class FrameWalker:
    """Splits a zstd frame at block boundaries as its bytes arrive, which bounds the output of each part.

    Source: RFC 8878, sections 3.1.1 and 3.1.1.2.
    """

    def __init__(self) -> None:
        self._head = b""  # of the frame, then of each block, as far as it is there
        self._in_blocks = False
        self._left = 0  # of the block
        self._last = False

    def cut(self, data: memoryview, blocks: int) -> Iterator[memoryview]:
        """Yield the bytes again, in parts that end at most ``blocks`` blocks each."""
        begin = at = ended = 0
        while at < len(data):
            before = self._left
            at += self._step(data[at : at + max(self._left, _HEADER_BYTES)])
            ended += before > 0 and self._left == 0
            if ended == blocks:
                yield data[begin:at]
                begin, ended = at, 0
        if begin < at:
            yield data[begin:at]

    def _step(self, data: memoryview) -> int:
        """Consume some of the bytes; return how many."""
        if self._left:
            taken = min(self._left, len(data))
            self._left -= taken
            return taken
        if self._last:  # a checksum, which no output comes from, or what does not belong to the frame
            return len(data)
        before = len(self._head)
        wanted = 3 if self._in_blocks else self._header_bytes(bytes(data))
        self._head += bytes(data[: wanted - before])
        taken = len(self._head) - before
        if len(self._head) == wanted:
            (self._begin_block if self._in_blocks else self._begin)()
        return taken

    def _header_bytes(self, data: bytes) -> int:
        """Return the length of the frame's header, as far as it is known."""
        head = self._head + data
        if head[:4] != MAGIC[: len(head)]:
            raise FrameError("they are no zstd frame")
        if len(head) < 5:
            return 5
        flags = head[4]
        single = bool(flags & _SINGLE_SEGMENT_FLAG)
        size_bytes = _SIZE_BYTES[flags >> 6] or single
        return 5 + (not single) + _DICTIONARY_BYTES[flags & 3] + size_bytes

    def _begin(self) -> None:
        if len(self._head) == 5 and self._header_bytes(b"") > 5:
            return
        self._in_blocks, self._head = True, b""

    def _begin_block(self) -> None:
        header = int.from_bytes(self._head, "little")
        self._head = b""
        self._last = bool(header & 1)
        kind, size = header >> 1 & 3, header >> 3
        self._left = 1 if kind == _RLE else size
        if kind == 3 or size > BLOCK_BYTES:
            raise FrameError("a block of the zstd frame is damaged")


# --- compression and decompression ------------------------------------------------------------------


ZSTD_NAME = "stream.zstd"
ZSTD_DESCRIPTOR = f"{ZSTD_NAME}/1"
_STEP_BYTES = 1 << 20
_STEP_BLOCKS = 32  # at a time: 4 MiB of output
_LEVELS = range(-7, 23)
_FOLLOWED = "other bytes follow the zstd frame"


@functools.cache
def require_zstd() -> Any:
    """Return the library; raise `AiockptError`, naming the missing package, if zstd is not available."""
    try:
        import zstandard
    except ImportError as exc:
        raise AiockptError("zstd needs the package zstandard, which is missing: pip install 'aiockpt[zstd]'") from exc
    return zstandard


@dataclass(frozen=True, slots=True)
class Zstd:
    """Compression with zstd.

    Attributes:
        level: -7 to 22; higher levels take longer for fewer bytes.
    """

    level: int = 3

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in _LEVELS:
            raise ValueError(f"the level of zstd must be {_LEVELS.start} to {_LEVELS.stop - 1}, not {self.level!r}")

    @property
    def descriptor(self) -> str:
        """The name of this compression in metadata: that of torch's extension."""
        return ZSTD_DESCRIPTOR

    def encoder(self, nbytes: int = -1) -> ZstdEncoder:
        """Return an encoder for one item; its frame says ``nbytes``, if they are known."""
        return ZstdEncoder(self.level, nbytes)

    def decoder(self) -> ZstdDecoder:
        """Return a decoder for one item."""
        return ZstdDecoder()

    def compressed_bytes(self, data: memoryview) -> int:
        """Return the compressed size of some bytes. Releases the GIL."""
        return len(require_zstd().ZstdCompressor(level=self.level).compress(data))


class ZstdEncoder:
    """Compresses one item."""

    def __init__(self, level: int, nbytes: int) -> None:
        compressor = require_zstd().ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        self._frame = compressor.compressobj(size=nbytes)

    def update(self, data: memoryview) -> bytes:
        if len(data) <= _STEP_BYTES:
            return bytes(self._frame.compress(data))
        return b"".join(self._frame.compress(data[at : at + _STEP_BYTES]) for at in range(0, len(data), _STEP_BYTES))

    def finish(self) -> bytes:
        return bytes(self._frame.flush())


class ZstdDecoder:
    """Decompresses one item, a few blocks at a time, so that a small input can't fill the memory."""

    def __init__(self) -> None:
        zstandard = require_zstd()
        self._errors = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj(write_size=_STEP_BYTES)
        self._walker = FrameWalker()

    def parts(self, data: memoryview) -> Iterator[bytes]:
        """Consume the next stored bytes; yield their content, a few MiB at a time."""
        for part in self._walker.cut(data, _STEP_BLOCKS):
            if self._frame.eof:
                raise FrameError(_FOLLOWED)
            try:
                made = self._frame.decompress(part)
            except self._errors as exc:
                raise FrameError(str(exc)) from exc
            if self._frame.unused_data:
                raise FrameError(_FOLLOWED)
            if made:
                yield made

    def finish(self, most: int) -> bytes:
        if not self._frame.eof:
            raise FrameError("the zstd frame is cut short")
        return b""


# --- rules: the values of save(compress=) ------------------------------------------------------------


if TYPE_CHECKING:
    Compression = Literal["zstd"] | Zstd | None
    CompressRule = Compression | Mapping[str, Compression] | Callable[[str, torch.Tensor], Compression]


def compression_of(value: Any) -> Zstd | None:
    """Return the compression that one value stands for; raise ValueError if it is none."""
    if value is None or isinstance(value, Zstd):
        return value
    if isinstance(value, str) and value == "zstd":
        return Zstd()
    raise ValueError(f"compress is {value!r}; it must be None, 'zstd', or aiockpt.Zstd(level=...)")


def choose_compression(
    rule: CompressRule, names: Sequence[str], tensors: Sequence[torch.Tensor | None]
) -> list[Zstd | None] | None:
    """Return the compression of each leaf; None if no leaf is compressed.

    A rule is one value for all; or values by patterns of names, where the first match counts; or a function of name and
    tensor, which is called for tensors only, so that objects are not compressed.
    """
    if isinstance(rule, Mapping):
        chosen = _by_pattern(rule, names)
    elif callable(rule):
        chosen = [
            None if tensor is None else _asked(rule, name, tensor) for name, tensor in zip(names, tensors, strict=True)
        ]
    else:
        chosen = [compression_of(rule)] * len(names)
    if not any(chosen):
        return None
    require_zstd()
    return chosen


def _by_pattern(rule: Mapping[str, Compression], names: Sequence[str]) -> list[Zstd | None]:
    from aiockpt.format.keys import matching  # which needs torch: the writer process does without

    chosen: dict[str, Zstd | None] = {}
    known = dict.fromkeys(names)
    for pattern, value in rule.items():
        if not isinstance(pattern, str):
            raise TypeError(f"compress has the key {pattern!r}; the keys must be names and patterns such as 'model.*'")
        compression = compression_of(value)
        for name in matching(known.keys(), [pattern])[0]:
            chosen.setdefault(name, compression)
    return [chosen.get(name) for name in names]


def _asked(rule: Callable[[str, torch.Tensor], Compression], name: str, tensor: torch.Tensor) -> Zstd | None:
    try:
        value = rule(name, tensor)
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:
        raise SaveError(f"the function given as compress failed for {name}: {type(exc).__name__}: {exc}") from exc
    return compression_of(value)
