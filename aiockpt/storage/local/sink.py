"""Files being written to a local or mounted file system: from beginning to end, or a part of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import aiofiles

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.threads import Workers, outlast
from aiockpt.errors import WriteError
from aiockpt.storage.base import FileSink, PartSink
from aiockpt.storage.faults import described, errors
from aiockpt.storage.local.retries import Repeater, sync_fd
from aiockpt.storage.syscalls import allocate

_DIRECT_MIN_BYTES = 1 << 20
FILE_MODE = 0o664  # less the umask; never writable for others
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_PART_FLAGS = os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_NEW_FLAGS = _PART_FLAGS | os.O_CREAT | os.O_EXCL  # what is there already was made by another process

logger = logging.getLogger("aiockpt")


class NewFile(NamedTuple):
    """A file in a temporary directory, and how it is written."""

    path: str
    final: str  # its later path, for messages
    fsync: bool
    workers: Workers
    repeater: Repeater


class LocalSink(FileSink):
    """Writes a file of aiofiles with the engine's threads; uses direct I/O until the file system refuses it."""

    def __init__(self, file: NewFile, nbytes: int | None) -> None:
        self.path, self._final, self._fsync, self._workers, repeater = file
        self._again = repeater.run
        self._nbytes = nbytes  # None if that is not known yet
        self._file: Any = None
        self._written = 0
        self._direct = False
        self._is_padded = False  # the file is longer than it is to be

    async def open(self, *, direct: bool) -> None:
        """Create the file and reserve its space, so that a full disk fails at once.

        ``direct``: write past the page cache if it is large and the file system allows it.
        """
        is_large = self._nbytes is None or self._nbytes >= _DIRECT_MIN_BYTES
        self._direct = direct and is_large and _O_DIRECT != 0
        size = "" if self._nbytes is None else f" ({self._nbytes} bytes)"
        with errors(WriteError, f"create {self._final}{size}", self.path):
            # Not idempotent, with O_EXCL: after an ambiguous error it is retried only if the file is not there.
            await self._again(f"create {self._final}", lambda: outlast(self._open()), undone=self._is_not_there)
            if self._nbytes is not None and is_large:
                reserve = partial(self._workers.run, allocate, self._file.fileno(), self._nbytes)
                await self._again(f"reserve {self._nbytes} bytes for {self._final}", reserve)

    async def _open(self) -> None:
        # Unbuffered: each write is one system call, from the aligned chunk itself.
        opening = aiofiles.open(self.path, "wb", buffering=0, opener=self._opener, executor=self._workers)
        self._file = await opening  # not returned: if the caller is cancelled meanwhile, `close` needs it

    def _opener(self, path: str, flags: int) -> int:
        # A file or a link that is there already was made by another process: it must not be written to.
        flags |= os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        try:
            return os.open(path, flags | (_O_DIRECT if self._direct else 0), FILE_MODE)
        except OSError as exc:
            if not self._direct or exc.errno != errno.EINVAL:
                raise
        self._direct = False
        # Some file systems create the file before they refuse direct I/O.
        return os.open(path, flags & ~os.O_EXCL, FILE_MODE)

    async def _is_not_there(self) -> bool:
        return not await self._workers.run(os.path.lexists, self.path)

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        rest = view if self._nbytes is None else view[: self._nbytes - self._written]
        try:
            while rest:
                what = f"write {self._final} at offset {self._written}"
                # Not by aiofiles: if cancelled, it returns at once, while its thread goes on reading the buffer.
                count = await self._again(what, partial(self._workers.run, self._write_some, rest))
                if count == 0:
                    raise OSError(errno.EIO, "the file system wrote nothing")
                self._written += count
                rest = rest[count:]
        except OSError as exc:
            raise WriteError(
                f"can't write {self._final} at offset {self._written}: {described(exc, self.path)}"
            ) from exc
        free()

    def _write_some(self, view: memoryview) -> int:
        """Write some of the next bytes at their offset, whatever an earlier attempt has done. Blocks."""
        blocks = self._blocks(view) if self._direct and self._written % BLOCK_BYTES == 0 else []  # a short write
        if blocks:
            try:
                if blocks[1:]:
                    return min(os.pwritev(self._file.fileno(), blocks, self._written), len(view))
                return min(os.pwrite(self._file.fileno(), blocks[0], self._written), len(view))
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
        if self._direct:
            self._leave_direct()
        return os.pwrite(self._file.fileno(), view, self._written)

    def _blocks(self, view: memoryview) -> list[memoryview | mmap.mmap]:
        """Return the whole blocks; the last one of a file is padded, if the size of the file is known."""
        whole = len(view) - len(view) % BLOCK_BYTES
        blocks: list[memoryview | mmap.mmap] = [view[:whole]] if whole else []
        if whole < len(view) and self._written + len(view) == self._nbytes:
            block = mmap.mmap(-1, BLOCK_BYTES)  # at the beginning of a page
            block[: len(view) - whole] = view[whole:]
            self._is_padded = True
            blocks.append(block)
        return blocks

    def _leave_direct(self) -> None:
        """Go on through the page cache: address, offset or length are not aligned for direct I/O."""
        fd = self._file.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)
        self._direct = False

    async def finish(self) -> None:
        with errors(WriteError, f"make {self._final} durable", self.path):
            if self._nbytes is not None and (self._is_padded or self._written != self._nbytes):
                await self._again(f"truncate {self._final}", lambda: outlast(self._file.truncate(self._nbytes)))
            if self._fsync:
                await self._workers.run(sync_fd, self._file.fileno())
            await outlast(self._file.close())

    async def close(self) -> None:
        """Close the file as it is; errors don't matter, since it will be removed."""
        if self._file is not None:
            try:
                await outlast(self._file.close())
            except OSError as exc:
                logger.debug("closing the abandoned file %s: %s", self.path, exc)


def write_small(file: NewFile, data: bytes | bytearray | memoryview) -> None:
    """Create, write, sync and close a file. Blocks; if it fails, the file is removed, so that it can be tried again."""
    step = "create"
    try:
        fd = os.open(file.path, _NEW_FLAGS, FILE_MODE)
        try:
            try:
                if len(data) >= _DIRECT_MIN_BYTES:  # so that a full disk fails at once
                    allocate(fd, len(data))
                step = "write"
                _write_all(fd, memoryview(data), 0)
                step = "make durable"
                if file.fsync:
                    sync_fd(fd)
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                os.unlink(file.path)
            raise
    except OSError as exc:
        raise WriteError(f"can't {step} {file.final}: {described(exc, file.path)}") from exc


def _write_all(fd: int, part: memoryview, offset: int) -> None:
    while part:
        count = os.pwrite(fd, part, offset)
        if count == 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        part, offset = part[count:], offset + count


# --- a part of a file ---------------------------------------------------------------------------------


class LocalPartSink(PartSink):
    """Writes runs of bytes at their offsets: past the page cache where a run has whole blocks at aligned addresses.

    Blocks that a run fills only partly go through the page cache, where they meet the bytes of other processes: the
    kernel merges them by bytes, on a network file system too, since the file has its final size before it is opened.
    """

    def __init__(self, file: NewFile) -> None:
        self.path, self._final, self._fsync, self._workers, repeater = file
        self._again = repeater.run
        self._fd = self._direct_fd = -1

    async def reserve(self, nbytes: int) -> None:
        """Create the file with its final size, and reserve the space, so that a full disk fails at once."""
        with errors(WriteError, f"create {self._final} ({nbytes} bytes)", self.path):
            await self._again(f"create {self._final}", partial(self._workers.run, self._reserve, nbytes))

    def _reserve(self, nbytes: int) -> None:
        # Not O_EXCL: a failed attempt may have made it, and no other process knows the directory yet.
        fd = os.open(self.path, _PART_FLAGS | os.O_CREAT, FILE_MODE)
        try:
            os.ftruncate(fd, nbytes)
            if nbytes >= _DIRECT_MIN_BYTES:
                allocate(fd, nbytes)
        finally:
            os.close(fd)

    async def open(self, *, direct: bool) -> None:
        """Open the file, which another process may have created."""
        with errors(WriteError, f"open {self._final}", self.path):
            await self._again(f"open {self._final}", partial(self._workers.run, self._open, direct))

    def _open(self, direct: bool) -> None:
        self._fd = os.open(self.path, _PART_FLAGS)
        if direct and _O_DIRECT and os.fstat(self._fd).st_size >= _DIRECT_MIN_BYTES:
            with contextlib.suppress(OSError):  # the file system has no direct I/O
                self._direct_fd = os.open(self.path, _PART_FLAGS | _O_DIRECT)

    async def write(self, view: memoryview, runs: Sequence[tuple[int, int, int]]) -> None:
        with errors(WriteError, f"write {self._final}", self.path):
            await self._again(f"write {self._final}", partial(self._workers.run, self._write, view, runs))

    def _write(self, view: memoryview, runs: Sequence[tuple[int, int, int]]) -> None:
        for offset, at, nbytes in runs:
            part = view[at : at + nbytes]
            if self._direct_fd >= 0 and nbytes >= _DIRECT_MIN_BYTES and (offset - at) % BLOCK_BYTES == 0:
                head = -offset % BLOCK_BYTES
                tail = (nbytes - head) % BLOCK_BYTES
                whole = part[head : nbytes - tail]
                _write_all(self._fd, part[:head], offset)
                self._write_directly(whole, offset + head)
                _write_all(self._fd, part[nbytes - tail :], offset + nbytes - tail)
            else:
                _write_all(self._fd, part, offset)

    def _write_directly(self, part: memoryview, offset: int) -> None:
        while part:
            try:
                count = os.pwrite(self._direct_fd, part, offset)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                count = 0
            if count % BLOCK_BYTES or not count:
                count -= count % BLOCK_BYTES
                _write_all(self._fd, part[count:], offset + count)
                return
            part, offset = part[count:], offset + count

    async def finish(self) -> None:
        with errors(WriteError, f"make {self._final} durable", self.path):
            if self._fsync:  # of the file, so for the writes of both descriptors
                await self._workers.run(sync_fd, self._fd)
            await self._workers.run(self._close)

    def _close(self) -> None:
        fds, self._fd, self._direct_fd = (self._direct_fd, self._fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    async def close(self) -> None:
        """Close the file as it is; errors don't matter, since it will be removed."""
        try:
            await self._workers.run(self._close)
        except OSError as exc:
            logger.debug("closing the abandoned file %s: %s", self.path, exc)
