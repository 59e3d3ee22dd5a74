"""The writer process: it serves one trainer, and outlives it as long as something that was staged is not durable."""

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
from aiockpt.writing.process.child_save import ChildSave, Saves
from aiockpt.writing.process.messages import Begin, Hello, Log, Message, Ready
from aiockpt.writing.process.parent_death import death_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup


_NICE = 10
_DRAIN_S = 0.01
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}

logger = logging.getLogger("aiockpt")


def main(trainer: int, end: int, memory: int) -> None:
    """Run until the trainer closes its end, or has died, and everything staged is done with.

    Args:
        trainer: the process to outlive.
        end: the descriptor of the socket to the trainer.
        memory: the descriptor of the memory with the chunks.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer decides, or its death
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=end) as ours:
        child = _Child(trainer, Channel(ours), memory)
        anyio.run(child.serve, backend="asyncio", backend_options={"loop_factory": new_event_loop})


class _Child:
    def __init__(self, trainer: int, channel: Channel, memory: int) -> None:
        self._trainer = trainer
        self._channel = channel
        self._fd = memory
        self._saves: dict[int, ChildSave] = {}
        self._last: ChildSave | None = None

    async def serve(self) -> None:
        async with death_of(self._trainer) as dead, anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.pump)
            async for hello in self._said(dead):
                await self._work(hello, dead)
                break
            async with _until(dead.wait):  # then nobody is left to be told
                with contextlib.suppress(OSError):
                    await self._channel.flush()
            tasks.cancel_scope.cancel()

    async def _work(self, hello: Hello, dead: anyio.Event) -> None:
        step_back(hello)
        whole = mmap.mmap(self._fd, os.fstat(self._fd).st_size, flags=mmap.MAP_SHARED)
        threads = hello.io_threads
        tools = WriterThreads(
            Workers(min(threads, max(2, os.cpu_count() or 1)), "seal", nice=_NICE), Workers(threads, "io")
        )
        shared = Saves(hello.chunk_bytes, memoryview(whole), tools, self._channel.post, hello.patience_s)
        logger.addHandler(_Forwarding(self._channel, asyncio.get_running_loop()))
        logger.propagate = False
        self._channel.post(Ready())
        async with anyio.create_task_group() as saving:
            async for message in self._said(dead):
                self._take(message, shared, saving)
            for save in self._saves.values():
                save.trainer_is_gone()
        tools.io_workers.close()
        tools.seal_workers.close()

    async def _said(self, dead: anyio.Event) -> AsyncIterator[Message]:
        """Give what the trainer says, until it has closed its end, or has died and nothing is left of what it said."""
        while True:
            message = None
            async with _until(partial(self._silent, dead)):
                with contextlib.suppress(EOFError, OSError):
                    message = await self._channel.receive()
            if message is None:
                return
            yield message

    async def _silent(self, dead: anyio.Event) -> None:
        """Wait until the trainer has died and nothing is left to be received."""
        await dead.wait()
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while poll.poll(0) and not self._channel.ended:  # noqa: ASYNC110 - the loop has no event for that
            await anyio.sleep(_DRAIN_S)
        await anyio.sleep(_DRAIN_S)

    def _take(self, message: Message, shared: Saves, saving: TaskGroup) -> None:
        if isinstance(message, Begin):
            if message.images is not None:
                shared.layouts.clear()
                shared.layouts[message.layout] = [image.unpacked() for image in message.images]
            previous = None if message.again else self._last
            save = ChildSave(message, shared.layouts[message.layout], shared, previous)
            self._saves[message.save] = save
            if not message.again:
                self._last = save
            saving.start_soon(self._run, save)
        else:
            known = self._saves.get(message.save)
            if known is not None:  # else it has ended meanwhile, and has said so
                known.take(message)

    async def _run(self, save: ChildSave) -> None:
        try:
            await save.run()
        finally:
            del self._saves[save.number]
            if self._last is save:
                self._last = None


@contextlib.asynccontextmanager
async def _until(comes: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Leave the body when something comes."""

    async def leave() -> None:
        await comes()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        yield
        tasks.cancel_scope.cancel()


class _Forwarding(logging.Handler):
    """Sends what is logged to the trainer."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._channel = channel
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._channel.post, Log(record.levelno, self.format(record)))


def step_back(hello: Hello) -> None:
    """Lower the priorities of this process, as far as it is allowed to; see nice(1) and ionice(1)."""
    if hello.nice:
        with contextlib.suppress(OSError):
            os.nice(hello.nice)
    if hello.ionice is not None and sys.platform == "linux":
        number = _IOPRIO_SET.get(os.uname().machine)
        scheduling, level = hello.ionice
        who_process = 1
        if number is not None:
            value = (scheduling << 13) | level
            ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(who_process), 0, ctypes.c_int(value))
