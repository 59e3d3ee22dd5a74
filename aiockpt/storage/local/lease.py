"""The lock of a run's directory: one manager writes, any number read. Without torch; blocks.

The lock is a flock on the file `.aiockpt.lock` in the directory, which names its owner: host, process, time, and what
distinguishes the process from all others, as in the names of temporary directories. The owner removes the file. If it
is killed, the kernel releases the flock and the file stays.

The file is written and locked under a temporary name, then linked to its own: it is never seen in part, nor free. One
that was left is renamed away first, which only one of several processes can do.

A flock does not reach other hosts on every file system, and some have none. So what the file says counts as well:

======================================  ==============================================================================
the file names                          and the flock is free, or there are none
======================================  ==============================================================================
a process of this kernel and namespace  taken if the process is dead
one of an earlier boot of this machine  taken
any other                               taken if the file system is known to share flocks with the hosts that mount it,
                                        or is local; else refused, as it may live
======================================  ==============================================================================
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from aiockpt.core.forks import called_in_children
from aiockpt.errors import RunLockedError, printable_key
from aiockpt.storage.base import LeaseFacts, RunLease
from aiockpt.storage.local.entries import NotRegularError, open_regular
from aiockpt.storage.local.temp_dir import Owner, liveness, lock, new_ticket, read_text, read_ticket, this_process
from aiockpt.storage.syscalls import link, open_directory, rename_noreplace

LOCK_NAME = ".aiockpt.lock"

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o664
_ATTEMPTS = 100
_PAUSE_S = 0.02
_FACT_BYTES = 1 << 16
_PROC = "/proc"

# Disks of this machine, and file systems that send flocks to their server by default.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay", "apfs", "hfs"})
_SHARING = frozenset({"nfs", "nfs4", "ceph", "gfs2", "ocfs2"})
_LOCKS_STAY_HERE = ("nolock", "local_lock=all", "local_lock=flock")  # mount options of NFS

logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True)
class LockFacts(LeaseFacts):
    """The contents of a lock file, or of the object of a lease."""

    ticket: str  # a temporary name of the process, with a random number; empty of an object that is free

    @property
    def owner(self) -> Owner | None:
        """The process; None if its system does not identify processes."""
        ticket = read_ticket(self.ticket)
        return None if ticket is None else ticket.owner

    @property
    def remedy(self) -> str:
        """The way to free the run, for messages."""
        if (self.owner, self.host, self.pid) == (this_process(), socket.gethostname(), os.getpid()):
            return "that is this very process: close the other manager of the run that it has"
        return "end that program first"


class RunLock(RunLease):
    """The lock of a run's directory, held until `release` or the end of the process; forked children do not hold it."""

    def __init__(self, fd: int, path: str, facts: LockFacts, *, is_locked: bool) -> None:
        self._fd: int | None = fd
        self._path = path
        self._pid = os.getpid()
        self._is_locked = is_locked
        self.facts = facts
        _held.add(self)

    def check(self) -> None:
        """Raise RunLockedError if the file was removed or replaced, so that others may have the run. Blocks."""
        try:
            if self._fd is None or self._is_own(self._fd):  # a forked child has none, and can't save
                return
            other = owner_of(os.path.dirname(self._path))
        except OSError as exc:  # the save may succeed all the same, by its retries
            logger.warning("the lock %s can't be looked at: %s", self._path, exc)
            return
        if other is not None:
            raise _refusal(self._path, other)
        raise RunLockedError(
            f"{self._path}, the lock of this manager, was removed, so that another one may write to the run; nothing "
            "was saved. Find out what removes or renames files of the run, then close this manager and make a new one"
        )

    def release(self) -> None:
        """Remove the file and the lock; idempotent. Blocks."""
        fd, self._fd = self._fd, None
        if fd is None or os.getpid() != self._pid:
            return
        try:
            with contextlib.suppress(OSError):  # it stays, and names a process that is dead soon
                # Removed while it is locked: a process that has opened it already finds it gone once it has the lock.
                if self._is_own(fd):
                    os.unlink(self._path)
        finally:
            # Closing alone would leave the lock held as long as a child, forked just now, has the descriptor too.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _is_own(self, fd: int | None) -> bool:
        return fd is not None and _is_at(fd, self._path) and (self._is_locked or read_facts(fd) == self.facts)

    def _leave_to_parent(self) -> None:
        """Close the descriptor in a forked child, which would else hold the lock beyond its parent's end."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.release()


_held = called_in_children(RunLock._leave_to_parent)


def take(directory: str) -> RunLock:
    """Lock a run's directory, made if need be; raise RunLockedError if another manager has the lock, or may have it."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, LOCK_NAME)
    facts = LockFacts(socket.gethostname(), os.getpid(), time.time(), new_ticket())
    for attempt in range(_ATTEMPTS):
        if _make_way(path, is_last=attempt == _ATTEMPTS - 1):
            taken = _make(path, facts)
            if taken is not None:
                return taken
    raise RunLockedError(
        f"{path} is made and removed again and again by other processes; check which programs use the run"
    )


def owner_of(directory: str) -> LockFacts | None:
    """Return the owner of a run that is alive, or may be; None if the run is free. Takes no lock."""
    try:
        fd = open_regular(os.path.join(directory, LOCK_NAME), flags=os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError, NotRegularError):  # a pipe of that name is nobody's lock
        return None
    try:
        facts = read_facts(fd)
    finally:
        os.close(fd)
    return None if facts is None or liveness(facts.owner, this_process()) == "dead" else facts


def is_finishing(directory: str) -> bool:
    """Return whether the writer process of a dead trainer still writes a checkpoint here, to be published soon."""
    here = this_process()
    names = os.listdir(directory) if os.path.isdir(directory) else ()  # without a lock, the first save makes it
    for name in names:
        ticket = read_ticket(name)
        if ticket is None or ticket.suffix or liveness(ticket.owner, here) != "dead":
            continue
        with contextlib.suppress(OSError), open_directory(os.path.join(directory, name)) as fd:  # it may go meanwhile
            if lock(fd, fcntl.LOCK_EX) == "refused":
                return True
    return False


def read_facts(fd: int) -> LockFacts | None:
    """Return the contents of a lock file; None if it is empty or can't be understood."""
    return decode_facts(os.pread(fd, _FACT_BYTES, 0))


def decode_facts(data: bytes) -> LockFacts | None:
    """Return the contents of a lock file, or of an object; None if they can't be understood."""
    try:
        found: Any = json.loads(data)
        facts = LockFacts(str(found["host"]), int(found["pid"]), float(found["since"]), str(found["ticket"]))
        str(facts)  # its time may be out of range
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None
    return facts


def _make_way(path: str, *, is_last: bool) -> bool:
    """Remove a lock file that is left; return False to try again. Raises RunLockedError if it has an owner."""
    try:
        fd = open_regular(path, flags=os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        locked = lock(fd, fcntl.LOCK_EX)
        before = read_facts(fd)
        state = "dead" if before is None else liveness(before.owner, this_process())
        if locked == "refused":
            if before is None or state != "dead":
                raise _refusal(path, before)
            if is_last:
                raise _refusal(path, before, holders=_holders(fd))
            time.sleep(_PAUSE_S)  # a child that was just forked from it has yet to close the file
            return False
        if not _is_at(fd, path):  # the owner before has removed the file since it was opened here
            return False
        is_proof = locked == "held" and shares_locks(path)  # the kernel has released the lock of the one before
        if not is_proof and state != "dead":
            raise _refusal(path, before, unsure=state == "unknown")
        if locked == "unsupported" and os.fstat(fd).st_size and before is None:
            raise _refusal(path, None, unsure=True)
        aside = os.path.join(os.path.dirname(path), new_ticket())
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        if not _is_at(fd, aside) or read_facts(fd) != before:  # without flocks, another process may just have taken it
            with contextlib.suppress(FileExistsError):  # a third one has taken it too: the second finds out by `check`
                rename_noreplace(aside, path)
                return False
        os.unlink(aside)
        return True
    finally:
        os.close(fd)


def _make(path: str, facts: LockFacts) -> RunLock | None:
    """Make the lock file and lock it; return None if another process has been faster."""
    draft = os.path.join(os.path.dirname(path), facts.ticket)
    made = _write(draft, path, facts)
    try:
        if link(draft, path):
            return made
        made = _write(path, path, facts)  # another process may find it empty, and remove it
    except FileExistsError:  # by another process, unless the answer of a network file system was lost
        pass
    finally:
        os.unlink(draft)
    return made if made._is_own(made._fd) else None


def _write(file: str, path: str, facts: LockFacts) -> RunLock:
    """Write a new file and lock it; FileExistsError if there is one, or another process has locked it just now."""
    fd = os.open(file, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        locked = lock(fd, fcntl.LOCK_EX)
        if locked == "refused":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.pwrite(fd, json.dumps(asdict(facts)).encode(), 0)
        with contextlib.suppress(OSError):  # some file systems sync nothing; it is for other processes, not for later
            os.fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    return RunLock(fd, path, facts, is_locked=locked == "held")


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        if exc.errno == errno.ESTALE:
            return False
        raise


def _refusal(path: str, owner: LockFacts | None, *, unsure: bool = False, holders: str | None = None) -> RunLockedError:
    who = "another process that is taking it now" if owner is None else str(owner)
    error = f"the run {os.path.dirname(path)} is being written by {who}: "
    if holders is not None:
        error = f"the lock of the run {os.path.dirname(path)} is that of {who}. That one is dead, but "
        error += f"its lock is still held by {holders}: end that, or find who has {path} open, as with lsof"
    elif unsure:
        error += (
            "it can't be known from here whether that process lives, as locks of this file system may not reach other "
            f"hosts: if it does not, remove {path}"
        )
    else:
        remedy = "end that program first" if owner is None else owner.remedy
        error += f"{remedy}, choose another directory, or only read with read_only=True"
    return RunLockedError(error) if owner is None else RunLockedError(error, owner.host, owner.pid, owner.since)


def _holders(fd: int) -> str:
    """Name the processes that hold the flock of a file, as far as this user may look at them."""
    # Not by /proc/locks: it has the process that has locked, though a child may have inherited the lock.
    found: dict[str, None] = {}
    for each in glob.iglob(f"{_PROC}/[0-9]*/fd/*"):
        process, number = each.split("/fd/")
        with contextlib.suppress(OSError):  # it has ended, or closed the file, or is of another user
            if os.path.samestat(os.stat(each), os.fstat(fd)) and "FLOCK" in read_text(f"{process}/fdinfo/{number}"):
                found[f"process {os.path.basename(process)} ({printable_key(read_text(f'{process}/comm'))})"] = None
    return ", ".join(found) or "another process, probably a child of it"


def shares_locks(path: str, mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether a flock holds on every host that mounts the file system of a path, or it is local."""
    if sys.platform != "linux":
        return True
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            found = [line.split() for line in lines]
    except OSError:
        return False
    real = os.path.realpath(path)
    listed = [(_unescaped(fields[4]), fields) for fields in reversed(found) if len(fields) > 6]
    above = [each for each in listed if real == each[0] or real.startswith(os.path.join(each[0], ""))]
    if not above:
        return False
    _, fields = max(above, key=lambda each: len(each[0]))  # of equal ones, the last covers
    after = fields.index("-")
    kind, options = fields[after + 1], f"{fields[5]},{fields[after + 3]}".split(",")
    if kind == "lustre":
        return "flock" in options
    return kind in _LOCAL or (kind in _SHARING and not any(option in _LOCKS_STAY_HERE for option in options))


def _unescaped(mount: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        mount = mount.replace(code, character)
    return mount
