"""The writing half of a save: chunks come filled, are sealed, and go to their files.

It runs in the process that saves or in one of its own, so nothing here knows tensors.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.errors import SaveError
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.planning.layout import Sealer, align_up
from aiockpt.writing.commit import commit_checkpoint
from aiockpt.writing.encode import EncodedOutput, ImageEncoder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from aiockpt.core.threads import Workers
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.planning.encoding import ImageCoding
    from aiockpt.planning.layout import FileImage
    from aiockpt.storage.base import Transaction
    from aiockpt.writing.commit import CommitDocuments

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class FilledChunk:
    """A filled chunk: the payload of the bytes ``start`` to ``stop`` of a file.

    Attributes:
        view: the chunk.
        start: where it begins in the file.
        stop: where it ends in the file.
        release: gives the chunk back.
        chunk: the number of the chunk, where it is shared with another process.
    """

    view: memoryview
    start: int
    stop: int
    release: Callable[[], None]
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """What is left to do when the files with items are written.

    Attributes:
        ending: encodes what makes a checkpoint of them; gives None where that is not for this process to write.
        times_s: durations so far, in seconds.
        started: when the save was called, by the clock that all processes of the host share.
        waits: publish when told to, not before.
        parting: of several ranks, what their writers need to agree without the trainers, pickled.
        check: raises an error where the checkpoint is not to be published any more.
    """

    ending: Callable[[], Awaitable[CommitDocuments | None]]
    times_s: Mapping[str, float]
    started: float
    waits: bool = False
    parting: Callable[[], Awaitable[bytes | None]] | None = None
    check: Callable[[], object] = lambda: None


class Later(Generic[T]):
    """A value that comes later, within one event loop."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._values: list[T] = []

    def set(self, value: T) -> None:
        """Give the value to whoever waits for it."""
        self._values.append(value)
        self._event.set()

    async def get(self) -> T:
        """Wait for the value."""
        await self._event.wait()
        return self._values[0]


@dataclass(frozen=True, slots=True)
class WriterThreads:
    """The threads that writing needs: those that compute, and those that wait for the disk."""

    seal_workers: Workers
    io_workers: Workers


class ChunkWriter(ABC):
    """The writing of the files of one save.

    Attributes:
        files: size and CRC of each file whose bytes are all sealed.
        crcs: for each image the CRC-32 of each slot's payload.
        agrees: it outlives this process, so that those of several ranks can `agree`.
    """

    files: dict[str, FileFacts]
    agrees = False

    @property
    @abstractmethod
    def crcs(self) -> Sequence[Sequence[int]]:
        """See above."""

    @abstractmethod
    def start(self, tasks: TaskGroup) -> None:
        """Begin, and be ready for parts; the tasks end when all files are written."""

    @abstractmethod
    async def put(self, number: int, part: FilledChunk) -> None:
        """Take the next part of a file; the parts of each come in order. Waits for no other part."""

    @abstractmethod
    def end(self, number: int) -> None:
        """Take note that a file has no more parts, or will not get them."""

    @abstractmethod
    async def hand_over(self, prepared: CommitInputs) -> None:
        """Be told that all parts have come, and what is left to do then."""

    @abstractmethod
    async def publish(self) -> dict[str, int]:
        """Complete the checkpoint, and publish it; for who saves alone.

        Returns:
            The size in bytes of each file but the manifest.
        """

    def revoke(self) -> None:
        """Let a `publish` that hangs publish nothing any more, if that can be had. Does not block."""

    async def abandon(self) -> None:
        """See that nobody works at it any more, after a failure. Not to be cancelled."""

    async def agree(self) -> None:
        """Publish together with the writers of the other ranks, of whose processes some are gone; or remove all.

        Raises:
            SaveError: it was removed.
        """
        raise SaveError("threads can't go on without the processes of other ranks")

    async def over(self) -> None:
        """Be told that the checkpoint was published by another rank. Not to be cancelled."""


class FileWriter(ChunkWriter):
    """Writes them, in this process.

    Args:
        images: the files.
        heads: what each begins with.
        names: what each is called.
        tools: the threads.
        begin: gives the transaction to write to.
        turn: is waited for before the first file is made: that earlier saves are over.
        report: is called with the bytes that were written, each time.
        codings: what becomes of the items of each image; None: they are stored as they are.

    Attributes:
        encoded: for each image what its items have come to, where they are not stored as they are.
    """

    def __init__(
        self,
        images: Sequence[FileImage],
        heads: Sequence[bytes],
        names: Sequence[str],
        tools: WriterThreads,
        begin: Callable[[], Awaitable[Transaction]],
        turn: Callable[[], Awaitable[object]],
        report: Callable[[int], None],
        codings: Sequence[ImageCoding] | None = None,
    ) -> None:
        self._images = images
        self._names = names
        self._tools = tools
        self._begin = begin
        self._turn = turn
        self._report = report
        self._transaction: Later[Transaction] = Later()
        self._begun: Transaction | None = None
        self._sealers = [Sealer(image, head) for image, head in zip(images, heads, strict=True)]
        self._inputs: list[MemoryObjectSendStream[FilledChunk]] = []
        self._prepared: CommitInputs | None = None
        self._finished = 0
        self._encoders = None if codings is None else [ImageEncoder(coding) for coding in codings]
        self.files: dict[str, FileFacts] = {}

    @property
    def encoded(self) -> list[list[EncodedItem]] | None:
        """See above."""
        return None if self._encoders is None else [encoder.encoded for encoder in self._encoders]

    @property
    def crcs(self) -> list[list[int]]:
        """For each image the CRC-32 of each slot's payload."""
        return [sealer.crcs for sealer in self._sealers]

    def start(self, tasks: TaskGroup) -> None:
        """Begin, and be ready for parts; the tasks end when all files are written."""
        tasks.start_soon(self._open)
        # So many files at a time, in order: the first of them can always go on, whatever chunks the others hold.
        turn = anyio.Semaphore(self._tools.io_workers.count)
        for number, (image, sealer, name) in enumerate(zip(self._images, self._sealers, self._names, strict=True)):
            filled_in, filled_out = anyio.create_memory_object_stream[FilledChunk](math.inf)
            sealed_in, sealed_out = anyio.create_memory_object_stream[FilledChunk](1)
            self._inputs.append(filled_in)
            if self._encoders is None:
                tasks.start_soon(self._seal, image, sealer, filled_out, sealed_in)
            else:
                tasks.start_soon(self._encode, image, sealer, self._encoders[number], filled_out, sealed_in)
            tasks.start_soon(self._write, image, name, sealed_out, turn)

    async def put(self, number: int, part: FilledChunk) -> None:
        """Take the next part of a file."""
        self.take(number, part)

    def take(self, number: int, part: FilledChunk) -> None:
        """Take the next part of a file, without waiting."""
        with contextlib.suppress(anyio.BrokenResourceError):  # its writer has failed, which ends the save
            self._inputs[number].send_nowait(part)

    def end(self, number: int) -> None:
        """Take note that a file has no more parts, or will not get them."""
        self._inputs[number].close()

    async def hand_over(self, prepared: CommitInputs) -> None:
        """Keep what is left to do."""
        self._prepared = prepared

    async def publish(self) -> dict[str, int]:
        """Write what makes it a checkpoint, and publish it."""
        prepared = self._prepared
        if prepared is None:
            raise RuntimeError("a save can't be published before it is staged")
        if self._finished != len(self._images):
            raise SaveError(f"{self._finished} of {len(self._images)} files were written; nothing is published")
        io, transaction = self._tools.io_workers, await self._transaction.get()
        ending = await prepared.ending()
        times_s = {**prepared.times_s, "data_written": time.perf_counter() - prepared.started}
        return await commit_checkpoint(
            transaction, ending, self.files, self.crcs, times_s, io, self.encoded, prepared.check
        )

    def revoke(self) -> None:
        """Revoke the transaction."""
        if self._begun is not None:
            self._begun.revoke()

    async def _open(self) -> None:
        self._begun = await self._begin()
        self._transaction.set(self._begun)

    async def _seal(
        self,
        image: FileImage,
        sealer: Sealer,
        receive: MemoryObjectReceiveStream[FilledChunk],
        send: MemoryObjectSendStream[FilledChunk],
    ) -> None:
        """Complete the parts of one file, one ahead of the writing."""
        with receive, send:
            async for part in receive:
                await self._tools.seal_workers.run(sealer.seal, part.view, part.start, part.stop)
                if part.stop == image.nbytes:
                    self.files[image.name] = FileFacts(image.nbytes, sealer.file_crc)
                with contextlib.suppress(anyio.BrokenResourceError):  # the writer has failed, which ends this too
                    await send.send(part)

    async def _encode(
        self,
        image: FileImage,
        sealer: Sealer,
        encoder: ImageEncoder,
        receive: MemoryObjectReceiveStream[FilledChunk],
        send: MemoryObjectSendStream[FilledChunk],
    ) -> None:
        """Complete the parts of one file, and pass on what their items come to."""

        async def pass_on(view: memoryview, start: int, stop: int, release: Callable[[], None]) -> None:
            with contextlib.suppress(anyio.BrokenResourceError):  # the writer has failed, which ends this too
                await send.send(FilledChunk(view, start, stop, release))

        run, output = self._tools.seal_workers.run, EncodedOutput(encoder, pass_on)
        with receive, send:
            async for part in receive:
                await run(sealer.seal, part.view, part.start, part.stop)
                encoder.take(part.view, part.start, part.stop)
                while await run(output.fill, await output.buffer()):
                    await output.pass_on()
                part.release()
                self._report(part.stop - part.start)
                if part.stop == image.nbytes:
                    await output.pass_on()
                    self.files[image.name] = FileFacts(encoder.nbytes, encoder.crc)

    async def _write(
        self, image: FileImage, name: str, receive: MemoryObjectReceiveStream[FilledChunk], turn: anyio.Semaphore
    ) -> None:
        """Write the parts of one file as they come."""
        with receive:
            async with turn:
                await self._turn()
                is_encoded = self._encoders is not None
                sink = await (await self._transaction.get()).create(name, None if is_encoded else image.nbytes)
                async for part in receive:
                    length = part.stop - part.start if is_encoded else align_up(part.stop - part.start, BLOCK_BYTES)
                    if length:
                        await sink.write(part.view[:length])
                    part.release()
                    if not is_encoded:  # which is counted as it is encoded
                        self._report(part.stop - part.start)
                await sink.finish()
                self._finished += 1
