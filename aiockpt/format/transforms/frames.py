"""The structure of a zstd frame: where its blocks end, which tells truncation, and how much a block can give.

Source: RFC 8878, sections 3.1.1 and 3.1.1.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES = 128 << 10
"""The most bytes that one block stands for."""
MOST_RATIO = 32_768
"""The most bytes that one stored byte stands for: a block of `BLOCK_BYTES` takes four at least."""
_RLE = 1
_HEADER_BYTES = 18
_CHECKSUM_FLAG = 4
_CHECKSUM_BYTES = 4
_SINGLE_SEGMENT_FLAG = 32
_DICTIONARY_BYTES = (0, 1, 2, 4)
_SIZE_BYTES = (0, 2, 4, 8)


class FrameError(ValueError):
    """The bytes are not one whole zstd frame."""


class FrameWalker:
    """Goes along a frame as its bytes come by, and cuts them where blocks end.

    Attributes:
        over: whether the frame has ended.
    """

    def __init__(self) -> None:
        self.over = False
        self._head = b""  # of the frame, then of each block, as far as it is there
        self._in_blocks = False
        self._left = 0  # of the block, or of the checksum
        self._last = False
        self._has_checksum = False

    def cut(self, data: memoryview, blocks: int) -> Iterator[memoryview]:
        """Give the bytes again, in parts that end at most so many blocks each.

        Raises:
            FrameError: something else than a frame begins, or something stands behind the frame.
        """
        begin = at = ended = 0
        while at < len(data):
            if self.over:
                raise FrameError("other bytes follow the zstd frame")
            before = self._left
            at += self._step(data[at : at + max(self._left, _HEADER_BYTES)])
            ended += before > 0 and self._left == 0
            if ended == blocks:
                yield data[begin:at]
                begin, ended = at, 0
        if begin < at:
            yield data[begin:at]

    def _step(self, data: memoryview) -> int:
        """Take some of the bytes; tell how many."""
        if self._left:
            taken = min(self._left, len(data))
            self._left -= taken
            if not self._left and self._last:
                self._end_block()
            return taken
        before = len(self._head)
        wanted = 3 if self._in_blocks else self._header_bytes(bytes(data))
        self._head += bytes(data[: wanted - before])
        taken = len(self._head) - before
        if len(self._head) == wanted:
            (self._begin_block if self._in_blocks else self._begin)()
        return taken

    def _header_bytes(self, data: bytes) -> int:
        """Tell how long the frame's header is, as far as that is known."""
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
        self._has_checksum = bool(self._head[4] & _CHECKSUM_FLAG)
        self._in_blocks, self._head = True, b""

    def _begin_block(self) -> None:
        header = int.from_bytes(self._head, "little")
        self._head = b""
        self._last = bool(header & 1)
        kind, size = header >> 1 & 3, header >> 3
        self._left = 1 if kind == _RLE else size
        if kind == 3 or size > BLOCK_BYTES:
            raise FrameError("a block of the zstd frame is damaged")
        if not self._left and self._last:
            self._end_block()

    def _end_block(self) -> None:
        """Go on behind the last block: to the checksum, and behind that to the end."""
        if self._has_checksum:
            self._has_checksum = False
            self._left = _CHECKSUM_BYTES
        else:
            self.over = True
