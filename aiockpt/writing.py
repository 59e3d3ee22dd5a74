"""The writing half of a save: chunks come filled, are sealed, and go to their files.

It runs in the process that saves or in one of its own, so nothing here knows tensors.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from aiockpt.format.manifest import FileFacts
from aiockpt.planning.layout import BLOCK_BYTES, Sealer, align_up

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from aiockpt.planning.layout import FileImage
    from aiockpt.storage.base import Transaction
    from aiockpt.threads import Workers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A filled chunk: the payload of the bytes ``start`` to ``stop`` of a file.

    Attributes:
        view: the chunk.
        start: where it begins in the file.
        stop: where it ends in the file.
        release: gives the chunk back.
    """

    view: memoryview
    start: int
    stop: int
    release: Callable[[], None]


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
class WritingTools:
    """The threads that writing needs: those that compute, and those that wait for the disk."""

    seal_workers: Workers
    io_workers: Workers


class Writing:
    """Writes the files of one save.

    Args:
        images: the files.
        heads: what each begins with.
        names: what each is called.
        tools: the threads.
        begin: gives the transaction to write to.
        turn: is waited for before the first file is made: that earlier saves are over.
        report: is called with the bytes that were written, each time.

    Attributes:
        files: size and CRC of each file whose bytes are all sealed.
    """

    def __init__(
        self,
        images: Sequence[FileImage],
        heads: Sequence[bytes],
        names: Sequence[str],
        tools: WritingTools,
        begin: Callable[[], Awaitable[Transaction]],
        turn: Callable[[], Awaitable[object]],
        report: Callable[[int], None],
    ) -> None:
        self._images = images
        self._names = names
        self._tools = tools
        self._begin = begin
        self._turn = turn
        self._report = report
        self._transaction: Later[Transaction] = Later()
        self._sealers = [Sealer(image, head) for image, head in zip(images, heads, strict=True)]
        self._inputs: list[MemoryObjectSendStream[Part]] = []
        self.files: dict[str, FileFacts] = {}

    @property
    def crcs(self) -> list[list[int]]:
        """For each image the CRC-32 of each slot's payload."""
        return [sealer.crcs for sealer in self._sealers]

    def start(self, tasks: TaskGroup) -> None:
        """Begin, and be ready for parts; the tasks end when all files are written."""
        tasks.start_soon(self._open)
        # So many files at a time, in order: the first of them can always go on, whatever chunks the others hold.
        turn = anyio.Semaphore(self._tools.io_workers.count)
        for image, sealer, name in zip(self._images, self._sealers, self._names, strict=True):
            filled_in, filled_out = anyio.create_memory_object_stream[Part](math.inf)
            sealed_in, sealed_out = anyio.create_memory_object_stream[Part](1)
            self._inputs.append(filled_in)
            tasks.start_soon(self._seal, image, sealer, filled_out, sealed_in)
            tasks.start_soon(self._write, image, name, sealed_out, turn)

    def put(self, number: int, part: Part) -> None:
        """Take the next part of a file; the parts of each come in order. Does not wait."""
        with contextlib.suppress(anyio.BrokenResourceError):  # its writer has failed, which ends the save
            self._inputs[number].send_nowait(part)

    def end(self, number: int) -> None:
        """Take note that a file has no more parts, or will not get them."""
        self._inputs[number].close()

    async def _open(self) -> None:
        self._transaction.set(await self._begin())

    async def _seal(
        self,
        image: FileImage,
        sealer: Sealer,
        receive: MemoryObjectReceiveStream[Part],
        send: MemoryObjectSendStream[Part],
    ) -> None:
        """Complete the parts of one file, one ahead of the writing."""
        with receive, send:
            async for part in receive:
                await self._tools.seal_workers.run(sealer.seal, part.view, part.start, part.stop)
                if part.stop == image.nbytes:
                    self.files[image.name] = FileFacts(image.nbytes, sealer.file_crc)
                with contextlib.suppress(anyio.BrokenResourceError):  # the writer has failed, which ends this too
                    await send.send(part)

    async def _write(
        self, image: FileImage, name: str, receive: MemoryObjectReceiveStream[Part], turn: anyio.Semaphore
    ) -> None:
        """Write the parts of one file as they come."""
        with receive:
            async with turn:
                await self._turn()
                sink = await (await self._transaction.get()).create(name, image.nbytes)
                async for part in receive:
                    length = align_up(part.stop - part.start, BLOCK_BYTES)
                    if length:
                        await sink.write(part.view[:length])
                    part.release()
                    self._report(part.stop - part.start)
                await sink.finish()
