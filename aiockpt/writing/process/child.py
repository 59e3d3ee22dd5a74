"""The writer process: serves one trainer, and outlives it until everything that was staged is durable."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import select
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aiockpt.core.threads import Workers, new_event_loop
from aiockpt.writing.file_writer import WriterThreads
from aiockpt.writing.process.channel import Channel
from aiockpt.writing.process.child_save import ChildSave, SharedState
from aiockpt.writing.process.messages import Begin, Hello, Log, Message, Ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup


_SEAL_NICE = 10
_DRAIN_S = 0.01
_POLL_PARENT_S = 0.5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS = 1

logger = logging.getLogger("aiockpt")


def main(trainer_pid: int, socket_fd: int, memory_fd: int) -> None:
    """Run until the trainer has closed its end, or has died, and every staged save has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # only the trainer, or its death, ends this process
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
        async with watch_parent(self._trainer_pid) as dead, anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.pump)
            async for hello in self._messages(dead):
                await self._run_saves(hello, dead)
                break
            async with _until(dead.wait):  # nobody receives what is sent to a dead trainer
                with contextlib.suppress(OSError):
                    await self._channel.flush()
            tasks.cancel_scope.cancel()

    async def _run_saves(self, hello: Hello, dead: anyio.Event) -> None:
        _lower_priority(hello)
        memory = mmap.mmap(self._memory_fd, os.fstat(self._memory_fd).st_size, flags=mmap.MAP_SHARED)
        seal_threads = min(hello.io_threads, max(2, os.cpu_count() or 1))
        threads = WriterThreads(Workers(seal_threads, "seal", nice=_SEAL_NICE), Workers(hello.io_threads, "io"))
        shared = SharedState(
            hello.chunk_bytes, memoryview(memory), threads, self._channel.post, hello.agreement_timeout_s
        )
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

    async def _messages(self, dead: anyio.Event) -> AsyncIterator[Message]:
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
        await anyio.sleep(_DRAIN_S)

    def _handle(self, message: Message, shared: SharedState, tasks: TaskGroup) -> None:
        if isinstance(message, Begin):
            if message.images is not None:
                shared.layouts.clear()
                shared.layouts[message.layout] = [image.unpack() for image in message.images]
            previous = None if message.again else self._last
            save = ChildSave(message, shared.layouts[message.layout], shared, previous)
            self._saves[message.save] = save
            if not message.again:
                self._last = save
            tasks.start_soon(self._run, save)
        elif (known := self._saves.get(message.save)) is not None:  # else it has ended, and the trainer will hear it
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


@contextlib.asynccontextmanager
async def watch_parent(pid: int) -> AsyncIterator[anyio.Event]:
    """Yield an event that is set when the parent process, with this pid, has ended.

    The end of the socket is no sure sign: a process forked by the trainer may hold it open.
    """
    dead = anyio.Event()
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):  # dead already, or not permitted in this container
        fd = -1
    if os.getppid() != pid:
        dead.set()

    def on_end() -> None:
        loop.remove_reader(fd)  # it stays readable
        dead.set()

    if fd >= 0:
        loop.add_reader(fd, on_end)
    try:
        async with anyio.create_task_group() as tasks:
            if fd < 0:
                tasks.start_soon(_poll_parent, pid, dead)
            try:
                yield dead
            finally:
                tasks.cancel_scope.cancel()
    finally:
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)


async def _poll_parent(pid: int, dead: anyio.Event) -> None:
    while os.getppid() == pid:  # noqa: ASYNC110 - without a pidfd there is no event for it
        await anyio.sleep(_POLL_PARENT_S)
    dead.set()


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
            value = (scheduling_class << 13) | level
            ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(_IOPRIO_WHO_PROCESS), 0, ctypes.c_int(value))
