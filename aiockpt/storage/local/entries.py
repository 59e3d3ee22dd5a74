"""The files of a directory, and bytes of them, for looking at what may be anything. Without torch; all functions block.

Nothing here waits for a pipe, touches a device, follows a link out of the directory, or reads without bound.
"""

from __future__ import annotations

import errno
import os
import stat
from itertools import islice

from aiockpt.storage.base import Listing, LookBudget

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class NotRegularError(OSError):
    """A path is a pipe, a socket, a device or a directory where a regular file should be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "it is no regular file", path)


def open_regular(name: str, dir_fd: int | None = None, *, flags: int = 0) -> int:
    """Open a regular file to read; raise NotRegularError for anything else, without waiting for it or touching it."""
    # Looked at before it is opened: to open a device may have an effect already. And after, since it may be replaced.
    mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # the kernel refuses the link
        fd = os.open(name, _FLAGS | flags, dir_fd=dir_fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.set_blocking(fd, True)
            return fd
        os.close(fd)  # it was replaced meanwhile
    raise NotRegularError(name)


def read_regular(name: str, dir_fd: int | None = None, *, most: int, flags: int = 0) -> bytes:
    """Read all of a regular file; raise OSError if it is none, or has more than so many bytes."""
    with open(open_regular(name, dir_fd, flags=flags), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", name)
        return file.read(size)


def homes_of(directory: int, path: str) -> list[str]:
    """Return the directories in which the files of a checkpoint may be, by its descriptor and its path."""
    try:
        root = os.readlink(f"/proc/self/fd/{directory}")
    except OSError:
        root = os.path.realpath(path)
    root = root.removesuffix(" (deleted)")  # which the kernel appends to the name of a removed directory
    parts = root.split(os.sep)
    # In the cache of the Hugging Face hub, REPO/snapshots/REVISION and all below it are links to files in REPO/blobs.
    repos = [os.sep.join(parts[:at]) for at, part in enumerate(parts[:-1]) if part == "snapshots"]
    return [root, *(os.path.join(repo + os.sep, "blobs") for repo in repos)]


def path_of_fd(fd: int, path: str) -> str:
    """Return the path of an open file, with links resolved."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)


def is_inside(path: str, homes: list[str]) -> bool:
    """Return whether a resolved path is below one of some directories."""
    return any(path.startswith(os.path.join(home, "")) for home in homes)


class LocalListing(Listing):
    """The entries of an open directory, links followed, or a file alone."""

    def __init__(self, path: str, budget: LookBudget | None = None) -> None:
        """Open and list it; raise OSError if it can't be read."""
        self.path = self._opened = path  # a wrapping storage may give it another name
        self.files: dict[str, int] = {}
        self.folders: list[str] = []
        self.others: list[str] = []
        self.shared_bytes = 0
        self._budget = budget or LookBudget()
        try:
            self._fd, self.is_file = os.open(path, _DIRECTORY), False
        except NotADirectoryError:
            self._fd, self.is_file = os.open(os.path.dirname(path) or ".", _DIRECTORY), True
        try:
            marks: list[tuple[str, int, int, int]] = []
            self.changed_s = 0.0 if self.is_file else os.fstat(self._fd).st_mtime
            if self.is_file:
                self._add_file(os.path.basename(path), os.stat(path), marks)
            else:
                self._list_top(marks)
            self.stamp = repr(sorted(marks))
        except BaseException:
            self.close()
            raise

    def _list_top(self, marks: list[tuple[str, int, int, int]]) -> None:
        with os.scandir(self._fd) as entries:
            for entry in entries:
                try:
                    if entry.is_dir():
                        self.folders.append(entry.name)
                    else:
                        facts = entry.stat()
                        self._add_file(entry.name, facts, marks)
                        if facts.st_nlink > 1 and not entry.is_symlink():
                            self.shared_bytes += facts.st_size
                except OSError:  # a link to nowhere or to itself, or removed meanwhile
                    self.others.append(entry.name)

    def _add_file(self, name: str, found: os.stat_result, marks: list[tuple[str, int, int, int]]) -> None:
        if not stat.S_ISREG(found.st_mode):
            self.others.append(name)
            return
        self.files[name] = found.st_size
        self.changed_s = max(self.changed_s, found.st_mtime)
        marks.append((name, found.st_size, found.st_ino, found.st_mtime_ns))

    def list_below(self) -> None:
        for folder in self.folders:
            if folder.startswith(".") or self._budget.is_spent:
                continue
            try:
                fd = os.open(folder, _DIRECTORY, dir_fd=self._fd)
            except OSError:  # it belongs to another user, or was removed meanwhile
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in islice(entries, self._budget.left):
                        self._budget.left -= 1
                        if entry.is_file():
                            self.files[f"{folder}/{entry.name}"] = entry.stat().st_size
            except OSError:
                continue
            finally:
                os.close(fd)

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        """Return bytes of a file; raise OSError if it is no regular file, or is outside."""
        fd, is_plain = self._open(name)
        try:
            if is_plain:  # it is inside
                os.stat(self._opened)  # raises if it is being deleted: its directory is renamed first
            elif not self._holds(fd, name):
                path = os.path.join(self.path, name)
                if self._is_moved():  # as by a deletion, between the two looks
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                raise OSError(errno.EXDEV, "it is a link that leads out of the checkpoint", path)
            parts = []
            while length > 0 and (part := os.pread(fd, min(length, 1 << 30), offset)):
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def _open(self, name: str) -> tuple[int, bool]:
        try:
            return open_regular(name, self._fd, flags=os.O_NOFOLLOW), "/" not in name
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            return open_regular(name, self._fd), self.is_file

    def _holds(self, fd: int, name: str) -> bool:
        return is_inside(path_of_fd(fd, os.path.join(self.path, name)), homes_of(self._fd, self.path))

    def _is_moved(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._opened), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
