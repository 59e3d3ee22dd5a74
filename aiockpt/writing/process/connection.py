"""The trainer's end of one writer process: it tells messages apart, and notices when the process has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

import anyio

from aiockpt.core.threads import DaemonThreads
from aiockpt.errors import WriteError
from aiockpt.writing.process.channel import Channel
from aiockpt.writing.process.messages import Hello, Log, Message, Ready

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from aiockpt.writing.process.launch import WriterProcess

START_S = 120.0
"""How long a process may take to start."""
_END_S = 30.0
_LEFT_S = 1.0

logger = logging.getLogger("aiockpt")


class Listener(Protocol):
    """A save that a writer process works at."""

    def take(self, message: Message) -> None:
        """Take note of what the process says."""

    def lose(self, error: WriteError) -> None:
        """Take note that the process has died."""


class Link:
    """One writer process.

    Args:
        process: the process.
        hello: how it is to work.

    Attributes:
        layout: the number of the layout that it was sent last.
        dead: it has ended, or is about to.
    """

    def __init__(self, process: WriterProcess, hello: Hello) -> None:
        self._process = process
        self._channel = Channel(process.end)
        self._saves: dict[int, Listener] = {}
        self._waiter = DaemonThreads(1, f"aiockpt-writer-{process.pid}")
        self._ready = anyio.Event()
        self._heard = anyio.Event()
        self._gone = anyio.Event()
        self._error: WriteError | None = None
        self.layout = 0
        self.dead = False
        self._channel.post(hello)

    def __repr__(self) -> str:
        return f"<writer process {self._process.pid}, {len(self._saves)} saves>"

    def start(self, tasks: TaskGroup) -> None:
        """Look after the process until it ends."""
        tasks.start_soon(self._look_after)

    def enter(self, number: int, save: Listener) -> None:
        """Let a save hear what the process says of it.

        Raises:
            WriteError: the process has died.
        """
        if self._error is not None:
            raise self._error
        self._saves[number] = save

    def leave(self, number: int) -> None:
        """Let nobody hear of that save any more."""
        self._saves.pop(number, None)

    def post(self, message: Message) -> None:
        """Let a message be sent; one that nobody can take any more is dropped: the end of the process is told apart."""
        self._channel.post(message)

    async def send(self, message: Message) -> None:
        """Send a message, and wait until it is in the kernel, which delivers it even if this process dies."""
        self._channel.post(message)
        with contextlib.suppress(OSError):
            await self._channel.flush()

    def kill(self) -> None:
        """End the process at once. From any thread."""
        self._process.kill()

    async def aclose(self) -> None:
        """Let the process end, and wait until it has. Idempotent."""
        self.dead = True
        with contextlib.suppress(OSError), anyio.move_on_after(_END_S):
            await self._channel.flush()
        self._channel.finish()
        with anyio.move_on_after(_END_S):
            await self._gone.wait()
        if not self._gone.is_set():
            logger.warning("the writer process %d did not end within %g s and was killed", self._process.pid, _END_S)
            self.kill()
            await self._gone.wait()

    async def _look_after(self) -> None:
        what = "has died"
        try:
            await self._serve()
        except Exception as exc:  # a defect: those who wait are to be told
            logger.exception("looking after the writer process %d has failed", self._process.pid)
            what = f"was given up ({type(exc).__name__}: {exc})"
            self.kill()
        finally:
            self.dead = True
            self._waiter.shutdown(wait=False)
            self._lose(what)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.pump)
            tasks.start_soon(self._listen)
            tasks.start_soon(self._expect_ready)
            await loop.run_in_executor(self._waiter, self._process.wait)
            self.dead = True
            with anyio.move_on_after(_LEFT_S):  # what it said before; a forked process may hold the other end open
                await self._heard.wait()
            tasks.cancel_scope.cancel()
        await loop.run_in_executor(None, self._waiter.end, _END_S)

    def _lose(self, what: str) -> None:
        """Tell those who wait that the process is no more."""
        self._error = WriteError(
            f"the writer process {self._process.pid} {what} ({self._process.how_it_ended()}); the next save starts a "
            "new one"
        )
        self._process.close()
        saves, self._saves = self._saves, {}
        for save in saves.values():
            save.lose(self._error)
        self._gone.set()

    async def _expect_ready(self) -> None:
        with anyio.move_on_after(START_S):
            await self._ready.wait()
        if not self._ready.is_set():
            logger.error("the writer process %d did not start within %g s", self._process.pid, START_S)
            self.kill()

    async def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = await self._channel.receive()
                if isinstance(message, Ready):
                    self._ready.set()
                elif isinstance(message, Log):
                    logger.log(message.level, "writer process %d: %s", self._process.pid, message.text)
                elif message.save in self._saves:
                    self._saves[message.save].take(message)
        self._ready.set()
        self._heard.set()
