"""Checkpoints in a directory of a local or mounted file system.

The files go to a hidden directory beside the final one; each is synced, then the directory, then it is
renamed to its final name, then the parent directory is synced. So the final name shows a complete and
durable checkpoint or nothing. A checkpoint that is one file is written there as well, and renamed alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import uuid
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import aiofiles

from aiockpt.errors import AiockptError, CommitError, WriteError
from aiockpt.storage.base import Fate, FileSink, Identity, Source, Storage, Transaction
from aiockpt.storage.local_source import open_source
from aiockpt.storage.publish import (
    NotTakenBackError,
    check_free,
    contents,
    fate_of,
    identity,
    make_directories,
    publish,
    remove,
    sizes_in,
    sweep,
    sync_directory,
    write_word,
)
from aiockpt.storage.syscalls import allocate
from aiockpt.threads import drained

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.threads import Workers

_BLOCK_BYTES = 4096
_DIRECT_MIN_BYTES = 1 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)

logger = logging.getLogger("aiockpt")


class LocalStorage(Storage):
    """Keeps each checkpoint in a directory, or in one file.

    Args:
        direct_io: write large files past the page cache, where the file system allows it.
        fsync: make files and directories durable. Without it a crash of the machine may lose a checkpoint
            that was announced as written.
    """

    def __init__(self, *, direct_io: bool = True, fsync: bool = True) -> None:
        self._direct_io = direct_io
        self._fsync = fsync
        self._buffers: deque[memoryview] = deque()

    def __repr__(self) -> str:
        return f"LocalStorage(direct_io={self._direct_io}, fsync={self._fsync})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LocalStorage, direct_io=self._direct_io, fsync=self._fsync), ()

    def locate(self, path: str) -> str:
        """Give the absolute path."""
        if "://" in path:
            raise AiockptError(f"{path} is a URL; this version keeps checkpoints in directories, so give a path")
        if not path:
            raise AiockptError("the path is empty; name a directory or a file")
        return os.path.abspath(path)

    def check(self, path: str, *, overwrite: bool) -> None:
        """Look whether the path is free, or holds what may be overwritten."""
        try:
            check_free(self.locate(path), overwrite=overwrite)
        except OSError as exc:
            if isinstance(exc, AiockptError):
                raise
            raise WriteError(f"can't look at {path}: {exc}") from exc

    def new_ticket(self, path: str) -> str:
        """Choose a name for the hidden directory."""
        # Shortened, for a name may have 255 bytes at most.
        name = os.fsdecode(os.fsencode(os.path.basename(self.locate(path)))[:180])
        return f".{name}.aiockpt-{os.getpid()}-{uuid.uuid4().hex[:12]}"

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        """Make the hidden directory that the files go to."""
        path = self.locate(path)
        await workers.run(self.check, path, overwrite=overwrite)
        hidden = _beside(path, ticket or self.new_ticket(path))
        try:
            await workers.run(make_directories, hidden, self._fsync)
            own = await workers.run(identity, hidden)
        except OSError as exc:
            raise WriteError(f"can't make the directory for {path}: {exc}") from exc
        return _LocalTransaction(self, path, hidden, overwrite=overwrite, workers=workers, own=own)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> Transaction:
        """Write to the hidden directory that another process has made."""
        path = self.locate(path)
        hidden = _beside(path, ticket)
        own = await workers.run(identity, hidden)
        if own is None:
            raise WriteError(
                f"{hidden}, which rank 0 has made for {path}, can't be seen on {socket.gethostname()}: all ranks must "
                "save to one file system that every host has mounted"
            )
        return _JoinedTransaction(self, path, hidden, overwrite=False, workers=workers, own=own)

    async def adopt(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> Transaction:
        """Go on with the hidden directory that another process has made."""
        path = self.locate(path)
        return _LocalTransaction(self, path, _beside(path, ticket), overwrite=overwrite, workers=workers, own=identity)

    def within(self, path: str, *, workers: Workers) -> Transaction:
        """Write files into a directory that is there, for who publishes it by other means."""
        path = self.locate(path)
        return _WithinTransaction(self, path, path, overwrite=False, workers=workers, own=None)

    async def open(self, path: str, *, workers: Workers) -> Source:
        """Look at a checkpoint's directory."""
        return await workers.run(open_source, self.locate(path), direct_io=self._direct_io, buffers=self._buffers)


class _LocalTransaction(Transaction):
    def __init__(
        self,
        storage: LocalStorage,
        path: str,
        hidden: str,
        *,
        overwrite: bool,
        workers: Workers,
        own: Identity | None,
    ) -> None:
        self._storage = storage
        self._path = path
        self._hidden = hidden
        self._overwrite = overwrite
        self._workers = workers
        self._single = ""
        self._sinks: list[_LocalSink] = []
        self._over = False
        self._identity = own

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        is_large = nbytes is None or nbytes >= _DIRECT_MIN_BYTES
        direct = self._storage._direct_io and is_large and _O_DIRECT != 0
        if not name:
            self._single = os.path.basename(self._path)
        path = os.path.join(self._hidden, name or self._single)
        final = os.path.join(self._path, name) if name else self._path
        sink = _LocalSink(path, final, nbytes, fsync=self._storage._fsync, workers=self._workers)
        self._sinks.append(sink)
        await sink.open(direct=direct)
        return sink

    async def commit(self) -> None:
        try:
            await self._workers.run(
                publish,
                self._hidden,
                self._path,
                self._single,
                overwrite=self._overwrite,
                fsync=self._storage._fsync,
            )
        except NotTakenBackError as exc:
            self._over = True  # what is in the hidden directory may be the only good checkpoint
            raise CommitError(str(exc)) from exc.__cause__
        self._over = True

    async def abort(self) -> None:
        if self._over:
            return
        self._over = True
        for sink in self._sinks:
            await sink.close()
        try:
            await self._workers.run(remove, self._hidden)
        except OSError as exc:
            raise WriteError(
                f"can't remove the unfinished checkpoint {self._hidden}: {exc}; remove it by hand"
            ) from exc

    @property
    def ticket(self) -> str:
        return os.path.basename(self._hidden)

    async def sizes(self) -> Mapping[str, int]:
        try:
            return await self._workers.run(sizes_in, self._hidden)
        except OSError as exc:
            raise WriteError(f"can't look at what was written for {self._path}: {exc}") from exc

    @property
    def identity(self) -> Identity | None:
        return self._identity

    async def leave_word(self, name: str, data: bytes) -> None:
        try:
            await self._workers.run(write_word, f"{self._hidden}-{name}", data)
        except OSError as exc:
            raise WriteError(f"can't leave a word beside {self._path}: {exc}") from exc

    async def word(self, name: str) -> bytes | None:
        try:
            return await self._workers.run(contents, f"{self._hidden}-{name}")
        except OSError as exc:
            raise WriteError(f"can't look at what was written for {self._path}: {exc}") from exc

    async def take_back(self, name: str) -> None:
        await self._remove(f"{self._hidden}-{name}")

    async def discard(self, name: str) -> None:
        await self._remove(os.path.join(self._hidden, name))

    async def _remove(self, path: str) -> None:
        try:
            await self._workers.run(remove, path)
        except OSError as exc:
            raise WriteError(f"can't remove {path}: {exc}; remove it by hand") from exc

    async def fate(self) -> Fate:
        try:
            return await self._workers.run(fate_of, self._hidden, self._path, self._identity)
        except OSError as exc:
            raise WriteError(f"can't look at what was written for {self._path}: {exc}") from exc

    async def tidy(self) -> None:
        self._over = True
        try:
            if await self._workers.run(fate_of, self._hidden, self._path, self._identity) == "published":
                await self._workers.run(remove, self._hidden)  # what it replaced
                await self._workers.run(sync_directory, os.path.dirname(self._path))
        except OSError as exc:
            raise WriteError(f"{self._path} was published, but can't be made durable: {exc}") from exc


class _JoinedTransaction(_LocalTransaction):
    """A part in what another process has begun, and commits or aborts."""

    async def commit(self) -> None:
        if self._storage._fsync:
            try:
                await self._workers.run(sync_directory, self._hidden)
            except OSError as exc:
                raise CommitError(f"can't make the files of {self._path} durable: {exc}") from exc

    async def abort(self) -> None:
        for sink in self._sinks:
            await sink.close()

    async def sweep(self) -> None:
        await self.abort()
        try:
            await self._workers.run(sweep, self._hidden)
        except OSError as exc:
            raise WriteError(
                f"can't remove the unfinished checkpoint {self._hidden}: {exc}; remove it by hand"
            ) from exc


class _WithinTransaction(_JoinedTransaction):
    """Files in a directory that belongs to somebody else: the own ones alone are removed."""

    async def abort(self) -> None:
        await super().abort()
        for sink in self._sinks:
            try:
                await self._workers.run(remove, sink.path)
            except OSError as exc:
                raise WriteError(f"can't remove the unfinished file {sink.path}: {exc}; remove it by hand") from exc


class _LocalSink(FileSink):
    """A file under the engine's executor, through aiofiles; direct I/O until the file system refuses it."""

    def __init__(self, path: str, final: str, nbytes: int | None, *, fsync: bool, workers: Workers) -> None:
        self.path = path
        self._final = final
        self._nbytes = nbytes
        self._fsync = fsync
        self._workers = workers
        self._file: Any = None
        self._written = 0
        self._direct = False

    async def open(self, *, direct: bool) -> None:
        """Create the file and reserve its space, so that a full disk shows at once."""

        def opener(path: str, flags: int) -> int:
            flags |= os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
            try:
                fd = os.open(path, flags | (_O_DIRECT if direct else 0), 0o666)
                self._direct = direct
            except OSError as exc:
                if not direct or exc.errno != errno.EINVAL:
                    raise
                # Some file systems create the file before they refuse direct I/O.
                fd = os.open(path, flags & ~os.O_EXCL, 0o666)
            try:
                if self._nbytes is not None and self._nbytes >= _DIRECT_MIN_BYTES:
                    allocate(fd, self._nbytes)
            except BaseException:
                os.close(fd)
                raise
            return fd

        try:
            self._file = await drained(
                aiofiles.open(self.path, "wb", buffering=0, opener=opener, executor=self._workers.executor).__aenter__()
            )
        except OSError as exc:
            size = "" if self._nbytes is None else f" ({self._nbytes} bytes)"
            raise WriteError(f"can't create {self._final}{size}: {exc}") from exc

    async def write(self, view: memoryview) -> None:
        rest = view
        try:
            while rest:
                if self._direct and len(rest) < _BLOCK_BYTES:
                    await self._workers.run(self._leave_direct)  # the end of a file whose size was not announced
                try:
                    count = await drained(self._file.write(self._next(rest)))
                except OSError as exc:
                    if exc.errno != errno.EINVAL or not self._direct:
                        raise
                    await self._workers.run(self._leave_direct)
                    continue
                if count == 0:
                    raise OSError(errno.EIO, "the file system wrote nothing")
                self._written += count
                rest = rest[count:]
                if self._direct and self._written % _BLOCK_BYTES:
                    await self._workers.run(self._leave_direct)  # a short write left an unaligned rest
                if self._nbytes is not None and self._written >= self._nbytes:
                    return
        except OSError as exc:
            raise WriteError(f"can't write {self._final} at offset {self._written}: {exc}") from exc

    def _next(self, view: memoryview) -> memoryview:
        """Give what can be written at once."""
        if self._direct:
            return view[: len(view) - len(view) % _BLOCK_BYTES]
        return view if self._nbytes is None else view[: self._nbytes - self._written]

    def _leave_direct(self) -> None:
        """Go on through the page cache: address, offset or length can't be written directly."""
        fd = self._file.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)
        self._direct = False

    async def finish(self) -> None:
        try:
            if self._nbytes is not None and self._written != self._nbytes:
                await drained(self._file.truncate(self._nbytes))
            if self._fsync:
                await self._workers.run(os.fsync, self._file.fileno())
            await drained(self._file.close())
        except OSError as exc:
            raise WriteError(f"can't make {self._final} durable: {exc}") from exc

    async def close(self) -> None:
        """Close the file as it is; errors don't matter any more, for it will be removed."""
        if self._file is not None:
            try:
                await drained(self._file.close())
            except OSError as exc:
                logger.debug("closing the abandoned file %s: %s", self.path, exc)


def _beside(path: str, ticket: str) -> str:
    """Give the hidden directory of a ticket.

    Raises:
        WriteError: it is no name of one.
    """
    if os.path.basename(ticket) != ticket or not ticket.startswith("."):
        raise WriteError(f"{ticket!r} is no ticket of an unfinished checkpoint")
    return os.path.join(os.path.dirname(path), ticket)
