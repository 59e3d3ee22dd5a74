"""Trying again what a file system refused for a moment. The decisions are pure; only `Repeater` waits.

Which errors of a local or mounted file system pass by themselves:

======================================  ===============================================================================
EAGAIN, ENOBUFS, ENOMEM                 the kernel or a server was short of something
EMFILE, ENFILE                          too many open files: others close theirs
EBUSY, ENOLCK                           somebody else has it just now; the lock server is starting
EINTR                                   a FUSE or a soft NFS mount gave a request up because of a signal
ETIMEDOUT, ESTALE, EHOSTDOWN,           the server did not answer in time, was restarted or is being replaced,
EHOSTUNREACH, ENETDOWN, ENETUNREACH,    or the network between
ENETRESET, ECONNABORTED, ECONNREFUSED,
ECONNRESET, ESHUTDOWN
======================================  ===============================================================================

And which don't: EIO (the device has given up after attempts of its own, and what it was given may be lost), ENOSPC,
EDQUOT and EFBIG (somebody has to make room, so it is said at once), EROFS (the kernel has found damage), EACCES and
EPERM (somebody has decided so), ENOTCONN, ENXIO and ENODEV (it was unplugged or its daemon has died; the mount that
comes back is another one), EINVAL and EOPNOTSUPP (answered with a fallback, not with a repetition).

An fsync that has failed is never tried again, whatever it says: the kernel may have dropped what it could not write,
and then the next fsync has nothing to complain about. (After EINTR Python itself goes on.) Nor is close, after which
the descriptor is gone.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import anyio

from aiockpt.errors import AiockptError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_NOTHING_DONE = ("EAGAIN", "ENOBUFS", "ENOMEM", "EMFILE", "ENFILE", "EBUSY", "ENOLCK")
_MAYBE_DONE = (
    "EINTR",
    "ETIMEDOUT",
    "ESTALE",
    "EHOSTDOWN",
    "EHOSTUNREACH",
    "ENETDOWN",
    "ENETUNREACH",
    "ENETRESET",
    "ECONNABORTED",
    "ECONNREFUSED",
    "ECONNRESET",
    "ESHUTDOWN",
)


def _numbers(names: tuple[str, ...]) -> frozenset[int]:
    """Give the numbers of errors, of those that this system has."""
    return frozenset(getattr(errno, name) for name in names if hasattr(errno, name))


AMBIGUOUS = _numbers(_MAYBE_DONE)
"""Errors after which the file system may have done what was asked all the same."""

TRANSIENT = _numbers(_NOTHING_DONE) | AMBIGUOUS
"""Errors of a file system that may pass by themselves."""

logger = logging.getLogger("aiockpt")


class NotSyncedError(OSError):
    """An fsync failed: what was written before may be lost, and no further fsync would tell."""


def sync_fd(fd: int) -> None:
    """Make what was written to a file or directory durable. Blocks.

    Raises:
        NotSyncedError: it failed; see there.
    """
    try:
        os.fsync(fd)
    except OSError as exc:
        raise NotSyncedError(exc.errno, exc.strerror) from exc


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and how fast, a storage tries again what has failed for a reason that may pass by itself.

    Each system call counts for itself. The pauses grow, and differ by chance, so that many ranks don't come back all
    at once; the buffer that was to be written is not touched meanwhile::

        aiockpt.AsyncCheckpointer(retries=aiockpt.Retries(attempts=8, most_s=30.0))   # up to a minute for a server

    Attributes:
        attempts: how often in all; 1 for no repetition.
        first_s: the pause after the first attempt, in seconds; up to half of it is left out, by chance.
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
        """Give the pause after so many attempts have failed.

        Args:
            failed: 1 or more.
            luck: between 0 and 1.
        """
        try:
            grown = self.first_s * self.factor ** (failed - 1)
        except OverflowError:
            grown = self.most_s
        return min(grown, self.most_s) * (0.5 + luck / 2)


DEFAULT_RETRIES = Retries()
NO_RETRIES = Retries(attempts=1)


def check_retries(retries: Retries | int | None) -> Retries:
    """Give what was meant: a number is how often to try again, and None is never.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(retries, Retries):
        return retries
    if retries is None:
        return NO_RETRIES
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries is {retries!r}; it must be an aiockpt.Retries, how often to try again, or None")
    return Retries(attempts=retries + 1)


def fault_of(error: BaseException) -> OSError | None:
    """Give what the file system said, of an error or of one of ours that has it as its cause."""
    said = error.__cause__ if isinstance(error, AiockptError) else error
    return said if isinstance(said, OSError) and not isinstance(said, AiockptError) else None


def next_pause_s(retries: Retries, error: BaseException, failed: int, luck: float) -> float | None:
    """Decide whether to try again: give the pause before, or None.

    Args:
        retries: how often, and how fast.
        error: of the last attempt.
        failed: how many attempts have failed.
        luck: between 0 and 1.
    """
    fault = fault_of(error)
    if fault is None or isinstance(fault, NotSyncedError) or fault.errno not in TRANSIENT:
        return None
    return None if failed >= retries.attempts else retries.pause_s(failed, luck)


def told(fault: OSError) -> str:
    """Say what the file system said, and how often it was tried."""
    return " ".join([str(fault), *(f"({note})" for note in getattr(fault, "__notes__", ()))])


class Repeater:
    """Does steps again as `Retries` says, on the loop that awaits it.

    Args:
        retries: how often, and how fast.
        draw: gives numbers between 0 and 1.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        retries: Retries,
        *,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> None:
        self.retries = retries
        self._draw = draw
        self._sleep = sleep

    async def run(
        self,
        what: str,
        step: Callable[[], Awaitable[T]],
        *,
        undone: Callable[[], Awaitable[bool]] | None = None,
    ) -> T:
        """Do a step, again and again while it may still succeed.

        Args:
            what: the step, for the log.
            step: is called for each attempt; nothing of one that has failed is running any more.
            undone: for a step that must not be done twice: tells, after an error that leaves it open, whether
                nothing has happened. If something has, or that can't be found out, the error counts.

        Raises:
            BaseException: of the last attempt. What the file system said has a note that tells how often it was tried.
        """
        begin = time.monotonic()
        failed = 0
        while True:
            try:
                return await step()
            except (OSError, AiockptError) as exc:
                failed += 1
                pause_s = next_pause_s(self.retries, exc, failed, self._draw())
                fault = fault_of(exc)
                if pause_s is None or fault is None or not await _is_undone(fault, undone):
                    if failed > 1 and fault is not None:
                        fault.add_note(f"tried {failed} times in {time.monotonic() - begin:.1f} s")
                    raise
                logger.info(
                    "%s: %s; trying again in %.2f s (attempt %d of %d)",
                    *(what, fault, pause_s, failed + 1, self.retries.attempts),
                )
            await self._sleep(pause_s)


async def _is_undone(fault: OSError, undone: Callable[[], Awaitable[bool]] | None) -> bool:
    if undone is None or fault.errno not in AMBIGUOUS:
        return True
    try:
        return await undone()
    except OSError:
        return False
