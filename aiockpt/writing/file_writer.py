"""Write filled chunks to files: seal or encode them, one ahead of the disk, and write each file in order.

This runs in the trainer or in the writer process, so nothing here knows tensors.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import anyio
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.spans import Span, span
from aiockpt.core.threads import SHORT_BYTES, SHORT_ITEMS
from aiockpt.errors import SaveError
from aiockpt.format.dcp.metadata_opcodes import EncodedItem
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.format.transforms.zstd import ZSTD_DESCRIPTOR, Zstd
from aiockpt.planning.layout import ITEM_ALIGNMENT, FileImage, Hashing, Sealer
from aiockpt.planning.parts import RUNS_AT_ONCE, PartImage, PartSealer
from aiockpt.storage.base import FileSink, Transaction, shared_transaction

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from aiockpt.core.threads import Workers
    from aiockpt.format.transforms.base import Encoder, Transform
    from aiockpt.planning.encoding import ImageCoding, ItemCoding
    from aiockpt.writing.commit import CommitDocuments

# --- transforms ---------------------------------------------------------------------------------------
# Staging fills the same image as without transforms. Its items are cut out of the sealed chunks and encoded, so the
# file has other bytes at other offsets, which are known only once they are written.


_SAMPLE_BYTES = 64 << 10
_SAMPLES = 4
_DECIDE_BYTES = _SAMPLES * _SAMPLE_BYTES
"""Size of the sample that decides whether an item is compressed; a smaller item is compressed as a trial."""
_WORTHWHILE = 0.95  # a compressed item must be at most so large, relative to its bytes
_SAMPLE_LEVEL = 1
_STEP_BYTES = 1 << 20
_OUTPUT_BYTES = 4 << 20


class ImageEncoder:
    """Encodes the sealed chunks of one image, in order."""

    def __init__(self, coding: ImageCoding) -> None:
        self._coding = coding
        self._remaining = iter(coding.items)
        self._item: _ItemEncoder | None = None
        self.free: list[memoryview] = []  # buffers to use again
        self._buffer: memoryview | None = None  # not full yet
        self._filled = 0  # of it
        self.encoded: list[EncodedItem] = []  # the items that are complete
        self.nbytes = 0  # of the file so far
        self.crc = 0  # of these bytes

    def encode(self, chunk: memoryview, start: int, stop: int, *, is_last: bool) -> Iterator[memoryview]:
        """Take the bytes ``start`` to ``stop`` of the image; yield the next buffers of the file. Blocks, and computes.

        All but the last one of the image are full. Raises SaveError if a transform fails.
        """
        for piece in self._pieces(chunk, start, stop):
            while piece:
                if self._buffer is None:
                    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # mapped: its address is aligned for direct I/O
                    self._buffer = (
                        self.free.pop() if self.free else memoryview(mmap.mmap(-1, _OUTPUT_BYTES, flags=flags))
                    )
                    self._filled = 0
                count = min(len(piece), _OUTPUT_BYTES - self._filled)
                self._buffer[self._filled : self._filled + count] = piece[:count]
                self._filled += count
                piece = piece[count:]
                if self._filled == _OUTPUT_BYTES:
                    full, self._buffer = self._buffer, None
                    yield full
        if is_last and self._buffer is not None:
            yield self._buffer[: self._filled]

    def _pieces(self, chunk: memoryview, start: int, stop: int) -> Iterator[memoryview]:
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


# --- files --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class FilledChunk:
    """The payload of the bytes ``start`` to ``stop`` of a file, in a chunk of staging memory."""

    view: memoryview
    start: int
    stop: int
    release: Callable[[], None]  # gives the chunk back to the pool
    number: int = 0  # of the chunk, where a writer process maps the same memory


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """Inputs of the commit, besides the files with items. Known once everything is staged."""

    documents: CommitDocuments | None  # None: rank 0 writes them, or there are none
    times_s: Mapping[str, float]
    started: float  # when the save was called, by time.perf_counter(), which all processes of a host share
    waits: bool = False  # a pre_commit hook decides: not to be committed unless asked to, even if the trainer dies


@dataclass(frozen=True, slots=True)
class WriterThreads:
    """The threads that writing needs: those that compute, and those that wait for the disk."""

    seal_workers: Workers
    io_workers: Workers


class ChunkWriter(ABC):
    """Writes the files of one save, in this process or in another.

    The order of calls: `start`; `begin`, from a task beside the staging; `put` for each chunk; `end` for each file;
    `hand_over` when everything is staged; then `encode_documents` and `commit`, or `abandon`.
    """

    files: dict[str, FileFacts]  # size and CRC of each file whose bytes are all sealed
    encoded: Sequence[Sequence[EncodedItem]] | None = None  # of each image, once written; None: they are as planned
    spans: Sequence[Span] = ()  # of another process, once it has committed
    outlives_trainer = False  # it goes on when this process dies

    @property
    @abstractmethod
    def crcs(self) -> bytes:
        """CRC-32 (uint32) of the payload of each tensor item, image by image, once written."""

    @abstractmethod
    def start(self, tasks: TaskGroup) -> None:
        """Start the tasks that write; they end when all files are written."""

    @abstractmethod
    async def put(self, number: int, chunk: FilledChunk) -> None:
        """Take the next chunk of a file; those of one file come in order. Waits for no other chunk."""

    @abstractmethod
    def end(self, number: int) -> None:
        """Mark the end of a file: it has no more chunks, or will not get them."""

    @abstractmethod
    async def hand_over(self, inputs: CommitInputs) -> None:
        """Receive the inputs of the commit, when all chunks have come."""

    @abstractmethod
    async def encode_documents(self) -> None:
        """Make the metadata and the manifest, unless that is a part of `commit`."""

    @abstractmethod
    async def commit(self) -> dict[str, int]:
        """Publish the checkpoint of one process under its final name, durably; return the size of each file."""

    def revoke(self) -> None:
        """Keep a `commit` that hangs in a thread from publishing anything later. Does not block."""

    async def abandon(self) -> None:
        """Stop after a failure; return when no thread or process uses the chunks. Not to be cancelled."""

    async def close(self) -> None:
        """End: rank 0 has published the checkpoint. Not to be cancelled."""


class FileWriter(ChunkWriter):
    """Writes the files in this process: ``images``, with the first bytes and the name of each.

    No file is created before ``after`` is set, when the save before is over. Without ``codings`` items are stored as
    they are.
    """

    _transaction: Transaction  # since `begin`
    _commit_inputs: CommitInputs  # since `hand_over`

    def __init__(
        self,
        images: Sequence[FileImage],
        heads: Sequence[bytes],
        names: Sequence[str],
        threads: WriterThreads,
        *,
        after: anyio.Event | None = None,
        count: Callable[[int], object] = lambda _: None,
        codings: Sequence[ImageCoding] | None = None,
        hashing: Hashing | None = None,
    ) -> None:
        self._images = images
        self._names = names
        self._threads = threads
        self._after = after
        self._count = count  # of the bytes that a file has taken
        self._begun = anyio.Event()
        self._hashes = hashing is not None
        self._sealers = [_sealer_of(image, head, hashing) for image, head in zip(images, heads, strict=True)]
        self._inputs: list[MemoryObjectSendStream[FilledChunk]] = []
        self._finished = 0
        self._sizes: dict[str, int] = {}
        self._documents: Mapping[str, bytes | bytearray] = {}
        self._encoders = None if codings is None else [ImageEncoder(coding) for coding in codings]
        self.encoded = None if self._encoders is None else [encoder.encoded for encoder in self._encoders]
        self.files: dict[str, FileFacts] = {}

    def start(self, tasks: TaskGroup) -> None:
        # The first io_workers files are written at once, in order: the first of them can always go on, whatever chunks
        # the others hold.
        turn = anyio.Semaphore(self._threads.io_workers.count)
        for number, (image, sealer) in enumerate(zip(self._images, self._sealers, strict=True)):
            # Unbounded, so that `put` never waits for the disk: the pool bounds the chunks. Sealed chunks are bounded,
            # so that a file is sealed one chunk ahead of the writing; of two buffers, one is filled while the other is
            # written.
            encoder = None if self._encoders is None else self._encoders[number]
            filled_in, filled_out = anyio.create_memory_object_stream[FilledChunk](math.inf)
            sealed_in, sealed_out = anyio.create_memory_object_stream[FilledChunk](1 if encoder is None else 0)
            self._inputs.append(filled_in)
            tasks.start_soon(self._seal, image, sealer, encoder, filled_out, sealed_in)
            tasks.start_soon(self._write, number, sealed_out, turn)

    def begin(self, transaction: Transaction) -> None:
        """Take the transaction to write to; chunks may have come before."""
        self._transaction = transaction
        self._begun.set()

    async def put(self, number: int, chunk: FilledChunk) -> None:
        self.put_nowait(number, chunk)

    def put_nowait(self, number: int, chunk: FilledChunk) -> None:
        """Take the next chunk of a file, without waiting."""
        # Both are raised if the file's writer has failed, which ends the save.
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._inputs[number].send_nowait(chunk)

    def end(self, number: int) -> None:
        self._inputs[number].close()

    async def hand_over(self, inputs: CommitInputs) -> None:
        self._commit_inputs = inputs

    async def encode_documents(self) -> None:
        inputs = self._commit_inputs
        if self._finished != len(self._images):
            raise SaveError(f"{self._finished} of {len(self._images)} files were written; nothing is published")
        self._sizes = {name: facts.nbytes for name, facts in self.files.items()}
        if inputs.documents is not None:
            times_s = {**inputs.times_s, "data_written": time.perf_counter() - inputs.started}
            files = {image.name: self.files[image.name] for image in self._images}
            crcs, encode = list(self._crcs()), inputs.documents.encode
            with span("documents"):
                is_short, workers = len(crcs) <= SHORT_ITEMS, self._threads.io_workers
                arguments = files, crcs, times_s, self.encoded or (), self.hashes
                documents = await workers.run_unless(is_short, encode, *arguments)
            self._documents = documents
            self._sizes |= {name: len(data) for name, data in documents.items() if name != MANIFEST_NAME}

    async def commit(self) -> dict[str, int]:
        with span("publish"):
            await self._transaction.commit(self._documents)
        return self._sizes

    @property
    def crcs(self) -> bytes:
        return array("I", self._crcs()).tobytes()

    def _crcs(self) -> Iterable[int]:
        return chain.from_iterable(sealer.crcs for sealer in self._sealers)

    @property
    def hashes(self) -> list[str | None] | None:
        """Hash of the payload of each tensor item, image by image, once written; None: they are not hashed."""
        sealers = [sealer for sealer in self._sealers if isinstance(sealer, Sealer)]
        return list(chain.from_iterable(sealer.hashes for sealer in sealers)) if self._hashes else None

    def revoke(self) -> None:
        if self._begun.is_set():  # else there is no transaction yet
            self._transaction.revoke()

    async def _seal(
        self,
        image: FileImage,
        sealer: Sealer | PartSealer,
        encoder: ImageEncoder | None,
        receive: MemoryObjectReceiveStream[FilledChunk],
        send: MemoryObjectSendStream[FilledChunk],
    ) -> None:
        """Complete the chunks of one file with what stands around payloads, and encode its items."""
        is_short = encoder is None and image.nbytes <= SHORT_BYTES
        nbytes = image.file_bytes if isinstance(image, PartImage) else image.nbytes
        with receive, send:
            async for chunk in receive:
                with span("seal", chunk.stop - chunk.start, image.name):
                    seal = self._threads.seal_workers.run_unless
                    await seal(is_short, sealer.seal, chunk.view, chunk.start, chunk.stop)
                if encoder is not None:
                    await self._encode(image, encoder, chunk, send)
                if chunk.stop == image.nbytes:
                    facts = (nbytes, sealer.file_crc) if encoder is None else (encoder.nbytes, encoder.crc)
                    self.files[image.name] = FileFacts(*facts)
                if encoder is None:
                    await _pass_on(chunk, send)

    async def _encode(
        self, image: FileImage, encoder: ImageEncoder, chunk: FilledChunk, send: MemoryObjectSendStream[FilledChunk]
    ) -> None:
        """Encode a chunk, release it, and pass the result on."""
        is_last = chunk.stop == image.nbytes
        buffers = encoder.encode(chunk.view, chunk.start, chunk.stop, is_last=is_last)
        while True:
            with span("encode", 0, image.name):
                buffer = await self._threads.seal_workers.run(next, buffers, None)
            if buffer is None:
                break
            release = partial(encoder.free.append, buffer)
            await _pass_on(FilledChunk(buffer, 0, len(buffer), release), send)  # only its length counts
        chunk.release()  # not before: the encoder reads it until then
        self._count(chunk.stop - chunk.start)

    async def _write(self, number: int, receive: MemoryObjectReceiveStream[FilledChunk], turn: anyio.Semaphore) -> None:
        image, name, is_encoded = self._images[number], self._names[number], self._encoders is not None
        with receive, self._inputs[number]:  # if this fails, later chunks are dropped instead of queued
            async with turn:
                if self._after is not None:
                    await self._after.wait()
                await self._begun.wait()
                if isinstance(image, PartImage):
                    await self._write_part(image, name, receive)
                    return
                is_small = not is_encoded and image.nbytes <= SHORT_BYTES
                sink = None if is_small else await self._create(image, name)
                async for chunk in receive:
                    length = chunk.stop - chunk.start
                    if is_small and length == image.nbytes:
                        with span("write", length, image.name):
                            await self._transaction.write_files({name: chunk.view[:length]})
                        self._finished += 1
                    else:
                        sink = sink or await self._create(image, name)
                        if length:
                            with span("write", length, image.name):
                                await sink.write(chunk.view[:length], chunk.release)
                    if sink is None or not length:  # else the sink gives it back
                        chunk.release()
                    if not is_encoded:  # encoded items are counted by what they were made from
                        self._count(chunk.stop - chunk.start)
                    if sink is None:
                        break  # a small file is one chunk
                if sink is not None:
                    with span("sync", 0, image.name):
                        await sink.finish()
                    self._finished += 1

    async def _create(self, image: FileImage, name: str) -> FileSink:
        with span("create", 0, image.name):
            return await self._transaction.create(name, None if self._encoders is not None else image.nbytes)

    async def _write_part(self, image: PartImage, name: str, receive: MemoryObjectReceiveStream[FilledChunk]) -> None:
        """Write the chunks of a part of a file, each piece to its place."""
        sink = await shared_transaction(self._transaction).open_part(name)
        async for chunk in receive:
            runs = image.runs(chunk.start, chunk.stop)
            while some := await self._threads.io_workers.run(list, islice(runs, RUNS_AT_ONCE)):
                with span("write", sum(run.nbytes for run in some), image.name):
                    await sink.write(chunk.view, some)
            chunk.release()
            self._count(chunk.stop - chunk.start)
        with span("sync", 0, image.name):
            await sink.finish()
        self._finished += 1


async def _pass_on(chunk: FilledChunk, send: MemoryObjectSendStream[FilledChunk]) -> None:
    with contextlib.suppress(anyio.BrokenResourceError):  # the writer has failed, which ends the sender too
        await send.send(chunk)


def _sealer_of(image: FileImage, head: bytes, hashing: Hashing | None) -> Sealer | PartSealer:
    return PartSealer(image, head) if isinstance(image, PartImage) else Sealer(image, head, hashing)
