"""Reads of a file of a local or mounted file system: from the page cache if it has the bytes, else past it.

Bytes in the page cache are copied straight to their target. Others are read with O_DIRECT, in large aligned pieces:
into place where address and kernel allow it, else through a bounce buffer. cachestat(2) tells which is which. (A read
with RWF_NOWAIT would tell too, but a refused one makes the kernel read ahead the whole range, so that the disk reads
it twice: as the fallback it asks for one page.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import stat
from typing import TYPE_CHECKING

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.storage.syscalls import UnsupportedError, cached_pages

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

_HUGE_PAGE_BYTES = 2 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_STEP_BYTES = 1 << 20  # copied from the page cache at a time, so that the CRC of it finds it in the processor's cache
_DIRECT_BYTES = 16 << 20  # read past the page cache at a time, straight into place
_BUFFER_BYTES = 8 << 20  # the same, through a buffer
_DIRECT_MIN_BYTES = 256 << 10
_FORK_SAFE = (6, 3)  # from this Linux on, a fork does not move the target of a direct read to the child
_WINDOW = 64  # short reads that are announced to the kernel together


def _reads_in_place() -> bool:
    """Return whether direct reads may go to private memory: a fork meanwhile could lose them; see open(2)."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and tuple(map(int, found.groups())) >= _FORK_SAFE


_IN_PLACE = _reads_in_place()


def _buffer(nbytes: int) -> memoryview:
    """Map memory for direct reads, in huge pages if there are any; forked children don't get it."""
    whole = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):
            whole.madvise(getattr(mmap, advice))
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % _HUGE_PAGE_BYTES
    return memoryview(whole)[skip : skip + nbytes]


def _open_regular(name: str, path: str, directory: int) -> int:
    """Open a regular file, never blocking on a pipe or touching a device; else CorruptCheckpointError."""
    fd = -1
    if stat.S_ISREG(os.stat(name, dir_fd=directory).st_mode):
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=directory)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.set_blocking(fd, True)
            return fd
        os.close(fd)  # it was replaced meanwhile
    raise CorruptCheckpointError(f"{path} is no regular file: it was not written by a save; use another checkpoint")


def _open_again(fd: int, name: str, directory: int) -> int:
    """Open the same file past the page cache; -1 if the file system can't, or it was replaced meanwhile."""
    direct_fd = -1
    with contextlib.suppress(OSError):
        direct_fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _O_DIRECT, dir_fd=directory)
        if os.path.samestat(os.fstat(fd), os.fstat(direct_fd)):
            os.set_blocking(direct_fd, True)
            return direct_fd
    if direct_fd >= 0:
        os.close(direct_fd)
    return -1


class LocalFile:
    """An open file: a descriptor for the page cache, and one for direct I/O where the file system has that.

    Any number of threads may read at once.
    """

    def __init__(self, name: str, path: str, directory: int, buffers: deque[memoryview], *, direct_io: bool) -> None:
        self.path = path  # for messages
        self._buffers = buffers  # unused bounce buffers, shared with other files
        self.users = 0  # how many reads are running
        self.tells_cached = True  # the kernel has cachestat
        self._shared = False
        self._direct_fd = -1
        self._fd = _open_regular(name, path, directory)
        self.nbytes = os.fstat(self._fd).st_size
        if direct_io and _O_DIRECT:
            self._direct_fd = _open_again(self._fd, name, directory)
        if self._direct_fd >= 0 and hasattr(os, "posix_fadvise"):  # only small parts come through the cache
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def real_path(self) -> str:
        """The path of the open file, with links resolved."""
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}")
        except OSError:
            return os.path.realpath(self.path)

    def read(self, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None) -> None:
        """Fill ``view`` with the bytes from an offset on."""
        cached_bytes = 0  # how much of what comes next the page cache has
        try:
            while view:
                if not cached_bytes:
                    cached_bytes, wanted = self._look(offset, len(view))
                if cached_bytes:
                    count = os.preadv(self._fd, [view[: min(cached_bytes, _STEP_BYTES)]], offset)
                    cached_bytes -= count
                else:
                    count = self._read_from_disk(offset, view[:wanted])
                if count == 0:
                    raise self._too_short(offset, len(view))
                if seen is not None:
                    for at in range(0, count, _STEP_BYTES):
                        seen(view[at : min(at + _STEP_BYTES, count)])
                offset += count
                view = view[count:]
        except OSError as exc:
            raise LoadError(f"can't read {self.path} at offset {offset}: {exc}") from exc

    def read_runs(self, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Read many short runs of bytes."""
        at = 0
        for first in range(0, len(runs), _WINDOW):
            window = runs[first : first + _WINDOW]
            if len(window) > 1 and self._is_cached(*window[0]) is not True:
                for offset, length in window:
                    os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_WILLNEED)
            for offset, length in window:
                part = view[at : at + length]
                if length >= _DIRECT_MIN_BYTES:
                    self.read(offset, part)
                else:
                    self._read_buffered(offset, part)
                at += length

    def map(self) -> mmap.mmap:
        """Map it, copy-on-write."""
        try:
            return mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as exc:
            raise LoadError(f"can't map {self.path} into memory: {exc}; load it without mmap=True") from exc

    def share(self) -> None:
        """Read through the page cache, since other processes read the same now: the disk reads it once."""
        self._shared = True
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Close the descriptors, once."""
        os.close(self._fd)
        if self._direct_fd >= 0:
            os.close(self._direct_fd)

    def _is_cached(self, offset: int, nbytes: int) -> bool | None:
        """Return whether the page cache has a range: True for all, False for none, None for a part of it."""
        if self.tells_cached:
            try:
                found = cached_pages(self._fd, offset, nbytes)
            except UnsupportedError:
                self.tells_cached = False
            else:
                pages = (offset + nbytes - 1) // BLOCK_BYTES - offset // BLOCK_BYTES + 1
                return True if found >= pages else None if found else False
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, _NOWAIT) > 0 if _NOWAIT else True
        except BlockingIOError:
            return False
        except OSError:
            return True  # unknown: use the page cache for everything

    def _look(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return how many of the next bytes the page cache has; if none, how many to read past it."""
        if self._direct_fd < 0 or self._shared:
            return nbytes, 0
        window = min(nbytes, _DIRECT_BYTES)
        if nbytes < _DIRECT_MIN_BYTES or (cached := self._is_cached(offset, window)):
            return window, 0
        if cached is None:  # a part: look at it step by step
            at = 0
            while at < window and self._is_cached(offset + at, min(_STEP_BYTES, window - at)) is not True:
                at += _STEP_BYTES
            return (min(_STEP_BYTES, window), 0) if at == 0 else (0, min(at, window))
        return 0, window

    def _read_from_disk(self, offset: int, view: memoryview) -> int:
        """Read some bytes that are not in the page cache: at least one, unless the file has ended."""
        if self._direct_fd < 0 or len(view) < _DIRECT_MIN_BYTES:
            return os.preadv(self._fd, [view], offset)
        try:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            if _IN_PLACE and (address - offset) % BLOCK_BYTES == 0:
                skip = -offset % BLOCK_BYTES
                if skip:
                    return os.preadv(self._fd, [view[:skip]], offset)
                if len(view) >= BLOCK_BYTES:
                    return os.preadv(self._direct_fd, [view[: len(view) // BLOCK_BYTES * BLOCK_BYTES]], offset)
            return self._read_through_buffer(offset, view)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return os.preadv(self._fd, [view], offset)

    def _read_through_buffer(self, offset: int, view: memoryview) -> int:
        view = view[:_BUFFER_BYTES]
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = _buffer(_BUFFER_BYTES + 2 * BLOCK_BYTES)
        skip = offset % BLOCK_BYTES
        wanted = -(-(skip + len(view)) // BLOCK_BYTES) * BLOCK_BYTES
        try:
            count = os.preadv(self._direct_fd, [buffer[:wanted]], offset - skip)
            count = max(0, min(count - skip, len(view)))
            if count:
                target = ctypes.addressof(ctypes.c_char.from_buffer(view))
                ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(buffer, skip)), count)
        finally:
            self._buffers.append(buffer)
        return count

    def _read_buffered(self, offset: int, view: memoryview) -> None:
        try:
            while view:
                count = os.preadv(self._fd, [view], offset)
                if count == 0:
                    raise self._too_short(offset, len(view))
                offset += count
                view = view[count:]
        except OSError as exc:
            raise LoadError(f"can't read {self.path} at offset {offset}: {exc}") from exc

    def _too_short(self, offset: int, missing: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path} ends at byte {offset}, {missing} bytes too early: it was truncated. Use an older checkpoint."
        )
