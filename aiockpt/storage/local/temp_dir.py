"""The hidden directory that a checkpoint is written to, and the words beside it. All functions block."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Literal

from aiockpt.storage.local.belonging import remove
from aiockpt.storage.local.dir_lock import hold
from aiockpt.storage.local.replacing import complete, is_between
from aiockpt.storage.local.temp_names import SWEPT, new_ticket, read_ticket, this_process
from aiockpt.storage.syscalls import identity, rename_noreplace

if TYPE_CHECKING:
    from aiockpt.storage.local.dir_lock import Hold

_ATTEMPTS = 100
_WORD_BYTES = 1 << 28  # the longest says where each of some million items is

# What is made follows the umask, but is never for everybody to write to.
_DIRECTORY_MODE = 0o775
_FILE_MODE = 0o664


def make_hidden(hidden: str) -> Hold:
    """Make a hidden directory and hold it; nothing that is there already is used.

    Raises:
        FileExistsError: the name is taken.
        OSError: it can't be made, or somebody has put another one in its place.
    """
    ticket = read_ticket(os.path.basename(hidden))
    if ticket is None or ticket.owner is None or ticket.owner == this_process():
        return _make(hidden)
    # Who has chosen the name may be dead: nobody must see it under that before it is held.
    return _make_elsewhere(hidden)


def _make_elsewhere(hidden: str) -> Hold:
    """Make a directory under a name of this process, and give it the other one when it is held."""
    folder = os.path.dirname(hidden)
    for attempt in range(_ATTEMPTS):
        own = os.path.join(folder, new_ticket())
        try:
            held = _make(own)
            break
        except FileExistsError:
            if attempt == _ATTEMPTS - 1:
                raise
    with contextlib.ExitStack() as undo:
        undo.callback(_discard, own)
        undo.callback(held.release)
        try:
            rename_noreplace(own, hidden)
        except OSError as exc:
            exc.filename = hidden
            if identity(hidden) != held.identity:  # else it is done, whatever was answered
                raise
        undo.pop_all()
    return held


def _make(path: str) -> Hold:
    os.mkdir(path, _DIRECTORY_MODE)
    with contextlib.ExitStack() as undo:
        undo.callback(_discard, path)
        try:
            held = hold(path)
        except FileNotFoundError as exc:  # who cleans up has been faster: another name is as good
            raise FileExistsError(errno.EEXIST, "somebody removes it already", path) from exc
        undo.callback(held.release)
        if not _is_own(held.fd):
            raise PermissionError(errno.EPERM, "another user has put a directory of his in its place", path)
        undo.pop_all()
    return held


def _discard(path: str) -> None:
    with contextlib.suppress(OSError):  # the first error counts
        os.rmdir(path)


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
    """Tell what has become of a hidden directory; None as its identity if that was never known.

    A replacement that was interrupted between its two renames is completed.
    """
    if is_between(hidden):
        complete(hidden, path, lambda: None)  # `LocalTransaction.tidy` syncs
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


def sweep(hidden: str, own: tuple[int, int] | None = None) -> None:
    """Remove an unfinished checkpoint whose owner is gone, as far as can be told.

    It gets another name first: should its owner live after all, then either it publishes the whole of it, or it
    finds that it is gone.

    Args:
        hidden: the hidden directory.
        own: its identity: a directory that has come to its name stays; None: whatever it is.
    """
    if own is not None and identity(hidden) != own:
        return
    swept = f"{hidden}{SWEPT}"
    try:
        os.rename(hidden, swept)
    except FileNotFoundError:  # it was published, or somebody else was faster
        return
    found = identity(swept)
    if own is None or found == own:
        remove(swept)
    elif found is not None:
        rename_noreplace(swept, hidden)
