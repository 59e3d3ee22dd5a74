"""The hidden directory that a checkpoint is written to, and the words beside it. All functions block."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Literal

from aiockpt.storage.hold import hold
from aiockpt.storage.publish import identity, remove
from aiockpt.storage.tickets import SWEPT

if TYPE_CHECKING:
    from aiockpt.storage.hold import Hold

_WORD_BYTES = 1 << 28  # the longest says where each of some million items is

# What is made follows the umask, but is never for everybody to write to.
_DIRECTORY_MODE = 0o775
_FILE_MODE = 0o664


def make_hidden(hidden: str) -> Hold:
    """Make a hidden directory; nothing that is there already is used.

    Raises:
        FileExistsError: the name is taken.
        OSError: it can't be made, or somebody has put another one in its place.
    """
    os.mkdir(hidden, _DIRECTORY_MODE)
    try:
        held = hold(hidden)
        if not _is_own(held.fd):
            held.release()
            raise PermissionError(errno.EPERM, "another user has put a directory of his in its place", hidden)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            os.rmdir(hidden)
        raise
    return held


def _is_own(directory: int) -> bool:
    """Tell whether a directory belongs to who this process is, as the file system sees it."""
    owner = os.fstat(directory).st_uid
    if owner == os.geteuid():
        return True
    probe = "probe"  # mounts may give all that is made to one user, so that what is made here tells
    os.mkdir(probe, 0o700, dir_fd=directory)
    try:
        return os.stat(probe, dir_fd=directory, follow_symlinks=False).st_uid == owner
    finally:
        os.rmdir(probe, dir_fd=directory)


def sizes_in(path: str) -> dict[str, int]:
    """Give the size in bytes of each file in a directory."""
    with os.scandir(path) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}


def contents(path: str) -> bytes | None:
    """Give the contents of a small file; None if it is not there.

    Raises:
        OSError: it is a link, no file at all, or larger than anything that belongs there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    with open(fd, "rb") as file:
        if found.st_size > _WORD_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_WORD_BYTES} bytes", path)
        return file.read(found.st_size)


def fate_of(hidden: str, path: str, own: tuple[int, int] | None) -> Literal["open", "published", "gone"]:
    """Tell what has become of a hidden directory; None as its identity if that was never known."""
    found = identity(hidden)
    if own is None:
        return "gone" if found is None else "open"
    if found == own:
        return "open"
    return "published" if identity(path) == own else "gone"


def write_word(path: str, data: bytes) -> None:
    """Write a small file that only takes part in an agreement of running processes: it need not be durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
    with open(fd, "wb") as file:
        file.write(data)


def sweep(hidden: str) -> None:
    """Remove an unfinished checkpoint whose owner is gone, as far as can be told.

    It gets another name first: should its owner live after all, then either it publishes the whole of it, or it
    finds that it is gone.
    """
    swept = f"{hidden}{SWEPT}"
    try:
        os.rename(hidden, swept)
    except FileNotFoundError:  # it was published, or somebody else was faster
        return
    remove(swept)
