"""Holding a directory, so that nobody takes it for one that a dead process has left. All functions block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import weakref
from typing import Literal

Lock = Literal["held", "refused", "unsupported"]

# EBADF: for directories on NFS; EACCES and EPERM: where a filter of system calls says so.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EACCES, errno.EPERM})
_PASSING = frozenset({errno.ENOLCK, errno.EINTR})
_ATTEMPTS = 4
_PAUSE_S = 0.01

logger = logging.getLogger("aiockpt")

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Hold:
    """An open directory with a shared lock on it, where the file system has locks.

    It ends with `release`, or at the latest with the process.

    Args:
        fd: the directory; belongs to the hold from now on.

    Attributes:
        identity: what tells the directory from all others, whatever it is called.
        release: let go of it. Idempotent.
    """

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd = fd
        self.identity = (found.st_dev, found.st_ino)
        self.release = weakref.finalize(self, _let_go, fd, os.getpid())
        self.release.atexit = False


def hold(path: str) -> Hold:
    """Hold a directory.

    Raises:
        FileNotFoundError: it is not there, or is just being removed.
        OSError: it is no directory, or can't be opened.
    """
    fd = os.open(path, _FLAGS)
    try:
        refused = lock(fd, fcntl.LOCK_SH) == "refused"
        if refused or not os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            raise FileNotFoundError(errno.ENOENT, "it is being removed", path)
        return Hold(fd)
    except BaseException:
        os.close(fd)
        raise


def hold_if_there(path: str) -> Hold | None:
    """Hold a directory; None if it is not there. Raises what `hold` does otherwise."""
    try:
        return hold(path)
    except FileNotFoundError:
        return None


def lock(fd: int, kind: int) -> Lock:
    """Lock a directory without waiting for others, shared or alone; see flock(2).

    Raises:
        OSError: it is not known whether it is locked.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return "refused"
        except OSError as exc:
            if exc.errno in _UNSUPPORTED:
                return "unsupported"
            if exc.errno not in _PASSING or (attempt == _ATTEMPTS and exc.errno != errno.ENOLCK):
                raise
            if attempt == _ATTEMPTS:
                logger.info("the file system gives no lock, so it counts as one without locks: %s", exc)
                return "unsupported"
            time.sleep(_PAUSE_S)
        else:
            return "held"
    raise AssertionError("the last attempt returns or raises")


def _let_go(fd: int, pid: int) -> None:
    """Unlock and close; only in the process that has locked, for those it has forked share the lock."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):  # there was no lock
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing would leave it to a process that was forked meanwhile
    os.close(fd)
