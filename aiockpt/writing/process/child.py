"""The writer process: serves one trainer, and outlives it until everything that was staged is durable."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from aiockpt.core.machine import libc
from aiockpt.core.spans import Span, record_to
from aiockpt.core.threads import Workers, new_event_loop
from aiockpt.errors import AiockptError, SaveCancelledError
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk, WriterThreads
from aiockpt.writing.process import messages
from aiockpt.writing.process.channel import Channel
from aiockpt.writing.process.messages import Begin, FromTrainer, Hello, Log, Message, Ready, as_save_error, dump_error

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from aiockpt.planning.layout import FileImage
    from aiockpt.storage.base import SharedStorage, SharedTransaction


# --- one save -------------------------------------------------------------------------------------


@dataclass
class SharedState:
    """State that all saves of the process share."""

    chunk_bytes: int
    memory: memoryview  # with the chunks; mapped by the trainer too
    threads: WriterThreads
    post: Callable[[Message], None]  # sends to the trainer
    images: Sequence[FileImage] = ()  # that came last

    def chunk(self, number: int) -> memoryview:
        return self.memory[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]


class ChildSave:
    """Writes and commits one save."""

    _storage: SharedStorage  # since `run`
    _inputs: CommitInputs  # once all is staged

    def __init__(
        self, begin: Begin, images: Sequence[FileImage], shared: SharedState, previous: ChildSave | None
    ) -> None:
        self.number = begin.save
        self._begin = begin
        self._images = images
        self._shared = shared
        self._previous = previous
        self._scope = anyio.CancelScope()
        self._transaction: SharedTransaction | None = None
        self._all_staged = anyio.Event()
        self._may_publish = anyio.Event()  # with several ranks: rank 0 has
        self._done = anyio.Event()
        self._early_chunks: list[tuple[int, FilledChunk]] = []  # they came before there was a writer
        self._writer: FileWriter | None = None
        self._spans: list[Span] = []

    # --- messages from the trainer -----------------------------------------------------------------

    def handle(self, message: FromTrainer) -> None:
        match message:
            case messages.ChunkFilled():
                self._put(message)
            case messages.Staged():
                self._inputs = message.inputs
                self._all_staged.set()
            case messages.Finish():
                self._may_publish.set()
            case messages.Cancel():
                self._scope.cancel()

    def on_trainer_end(self) -> None:
        """Complete the save without the trainer if it was staged, and no other rank takes part; else cancel it."""
        # A pre_commit hook is the trainer's: without its consent nothing is published.
        needs_trainer = not self._all_staged.is_set() or self._inputs.waits or self._begin.joins
        if needs_trainer and not self._may_publish.is_set():
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
        record_to(self._spans)
        try:
            with self._scope:
                await self._write_and_commit()
            if self._scope.cancelled_caught:
                error = SaveCancelledError(f"the save of {self._begin.path} was cancelled; nothing of it is left")
        except BaseException as exc:  # the trainer raises it
            error = as_save_error(exc)
        if error is not None:
            if self._transaction is not None:
                try:
                    with anyio.CancelScope(shield=True):
                        await self._transaction.abort()
                except AiockptError as exc:
                    error.add_note(str(exc))
            self._shared.post(messages.Failed(self.number, dump_error(error)))
        if self._previous is not None:  # keep the commit order: the next save waits for this one only
            await self._previous._done.wait()
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
        if begin.joins:
            await self._finish_part(writer)
        else:
            await self._publish(writer, self._inputs)

    async def _open(self, writer: FileWriter) -> None:
        begin, storage = self._begin, self._storage
        workers = self._shared.threads.io_workers
        if begin.joins:
            self._transaction = await storage.join(begin.path, begin.ticket or "", workers=workers)
        else:
            self._transaction = await storage.begin(
                begin.path, overwrite=begin.overwrite, workers=workers, ticket=begin.ticket
            )
            self._shared.post(messages.Began(self.number, self._transaction.stamp))
        writer.begin(self._transaction)

    async def _publish(self, writer: FileWriter, inputs: CommitInputs) -> None:
        """Publish the transaction that this process has begun."""
        self._shared.post(messages.FilesWritten(self.number, writer.files))
        await self._may_publish.wait()
        await writer.hand_over(inputs)
        with anyio.CancelScope(shield=True):  # from here on it is completed or undone, never half
            await writer.encode_documents()
            sizes = await writer.commit()
            self._transaction = None  # nothing to clean up any more
            self._shared.post(messages.Published(self.number, sizes, self._recorded()))

    async def _finish_part(self, writer: FileWriter) -> None:
        """Make this rank's files durable; rank 0 publishes them."""
        transaction = self._transaction
        if transaction is None:
            raise RuntimeError("a rank's files were written without a transaction")
        await transaction.commit()
        message = messages.FilesWritten(self.number, writer.files, self._recorded(), writer.crcs, writer.encoded)
        self._shared.post(message)
        try:
            await self._may_publish.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await transaction.release()

    def _recorded(self) -> list[Span]:
        pid = os.getpid()
        return [span._replace(pid=pid) for span in self._spans]


# --- the process ----------------------------------------------------------------------------------


_SEAL_NICE = 10
_DRAIN_S = 0.01
_POLL_PARENT_S = 0.25
# Numbers of ioprio_set(2), for which neither Python nor the C library has a function.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS = 1

logger = logging.getLogger("aiockpt")


def main(trainer_pid: int, socket_fd: int, memory_fd: int) -> None:
    """Run until the trainer has closed its end, or has died, and every staged save has ended."""
    # Only the trainer, or its death, ends this process: staged saves have to survive a launcher's SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=socket_fd) as end:
        child = _Child(trainer_pid, Channel(end), memory_fd)
        anyio.run(child.serve, backend="asyncio", backend_options={"loop_factory": new_event_loop})


class _Child:
    def __init__(self, trainer_pid: int, channel: Channel, memory_fd: int) -> None:
        self._trainer_pid = trainer_pid
        self._channel = channel
        self._memory_fd = memory_fd
        self._saves: dict[int, ChildSave] = {}
        self._last: ChildSave | None = None

    async def serve(self) -> None:
        dead = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_trainer, dead)
            tasks.start_soon(self._channel.pump)
            async for hello in self._messages(dead):
                await self._run_saves(hello, dead)
                break
            async with _until(dead.wait):  # nothing receives what is sent to a dead trainer
                with contextlib.suppress(OSError):
                    await self._channel.flush()
            tasks.cancel_scope.cancel()

    async def _watch_trainer(self, dead: anyio.Event) -> None:
        """Set an event when the trainer has ended. The socket may stay open: a process that it has forked holds it."""
        while os.getppid() == self._trainer_pid:  # noqa: ASYNC110 - there is no event for it on every kernel
            await anyio.sleep(_POLL_PARENT_S)
        dead.set()

    async def _run_saves(self, hello: Hello, dead: anyio.Event) -> None:
        _lower_priority(hello)
        memory = mmap.mmap(self._memory_fd, os.fstat(self._memory_fd).st_size, flags=mmap.MAP_SHARED)
        seal_threads = min(hello.io_threads, max(2, os.cpu_count() or 1))
        threads = WriterThreads(Workers(seal_threads, "seal", nice=_SEAL_NICE), Workers(hello.io_threads, "io"))
        shared = SharedState(hello.chunk_bytes, memoryview(memory), threads, self._channel.post)
        logger.addHandler(_LogForwarder(self._channel, asyncio.get_running_loop()))
        logger.propagate = False
        self._channel.post(Ready())
        async with anyio.create_task_group() as tasks:
            async for message in self._messages(dead):
                self._handle(message, shared, tasks)
            for save in self._saves.values():
                save.on_trainer_end()
        threads.io_workers.close()
        threads.seal_workers.close()

    async def _messages(self, dead: anyio.Event) -> AsyncIterator[Any]:
        """Yield the trainer's messages, until it has closed its end, or has died and all that it sent was received."""
        while True:
            message = None
            async with _until(partial(self._dead_and_drained, dead)):
                with contextlib.suppress(EOFError, OSError):
                    message = await self._channel.receive()
            if message is None:
                return
            yield message

    async def _dead_and_drained(self, dead: anyio.Event) -> None:
        """Wait until the trainer has died and nothing is left to receive."""
        await dead.wait()
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while poll.poll(0) and not self._channel.ended:  # noqa: ASYNC110 - the loop has no event for that
            await anyio.sleep(_DRAIN_S)
        await anyio.sleep(_DRAIN_S)  # the last bytes may have left the socket, and not yet reached `receive`

    def _handle(self, message: FromTrainer, shared: SharedState, tasks: TaskGroup) -> None:
        if isinstance(message, Begin):
            if message.images is not None:  # a save that needs others than those that came last brings them
                shared.images = list(map(messages.unpack, message.images))
            previous = None if message.again else self._last
            save = ChildSave(message, shared.images, shared, previous)
            self._saves[message.save] = save
            if not message.again:
                self._last = save
            tasks.start_soon(self._run, save)
        elif (known := self._saves.get(message.save)) is not None:  # else it has ended, and its outcome was sent
            known.handle(message)

    async def _run(self, save: ChildSave) -> None:
        try:
            await save.run()
        finally:
            del self._saves[save.number]
            if self._last is save:
                self._last = None


@contextlib.asynccontextmanager
async def _until(condition: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Cancel the body when an awaitable completes."""

    async def watch() -> None:
        await condition()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()


class _LogForwarder(logging.Handler):
    """Sends log records to the trainer."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._channel = channel
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._channel.post, Log(record.levelno, self.format(record)))


def _lower_priority(hello: Hello) -> None:
    """Lower the CPU and disk priority of this process, as far as permitted; see nice(1) and ionice(1)."""
    if hello.nice:
        with contextlib.suppress(OSError):
            os.nice(hello.nice)
    if hello.ionice is not None and sys.platform == "linux":
        number = _IOPRIO_SET.get(os.uname().machine)
        scheduling_class, level = hello.ionice
        if number is not None:
            value = (scheduling_class << 13) | level  # IOPRIO_PRIO_VALUE of the kernel's headers
            libc().syscall(ctypes.c_long(number), ctypes.c_int(_IOPRIO_WHO_PROCESS), 0, ctypes.c_int(value))
