"""Reading checkpoints of a local or mounted file system: from the page cache where it has the bytes, else past it.

Bytes that are in the page cache are copied straight to where they belong. Bytes that aren't are read with
O_DIRECT, in large aligned pieces: into place where address and kernel allow it, else through a buffer of the thread.
Which is which cachestat(2) tells. (A read with RWF_NOWAIT tells as well, but one that is refused makes the kernel
read ahead what was asked for, so that the disk reads it twice: where it has to do, it asks for one page.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import threading
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.storage.base import Source
from aiockpt.storage.syscalls import UnsupportedError, cached_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BLOCK_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_STEP_BYTES = 1 << 20  # copied from the page cache at a time, so that who looks at it next finds it in the processor's
_DIRECT_BYTES = 4 << 20  # read past the page cache at a time
_DIRECT_MIN_BYTES = 256 << 10
_FORK_SAFE = (6, 3)  # from this Linux on, memory that a direct read goes to stays this process's when it forks
_WINDOW = 64  # short reads that are announced to the kernel together


def open_source(path: str, *, direct_io: bool) -> Source:
    """Look at a checkpoint, a directory or one file. Blocks.

    Raises:
        CheckpointNotFoundError: there is nothing.
    """
    try:
        if os.path.isfile(path):
            root, files = os.path.dirname(path), {os.path.basename(path): os.stat(path).st_size}
        else:
            root, files = path, _sizes(path)
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path}: no such path") from exc
    except NotADirectoryError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path}: it is neither directory nor file") from exc
    except OSError as exc:
        raise LoadError(f"can't look into {path}: {exc}") from exc
    return LocalSource(root, files, direct_io=direct_io, is_file=root != path)


def _sizes(root: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    pending = [root]
    while pending:
        directory = pending.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file():
                    sizes[os.path.relpath(entry.path, root)] = entry.stat().st_size
    return sizes


def _reads_in_place() -> bool:
    """Tell whether direct reads may go to private memory: a fork meanwhile could lose them; see open(2)."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and tuple(map(int, found.groups())) >= _FORK_SAFE


def _buffer(nbytes: int) -> memoryview:
    """Map memory that the disk may write to, in huge pages if there are any; children don't get it."""
    whole = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):
            whole.madvise(getattr(mmap, advice))
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % _HUGE_PAGE_BYTES
    return memoryview(whole)[skip : skip + nbytes]


class _File:
    """An open file: a descriptor for the page cache, and one past it where the file system has that."""

    def __init__(self, path: str, *, direct_io: bool) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct_fd = -1
        self.tells = True
        if direct_io and _O_DIRECT:
            with contextlib.suppress(OSError):  # this file system has no direct I/O: its page cache does
                self.direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        if self.direct_fd >= 0 and hasattr(os, "posix_fadvise"):  # only small parts come through the cache
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def is_cached(self, offset: int, nbytes: int) -> bool | None:
        """Tell whether the page cache has a range: True, False for none of it, None for some."""
        if self.tells:
            try:
                found = cached_pages(self.fd, offset, nbytes)
            except UnsupportedError:
                self.tells = False
            else:
                pages = (offset + nbytes - 1) // _BLOCK_BYTES - offset // _BLOCK_BYTES + 1
                return True if found >= pages else None if found else False
        try:
            return os.preadv(self.fd, [bytearray(1)], offset, _NOWAIT) > 0 if _NOWAIT else True
        except BlockingIOError:
            return False
        except OSError:
            return True  # no way to find out: then the page cache for everything

    def close(self) -> None:
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)


class LocalSource(Source):
    """Files below a directory. Any number of threads may read at once.

    Args:
        root: the directory.
        files: the sizes of the files, by name.
        direct_io: read past the page cache what is not in it.
        is_file: the checkpoint is one file, which the caller has named, not the directory.
    """

    def __init__(self, root: str, files: dict[str, int], *, direct_io: bool, is_file: bool = False) -> None:
        self._root = root
        self._sizes = files
        self._direct_io = direct_io
        self._is_file = is_file
        self._in_place = _reads_in_place()
        self._open: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def files(self) -> Mapping[str, int]:
        """The size in bytes of each file, by name relative to the checkpoint."""
        return self._sizes

    def read(
        self, name: str, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill ``view``; see `Source.read`."""
        file = self._file(name)
        cached_bytes = 0  # how much of what comes next the page cache has
        try:
            while view:
                if not cached_bytes:
                    cached_bytes, wanted = self._look(file, offset, len(view))
                if cached_bytes:
                    count = os.preadv(file.fd, [view[: min(cached_bytes, _STEP_BYTES)]], offset)
                    cached_bytes -= count
                else:
                    count = self._read_from_disk(file, offset, view[:wanted])
                if count == 0:
                    raise CorruptCheckpointError(
                        f"{file.path} ends at byte {offset}, {len(view)} bytes too early: it was truncated. "
                        "Use an older checkpoint."
                    )
                if seen is not None:
                    for at in range(0, count, _STEP_BYTES):
                        seen(view[at : min(at + _STEP_BYTES, count)])
                offset += count
                view = view[count:]
        except OSError as exc:
            raise LoadError(f"can't read {file.path} at offset {offset}: {exc}") from exc

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Read many short runs; see `Source.read_runs`."""
        file = self._file(name)
        at = 0
        for first in range(0, len(runs), _WINDOW):
            window = runs[first : first + _WINDOW]
            if len(window) > 1 and file.is_cached(*window[0]) is not True:
                for offset, length in window:
                    os.posix_fadvise(file.fd, offset, length, os.POSIX_FADV_WILLNEED)
            for offset, length in window:
                part = view[at : at + length]
                if length >= _DIRECT_MIN_BYTES:
                    self.read(name, offset, part)
                else:
                    self._read_buffered(file, offset, part)
                at += length

    def map(self, name: str) -> mmap.mmap:
        """Map a file; see `Source.map`."""
        file = self._file(name)
        try:
            return mmap.mmap(file.fd, self._sizes[name], access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as exc:
            raise LoadError(f"can't map {file.path} into memory: {exc}; load it without mmap=True") from exc

    def close(self) -> None:
        """Close all files. Idempotent."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def _file(self, name: str) -> _File:
        with self._lock:
            file = self._open.get(name)
            if file is None:
                file = self._open[name] = self._open_file(name)
            return file

    def _open_file(self, name: str) -> _File:
        path = os.path.join(self._root, name)
        if os.path.isabs(name) or ".." in name.split(os.sep) or not (self._is_file or self._is_inside(path)):
            raise UnsafeCheckpointError(
                f"{self._root} refers to {name!r}, which is outside of its directory; it was not read"
            )
        try:
            return _File(path, direct_io=self._direct_io)
        except FileNotFoundError as exc:
            raise CorruptCheckpointError(f"{path} is missing; use an older checkpoint") from exc
        except OSError as exc:
            raise LoadError(f"can't open {path}: {exc}") from exc

    def _is_inside(self, path: str) -> bool:
        """Tell whether a path, its links followed, stays in the directory."""
        root = os.path.realpath(self._root)
        homes = [root]
        if os.path.basename(os.path.dirname(root)) == "snapshots":  # the cache of the Hugging Face hub: all are links
            homes.append(os.path.join(os.path.dirname(os.path.dirname(root)), "blobs"))
        real = os.path.realpath(path)
        return any(real.startswith(os.path.join(home, "")) for home in homes)

    # --- one step ---------------------------------------------------------------------------------

    @staticmethod
    def _look(file: _File, offset: int, nbytes: int) -> tuple[int, int]:
        """Tell how many of the next bytes the page cache has; if none, how many to read past it."""
        if file.direct_fd < 0:
            return nbytes, 0
        window = min(nbytes, _DIRECT_BYTES)
        if nbytes < _DIRECT_MIN_BYTES or (cached := file.is_cached(offset, window)):
            return window, 0
        if cached is None:  # some: look at it step by step
            at = 0
            while at < window and file.is_cached(offset + at, min(_STEP_BYTES, window - at)) is not True:
                at += _STEP_BYTES
            return (min(_STEP_BYTES, window), 0) if at == 0 else (0, min(at, window))
        return 0, window

    def _read_from_disk(self, file: _File, offset: int, view: memoryview) -> int:
        """Read some of what is not in the page cache: at least a byte, unless the file has ended."""
        if file.direct_fd < 0 or len(view) < _DIRECT_MIN_BYTES:
            return os.preadv(file.fd, [view], offset)
        try:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            if self._in_place and (address - offset) % _BLOCK_BYTES == 0:
                skip = -offset % _BLOCK_BYTES
                if skip:
                    return os.preadv(file.fd, [view[:skip]], offset)
                if len(view) >= _BLOCK_BYTES:
                    return os.preadv(file.direct_fd, [view[: len(view) // _BLOCK_BYTES * _BLOCK_BYTES]], offset)
            return self._read_through_buffer(file, offset, view)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return os.preadv(file.fd, [view], offset)

    def _read_through_buffer(self, file: _File, offset: int, view: memoryview) -> int:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = _buffer(_DIRECT_BYTES + 2 * _BLOCK_BYTES)
        skip = offset % _BLOCK_BYTES
        wanted = -(-(skip + len(view)) // _BLOCK_BYTES) * _BLOCK_BYTES
        count = os.preadv(file.direct_fd, [buffer[:wanted]], offset - skip)
        count = max(0, min(count - skip, len(view)))
        if count:
            target = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(buffer, skip)), count)
        return count

    @staticmethod
    def _read_buffered(file: _File, offset: int, view: memoryview) -> None:
        while view:
            count = os.preadv(file.fd, [view], offset)
            if count == 0:
                raise CorruptCheckpointError(
                    f"{file.path} ends at byte {offset}, {len(view)} bytes too early: it was truncated. "
                    "Use an older checkpoint."
                )
            offset += count
            view = view[count:]
