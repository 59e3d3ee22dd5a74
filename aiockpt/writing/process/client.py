"""One save whose files a writer process writes, as the trainer sees it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import AiockptError, SaveError, WriteError
from aiockpt.writing.file_writer import ChunkWriter, CommitInputs, FilledChunk, Later
from aiockpt.writing.process.error_transport import load_error
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
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup

    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.encoding import ImageCoding
    from aiockpt.planning.planner import Layout
    from aiockpt.storage.base import Identity, Status, Storage
    from aiockpt.writing.process.connection import Link
    from aiockpt.writing.process.supervisor import WriterHost


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """What is to be written.

    Attributes:
        path: where the checkpoint is to be.
        storage: where to keep it.
        overwrite: replace what is there.
        names: what the files are called.
        layout: the files.
        heads: what each begins with.
        started: when the save was called.
        ticket: gives the ticket of the transaction that rank 0 has begun, or None: the process begins one.
        codings: what becomes of the items of each file; None: they are stored as they are.
        again: it was tried elsewhere before; those that have begun since are behind it.
    """

    path: str
    storage: Storage = field(repr=False)
    overwrite: bool
    names: Sequence[str] = field(repr=False)
    layout: Layout = field(repr=False)
    heads: Sequence[bytes] = field(repr=False)
    started: float
    ticket: Callable[[], Awaitable[str | None]]
    codings: Sequence[ImageCoding] | None = field(repr=False, default=None)
    again: bool = False


class RemoteWriter(ChunkWriter):
    """Has the files of one save written by a writer process.

    Args:
        host: gives the process.
        order: what is to be written.
        report: is called with the bytes that were written, each time.
        workers: threads to clean up in.
    """

    agrees = True

    def __init__(self, host: WriterHost, order: WriteOrder, report: Callable[[int], None], workers: Workers) -> None:
        self._workers = workers
        self._host = host
        self._order = order
        self._report = report
        self._number = host.number()
        self._link: Later[Link] = Later()
        self._begun: Link | None = None
        self._out: dict[int, Callable[[], None]] = {}
        self._news = anyio.Event()
        self._written: Written | None = None
        self._sizes: dict[str, int] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._lost = False
        self._ticket: str | None = None
        self._identity: Identity | None = None
        self.files: dict[str, FileFacts] = {}

    @property
    def crcs(self) -> Sequence[Sequence[int]]:
        """For each image the CRC-32 of each slot's payload, once all is written."""
        return () if self._written is None else self._written.crcs

    # --- what the process says --------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """Take note of what the process says."""
        match message:
            case Wrote():
                self._out.pop(message.chunk)()
                self._report(message.nbytes)
                return
            case Began():
                self._identity = message.identity
                return
            case Written():
                self._written = message
                self.files = message.files
            case Published():
                self._sizes = message.sizes
                self._end()
            case Failed():
                self._error = load_error(message.error)
                self._end()
        self._news.set()

    def lose(self, error: WriteError) -> None:
        """Take note that the process has died."""
        self._error = WriteError(str(error))
        self._lost = True
        self._end()
        self._news.set()

    def _end(self) -> None:
        self._ended = True
        if self._begun is not None:
            self._begun.leave(self._number)

    # --- what the save does -----------------------------------------------------------------------

    def start(self, tasks: TaskGroup) -> None:
        """Begin, and be ready for parts; the task ends when all files are written."""
        tasks.start_soon(self._run)

    async def _run(self) -> None:
        try:
            await self._begin()
            await self._until(lambda: self._written is not None)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.abandon()
            raise

    async def _begin(self) -> None:
        order = self._order
        joined = await order.ticket()
        self._ticket = order.storage.new_ticket(order.path) if joined is None else None
        link = await self._host.link()
        number, images = await self._host.images_for(link, order.layout)
        link.enter(self._number, self)
        self._begun = link
        await link.send(
            Begin(
                self._number,
                order.path,
                pickle.dumps(order.storage),
                order.overwrite,
                order.names,
                number,
                images,
                order.heads,
                self._ticket if joined is None else joined,
                joined is not None,
                order.started,
                None if order.codings is None else pickle.dumps(order.codings),
                order.again,
            )
        )
        self._link.set(link)

    async def _until(self, come: Callable[[], bool]) -> None:
        """Wait until something has come; raise what has come instead."""
        while not come():
            if self._error is not None:
                raise self._error
            if self._ended:
                raise SaveError(f"the save of {self._order.path} has ended too early in the writer process")
            await self._news.wait()
            self._news = anyio.Event()

    async def put(self, number: int, part: FilledChunk) -> None:
        """Tell the process that a chunk is filled."""
        link = await self._link.get()
        self._out[part.chunk] = part.release
        link.post(Filled(self._number, number, part.start, part.stop, part.chunk))

    def end(self, number: int) -> None:
        """Do nothing: the process knows the sizes of the files."""

    async def hand_over(self, prepared: CommitInputs) -> None:
        """Let the process have what it needs to complete the checkpoint should this one die."""
        link = await self._link.get()
        ending = await prepared.ending()
        parting = None if prepared.parting is None else await prepared.parting()
        await link.send(Staged(self._number, ending, prepared.times_s, prepared.waits, parting))
        if self._error is not None:  # it has died: nobody has what was staged
            raise self._error

    async def publish(self) -> dict[str, int]:
        """Have the process complete the checkpoint, and publish it."""
        link = await self._link.get()
        await link.send(Publish(self._number))
        try:
            await self._until(lambda: self._sizes is not None)
        except WriteError:
            if await self._clean_up() != "published":
                raise
            return {name: facts.nbytes for name, facts in self.files.items()}  # it died right after that
        return {} if self._sizes is None else self._sizes

    async def abandon(self) -> None:
        """Have it called off, and wait until nothing of it is left."""
        link = self._begun
        if link is not None and not self._ended:
            await link.send(Cancel(self._number))
            while not self._ended:
                await self._news.wait()
                self._news = anyio.Event()
        await self._clean_up()

    async def _clean_up(self) -> Status:
        """Remove what the process has left, if it has died; tell what has become of the checkpoint."""
        order = self._order
        if not self._lost or self._ticket is None:
            return "gone"
        self._lost = False
        try:
            adopted = await order.storage.take_over(
                order.path, self._ticket, overwrite=order.overwrite, workers=self._workers, identity=self._identity
            )
            fate = await adopted.status()
            await (adopted.finalize() if fate == "published" else adopted.abort())
        except AiockptError as exc:
            if self._error is not None:
                self._error.add_note(str(exc))
            return "gone"
        return fate

    async def agree(self) -> None:
        """Have the writer processes of all ranks agree."""
        link = await self._link.get()
        await link.send(Agree(self._number))
        await self._until(lambda: self._sizes is not None)

    async def over(self) -> None:
        """Tell the process that rank 0 has published."""
        if self._begun is not None and not self._ended:
            await self._begun.send(Over(self._number))
            self._end()
