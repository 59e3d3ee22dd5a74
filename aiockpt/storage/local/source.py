"""Checkpoints of a local or mounted file system, open for reading.

The directory is opened once and its files are opened through it, at once where they are few: what is read is one
checkpoint, even when another one takes its place meanwhile.

Bytes in the page cache are copied straight to their target. Others are read with O_DIRECT, through bounce buffers of
one huge page. cachestat(2) tells which is which. If the page in the middle is in the cache, the rest is hoped to be: it
is read with RWF_NOWAIT, which stops where a page is missing. (Such a read makes the kernel read ahead what is left of
the step. To find out whether a page is there, it would make the disk read a step twice; where there is no cachestat, it
asks for one page.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from aiockpt.core import pages
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.storage.base import Seen, Source
from aiockpt.storage.local.entries import NotRegularError, homes_of, is_inside, open_regular, path_of_fd
from aiockpt.storage.local.replacing import readable, stand_in
from aiockpt.storage.syscalls import UnsupportedError, cached_pages, is_on_network

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# --- files ----------------------------------------------------------------------------------------


_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_STEP_BYTES = 1 << 20  # copied at a time, so that the CRC of it finds it in the processor's cache
_LOOK_BYTES = 16 << 20  # looked for in the page cache at a time
_DIRECT_MIN_BYTES = 256 << 10
_WINDOW = 64  # short reads that are announced to the kernel together
_GAP_BYTES = 16 << 10  # between runs of less than a page, read through: another read takes a disk as long
_LEAST_RUNS, _LEAST_SPAN_BYTES = 8, 256 << 10  # read with their gaps: fewer ones are announced, and read at once

# Direct reads go through buffers, not into place. Memory of tensors is often in small pages: the kernel then describes
# a read page by page and splits it at some 256, which virtual disks took up to twice as long for, where the copy costs
# a fifth of the CRC. Nor does a fork lose what is being read: the buffers are not for children; see open(2).
_BUFFER_BYTES = pages.HUGE_PAGE_BYTES


class _Buffers(threading.local):
    """A buffer for each thread that reads past the page cache; it is freed when the thread ends."""

    buffer: memoryview | None = None

    def get(self) -> memoryview:
        """Return the thread's buffer: a huge page whatever it costs, because it is used again and again."""
        if self.buffer is None:
            whole, skip = pages.map_aligned(_BUFFER_BYTES)
            pages.advise_huge(ctypes.addressof(ctypes.c_char.from_buffer(whole, skip)), _BUFFER_BYTES)
            self.buffer = memoryview(whole)[skip : skip + _BUFFER_BYTES]
        return self.buffer


_buffers = _Buffers()


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

    def __init__(self, name: str, path: str, directory: int, *, direct_io: bool) -> None:
        self.path = path  # for messages
        self.users = 0  # how many reads are running
        self.tells_cached = True  # the kernel has cachestat
        self._shared = False
        self._tries_nowait = False
        self._direct_fd = -1
        self._fd = open_regular(name, directory)
        self.nbytes = os.fstat(self._fd).st_size
        if direct_io and _O_DIRECT:
            self._direct_fd = _open_again(self._fd, name, directory)
        self._tries_nowait = self._direct_fd >= 0 and bool(_NOWAIT)
        # Without readahead: only small parts are read through the cache, and the kernel would read around them.
        if self._direct_fd >= 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def real_path(self) -> str:
        """The path of the open file, with links resolved."""
        return path_of_fd(self._fd, self.path)

    def read(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """Fill ``view`` with the bytes from an offset on."""
        known = missing = 0  # how many of the next bytes the page cache has, or has not
        exactly = not self._tries_nowait or len(view) < _DIRECT_MIN_BYTES
        try:
            while view:
                if not known and not missing:
                    known, missing = self._look(offset, len(view), exactly=exactly)
                if known:
                    piece = view[: min(known, _STEP_BYTES)]
                    count = self._read_cached(offset, piece, exactly=exactly)
                    known -= count
                    if count < len(piece) and not exactly:  # a hole
                        known, exactly = 0, True
                        if not count:
                            continue
                else:
                    count = self._read_from_disk(offset, view[:missing])
                    missing -= count
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
        if self._direct_fd < 0 or self._shared or len(runs) < _LEAST_RUNS or self._is_cached(*runs[len(runs) // 2]):
            self._read_each(runs, view)
            return
        import numpy as np  # not above: the writer process does without

        begin, length = np.array(runs, np.int64).T
        end = begin + length
        is_near = (begin[1:] >= end[:-1]) & (begin[1:] - end[:-1] <= _GAP_BYTES)
        is_near &= np.maximum(length[1:], length[:-1]) < BLOCK_BYTES
        bounds = [0, *(np.flatnonzero(~is_near) + 1).tolist(), len(runs)]
        pieces, done = list[slice](), 0  # of the runs: those with and without their gaps in turn
        for first, last in pairwise(bounds):
            if last - first < _LEAST_RUNS or end[last - 1] - begin[first] < _LEAST_SPAN_BYTES:
                continue
            while first < last:
                most = int(begin[first]) // BLOCK_BYTES * BLOCK_BYTES + _BUFFER_BYTES
                stop = first + max(1, int(np.searchsorted(end[first:last], most, "right")))
                pieces += [slice(done, first), slice(first, stop)]
                first = done = stop
        at = 0
        for number, some in enumerate([*pieces, slice(done, len(runs))]):
            part = view[at : at + int(length[some].sum())]
            if not (number % 2 and self._read_with_gaps(begin[some], length[some], part)):
                self._read_each(runs[some], part)
            at += len(part)

    def _read_with_gaps(self, begin: NDArray[np.int64], length: NDArray[np.int64], view: memoryview) -> bool:
        """Read runs that fit into the buffer, and what is between them, past the page cache; False if it has them."""
        if len(begin) < _LEAST_RUNS or self._is_cached(int(begin[0]), int(length[0])):
            return False
        import numpy as np
        from numpy.lib.stride_tricks import as_strided

        skip = int(begin[0]) % BLOCK_BYTES
        start, buffer, at = int(begin[0]) - skip, _buffers.get(), begin - begin[0] + skip
        wanted = int(at[-1] + length[-1])
        try:
            count = os.preadv(self._direct_fd, [buffer[: -(-wanted // BLOCK_BYTES) * BLOCK_BYTES]], start)
        except OSError:
            return False  # as where the file has ended: what is wrong is said by a read of each
        if count < wanted:
            return False
        read, target = np.frombuffer(buffer, np.uint8), np.frombuffer(view, np.uint8)
        steps = np.diff(begin)
        if (steps == steps[0]).all() and (length == length[0]).all():
            rows = as_strided(read[skip:], (len(begin), int(length[0])), (int(steps[0]), 1))
            target.reshape(rows.shape)[:] = rows
            return True
        put = 0
        for low, nbytes in zip(at.tolist(), length.tolist(), strict=True):
            target[put : put + nbytes] = read[low : low + nbytes]
            put += nbytes
        return True

    def _read_each(self, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
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

    def is_cached(self, offset: int) -> bool:
        return self._tries_nowait and self._is_cached(offset, 1) is True

    def map(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as exc:
            raise LoadError(f"can't map {self.path} into memory: {exc}; load it without mmap=True") from exc

    def share(self) -> None:
        """Read through the page cache, since other processes read the same now: the disk reads it once."""
        self._shared = True
        self._tries_nowait = False
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # with readahead again

    def close(self) -> None:
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

    def _look(self, offset: int, nbytes: int, *, exactly: bool) -> tuple[int, int]:
        """Return how many of the next bytes the page cache has; if none, how many to read past it.

        Unless ``exactly``, only the page in the middle is looked at: the kernel takes 0.1 ms to look at 16 MiB, and the
        pages at the ends of an item may be cached alone, since its framing was read.
        """
        if self._direct_fd < 0 or self._shared:
            return nbytes, 0
        window = min(nbytes, _LOOK_BYTES - offset % BLOCK_BYTES)  # the next look begins at a block
        if not exactly and self._is_cached(offset + window // 2, 1):
            return window, 0
        if nbytes < _DIRECT_MIN_BYTES or (cached := self._is_cached(offset, window)):
            return window, 0
        if cached is None:  # a part: look at it step by step
            at = 0
            while at < window and self._is_cached(offset + at, min(_STEP_BYTES, window - at)) is not True:
                at += _STEP_BYTES
            return (min(_STEP_BYTES, window), 0) if at == 0 else (0, min(at, window))
        return 0, window

    def _read_cached(self, offset: int, view: memoryview, *, exactly: bool) -> int:
        """Read some bytes through the page cache; unless ``exactly``, only those that it has."""
        if exactly:
            return os.preadv(self._fd, [view], offset)
        try:
            return os.preadv(self._fd, [view], offset, _NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            self._tries_nowait = False  # this file system can't
            return 0

    def _read_from_disk(self, offset: int, view: memoryview) -> int:
        """Read some bytes that are not in the page cache: at least one, unless the file has ended."""
        skip = offset % BLOCK_BYTES
        view = view[: _BUFFER_BYTES - skip]
        buffer = _buffers.get()
        wanted = -(-(skip + len(view)) // BLOCK_BYTES) * BLOCK_BYTES
        try:
            count = os.preadv(self._direct_fd, [buffer[:wanted]], offset - skip)
            count = max(0, min(count - skip, len(view)))
            if count:  # not by assigning to a slice, which holds the GIL
                target = ctypes.addressof(ctypes.c_char.from_buffer(view))
                ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(buffer, skip)), count)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return os.preadv(self._fd, [view], offset)
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


# --- checkpoints ----------------------------------------------------------------------------------


_MOST_OPEN = 64  # files; only more that are in use at once may be open
_ATTEMPTS = 5


def open_source(path: str, *, direct_io: bool) -> Source:
    """Open a checkpoint, a directory or one file. Blocks."""
    try:
        for _ in range(_ATTEMPTS):
            place = _place_of(path)
            try:
                source = LocalSource(place, direct_io=direct_io)
            except FileNotFoundError:
                if place == path:
                    raise
                continue  # the replacement was just completed
            if source.is_current(place):
                return source
            source.close()  # another checkpoint has come to this path while this one was being opened
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path}: no such path") from exc
    except NotADirectoryError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path}: it is neither directory nor file") from exc
    except OSError as exc:
        raise LoadError(f"can't look into {path}: {exc}") from exc
    raise LoadError(f"{path} is replaced again and again; load it when no save replaces it")


def _place_of(path: str) -> str:
    """Return where the checkpoint of a path is: elsewhere if its replacement was interrupted by a kill."""
    if not os.path.lexists(path):
        hidden = stand_in(path)
        if hidden is not None and not os.path.lexists(path):
            return readable(hidden)
        above, name = os.path.split(path)  # it may be a part of one that was published together with others
        if name and not os.path.lexists(above):
            return os.path.join(_place_of(above), name)
    return path


class LocalSource(Source):
    """The files below a directory, or one file. Any number of threads may read at once."""

    _directory = -1

    def __init__(self, path: str, *, direct_io: bool) -> None:
        self._is_file = os.path.isfile(path)
        self._root = os.path.dirname(path) if self._is_file else path
        self._direct_io = direct_io
        self._shared = False
        self._opened: dict[str, LocalFile] = {}  # in order of their last use
        self._lock = threading.Lock()
        self._directory = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0))
        self.is_remote = is_on_network(self._directory)
        try:
            if self._is_file:
                self._sizes = {os.path.basename(path): os.stat(path).st_size}
            else:
                self._sizes = _sizes(self._directory)
            self._open_ahead()
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> Mapping[str, int]:
        return self._sizes

    def is_current(self, path: str) -> bool:
        """Return whether a path still leads to the open checkpoint."""
        try:
            found = os.stat(os.path.dirname(path) if self._is_file else path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._directory))

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        with self._file(name) as file:
            file.read(offset, view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        with self._file(name) as file:
            file.read_runs(runs, view)

    def is_cached(self, name: str, offset: int) -> bool:
        with self._file(name) as file:
            return file.is_cached(offset)

    def map(self, name: str) -> mmap.mmap:
        with self._file(name) as file:
            return file.map()

    def share(self) -> None:
        self._shared = True
        with self._lock:
            for file in self._opened.values():
                file.share()

    def close(self) -> None:
        """Close what is not in use; the last user of a file closes it."""
        with self._lock:
            directory, self._directory = self._directory, -1
            if directory < 0:
                return
            os.close(directory)
            for file in self._opened.values():
                if not file.users:
                    file.close()
            self._opened.clear()

    def __del__(self) -> None:
        if self._directory >= 0:  # the caller has forgotten to
            self.close()

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[LocalFile]:
        """Return a file that stays open within the context."""
        with self._lock:
            if self._directory < 0:
                raise LoadError(f"{os.path.join(self._root, name)} was closed before it was read")
            file = self._opened.pop(name, None)
            if file is None:
                self._make_room()
                file = self._open_file(name)
            self._opened[name] = file  # the last
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                if self._directory < 0 and not file.users:
                    file.close()

    def _make_room(self) -> None:
        """Close the files that were not used for longest, so that one more may be opened."""
        surplus = len(self._opened) + 1 - _MOST_OPEN
        if surplus > 0:
            for name in [name for name, file in self._opened.items() if not file.users][:surplus]:
                self._opened.pop(name).close()

    def _open_ahead(self) -> None:
        """Open all files if they are few, so that they can be read even after they were replaced."""
        if len(self._sizes) > _MOST_OPEN:
            return
        for name in self._sizes:
            with contextlib.suppress(LoadError):  # reported when it is read, if it ever is
                file = self._opened[name] = self._open_file(name)
                self._sizes[name] = file.nbytes

    def _open_file(self, name: str) -> LocalFile:
        path = os.path.join(self._root, name)
        if os.path.isabs(name) or ".." in name.split(os.sep):
            raise self._leads_out(name)
        try:
            file = LocalFile(name, path, self._directory, direct_io=self._direct_io)
        except FileNotFoundError as exc:
            raise CorruptCheckpointError(
                f"{path} is missing, or was removed or replaced while it was read; use another checkpoint"
            ) from exc
        except NotRegularError as exc:
            raise CorruptCheckpointError(
                f"{path} is no regular file: it was not written by a save; use another checkpoint"
            ) from exc
        except OSError as exc:
            raise LoadError(f"can't open {path}: {exc}") from exc
        if self._shared:
            file.share()
        if not self._is_file and not is_inside(file.real_path, homes_of(self._directory, self._root)):
            file.close()
            raise self._leads_out(name)
        return file

    def _leads_out(self, name: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"{self._root} refers to {name!r}, which is outside of its directory; it was not read"
        )


def _sizes(directory: int) -> dict[str, int]:
    """Return the sizes of all files below a directory; what can't be read is left out."""
    sizes: dict[str, int] = {}
    for folder, _, names, descriptor in os.fwalk(".", dir_fd=directory):
        for name in names:
            try:
                found = os.stat(name, dir_fd=descriptor)
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.ELOOP):  # a link to nowhere or to itself, or removed meanwhile
                    continue
                raise
            if stat.S_ISREG(found.st_mode):
                sizes[os.path.normpath(os.path.join(folder, name))] = found.st_size
    return sizes
