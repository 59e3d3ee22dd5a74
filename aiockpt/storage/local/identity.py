"""The id of the disk that a run's directory is on, in the hidden file `.aiockpt.disk` there. Blocks.

Processes that read the same id share the directory, whatever their hosts are called; a host with an empty disk has
another one. The file appears at once and whole, and is never changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets

from aiockpt.storage.local.commit import make_directories, sync_directory
from aiockpt.storage.local.entries import read_regular
from aiockpt.storage.local.temp_dir import new_ticket, write_new
from aiockpt.storage.syscalls import link

DISK_NAME = ".aiockpt.disk"

_DIGITS = 32
_MOST_BYTES = 1 << 10


def identify(directory: str, *, make: bool) -> str | None:
    """Return the id; see `aiockpt.storage.base.Directories.identify`."""
    path = os.path.join(directory, DISK_NAME)
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    if not make:
        return None
    if not os.path.isdir(directory):
        make_directories(directory, fsync=True)
    draft, own = os.path.join(directory, new_ticket()), secrets.token_hex(_DIGITS // 2).encode()
    try:
        write_new(draft, own, fsync=True)
        with contextlib.suppress(FileExistsError):  # another rank of this host was faster
            if not link(draft, path):  # a file system without hard links
                write_new(path, own, fsync=True)
    finally:
        os.unlink(draft)
    sync_directory(directory)
    return _read(path)


def _read(path: str) -> str:
    found = read_regular(path, most=_MOST_BYTES, flags=os.O_NOFOLLOW).decode("ascii", "replace").strip()
    if len(found) != _DIGITS or not set(found) <= set("0123456789abcdef"):
        raise OSError(f"{path} holds no id of a disk: remove it, and another one is chosen")
    return found
