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
from aiockpt.writing.process.error_transport import as_save_error, dump_error
from aiockpt.writing.process.messages import (
    Agree,
    Began,
    Begin,
    Cancel,
    Failed,
    Filled,
    Message,
    Over,
    Publish,
    Published,
    Staged,
    Written,
    Wrote,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.layout import FileImage
    from aiockpt.storage.base import Storage, Transaction
    from aiockpt.writing.commit import CommitDocuments
    from aiockpt.writing.file_writer import WriterThreads


@dataclass
class Saves:
    """The saves of this process, by number; and what they share."""

    chunk_bytes: int
    memory: memoryview
    tools: WriterThreads
    post: Callable[[Message], None]
    patience_s: float
    layouts: dict[int, list[FileImage]] = field(default_factory=dict)

    def chunk(self, number: int) -> memoryview:
        """Give a chunk."""
        return self.memory[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]


class ChildSave:
    """Writes one save, and publishes it.

    Args:
        begin: what it is.
        images: its files.
        shared: what it shares with other saves.
        previous: the save before.
    """

    def __init__(self, begin: Begin, images: Sequence[FileImage], shared: Saves, previous: ChildSave | None) -> None:
        self.number = begin.save
        self._begin = begin
        self._images = images
        self._shared = shared
        self._previous = previous
        self._scope = anyio.CancelScope()
        self._transaction: Transaction | None = None
        self._staged: Staged | None = None
        self._all_staged = anyio.Event()
        self._may_publish = anyio.Event()
        self._told = anyio.Event()
        self._over = anyio.Event()
        self._parts: list[tuple[int, FilledChunk]] = []
        self._writing: FileWriter | None = None
        self._orphan = False

    # --- what the trainer says --------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """Do as the trainer says."""
        match message:
            case Filled():
                self._put(message)
            case Staged():
                self._staged = message
                self._all_staged.set()
            case Publish() | Over():
                self._may_publish.set()
                self._told.set()
            case Agree():
                self._orphan = True
                self._told.set()
            case Cancel():
                self._scope.cancel()

    def trainer_is_gone(self) -> None:
        """Go on without the trainer, if all is there that is needed; else call it off."""
        self._orphan = True
        self._told.set()
        if self._staged is None or (self._staged.waits and not self._may_publish.is_set()):
            self._scope.cancel()
        self._may_publish.set()

    def _put(self, message: Filled) -> None:
        view = self._shared.chunk(message.chunk)
        nbytes = message.stop - message.start
        release = partial(self._tell, Wrote(self.number, nbytes, message.chunk))
        part = FilledChunk(view, message.start, message.stop, release)
        if self._writing is None:
            self._parts.append((message.image, part))
        else:
            self._put_part(message.image, part)

    def _put_part(self, number: int, part: FilledChunk) -> None:
        if self._writing is not None:
            self._writing.take(number, part)
            if part.stop == self._images[number].nbytes:
                self._writing.end(number)

    def _tell(self, message: Message) -> None:
        self._shared.post(message)

    # --- its course -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write, and publish; never raises."""
        error: BaseException | None = None
        try:
            with self._scope:
                await self._course()
            if self._scope.cancelled_caught:
                error = SaveCancelledError(f"the save of {self._begin.path} was cancelled; nothing of it is left")
        except BaseException as exc:  # the trainer is told
            error = as_save_error(exc)
        if error is not None:
            with anyio.CancelScope(shield=True):
                await self._give_up(error)
            self._tell(Failed(self.number, dump_error(error)))
        await self._turn()  # who is behind this one is not to overtake those before it
        self._over.set()
        self._previous = None

    async def _course(self) -> None:
        begin = self._begin
        self._storage: Storage = pickle.loads(begin.storage)
        writing = FileWriter(
            self._images,
            begin.heads,
            begin.names,
            self._shared.tools,
            self._open,
            self._turn,
            lambda _: None,
            None if begin.codings is None else pickle.loads(begin.codings),
        )
        async with anyio.create_task_group() as tasks:
            writing.start(tasks)
            self._writing = writing
            for number, part in self._parts:
                self._put_part(number, part)
            self._parts.clear()
        await self._all_staged.wait()
        if begin.joins:
            await self._part(writing)
        else:
            await self._publish(writing)

    async def _publish(self, writing: FileWriter) -> None:
        """Publish what this process has begun."""
        staged = self._staged
        if staged is None:
            raise RuntimeError("a save goes on before it is staged")
        self._tell(Written(self.number, writing.files, ()))
        await self._may_publish.wait()

        async def ending() -> CommitDocuments | None:
            return staged.ending

        await writing.hand_over(CommitInputs(ending, staged.times_s, self._begin.started))
        with anyio.CancelScope(shield=True):  # from here on it is done or undone, not half
            sizes = await writing.publish()
            self._transaction = None
            self._tell(Published(self.number, sizes))

    async def _part(self, writing: FileWriter) -> None:
        """Make this rank's part durable; rank 0 publishes all."""
        transaction = self._transaction
        if transaction is None:
            raise RuntimeError("a part was written to no transaction")
        await transaction.commit()
        self._tell(Written(self.number, writing.files, writing.crcs))
        try:
            await self._told.wait()
            if self._orphan:
                with anyio.CancelScope(shield=True):
                    await self._agree(writing.files)
                self._tell(Published(self.number, {name: facts.nbytes for name, facts in writing.files.items()}))
        finally:
            with anyio.CancelScope(shield=True):
                await transaction.release()

    async def _agree(self, files: dict[str, FileFacts]) -> None:
        """Agree with the writers of the other ranks, without the trainers."""
        transaction, self._transaction = self._transaction, None
        if transaction is None or self._staged is None or self._staged.parting is None:
            raise SaveError("nothing is known of the other ranks")
        # Only now, for it takes long: what the ranks have planned is known in torch's terms.
        agreement = importlib.import_module("aiockpt.writing.process.orphan_commit").Agreement
        workers = self._shared.tools.io_workers
        parting, patience_s = self._staged.parting, self._shared.patience_s
        await agreement(self._begin, parting, self._storage, transaction, patience_s, workers).settle(files)

    async def _open(self) -> Transaction:
        begin = self._begin
        workers = self._shared.tools.io_workers
        if begin.joins:
            self._transaction = await self._storage.join(begin.path, begin.ticket or "", workers=workers)
        else:
            self._transaction = await self._storage.begin(
                begin.path, overwrite=begin.overwrite, workers=workers, ticket=begin.ticket
            )
            self._tell(Began(self.number, self._transaction.identity))
        return self._transaction

    async def _turn(self) -> None:
        if self._previous is not None:
            await self._previous._over.wait()

    async def _give_up(self, error: BaseException) -> None:
        """Remove what was written; without the trainers, what all ranks have written."""
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
        try:
            await (transaction.discard_all() if self._orphan and self._begin.joins else transaction.abort())
        except AiockptError as exc:
            error.add_note(str(exc))
