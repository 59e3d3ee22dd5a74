"""The writer process: it serves one trainer, and outlives it as long as something that was staged is not durable."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING

import anyio

from aiockpt.threads import Workers
from aiockpt.writer.channel import Channel
from aiockpt.writer.child_save import ChildSave, Saves
from aiockpt.writer.messages import Begin, Hello, Log, Message, Ready
from aiockpt.writer.trainer_watch import death_of
from aiockpt.writing import WritingTools

if TYPE_CHECKING:
    from anyio.abc import TaskGroup


_NICE = 10
_DRAIN_S = 0.01
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}

logger = logging.getLogger("aiockpt")


def main(end: int, memory: int) -> None:
    """Run until the trainer closes its end, or has died, and everything staged is done with.

    Args:
        end: the descriptor of the socket to the trainer.
        memory: the descriptor of the memory with the chunks.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer decides, or its death
        signal.signal(number, signal.SIG_IGN)
    use_uvloop = False
    with contextlib.suppress(Exception):  # missing, or broken: whatever its import raises
        importlib.import_module("uvloop")
        use_uvloop = True
    with socket.socket(fileno=end) as trainer:
        anyio.run(_Child(Channel(trainer), memory).serve, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


class _Child:
    def __init__(self, channel: Channel, memory: int) -> None:
        self._channel = channel
        self._fd = memory
        self._saves: dict[int, ChildSave] = {}
        self._last: ChildSave | None = None

    async def serve(self) -> None:
        hello = await self._channel.receive()
        if not isinstance(hello, Hello):
            raise TypeError(f"the trainer has begun with {type(hello).__name__}")
        step_back(hello)
        whole = mmap.mmap(self._fd, os.fstat(self._fd).st_size, flags=mmap.MAP_SHARED)
        threads = hello.io_threads
        tools = WritingTools(
            Workers(min(threads, max(2, os.cpu_count() or 1)), "seal", nice=_NICE), Workers(threads, "io")
        )
        shared = Saves(hello.chunk_bytes, memoryview(whole), tools, self._channel.post, hello.patience_s)
        logger.addHandler(_Forwarding(self._channel))
        logger.propagate = False
        async with death_of(hello.trainer) as dead, anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.pump)
            self._channel.post(Ready())
            async with anyio.create_task_group() as saving:
                await self._listen(shared, saving, dead)
                for save in self._saves.values():
                    save.trainer_is_gone()
            with contextlib.suppress(OSError):  # nobody is left to be told
                await self._channel.flush()
            tasks.cancel_scope.cancel()
        tools.io_workers.close()
        tools.seal_workers.close()

    async def _listen(self, shared: Saves, saving: TaskGroup, dead: anyio.Event) -> None:
        """Do as the trainer says, until it says no more."""
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._leave_when_dead, dead, scope)
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        self._take(await self._channel.receive(), shared, saving)
                watching.cancel_scope.cancel()

    async def _leave_when_dead(self, dead: anyio.Event, scope: anyio.CancelScope) -> None:
        """Stop listening when the trainer has died and nothing is left of what it said."""
        await dead.wait()
        while select.select([self._channel.fileno()], [], [], 0)[0]:
            await anyio.sleep(_DRAIN_S)
            if self._channel.ended:
                break
        await anyio.sleep(_DRAIN_S)
        scope.cancel()

    def _take(self, message: Message, shared: Saves, saving: TaskGroup) -> None:
        if isinstance(message, Begin):
            if message.images is not None:
                shared.layouts.clear()
                shared.layouts[message.layout] = [image.unpacked() for image in message.images]
            save = ChildSave(message, shared.layouts[message.layout], shared, self._last)
            self._saves[message.save] = self._last = save
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


class _Forwarding(logging.Handler):
    """Sends what is logged to the trainer."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        self._channel.post(Log(record.levelno, self.format(record)))


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
