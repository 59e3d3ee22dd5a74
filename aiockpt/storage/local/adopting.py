"""Files that a checkpoint shares with an earlier one, made only of bytes that are known. All this blocks.

Where the file system has them they are reflinks: files of their own, whose blocks are shared until somebody writes to
one. Elsewhere they are hard links, and read-only: what writes to one in place, as torch's own `dcp.save` does into an
existing directory, would change all checkpoints that have it. So it fails, unless it is run by root.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from threading import Lock
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.storage.local.entries import open_regular
from aiockpt.storage.local.retries import sync_fd
from aiockpt.storage.local.sink import FILE_MODE
from aiockpt.storage.syscalls import Identity, UnsupportedError, clone

if TYPE_CHECKING:
    from aiockpt.format.manifest.manifest import FileFacts

_STEP_BYTES = 1 << 20
_WRITABLE = 0o222
_MOST_KNOWN = 1024

logger = logging.getLogger("aiockpt")


class KnownFiles:
    """The CRCs of files that this process has written or read, by which their bytes are known without being read.

    A file that was written to in place since then has another time of modification.
    """

    def __init__(self) -> None:
        self._facts: dict[Identity, tuple[int, int, int]] = {}  # size, time of modification, CRC
        self._lock = Lock()
        self.without_clones: set[int] = set()  # devices whose file systems have no reflinks

    def note(self, found: os.stat_result, crc: int) -> None:
        """Note the CRC of a file."""
        with self._lock:
            key = (found.st_dev, found.st_ino)
            self._facts.pop(key, None)  # it becomes the youngest
            self._facts[key] = (found.st_size, found.st_mtime_ns, crc)
            while len(self._facts) > _MOST_KNOWN:
                del self._facts[next(iter(self._facts))]

    def crc_of(self, found: os.stat_result) -> int | None:
        """Return the CRC of a file; None if it is not known."""
        size, changed, crc = self._facts.get((found.st_dev, found.st_ino), (-1, -1, 0))
        return crc if (size, changed) == (found.st_size, found.st_mtime_ns) else None

    def vouch(self, path: str, facts: FileFacts) -> None:
        """Note the facts of a file that this process has just written."""
        with contextlib.suppress(OSError):  # it will be read
            found = os.stat(path, follow_symlinks=False)
            if found.st_size == facts.nbytes:
                self.note(found, facts.crc)


def adopt(source: str, target: str, facts: FileFacts, known: KnownFiles, *, fsync: bool) -> bool:
    """Link a file of another checkpoint to a new name, if it has these facts; return whether it is there, durably.

    The name itself becomes durable with its directory.
    """
    try:
        fd = open_regular(source, flags=os.O_NOFOLLOW)
        try:
            found = _examined(fd, facts, known)
            if found is None:
                logger.info("%s is not as its checkpoint says, so it is not shared, but written anew", source)
                return False
            return _clone(fd, found, target, facts, known, fsync=fsync) or _link(fd, found, source, target, fsync=fsync)
        finally:
            os.close(fd)
    except OSError as exc:  # the base was deleted, is on another file system or of another user, has too many links
        if os.path.lexists(target):  # it must not be published
            raise
        logger.info("%s can't be shared, so it is written anew: %s", source, exc)
        return False


def _link(fd: int, found: os.stat_result, source: str, target: str, *, fsync: bool) -> bool:
    """Add a name to an open file, and make it read-only; return whether it is there as it was found."""
    if found.st_mode & _WRITABLE:
        os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~_WRITABLE)
    is_shared = False
    try:
        os.link(source, target, follow_symlinks=False)
        if fsync:  # another process may have written it without
            sync_fd(fd)
        # Another file may have got the name of the base.
        is_shared = _state_of(os.stat(target, follow_symlinks=False)) == _state_of(found)
    finally:
        if not is_shared:
            with contextlib.suppress(OSError):
                os.unlink(target)
    return is_shared


def _clone(fd: int, found: os.stat_result, target: str, facts: FileFacts, known: KnownFiles, *, fsync: bool) -> bool:
    """Make a file that shares the blocks of an open one, where the file system can; return whether it is there."""
    if found.st_dev in known.without_clones:
        return False
    own, is_cloned = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), False
    try:
        clone(fd, own)
        made = os.fstat(own)
        if made.st_size == facts.nbytes and _state_of(os.fstat(fd)) == _state_of(found):
            if fsync:
                sync_fd(own)
            known.note(made, facts.crc)
            is_cloned = True
    except UnsupportedError:
        if os.fstat(own).st_dev == found.st_dev:
            known.without_clones.add(found.st_dev)
    except OSError as exc:  # another file system, or no room
        logger.info("%s can't share blocks with another file: %s", target, exc)
    finally:
        os.close(own)
        if not is_cloned:
            os.unlink(target)
    return is_cloned


def _examined(fd: int, facts: FileFacts, known: KnownFiles) -> os.stat_result | None:
    """Return the state of an open file that has these facts, else None; read it if that is not known."""
    found = os.fstat(fd)
    if found.st_size != facts.nbytes:
        return None
    crc = known.crc_of(found)
    if crc is None:
        crc = at = 0
        while piece := os.pread(fd, _STEP_BYTES, at):
            crc, at = crc32(piece, crc), at + len(piece)
        if at != facts.nbytes or _state_of(os.fstat(fd)) != _state_of(found):
            return None
        known.note(found, crc)
    return found if crc == facts.crc else None


def _state_of(found: os.stat_result) -> tuple[int, ...]:
    """Return what is another for another file, and after somebody has written to it."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
