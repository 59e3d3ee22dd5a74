"""Retries of transient errors of a file system. The decisions are pure; only `Repeater` waits.

Transient errors of local and mounted file systems:

======================================  ===============================================================================
EAGAIN, ENOBUFS, ENOMEM                 the kernel or a server was short of something
EMFILE, ENFILE                          too many open files: others close theirs
EBUSY, ENOLCK                           another process has it just now; the lock server is starting
EINTR                                   a signal interrupted a request to a FUSE or a soft NFS mount
ETIMEDOUT, ESTALE, EHOSTDOWN,           the server did not answer in time, was restarted or is being replaced,
EHOSTUNREACH, ENETDOWN, ENETUNREACH,    or the network between
ENETRESET, ECONNABORTED, ECONNREFUSED,
ECONNRESET, ESHUTDOWN
======================================  ===============================================================================

Not transient: EIO (the device has given up after retries of its own, and its data may be lost), ENOSPC, EDQUOT and
EFBIG (a user has to make room, so it is reported at once; but what a run deletes anyway, see `room_coming`, is waited
for once), EROFS (the kernel has found damage), EACCES and EPERM (an
administrator has decided so), ENOTCONN, ENXIO and ENODEV (it was unplugged or its daemon has died; the mount that
comes back is another one), EINVAL and EOPNOTSUPP (answered with a fallback, not with a retry).

A failed fsync is never retried, whatever its error: the kernel may have dropped the pages that it could not write, and
then the next fsync succeeds. (After EINTR Python itself goes on.) Nor is close, after which the descriptor is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from aiockpt.core.dataclasses import dataclass
from aiockpt.errors import AiockptError
from aiockpt.storage.base import room_coming

T = TypeVar("T")

_NO_ANSWER = {errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_NETWORK = {errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ECONNABORTED, errno.ECONNREFUSED}
AMBIGUOUS = frozenset(_NO_ANSWER | _NETWORK | {errno.ECONNRESET, errno.ESHUTDOWN})
"""Errors after which the operation may have happened all the same."""

_NOTHING_DONE = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EBUSY, errno.ENOLCK}
TRANSIENT = AMBIGUOUS | _NOTHING_DONE
"""Errors of a file system that may pass by themselves."""

_draw = Random().random  # of its own: the program's must not be advanced
logger = logging.getLogger("aiockpt")


class NotSyncedError(OSError):
    """An fsync failed: what was written before may be lost, and no further fsync would report it."""


def sync_fd(fd: int) -> None:
    """Fsync a file or directory; raise every error as a `NotSyncedError`, which is never retried. Blocks."""
    try:
        os.fsync(fd)
    except OSError as exc:
        raise NotSyncedError(exc.errno, exc.strerror) from exc


@dataclasses.dataclass(frozen=True, slots=True)
class Retries:
    """The number and the pauses of a storage's retries after transient errors.

    Each system call counts for itself. The pauses grow, and are randomised, so that many ranks don't retry all at once;
    the buffer that was to be written is not touched meanwhile::

        aiockpt.AsyncCheckpointer(retries=aiockpt.Retries(attempts=8, most_s=30.0))   # up to a minute for a server

    Attributes:
        attempts: how often in all; 1 for no retry.
        first_s: the pause after the first attempt, in seconds; up to half of it is left out at random.
        factor: how much longer each next pause is.
        most_s: the longest pause, in seconds.
    """

    attempts: int = 4
    first_s: float = 0.1
    factor: float = 2.0
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.attempts, int) or isinstance(self.attempts, bool) or self.attempts < 1:
            raise ValueError(f"attempts must be an integer of at least 1, not {self.attempts!r}")
        for name, least in (("first_s", 0.0), ("factor", 1.0), ("most_s", 0.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least {least:g}, not {value!r}")

    def pause_s(self, failed: int, luck: float) -> float:
        """Return the pause after ``failed`` attempts (1 or more), with a random number between 0 and 1."""
        try:
            grown = self.first_s * self.factor ** (failed - 1)
        except OverflowError:
            grown = self.most_s
        return min(grown, self.most_s) * (0.5 + luck / 2)


DEFAULT_RETRIES = Retries()
NO_RETRIES = Retries(attempts=1)


def check_retries(retries: Retries | int | None) -> Retries:
    """Return `Retries`, also for a number of attempts after the first, or None for no retry; raise ValueError."""
    if isinstance(retries, Retries):
        return retries
    if retries is None:
        return NO_RETRIES
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries is {retries!r}; it must be an aiockpt.Retries, how often to try again, or None")
    return Retries(attempts=retries + 1)


def fault_of(error: BaseException) -> OSError | None:
    """Return the OSError of the file system: the error itself, or the cause of one of aiockpt's errors."""
    said = error.__cause__ if isinstance(error, AiockptError) else error
    return said if isinstance(said, OSError) and not isinstance(said, AiockptError) else None


def next_pause_s(retries: Retries, error: BaseException, failed: int, luck: float) -> float | None:
    """Return the pause before the next attempt, or None if there is to be none; ``luck`` is between 0 and 1."""
    fault = fault_of(error)
    if fault is None or isinstance(fault, NotSyncedError) or fault.errno not in TRANSIENT:
        return None
    return None if failed >= retries.attempts else retries.pause_s(failed, luck)


async def _pause(seconds: float) -> None:
    import anyio  # not at the top: commands that list checkpoints come without a loop

    await anyio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Repeater:
    """Retries steps, on the loop that awaits it. ``draw`` returns random numbers between 0 and 1."""

    retries: Retries
    draw: Callable[[], float] = _draw
    sleep: Callable[[float], Awaitable[object]] = _pause

    async def run(
        self,
        what: str,
        step: Callable[[], Awaitable[T]],
        *,
        undone: Callable[[], Awaitable[bool]] | None = None,
    ) -> T:
        """Run a step until it succeeds, fails with a permanent error, or the attempts are used up.

        ``undone`` is for a step that is not idempotent: called after an ambiguous error, it returns whether nothing has
        happened. If something has, or that can't be found out, the error is raised. The OSError of a last attempt has a
        note that says how often it was tried.
        """
        begin = time.monotonic()
        failed = 0
        room = room_coming.get()
        while True:
            try:
                return await step()
            except (OSError, AiockptError) as exc:
                failed += 1
                pause_s = next_pause_s(self.retries, exc, failed, self.draw())
                fault = fault_of(exc)
                if room is not None and fault is not None and _is_full(fault):
                    logger.info("%s: %s; trying once more when earlier steps are deleted", what, fault)
                    await asyncio.wrap_future(room)
                    room = None
                    continue
                if pause_s is None or fault is None or not await _is_undone(fault, undone):
                    if failed > 1 and fault is not None:
                        fault.add_note(f"tried {failed} times in {time.monotonic() - begin:.1f} s")
                    raise
                logger.info(
                    "%s: %s; trying again in %.2f s (attempt %d of %d)",
                    *(what, fault, pause_s, failed + 1, self.retries.attempts),
                )
            await self.sleep(pause_s)


def _is_full(fault: OSError) -> bool:
    return fault.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(fault, NotSyncedError)


async def _is_undone(fault: OSError, undone: Callable[[], Awaitable[bool]] | None) -> bool:
    if undone is None or fault.errno not in AMBIGUOUS:
        return True
    try:
        return await undone()
    except OSError:
        return False
