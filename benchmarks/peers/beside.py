"""Contenders that save beside other work: aiockpt and its peers, with a writer thread or a writer process."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import aiockpt
from aiockpt.saving.handle import SaveHandle
from benchmarks.harness.measure import Sample
from benchmarks.harness.states import State
from benchmarks.peers import contenders

LIMIT_S = 300.0


class Saving(ABC):
    """A save in progress.

    Attributes:
        blocked_s: the seconds for which the call blocked.
    """

    blocked_s: float

    @abstractmethod
    def let_change(self) -> None:
        """Block until the tensors may change, or make the device wait."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the save is over."""

    @abstractmethod
    def finish(self) -> Sample:
        """Block until the save is over; return its moments, in seconds since it began."""


class Beside(ABC):
    """A contender that saves in the background, without an event loop of the caller."""

    name: str
    note: str = ""

    async def open(self, state: State) -> None:
        """Create what is kept between saves."""

    @abstractmethod
    def begin(self, state: State, path: Path) -> Saving:
        """Start a save."""

    async def close(self) -> None:
        """Release what `open` created."""


# --- aiockpt ---------------------------------------------------------------------------------------------


class OurSaving(Saving):
    """A save of this package."""

    def __init__(self, checkpointer: aiockpt.AsyncCheckpointer, state: State, path: Path) -> None:
        started = time.perf_counter()
        self.handle: SaveHandle = checkpointer.save(state, path)
        self.blocked_s = time.perf_counter() - started

    def let_change(self) -> None:
        self.handle.fence(LIMIT_S)

    def done(self) -> bool:
        return self.handle.written.done()

    def finish(self) -> Sample:
        result = self.handle.written.result(LIMIT_S)
        return {"blocked_s": self.blocked_s, "staged_s": result.staged_s, "durable_s": result.written_s}


class AiockptBeside(Beside):
    """This package, with staging memory allocated before the first save.

    Args:
        writer: the option of `aiockpt.AsyncCheckpointer`.
    """

    note = "CRC"

    def __init__(self, writer: Literal["thread", "process"] | aiockpt.ProcessWriter) -> None:
        kind = f"process, nice {writer.nice}" if isinstance(writer, aiockpt.ProcessWriter) else writer
        self.name = f"aiockpt, {kind}"
        self._writer = writer

    async def open(self, state: State) -> None:
        checkpointer = aiockpt.AsyncCheckpointer(writer=self._writer, process_group=None)
        self.checkpointer = await checkpointer.__aenter__()
        await self.checkpointer.prewarm(state)

    def begin(self, state: State, path: Path) -> OurSaving:
        return OurSaving(self.checkpointer, state, path)

    async def close(self) -> None:
        if hasattr(self, "checkpointer"):
            await self.checkpointer.aclose()


# --- peers -----------------------------------------------------------------------------------------------


class PeerSaving(Saving):
    """A save with futures.

    Args:
        began: the time of the call, as a value of `time.perf_counter`.
        blocked_s: the seconds for which the call blocked.
        staged: a function that blocks until the tensors may change.
        written: the future of the durable checkpoint.
    """

    def __init__(self, began: float, blocked_s: float, staged: Callable[[], object], written: Future[Any]) -> None:
        self.blocked_s, self._staged, self._written = blocked_s, staged, written
        self._at: list[float] = []
        written.add_done_callback(lambda _: self._at.append(time.perf_counter() - began))

    def let_change(self) -> None:
        self._staged()

    def done(self) -> bool:
        return self._written.done()

    def finish(self) -> Sample:
        self._written.result(LIMIT_S)
        return {"blocked_s": self.blocked_s, "durable_s": self._at[0]}


class DcpBeside(Beside):
    """``dcp.async_save`` with its asynchronous stager."""

    def __init__(self, writer: Literal["thread", "process"], device: str = "cpu") -> None:
        self._saver = contenders.DcpAsyncSave("async", writer, device)
        self.name, self.note = f"dcp.async_save, {writer}", self._saver.note

    async def open(self, state: State) -> None:
        await self._saver.open(state)

    def begin(self, state: State, path: Path) -> PeerSaving:
        began = time.perf_counter()
        staging, written = self._saver.begin(state, path)
        blocked_s = time.perf_counter() - began
        staged = written if staging is None else staging
        return PeerSaving(began, blocked_s, lambda: staged.result(LIMIT_S), written)

    async def close(self) -> None:
        await self._saver.close()


class _Manager(contenders.TorchCheckpointing):
    """torch_checkpointing's manager, with the moments of a save."""

    def begin(self, path: Path) -> PeerSaving:
        began = time.perf_counter()
        written = self._manager.save(os.fspath(path), self._items)
        blocked_s = time.perf_counter() - began
        if not isinstance(written, Future):
            raise TypeError(f"an asynchronous save gave {written!r}")
        return PeerSaving(began, blocked_s, self._wait_until_staged, written)


class TorchCheckpointingBeside(Beside):
    """``torch_checkpointing``: staging to shared memory, pinned for a state on a GPU; a process writes."""

    def __init__(self) -> None:
        self._manager: _Manager | None = None
        self.name, self.note = _Manager().name, "in a process, synced by a hook"

    async def open(self, state: State) -> None:
        manager = _Manager()
        await manager.open(state)
        self._manager = manager

    def begin(self, state: State, path: Path) -> PeerSaving:
        if self._manager is None:
            raise RuntimeError("not open")
        return self._manager.begin(path)

    async def close(self) -> None:
        if self._manager is not None:
            await self._manager.close()


def peers(device: str = "cpu") -> list[Beside]:
    """Return the peers that can save beside other work."""
    return [DcpBeside("thread", device), DcpBeside("process", device), TorchCheckpointingBeside()]
