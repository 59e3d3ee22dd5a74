"""A minimal durable storage, and variants of it that skip one sync each."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from aiockpt.core.threads import Workers
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import NO_DOCUMENTS, Document, FileSink, Source, Storage, Transaction
from aiockpt.storage.syscalls import rename_exchange
from tests.crash.scenarios import OPTIONS, Announce, Program, checkpointer

Care = Literal[
    "sync a data file",
    "sync .metadata",
    "sync the manifest",
    "sync the hidden directory",
    "sync the parent directory",
    "sync before it is announced",
    "sync before what it replaced is removed",
]
CARES: tuple[Care, ...] = get_args(Care)


class CarelessStorage(Storage):
    """A storage of checkpoints in directories that skips one sync or does it too late.

    Args:
        lacks: the sync to skip or delay; None for a correct storage.
    """

    def __init__(self, lacks: Care | None = None) -> None:
        self.replaced: list[str] = []
        self._lacks = lacks
        self._inner = LocalStorage()

    def resolve(self, path: str) -> str:
        return self._inner.resolve(path)

    def check(self, path: str, *, overwrite: bool) -> None:
        self._inner.check(path, overwrite=overwrite)

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        path = self.resolve(path)
        hidden = os.path.join(os.path.dirname(path), f".aiockpt-{secrets.token_hex(4)}")
        await workers.run(os.mkdir, hidden)
        return _CarelessTransaction(path, hidden, self._lacks, self.replaced, workers)

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await self._inner.open(path, workers=workers)

    def settle(self, folder: Path) -> None:
        """Do the delayed sync and removals of a storage that announces too early."""
        _sync(str(folder))
        for hidden in self.replaced:
            shutil.rmtree(hidden)


class _CarelessTransaction(Transaction):
    def __init__(self, path: str, hidden: str, lacks: Care | None, replaced: list[str], workers: Workers) -> None:
        self._replaced = replaced
        self._path = path
        self._hidden = hidden
        self._lacks = lacks
        self._workers = workers

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        care = {".metadata": "sync .metadata", ".aiockpt.json": "sync the manifest"}.get(name, "sync a data file")
        return _CarelessSink(os.path.join(self._hidden, name), nbytes, care != self._lacks, self._workers)

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await self.write_files(documents)
        await self._workers.run(self._publish)

    def _publish(self) -> None:
        parent = os.path.dirname(self._path)
        if self._lacks != "sync the hidden directory":
            _sync(self._hidden)
        replaces = os.path.lexists(self._path)
        (rename_exchange if replaces else os.rename)(self._hidden, self._path)
        late = self._lacks == "sync before what it replaced is removed"
        if not late and self._lacks not in ("sync the parent directory", "sync before it is announced"):
            _sync(parent)
        if replaces and self._lacks == "sync before it is announced":
            self._replaced.append(self._hidden)
        elif replaces:
            shutil.rmtree(self._hidden)
        if late:
            _sync(parent)

    async def abort(self) -> None:
        if os.path.lexists(self._hidden):
            await self._workers.run(shutil.rmtree, self._hidden)


class _CarelessSink(FileSink):
    def __init__(self, path: str, nbytes: int | None, careful: bool, workers: Workers) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by finish
        self._nbytes = nbytes
        self._careful = careful
        self._workers = workers

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        rest = None if self._nbytes is None else self._nbytes - self._file.tell()
        await self._workers.run(self._file.write, view[:rest])
        free()

    async def finish(self) -> None:
        if self._careful:
            await self._workers.run(os.fsync, self._file.fileno())
        self._file.close()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_carelessly(folder: Path, announce: Announce, lacks: Care | None) -> None:
    """Save under a new name, then over an existing checkpoint."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce)
        storage = CarelessStorage(lacks)
        for name, step, overwrite in (("d", 2, False), ("c", 3, True)):
            program.save(name, step, overwrite=overwrite, storage=storage, **OPTIONS)
        storage.settle(folder)


def careless(lacks: Care | None) -> partial[None]:
    return partial(save_carelessly, lacks=lacks)
