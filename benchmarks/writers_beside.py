"""Who saves beside other work: aiockpt and its peers, each with a writer in a thread or in a process."""

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
from benchmarks import contenders
from benchmarks.measure import Sample
from benchmarks.states import State

LIMIT_S = 300.0


class Saving(ABC):
    """A save that goes on beside its caller.

    Attributes:
        blocked_s: how long the call that began it took.
    """

    blocked_s: float

    @abstractmethod
    def let_change(self) -> None:
        """Block, or make the device wait, until the tensors may change."""

    @abstractmethod
    def done(self) -> bool:
        """Tell whether it is over."""

    @abstractmethod
    def finish(self) -> Sample:
        """Block until it is over; give its moments, in seconds since it began."""


class Beside(ABC):
    """Saves in the background; plain programs can use it, and no loop has to run."""

    name: str
    note: str = ""

    async def open(self, state: State) -> None:
        """Make what lives from save to save."""

    @abstractmethod
    def begin(self, state: State, path: Path) -> Saving:
        """Start to save."""

    async def close(self) -> None:
        """End what `open` made."""


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
    """This package, its staging memory made before the first save.

    Args:
        writer: as `aiockpt.AsyncCheckpointer` takes it.
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
    """A save that gives futures.

    Args:
        began: when it did.
        blocked_s: how long the call took.
        staged: blocks until the tensors may change.
        written: when it is durable.
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
    """Tells the moments of a save apart."""

    def begin(self, path: Path) -> PeerSaving:
        began = time.perf_counter()
        written = self._manager.save(os.fspath(path), self._items)
        blocked_s = time.perf_counter() - began
        if not isinstance(written, Future):
            raise TypeError(f"an asynchronous save gave {written!r}")
        return PeerSaving(began, blocked_s, self._wait_until_staged, written)


class TorchCheckpointingBeside(Beside):
    """``torch_checkpointing``: staging to shared memory, pinned where there is a device; written by a process."""

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
    """Give the peers that can save beside other work."""
    return [DcpBeside("thread", device), DcpBeside("process", device), TorchCheckpointingBeside()]
