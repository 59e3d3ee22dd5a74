"""Compresses and transforms items between sealing and writing. Imports no torch.

Staging fills the same image as without transforms. Its items are cut out of the sealed chunks and encoded, so the file
has other bytes at other offsets, which are known only once they are written.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import anyio
from isal.isal_zlib import crc32

from aiockpt.errors import SaveError
from aiockpt.format.dcp.metadata_opcodes import EncodedItem
from aiockpt.format.transforms.zstd import ZSTD_DESCRIPTOR, Zstd
from aiockpt.planning.layout import ITEM_ALIGNMENT

if TYPE_CHECKING:
    from aiockpt.format.transforms.base import Encoder, Transform
    from aiockpt.planning.encoding import ImageCoding, ItemCoding

    PassOn = Callable[[memoryview, int, int, Callable[[], None]], Awaitable[None]]

_SAMPLE_BYTES = 64 << 10
_SAMPLES = 4
_DECIDE_BYTES = _SAMPLES * _SAMPLE_BYTES
"""Size of the sample that decides whether an item is compressed; a smaller item is compressed as a trial."""
_WORTHWHILE = 0.95  # a compressed item must be at most so large, relative to its bytes
_SAMPLE_LEVEL = 1
_STEP_BYTES = 1 << 20
_OUTPUT_BYTES = 4 << 20
_OUTPUT_BUFFERS = 2


class ImageEncoder:
    """Encodes the sealed chunks of one image, in order."""

    def __init__(self, coding: ImageCoding) -> None:
        self._coding = coding
        self._remaining = iter(coding.items)
        self._item: _ItemEncoder | None = None
        self._pieces: Iterator[memoryview] = iter(())
        self._rest = memoryview(b"")  # of a piece that did not fit into a buffer
        self.encoded: list[EncodedItem] = []  # the items that are complete
        self.nbytes = 0  # of the file so far
        self.crc = 0  # of these bytes

    def take(self, chunk: memoryview, start: int, stop: int) -> None:
        """Set the input of `fill`: the bytes ``start`` to ``stop`` of the image, unchanged until it is used up."""
        self._pieces = self._encode(chunk, start, stop)

    def fill(self, buffer: memoryview, position: int) -> int:
        """Write encoded bytes into a buffer from ``position`` on; return where they end. Blocks, and computes.

        They end before the end of the buffer if the input is used up. Raises SaveError if a transform fails.
        """
        while position < len(buffer):
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = piece
            count = min(len(self._rest), len(buffer) - position)
            buffer[position : position + count] = self._rest[:count]
            self._rest = self._rest[count:]
            position += count
        return position

    def _encode(self, chunk: memoryview, start: int, stop: int) -> Iterator[memoryview]:
        while True:
            if self._item is None:
                coding = next(self._remaining, None)
                if coding is None:
                    return
                self._item = _ItemEncoder(coding, self._coding.transforms)
            item = self._item
            if item.coding.offset >= stop:
                return
            end = item.coding.offset + item.coding.length
            low, high = max(item.coding.offset, start) - start, min(end, stop) - start
            if item.offset is None:
                gap = -self.nbytes % ITEM_ALIGNMENT
                yield from self._counted(memoryview(bytes(gap)))
                item.offset = self.nbytes
            for piece in item.encode(chunk[low:high], is_last=end <= stop):
                yield from self._counted(piece)
            if end > stop:
                return
            self.encoded.append(item.result())
            self._item = None

    def _counted(self, piece: memoryview) -> Iterator[memoryview]:
        if piece:
            self.crc = crc32(piece, self.crc)
            self.nbytes += len(piece)
            yield piece


class EncodedOutput:
    """Double-buffered output of an encoder: one buffer is filled while the other is written."""

    def __init__(self, encoder: ImageEncoder, pass_on: PassOn) -> None:
        self._encoder = encoder
        self._pass_on = pass_on  # takes a buffer, its start and stop in the file, and a function that releases it
        self._may_use = anyio.Semaphore(_OUTPUT_BUFFERS)
        self._free: list[memoryview] = []
        self._buffer: memoryview | None = None
        self._filled = 0  # of the buffer
        self._passed = 0  # of the file

    async def buffer(self) -> memoryview:
        """Return the buffer that is being filled; if all are full, wait until one is written."""
        if self._buffer is None:
            await self._may_use.acquire()
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # mapped, so that its address is aligned for direct I/O
            self._buffer = self._free.pop() if self._free else memoryview(mmap.mmap(-1, _OUTPUT_BYTES, flags=flags))
        return self._buffer

    def fill(self, buffer: memoryview) -> bool:
        """Fill the buffer with the encoder's output; return whether it is full. Blocks, and computes."""
        self._filled = self._encoder.fill(buffer, self._filled)
        return self._filled == len(buffer)

    async def pass_on(self) -> None:
        """Pass the buffer on to be written, as far as it is filled."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        start, self._passed = self._passed, self._passed + self._filled
        self._filled = 0
        await self._pass_on(buffer, start, self._passed, partial(self._release, buffer))

    def _release(self, buffer: memoryview) -> None:
        self._free.append(buffer)
        self._may_use.release()


class _ItemEncoder:
    """Encodes one item: optional compression, then the transforms."""

    def __init__(self, coding: ItemCoding, transforms: Sequence[Transform]) -> None:
        self.coding = coding
        self.offset: int | None = None  # in the file, once it is known
        self._transforms = transforms
        self._names: list[str] = []
        self._encoders: list[Encoder] | None = None
        self._undecided = bytearray()  # input that came before the decision whether to compress
        self._length = 0
        self._crc = 0

    def encode(self, data: memoryview, *, is_last: bool) -> Iterator[memoryview]:
        """Take the next bytes of the item; yield encoded bytes."""
        inputs: Sequence[memoryview] = (data,)
        if self._encoders is None:
            if self.coding.compression is None:
                self._begin(None)
            else:
                if not is_last and len(self._undecided) + len(data) < _DECIDE_BYTES:
                    self._undecided += data
                    return
                if self._undecided:
                    inputs = (memoryview(bytes(self._undecided)), data)
                    self._undecided = bytearray()
                self._begin(self.coding.compression if _is_compressible(inputs) else None)
        for piece in chain.from_iterable(self._update(each) for each in inputs):
            yield self._counted(piece)
        if is_last:
            for piece in self._finish():
                yield self._counted(piece)

    def result(self) -> EncodedItem:
        """Return the size, CRC and descriptors of the encoded item."""
        descriptors = tuple(reversed(self._names))
        return EncodedItem(self.offset or 0, self._length, self._crc, self.coding.length, descriptors)

    def _begin(self, compression: Zstd | None) -> None:
        self._encoders = []
        if compression is not None:
            self._names.append(ZSTD_DESCRIPTOR)
            self._encoders.append(compression.encoder(self.coding.length))
        for transform in self._transforms:
            self._names.append(transform.descriptor)
            with self._named_error(len(self._names) - 1):
                self._encoders.append(transform.encoder())

    def _update(self, data: memoryview, first: int = 0) -> Iterator[memoryview]:
        """Pass bytes through the encoders from number ``first`` on."""
        for start in range(0, len(data), _STEP_BYTES):
            piece = data[start : start + _STEP_BYTES]
            for number, encoder in enumerate((self._encoders or [])[first:], first):
                with self._named_error(number):
                    piece = memoryview(encoder.update(piece)).cast("B")
                if not piece:
                    break
            yield piece

    def _finish(self) -> Iterator[memoryview]:
        """Finish the encoders in order; each one's last bytes pass through those after it."""
        for number, encoder in enumerate(self._encoders or []):
            with self._named_error(number):
                piece = memoryview(encoder.finish()).cast("B")
            yield from self._update(piece, number + 1)

    def _counted(self, piece: memoryview) -> memoryview:
        self._crc = crc32(piece, self._crc)
        self._length += len(piece)
        return piece

    @contextlib.contextmanager
    def _named_error(self, number: int) -> Iterator[None]:
        """Raise a SaveError that names the transform and the item, if the transform fails."""
        try:
            yield
        except Warning:  # an error only because the program turns warnings into errors
            raise
        except Exception as exc:
            raise SaveError(
                f"the transform {self._names[number]} failed for {self.coding.name}: {type(exc).__name__}: {exc}"
            ) from exc


def _is_compressible(data: Sequence[memoryview]) -> bool:
    """Return whether compression makes an item smaller, judged by its beginning or all of it."""
    nbytes = sum(map(len, data))
    sample: bytes | memoryview
    if nbytes <= _DECIDE_BYTES:
        sample = b"".join(data)
    else:
        # Spread over the bytes, and not right at the beginning, where the framing is.
        longest = max(data, key=len)
        step = len(longest) // (_SAMPLES + 1)
        each = min(step, _SAMPLE_BYTES)  # without overlaps, which would compress well
        sample = b"".join(longest[step * n : step * n + each] for n in range(1, _SAMPLES + 1))
    return Zstd(_SAMPLE_LEVEL).compressed_bytes(memoryview(sample)) <= _WORTHWHILE * len(sample)
