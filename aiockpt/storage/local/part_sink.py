"""One process's part of a file that several processes write at the same time."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.errors import WriteError
from aiockpt.storage.base import PartSink
from aiockpt.storage.local.retries import described, sync_fd
from aiockpt.storage.local.sink import DIRECT_MIN_BYTES, FILE_MODE
from aiockpt.storage.syscalls import allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.core.threads import Workers
    from aiockpt.storage.local.retries import Repeater

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_FLAGS = os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)

logger = logging.getLogger("aiockpt")


class LocalPartSink(PartSink):
    """Writes runs of bytes at their offsets: past the page cache where a run has whole blocks at aligned addresses.

    Blocks that a run fills only partly go through the page cache, where neighbours of other processes meet: the kernel
    merges them by bytes, on a network file system too, since the file has its final size before anybody opens it.
    """

    def __init__(self, path: str, final: str, *, fsync: bool, workers: Workers, repeater: Repeater) -> None:
        self.path = path
        self._final = final  # its later path, for messages
        self._fsync = fsync
        self._workers = workers
        self._again = repeater.run
        self._fd = self._direct_fd = -1

    async def reserve(self, nbytes: int) -> None:
        """Create the file with its final size, and reserve the space, so that a full disk fails at once."""
        try:
            await self._again(f"create {self._final}", partial(self._workers.run, self._reserve, nbytes))
        except OSError as exc:
            raise WriteError(f"can't create {self._final} ({nbytes} bytes): {described(exc)}") from exc

    def _reserve(self, nbytes: int) -> None:
        # Not O_EXCL: an attempt that failed may have made it, in a directory that nobody else knows yet.
        fd = os.open(self.path, _FLAGS | os.O_CREAT, FILE_MODE)
        try:
            os.ftruncate(fd, nbytes)
            if nbytes >= DIRECT_MIN_BYTES:
                allocate(fd, nbytes)
        finally:
            os.close(fd)

    async def open(self, *, direct: bool) -> None:
        """Open the file, which another process may have created."""
        try:
            await self._again(f"open {self._final}", partial(self._workers.run, self._open, direct))
        except OSError as exc:
            raise WriteError(f"can't open {self._final}: {described(exc)}") from exc

    def _open(self, direct: bool) -> None:
        self._fd = os.open(self.path, _FLAGS)
        if direct and _O_DIRECT and os.fstat(self._fd).st_size >= DIRECT_MIN_BYTES:
            with contextlib.suppress(OSError):  # the file system has no direct I/O
                self._direct_fd = os.open(self.path, _FLAGS | _O_DIRECT)

    async def write(self, view: memoryview, runs: Sequence[tuple[int, int, int]]) -> None:
        """Write runs of ``view``."""
        try:
            await self._again(f"write {self._final}", partial(self._workers.run, self._write, view, runs))
        except OSError as exc:
            raise WriteError(f"can't write {self._final}: {described(exc)}") from exc

    def _write(self, view: memoryview, runs: Sequence[tuple[int, int, int]]) -> None:
        for offset, at, nbytes in runs:
            part = view[at : at + nbytes]
            if self._direct_fd >= 0 and nbytes >= DIRECT_MIN_BYTES and (offset - at) % BLOCK_BYTES == 0:
                head = -offset % BLOCK_BYTES
                tail = (nbytes - head) % BLOCK_BYTES
                whole = part[head : nbytes - tail]
                self._write_at(part[:head], offset)
                self._write_directly(whole, offset + head)
                self._write_at(part[nbytes - tail :], offset + nbytes - tail)
            else:
                self._write_at(part, offset)

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
                self._write_at(part[count:], offset + count)
                return
            part, offset = part[count:], offset + count

    def _write_at(self, part: memoryview, offset: int) -> None:
        while part:
            count = os.pwrite(self._fd, part, offset)
            if count == 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            part, offset = part[count:], offset + count

    async def finish(self) -> None:
        """Sync and close."""
        try:
            if self._fsync:
                await self._workers.run(sync_fd, self._fd)
            await self._workers.run(self._close)
        except OSError as exc:
            raise WriteError(f"can't make {self._final} durable: {described(exc)}") from exc

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
