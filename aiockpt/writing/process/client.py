"""One save whose files a writer process writes, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import AiockptError, SaveError, WriteError
from aiockpt.storage.base import Stamp, Status, Storage, shared_storage
from aiockpt.writing.file_writer import ChunkWriter, CommitInputs, FilledChunk
from aiockpt.writing.process import messages
from aiockpt.writing.process.messages import load_error

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.planner import Layout
    from aiockpt.writing.process.messages import FromWriter
    from aiockpt.writing.process.supervisor import WriterConnection, WriterHost


class RemoteWriter(ChunkWriter):
    """Sends the chunks of one save to a writer process, which writes the files of ``layout`` as ``order`` says."""

    outlives_trainer = True

    def __init__(
        self,
        host: WriterHost,
        order: messages.Begin,
        storage: Storage,
        layout: Layout,
        count: Callable[[int], object],
        workers: Workers,
    ) -> None:
        self._host = host
        self._order = order
        self._storage = storage
        self._layout = layout
        self._count = count  # of the bytes that a file has taken
        self._workers = workers  # for cleaning up
        self._number = order.save
        self._begun = anyio.Event()
        self._connection: WriterConnection | None = None
        self._release_chunk: dict[int, Callable[[], None]] = {}
        self._written: messages.FilesWritten | None = None
        self._sizes: dict[str, int] | None = None
        self._error: BaseException | None = None
        self._files_written, self._ended = anyio.Event(), anyio.Event()
        self._must_clean_up = False
        self._ticket: str | None = None
        self._stamp: Stamp | None = None
        self.files: dict[str, FileFacts] = {}

    # --- messages from the process -----------------------------------------------------------------

    def on_message(self, message: FromWriter | WriteError) -> None:
        """Handle a message, or the death of the process: what it has left is removed later."""
        match message:
            case WriteError():
                self._error = WriteError(str(message))  # an own one, since each save adds notes
                self._must_clean_up = True
                self._end()
            case messages.ChunkWritten():
                self._release_chunk.pop(message.chunk)()
                self._count(message.nbytes)
            case messages.Began():
                self._stamp = message.stamp
            case messages.FilesWritten():
                self._written = message
                self.files, self.encoded, self.spans = message.files, message.encoded, message.spans
                self._files_written.set()
            case messages.Published():
                self._sizes = message.sizes
                self.spans = message.spans or self.spans
                self._end()
            case messages.Failed():
                self._error = load_error(message.error)
                self._end()

    def _end(self) -> None:
        self._ended.set()
        self._files_written.set()  # or they never will be
        if self._connection is not None:
            self._connection.unregister(self._number)

    # --- calls of the save -------------------------------------------------------------------------

    @property
    def crcs(self) -> bytes:
        return b"" if self._written is None else self._written.crcs

    def start(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._run)

    async def _run(self) -> None:
        try:
            await self._files_written.wait()
            if self._written is None:
                await self._outcome()
        except BaseException:
            with anyio.CancelScope(shield=True):  # the process reads the chunks until it has ended the save
                await self.abandon()
            raise

    async def begin(self, joined: str | None) -> None:
        """Begin the save in the process: join a transaction of rank 0 by its ticket, or begin one if it is None."""
        order, joins = self._order, joined is not None
        self._ticket = None if joins else shared_storage(self._storage).new_ticket(order.path)
        connection = await self._host.connect()
        images = await self._host.images_for(connection, self._layout)
        # No await from here until the message is queued: the next save's message, which refers to these images, must
        # not overtake it.
        connection.register(self._number, self.on_message)
        self._connection = connection
        await connection.send(replace(order, images=images, ticket=joined or self._ticket, joins=joins))
        self._begun.set()

    async def _connected(self) -> WriterConnection:
        """Wait until the save has begun in the process."""
        await self._begun.wait()
        if self._connection is None:
            raise RuntimeError("a save has begun without a process")
        return self._connection

    async def _outcome(self) -> dict[str, int]:
        """Wait until the save has ended in the process; return the sizes of its files, or raise its error."""
        await self._ended.wait()
        if self._sizes is None:
            what = f"the save of {self._order.path} has ended too early in the writer process"
            raise self._error or SaveError(what)
        return self._sizes

    async def put(self, number: int, chunk: FilledChunk) -> None:
        connection = await self._connected()
        self._release_chunk[chunk.number] = chunk.release  # before the message: its answer looks it up
        connection.post(messages.ChunkFilled(self._number, number, chunk.start, chunk.stop, chunk.number))

    def end(self, number: int) -> None:
        """Do nothing: the process knows the sizes of the files."""

    async def hand_over(self, inputs: CommitInputs) -> None:
        """Send what the process needs to complete the checkpoint if the trainer dies."""
        connection = await self._connected()
        await connection.send(messages.Staged(self._number, inputs))
        if self._error is not None:  # the process has died, and with it what was staged
            raise self._error

    async def encode_documents(self) -> None:
        """Do nothing: the process writes them when it is asked to commit."""

    async def commit(self) -> dict[str, int]:
        """Have the process write the documents and publish the checkpoint."""
        connection = await self._connected()
        await connection.send(messages.Finish(self._number))
        try:
            return await self._outcome()
        except WriteError:
            if await self._clean_up() != "published":
                raise
            return {name: facts.nbytes for name, facts in self.files.items()}  # it died right after publishing

    async def abandon(self) -> None:
        if self._connection is not None and not self._ended.is_set():
            await self._connection.send(messages.Cancel(self._number))
            await self._ended.wait()
        await self._clean_up()

    async def _clean_up(self) -> Status:
        """Remove what a dead process has left, or complete what it has published; return which."""
        order = self._order
        if not self._must_clean_up or self._ticket is None:
            return "gone"
        self._must_clean_up = False
        try:
            adopted = await shared_storage(self._storage).take_over(
                order.path, self._ticket, overwrite=order.overwrite, workers=self._workers, stamp=self._stamp
            )
            status = await adopted.status()
            await (adopted.finalize() if status == "published" else adopted.abort())
        except AiockptError as exc:
            if self._error is not None:
                self._error.add_note(str(exc))
            return "gone"
        return status

    async def close(self) -> None:
        if self._connection is not None and not self._ended.is_set():
            await self._connection.send(messages.Finish(self._number))
            self._end()
