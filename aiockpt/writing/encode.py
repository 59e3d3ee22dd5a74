"""The transforming stage of writing: sealed images are cut into their items, and what these come to is stored.

The image of a file stays what staging fills; the file has other bytes at other places, which are known only when
they are written. Free of torch.
"""

from __future__ import annotations

import mmap
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
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from aiockpt.format.transforms.base import Encoder, Transform
    from aiockpt.planning.encoding import ImageCoding, ItemCoding

    PassOn = Callable[[memoryview, int, int, Callable[[], None]], Awaitable[None]]

_SAMPLE_BYTES = 64 << 10
_SAMPLES = 4
_DECIDE_BYTES = _SAMPLES * _SAMPLE_BYTES
"""How much of an item shows whether it can be compressed; one up to this size is compressed to see."""
_WORTH = 0.95  # of its bytes, at most, is what a compressed item must come to
_SAMPLE_LEVEL = 1
_STEP_BYTES = 1 << 20
_OUTPUT_BYTES = 4 << 20
_OUTPUT_BUFFERS = 2


class ImageEncoder:
    """Encodes the sealed parts of one image, in order.

    Args:
        coding: what becomes of it.

    Attributes:
        encoded: the items that are stored so far.
        nbytes: the bytes of the file so far.
        crc: their CRC-32.
    """

    def __init__(self, coding: ImageCoding) -> None:
        self._coding = coding
        self._waiting = iter(coding.items)
        self._item: _ItemEncoder | None = None
        self._pieces: Iterator[memoryview] = iter(())
        self._rest = memoryview(b"")
        self.encoded: list[EncodedItem] = []
        self.nbytes = 0
        self.crc = 0

    def take(self, part: memoryview, start: int, stop: int) -> None:
        """Take the bytes ``start`` to ``stop`` of the image, which stay as they are until `fill` has used them up."""
        self._pieces = self._encode(part, start, stop)

    def fill(self, buffer: memoryview, at: int) -> int:
        """Put what is to be stored into a buffer, from ``at`` on; tell where it ends. Blocks, and computes.

        It ends before the buffer does when what was taken is used up.

        Raises:
            SaveError: a transform has failed.
        """
        while at < len(buffer):
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = piece
            count = min(len(self._rest), len(buffer) - at)
            buffer[at : at + count] = self._rest[:count]
            self._rest = self._rest[count:]
            at += count
        return at

    def _encode(self, part: memoryview, start: int, stop: int) -> Iterator[memoryview]:
        while True:
            if self._item is None:
                coding = next(self._waiting, None)
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
            for piece in item.encode(part[low:high], is_last=end <= stop):
                yield from self._counted(piece)
            if end > stop:
                return
            self.encoded.append(item.stored())
            self._item = None

    def _counted(self, piece: memoryview) -> Iterator[memoryview]:
        if piece:
            self.crc = crc32(piece, self.crc)
            self.nbytes += len(piece)
            yield piece


class EncodedOutput:
    """The encoded bytes of one file on their way: buffers that are filled while others are written.

    Args:
        encoder: gives the bytes.
        pass_on: is given what is to be written: a buffer's beginning, where it begins and ends in the file, and what
            to call when it is written.
    """

    def __init__(self, encoder: ImageEncoder, pass_on: PassOn) -> None:
        self._encoder = encoder
        self._pass_on = pass_on
        self._may_use = anyio.Semaphore(_OUTPUT_BUFFERS)
        self._free: list[memoryview] = []
        self._buffer: memoryview | None = None
        self._filled = 0
        self._passed = 0

    async def buffer(self) -> memoryview:
        """Give the buffer that is being filled; wait for one that is written, if all are full."""
        if self._buffer is None:
            await self._may_use.acquire()
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._buffer = self._free.pop() if self._free else memoryview(mmap.mmap(-1, _OUTPUT_BYTES, flags=flags))
        return self._buffer

    def fill(self, buffer: memoryview) -> bool:
        """Fill it with what the encoder has; tell whether it is full. Blocks, and computes."""
        self._filled = self._encoder.fill(buffer, self._filled)
        return self._filled == len(buffer)

    async def pass_on(self) -> None:
        """Let what is in the buffer be written."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        begin, self._passed = self._passed, self._passed + self._filled
        self._filled = 0
        await self._pass_on(buffer, begin, self._passed, partial(self._take_back, buffer))

    def _take_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)
        self._may_use.release()


class _ItemEncoder:
    """Encodes one item."""

    def __init__(self, coding: ItemCoding, transforms: Sequence[Transform]) -> None:
        self.coding = coding
        self.offset: int | None = None
        self._transforms = transforms
        self._names: list[str] = []
        self._encoders: list[Encoder] | None = None
        self._held = bytearray()  # what has come before it is decided whether to compress it
        self._length = 0
        self._crc = 0

    def encode(self, data: memoryview, *, is_last: bool) -> Iterator[memoryview]:
        """Take the next bytes of the item; give what is stored of them."""
        begin: Sequence[memoryview] = (data,)
        if self._encoders is None:
            if self.coding.compression is None:
                self._begin(None)
            else:
                if not is_last and len(self._held) + len(data) < _DECIDE_BYTES:
                    self._held += data
                    return
                if self._held:
                    begin = (memoryview(bytes(self._held)), data)
                    self._held = bytearray()
                self._begin(self.coding.compression if _is_worth_it(begin) else None)
        for piece in chain.from_iterable(self._through(each) for each in begin):
            yield self._summed(piece)
        if is_last:
            for piece in self._end():
                yield self._summed(piece)

    def stored(self) -> EncodedItem:
        """Give what the item has come to."""
        descriptors = tuple(reversed(self._names))
        return EncodedItem(self.offset or 0, self._length, self._crc, self.coding.length, descriptors)

    def _begin(self, compression: Zstd | None) -> None:
        self._encoders = []
        if compression is not None:
            self._names.append(ZSTD_DESCRIPTOR)
            self._encoders.append(compression.encoder(self.coding.length))
        for transform in self._transforms:
            self._names.append(transform.descriptor)
            try:
                self._encoders.append(transform.encoder())
            except Warning:  # an error only because the program makes errors of warnings
                raise
            except Exception as exc:
                raise self._failed(len(self._names) - 1, exc) from exc

    def _through(self, data: memoryview, first: int = 0) -> Iterator[memoryview]:
        """Pass bytes through the encoders from one on."""
        for at in range(0, len(data), _STEP_BYTES):
            piece = data[at : at + _STEP_BYTES]
            for number, encoder in enumerate((self._encoders or [])[first:], first):
                try:
                    piece = memoryview(encoder.update(piece)).cast("B")
                except Warning:  # an error only because the program makes errors of warnings
                    raise
                except Exception as exc:
                    raise self._failed(number, exc) from exc
                if not piece:
                    break
            yield piece

    def _end(self) -> Iterator[memoryview]:
        """End the encoders, each after those whose bytes it gets."""
        for number, encoder in enumerate(self._encoders or []):
            try:
                piece = memoryview(encoder.finish()).cast("B")
            except Warning:  # an error only because the program makes errors of warnings
                raise
            except Exception as exc:
                raise self._failed(number, exc) from exc
            yield from self._through(piece, number + 1)

    def _summed(self, piece: memoryview) -> memoryview:
        self._crc = crc32(piece, self._crc)
        self._length += len(piece)
        return piece

    def _failed(self, number: int, exc: Exception) -> SaveError:
        return SaveError(
            f"the transform {self._names[number]} failed for {self.coding.name}: {type(exc).__name__}: {exc}"
        )


def _is_worth_it(data: Sequence[memoryview]) -> bool:
    """Tell from the beginning of an item, or all of it, whether it becomes smaller by being compressed."""
    nbytes = sum(map(len, data))
    sample: bytes | memoryview
    if nbytes <= _DECIDE_BYTES:
        sample = b"".join(data)
    else:
        # Spread over what is there, and not right at the beginning, where framing stands.
        longest = max(data, key=len)
        step = len(longest) // (_SAMPLES + 1)
        each = min(step, _SAMPLE_BYTES)  # without overlaps, which would be found again
        sample = b"".join(longest[step * n : step * n + each] for n in range(1, _SAMPLES + 1))
    return Zstd(_SAMPLE_LEVEL).compressed_bytes(memoryview(sample)) <= _WORTH * len(sample)
