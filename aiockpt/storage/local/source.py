"""Checkpoints of a local or mounted file system, open for reading.

The directory is opened once and its files are opened through it, at once where they are few: what is read is one
checkpoint, even when another one takes its place meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.storage.base import Source
from aiockpt.storage.local.file import LocalFile
from aiockpt.storage.local.replacing import readable, stand_in

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Mapping, Sequence

_OPENED_AHEAD = 64
_ATTEMPTS = 5


def open_source(path: str, *, direct_io: bool, buffers: deque[memoryview] | None = None) -> Source:
    """Open a checkpoint, a directory or one file. Blocks. ``buffers`` are those of earlier sources, to be reused."""
    try:
        for _ in range(_ATTEMPTS):
            place = _place_of(path)
            try:
                source = LocalSource(place, deque() if buffers is None else buffers, direct_io=direct_io)
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
    return path


class _Opened:
    """The descriptors of a source: each is closed once, by its last user."""

    def __init__(self, directory: int) -> None:
        self.directory = directory
        self.files: dict[str, LocalFile] = {}
        self.lock = threading.Lock()
        self.closed = False

    def close(self) -> None:
        """Close what is not in use. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            os.close(self.directory)
            for file in self.files.values():
                if not file.users:
                    file.close()
            self.files.clear()

    def let_go(self, file: LocalFile) -> None:
        """Stop using a file."""
        with self.lock:
            file.users -= 1
            if self.closed and not file.users:
                file.close()


class LocalSource(Source):
    """The files below a directory, or one file. Any number of threads may read at once."""

    def __init__(self, path: str, buffers: deque[memoryview], *, direct_io: bool) -> None:
        self._is_file = os.path.isfile(path)
        self._root = os.path.dirname(path) if self._is_file else path
        self._direct_io = direct_io
        self._buffers = buffers
        self._shared = False
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)
        self._opened = _Opened(os.open(self._root, flags))
        weakref.finalize(self, self._opened.close)  # if the caller forgets to
        try:
            if self._is_file:
                self._sizes = {os.path.basename(path): os.stat(path).st_size}
            else:
                self._sizes = _sizes(self._opened.directory)
            self._open_ahead()
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> Mapping[str, int]:
        """The size in bytes of each file, by name relative to the checkpoint."""
        return self._sizes

    def is_current(self, path: str) -> bool:
        """Return whether a path still leads to the open checkpoint."""
        try:
            found = os.stat(os.path.dirname(path) if self._is_file else path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._opened.directory))

    def read(
        self, name: str, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill ``view`` with bytes of a file."""
        with self._file(name) as file:
            file.read(offset, view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Read many short runs of bytes."""
        with self._file(name) as file:
            file.read_runs(runs, view)

    def map(self, name: str) -> mmap.mmap:
        """Map a file into memory, copy-on-write."""
        with self._file(name) as file:
            return file.map()

    def share(self) -> None:
        """Read through the page cache, which other processes of this host share."""
        self._shared = True
        with self._opened.lock:
            for file in self._opened.files.values():
                file.share()

    def close(self) -> None:
        """Close all files, each when its last read is over. Idempotent."""
        self._opened.close()

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[LocalFile]:
        """Return a file that stays open within the context."""
        opened = self._opened
        with opened.lock:
            if opened.closed:
                raise LoadError(f"{os.path.join(self._root, name)} was closed before it was read")
            file = opened.files.get(name)
            if file is None:
                file = opened.files[name] = self._open_file(name)
            file.users += 1
        try:
            yield file
        finally:
            opened.let_go(file)

    def _open_ahead(self) -> None:
        """Open all files if they are few, so that they can be read even after they were replaced."""
        if len(self._sizes) > _OPENED_AHEAD:
            return
        for name in self._sizes:
            with contextlib.suppress(LoadError):  # reported when it is read, if it ever is
                file = self._opened.files[name] = self._open_file(name)
                self._sizes[name] = file.nbytes

    def _open_file(self, name: str) -> LocalFile:
        path = os.path.join(self._root, name)
        if os.path.isabs(name) or ".." in name.split(os.sep):
            raise self._leads_out(name)
        try:
            file = LocalFile(name, path, self._opened.directory, self._buffers, direct_io=self._direct_io)
        except FileNotFoundError as exc:
            raise CorruptCheckpointError(
                f"{path} is missing, or was removed or replaced while it was read; use another checkpoint"
            ) from exc
        except OSError as exc:
            raise LoadError(f"can't open {path}: {exc}") from exc
        if self._shared:
            file.share()
        if not self._is_file and not self._is_inside(file.real_path):
            file.close()
            raise self._leads_out(name)
        return file

    def _leads_out(self, name: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"{self._root} refers to {name!r}, which is outside of its directory; it was not read"
        )

    def _is_inside(self, path: str) -> bool:
        """Return whether a file, its links followed, is in the directory."""
        try:
            root = os.readlink(f"/proc/self/fd/{self._opened.directory}")
        except OSError:
            root = os.path.realpath(self._root)
        homes = [root]
        if os.path.basename(os.path.dirname(root)) == "snapshots":  # the cache of the Hugging Face hub: all are links
            homes.append(os.path.join(os.path.dirname(os.path.dirname(root)), "blobs"))
        # The kernel appends this to the name of a removed directory.
        homes = [home.removesuffix(" (deleted)") for home in homes]
        return any(path.startswith(os.path.join(home, "")) for home in homes)


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
