"""Storages that stop or fail in a writer process, controlled by the test through named pipes."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import anyio
import psutil

from aiockpt.core.threads import Workers
from aiockpt.errors import WriteError
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import NO_DOCUMENTS, Document, Storage, Transaction
from aiockpt.storage.wrapper import WrapperTransaction
from tests.polling import until

WAIT_S = 60.0


class PipedStorage(WrapperStorage):
    """Stops before a step: signals it through one pipe, and continues when it reads a byte from another.

    Args:
        folder: folder of the pipes, which `Gate` makes.
        step: step as in `WrapperStorage.before`.
        nth: occurrence of the step to stop at, counted from 1 in each process.
        inner: the storage that does the steps; None: the file system.
    """

    def __init__(self, folder: Path, step: str, nth: int = 1, inner: Storage | None = None) -> None:
        super().__init__(inner or LocalStorage())
        self._folder = folder
        self._step = step
        self._nth = nth
        self._seen = 0

    async def before(self, step: str, name: str) -> None:
        if step == self._step:
            self._seen += 1
            if self._seen == self._nth:
                await anyio.to_thread.run_sync(self._stop)

    def _stop(self) -> None:
        (self._folder / "reached").open("wb").close()  # blocks until the test reads
        with (self._folder / "go").open("rb") as go:
            go.read(1)


class KilledAfterCommit(WrapperStorage):
    """Kills its process right after a checkpoint is published."""

    def __init__(self) -> None:
        super().__init__(LocalStorage())

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        inner = await self.inner.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return _Killed(self, inner, path)


class _Killed(WrapperTransaction):
    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await super().commit(documents)
        os.kill(os.getpid(), signal.SIGKILL)


class BrokenStorage(WrapperStorage):
    """Fails at a step, in the process that reaches it; only for one path or file, if a name is given."""

    def __init__(self, step: str, name: str = "") -> None:
        super().__init__(LocalStorage())
        self._step = step
        self._name = name

    async def before(self, step: str, name: str) -> None:
        if step == self._step and name.endswith(self._name):
            raise WriteError(f"{step} of {os.path.basename(name)} in process {os.getpid()}: no space") from OSError(
                28, "No space left on device"
            )


class Gate:
    """The test's end of the pipes of a `PipedStorage`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("reached", "go"):
            os.mkfifo(folder / name)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the test's end of pipes that another process has made."""
        gate = cls.__new__(cls)
        gate.folder = folder
        return gate

    def storage(self, step: str, nth: int = 1, inner: Storage | None = None) -> PipedStorage:
        return PipedStorage(self.folder, step, nth, inner)

    def wait(self) -> None:
        """Wait until a process has stopped at the step."""
        fd = os.open(self.folder / "reached", os.O_RDONLY | os.O_NONBLOCK)
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        try:
            assert poll.poll(WAIT_S * 1000), "the step was not reached"
        finally:
            os.close(fd)

    def open(self) -> None:
        """Wait until a process is at the gate, and release it."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                go = os.open(self.folder / "go", os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError as exc:
                if exc.errno != errno.ENXIO:
                    raise
                assert time.monotonic() < deadline, "no process waits for the gate"
                time.sleep(0.01)
        with open(go, "wb") as pipe:
            pipe.write(b"x")


def writers_of(pid: int) -> list[psutil.Process]:
    """Return the writer processes of a trainer; wait until there is one."""
    found: list[psutil.Process] = []

    def look() -> bool:
        children = psutil.Process(pid).children()
        found[:] = [child for child in children if "aiockpt.writing.process" in " ".join(child.cmdline())]
        return bool(found)

    until(look, WAIT_S)
    return found


def ended(pid: int, timeout_s: float = WAIT_S) -> bool:
    """Wait until a process has ended, which need not be a child; return whether it ended in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)
