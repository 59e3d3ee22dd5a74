"""Stops that hold a save, in this process or in its writer process, until they are opened."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Literal, Protocol

from aiockpt import Completion
from aiockpt.core.threads import Workers
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import FileSink, Storage, Transaction
from aiockpt.storage.wrapper import WrapperTransaction, _WrapperSink
from aiockpt.testing import GatedStorage
from tests.writing.gates import Gate

WAIT_S = 30.0
Writer = Literal["thread", "process"]

_numbers = itertools.count()


class Stop(Protocol):
    """A step of a save, before which it is held.

    Attributes:
        storage: storage to pass to the save.
        holds_a_thread: whether it holds a thread, so that a cancellation has to wait for it.
    """

    storage: Storage
    holds_a_thread: bool

    async def reached(self) -> None:
        """Wait until the save is held."""

    def open(self) -> None:
        """Release the save. Idempotent."""


class TaskStop:
    """Holds a task of the engine."""

    holds_a_thread = False

    def __init__(self, step: str) -> None:
        self._step = step
        self.storage = GatedStorage(LocalStorage(), [step])

    async def reached(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.storage.reached[self._step]

    def open(self) -> None:
        self.storage.open(self._step)


class ProcessStop:
    """Holds a thread of the writer process, by named pipes."""

    holds_a_thread = True

    def __init__(self, step: str, folder: Path) -> None:
        self._gate = Gate(folder / f"gate-{next(_numbers)}")
        self._is_open = False
        self.storage = self._gate.storage(step)

    async def reached(self) -> None:
        await asyncio.to_thread(self._gate.wait)

    def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._gate.open()


class ThreadStop:
    """Holds a thread of the engine in the middle of its first write, with the memory that it writes from.

    Attributes:
        before: content of that memory when the thread stopped.
        after: its content when the thread goes on.
    """

    holds_a_thread = True

    def __init__(self) -> None:
        self.storage = _WritesInThreads(self)
        self.before = self.after = b""
        self._reached: Completion[None] = Completion("the write")
        self._go = threading.Event()

    async def reached(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._reached

    def open(self) -> None:
        self._go.set()

    def write(self, view: memoryview) -> None:
        """Block the calling thread, the first time."""
        if not self._reached.done():
            self.before = bytes(view)
            self._reached._settle(None)
            assert self._go.wait(WAIT_S)
            self.after = bytes(view)


class _WritesInThreads(WrapperStorage):
    def __init__(self, stop: ThreadStop) -> None:
        super().__init__(LocalStorage())
        self.stop = stop

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        inner = await self.inner.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return _Transaction(self, inner, path, workers)


class _Transaction(WrapperTransaction):
    def __init__(self, storage: _WritesInThreads, inner: Transaction, path: str, workers: Workers) -> None:
        super().__init__(storage, inner, path)
        self._stop = storage.stop
        self._workers = workers

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        return _Sink(self._storage, await self._inner.create(name, nbytes), name, self._stop, self._workers)


class _Sink(_WrapperSink):
    def __init__(self, storage: WrapperStorage, inner: FileSink, name: str, stop: ThreadStop, workers: Workers) -> None:
        super().__init__(storage, inner, name)
        self._stop = stop
        self._workers = workers

    async def write(self, view: memoryview, *more: object) -> None:
        await self._workers.run(self._stop.write, view)
        await self._inner.write(view, *more)


def stop_before(step: str, writer: Writer, folder: Path) -> Stop:
    """Make a stop for a save by this kind of writer; "a thread" stops within a write. Pipes go to `folder`."""
    if writer == "process":
        return ProcessStop("write" if step == "a thread" else step, folder)
    return ThreadStop() if step == "a thread" else TaskStop(step)
