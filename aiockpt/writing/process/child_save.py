"""One save in the writer process."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import AiockptError, SaveCancelledError, SaveError
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk
from aiockpt.writing.process import messages
from aiockpt.writing.process.error_transport import as_save_error, dump_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiockpt.planning.layout import FileImage
    from aiockpt.storage.base import SharedStorage, SharedTransaction
    from aiockpt.writing.file_writer import WriterThreads
    from aiockpt.writing.process.messages import Begin, Message


@dataclass
class SharedState:
    """State that all saves of the process share."""

    chunk_bytes: int
    memory: memoryview  # with the chunks; mapped by the trainer too
    threads: WriterThreads
    post: Callable[[Message], None]  # sends to the trainer
    agreement_timeout_s: float
    layouts: dict[int, list[FileImage]] = field(default_factory=dict)  # by number

    def chunk(self, number: int) -> memoryview:
        """Return a chunk of the memory."""
        return self.memory[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]


class ChildSave:
    """Writes and commits one save."""

    def __init__(
        self, begin: Begin, images: Sequence[FileImage], shared: SharedState, previous: ChildSave | None
    ) -> None:
        self.number = begin.save
        self._begin = begin
        self._images = images
        self._shared = shared
        self._previous = previous
        self._scope = anyio.CancelScope()
        self._storage: SharedStorage | None = None
        self._transaction: SharedTransaction | None = None
        self._staged: messages.Staged | None = None
        self._all_staged = anyio.Event()
        self._may_publish = anyio.Event()
        self._may_finish = anyio.Event()  # with several ranks: rank 0 has published, or this process is to commit
        self._done = anyio.Event()
        self._early_chunks: list[tuple[int, FilledChunk]] = []  # they came before there was a writer
        self._writer: FileWriter | None = None
        self._orphan = False

    # --- messages from the trainer -----------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Handle a message from the trainer."""
        match message:
            case messages.ChunkFilled():
                self._put(message)
            case messages.Staged():
                self._staged = message
                self._all_staged.set()
            case messages.Publish() | messages.Finish():
                self._may_publish.set()
                self._may_finish.set()
            case messages.CommitAsOrphan():
                self._orphan = True
                self._may_finish.set()
            case messages.Cancel():
                self._scope.cancel()

    def on_trainer_end(self) -> None:
        """Complete the save without the trainer if it was staged; otherwise cancel it."""
        self._orphan = True
        self._may_finish.set()
        if self._staged is None or (self._staged.waits and not self._may_publish.is_set()):
            self._scope.cancel()
        self._may_publish.set()

    def _put(self, message: messages.ChunkFilled) -> None:
        nbytes = message.stop - message.start
        release = partial(self._shared.post, messages.ChunkWritten(self.number, nbytes, message.chunk))
        chunk = FilledChunk(self._shared.chunk(message.chunk), message.start, message.stop, release)
        if self._writer is None:
            self._early_chunks.append((message.image, chunk))
        else:
            self._write(self._writer, message.image, chunk)

    def _write(self, writer: FileWriter, number: int, chunk: FilledChunk) -> None:
        writer.put_nowait(number, chunk)
        if chunk.stop == self._images[number].nbytes:
            writer.end(number)

    # --- writing and committing --------------------------------------------------------------------

    async def run(self) -> None:
        """Write and commit; report the outcome to the trainer. Never raises."""
        error: BaseException | None = None
        try:
            with self._scope:
                await self._write_and_commit()
            if self._scope.cancelled_caught:
                error = SaveCancelledError(f"the save of {self._begin.path} was cancelled; nothing of it is left")
        except BaseException as exc:  # the trainer raises it
            error = as_save_error(exc)
        if error is not None:
            with anyio.CancelScope(shield=True):
                await self._clean_up(error)
            self._shared.post(messages.Failed(self.number, dump_error(error)))
        await self._wait_for_previous()  # keep the commit order: the next save waits for this one only
        self._done.set()
        self._previous = None

    async def _write_and_commit(self) -> None:
        begin = self._begin
        self._storage = pickle.loads(begin.storage)
        writer = FileWriter(
            self._images,
            begin.heads,
            begin.names,
            self._shared.threads,
            after=None if self._previous is None else self._previous._done,
            codings=None if begin.codings is None else pickle.loads(begin.codings),
        )
        async with anyio.create_task_group() as tasks:
            writer.start(tasks)
            tasks.start_soon(self._open, writer)
            self._writer = writer
            for number, chunk in self._early_chunks:
                self._write(writer, number, chunk)
            self._early_chunks.clear()
        await self._all_staged.wait()
        if self._staged is None:
            raise RuntimeError("a save goes on before it is staged")
        if begin.joins:
            await self._finish_part(writer, self._staged)
        else:
            await self._publish(writer, self._staged)

    async def _open(self, writer: FileWriter) -> None:
        begin, storage = self._begin, self._storage
        if storage is None:
            raise RuntimeError("a transaction is opened before its storage is known")
        workers = self._shared.threads.io_workers
        if begin.joins:
            self._transaction = await storage.join(begin.path, begin.ticket or "", workers=workers)
        else:
            self._transaction = await storage.begin(
                begin.path, overwrite=begin.overwrite, workers=workers, ticket=begin.ticket
            )
            self._shared.post(messages.Began(self.number, self._transaction.identity))
        writer.begin(self._transaction)

    async def _publish(self, writer: FileWriter, staged: messages.Staged) -> None:
        """Publish the transaction that this process has begun."""
        self._shared.post(messages.FilesWritten(self.number, writer.files, ()))
        await self._may_publish.wait()
        await writer.hand_over(CommitInputs(staged.documents, staged.times_s, self._begin.started))
        with anyio.CancelScope(shield=True):  # from here on it is completed or undone, never half
            await writer.write_documents()
            sizes = await writer.commit()
            self._transaction = None
            self._shared.post(messages.Published(self.number, sizes))

    async def _finish_part(self, writer: FileWriter, staged: messages.Staged) -> None:
        """Make this rank's files durable; rank 0 publishes, or the writers of all ranks do if a trainer has died."""
        transaction = self._transaction
        if transaction is None:
            raise RuntimeError("a rank's files were written without a transaction")
        await transaction.commit()
        self._shared.post(messages.FilesWritten(self.number, writer.files, writer.crcs))
        try:
            await self._may_finish.wait()
            if self._orphan:
                with anyio.CancelScope(shield=True):
                    await self._commit_as_orphan(writer, staged)
                sizes = {name: facts.nbytes for name, facts in writer.files.items()}
                self._shared.post(messages.Published(self.number, sizes))
        finally:
            with anyio.CancelScope(shield=True):
                await transaction.release()

    async def _commit_as_orphan(self, writer: FileWriter, staged: messages.Staged) -> None:
        """Commit together with the writers of the other ranks, without the trainers."""
        transaction, self._transaction = self._transaction, None
        if transaction is None or self._storage is None or staged.recovery is None:
            raise SaveError("nothing is known of the other ranks")
        # Imported only now, since it imports torch, which takes long.
        orphan_commit = importlib.import_module("aiockpt.writing.process.orphan_commit").OrphanCommit
        await orphan_commit(
            self._begin,
            staged.recovery,
            self._storage,
            transaction,
            self._shared.agreement_timeout_s,
            self._shared.threads.io_workers,
        ).run(writer.files)

    async def _wait_for_previous(self) -> None:
        if self._previous is not None:
            await self._previous._done.wait()

    async def _clean_up(self, error: BaseException) -> None:
        """Remove what this process has written; as an orphan of several ranks, what all ranks have written."""
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
        try:
            await (transaction.discard_all() if self._orphan and self._begin.joins else transaction.abort())
        except AiockptError as exc:
            error.add_note(str(exc))
