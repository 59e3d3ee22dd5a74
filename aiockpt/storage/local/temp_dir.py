r"""The temporary directory that a checkpoint is written to: its name, its lock, and the sidecar files beside it.

A name is `.aiockpt-MACHINE BOOT SPACE.PID.START.RANDOM`, the first three being hashes of ten letters each without a gap
between them, and maybe a suffix: `-swept` for a directory that is being removed, say. The name encodes the owner
process, so that orphans can be recognised. RANDOM has 64 bits, so that it can't be guessed.

The name of the checkpoint is no part of it: a program that looks for checkpoints with `step-(\d+)` would take a killed
save for a complete one. For the same reason the hashes have no vowels, so that they spell no word by chance, and no
name has a digit: some programs take the entry with the largest number in its name. Earlier versions wrote digits.

The processes of a save hold a shared flock on the directory; an orphan is removed under an exclusive one. All functions
block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Literal, TypeVar

from aiockpt.core.dataclasses import dataclass
from aiockpt.errors import CommitError
from aiockpt.format.names import HIDDEN
from aiockpt.storage.local.belonging import remove
from aiockpt.storage.local.entries import read_regular
from aiockpt.storage.local.retries import NotSyncedError, fault_of, sync_fd
from aiockpt.storage.syscalls import identity, rename_noreplace

_LETTERS = "bcdfghjklmnpqrstvwxz"
_HASH_LETTERS = 10
_SPELLED, _READ = (str.maketrans(*each) for each in (("0123456789", "hjkmnpqrsv"), ("hjkmnpqrsv", "0123456789")))
_FIRST_SPACE = "pid:[4026531836]"  # of the processes that are in no container; see PROC_PID_INIT_INO in the kernel
_OWNED = re.compile(
    r"(?P<base>\.aiockpt-(?P<machine>[a-z]{10})(?P<boot>[a-z]{10})(?P<space>[a-z]{10})"
    r"\.(?P<pid>[0-9hjkmnpqrsv]{1,7})\.(?P<start>[0-9hjkmnpqrsv]{1,20})\.[0-9a-fhjkmnpqrsv]{16})"
    r"(?P<suffix>(?:-[a-z0-9]+)*)"
)
# Names made on systems that don't identify processes, and by the adapters for DCP.
_UNOWNED = re.compile(
    r"(?P<base>\.aiockpt-(?:x\.[0-9hjkmnpqrsv]{1,7}\.[0-9a-fhjkmnpqrsv]{16}|dcp(?:-[a-z]{20})?))"
    r"(?P<suffix>(?:-[a-z0-9]+)*)"
)
SWEPT = "-swept"  # suffix of a directory that is being removed
REPLACED = "-replaced"  # suffix of what the directory's contents are about to replace; see `replacing`
RECORD = "-replaces"  # suffix of a file with the name of the checkpoint that they replace

# New files and directories follow the umask, but are never writable for others.
_DIRECTORY_MODE = 0o775
_FILE_MODE = 0o664
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_ATTEMPTS = 100
_SIDECAR_BYTES = 1 << 28  # far more than any has

Liveness = Literal["dead", "alive", "unknown"]
LockResult = Literal["held", "refused", "unsupported"]
# EBADF: for directories on NFS; EACCES and EPERM: where a filter of system calls refuses flock.
_LOCK_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EACCES, errno.EPERM})
_LOCK_PASSING = frozenset({errno.ENOLCK, errno.EINTR})
_LOCK_ATTEMPTS = 4
CANT_RENAME_OPEN = frozenset({errno.EACCES, errno.EBUSY, errno.EPERM})
"""Errors of file systems that can't rename a directory while it is open, such as 9P (WSL) and SMB; also of others."""

T = TypeVar("T")
_LOCK_PAUSE_S = 0.01

logger = logging.getLogger("aiockpt")


# --- names --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, distinguished from all others that exist or have existed."""

    machine: str  # a hash of the machine's id and host name; unique where these prove nothing
    boot: str  # a hash of the id of this run of its kernel
    space: str  # a hash of that and of the process's namespace, within which its number counts
    pid: int  # its number there
    start: int  # when it was started, in ticks since the kernel was

    def __str__(self) -> str:
        return f"{self.machine}{self.boot}{self.space}.{self.pid}.{self.start}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A temporary name, taken apart."""

    base: str  # the name of the directory
    suffix: str  # empty for the directory itself
    owner: Owner | None  # None if it is not known


def new_ticket() -> str:
    """Choose a temporary name."""
    return spelled(f"{HIDDEN}{this_process() or f'x.{os.getpid()}'}.{secrets.token_hex(8)}")


def copy_ticket(save_id: str, number: int = 0) -> str:
    """Return the temporary name of the copy of a checkpoint, the same in every process: so it has no owner."""
    return spelled(f"{HIDDEN}x.{number}.{save_id}")


def spelled(name: str) -> str:
    """Return a name with letters for its digits."""
    return name.translate(_SPELLED)


def shared_ticket(name: str) -> str:
    """Return the temporary name that all ranks of an adapter for DCP use for a checkpoint of this name."""
    return f"{HIDDEN}dcp-{_hash(name, 2 * _HASH_LETTERS)}"


def read_ticket(name: str) -> Ticket | None:
    """Take a name apart; None if it is no temporary one."""
    found = _OWNED.fullmatch(name)
    if found is not None:
        pid, start = (int(found[number].translate(_READ)) for number in ("pid", "start"))
        owner = Owner(found["machine"], found["boot"], found["space"], pid, start)
        return Ticket(found["base"], found["suffix"], owner)
    found = _UNOWNED.fullmatch(name)
    return None if found is None else Ticket(found["base"], found["suffix"], None)


def this_process() -> Owner | None:
    """Return what identifies this process; None where the system doesn't say."""
    return _process(os.getpid())


@cache  # by pid: a forked child is another process
def _process(pid: int) -> Owner | None:
    if sys.platform != "linux":
        return None
    try:
        boot = read_text("/proc/sys/kernel/random/boot_id")
        space = os.stat("/proc/self/ns/pid").st_ino
        start = _start_ticks(pid)
        if os.readlink("/proc/self") != str(pid) or start is None:  # /proc is of another namespace
            return None
    except OSError:
        return None
    return Owner(_hash(_machine()), _hash(boot), _hash(f"{boot} {space}"), pid, start)


def is_running(owner: Owner) -> bool:
    """Return whether a process of this namespace still exists; True where that can't be found out."""
    try:
        os.kill(owner.pid, 0)
        return _start_ticks(owner.pid) == owner.start  # else the pid has been given to a later process
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or not shown
        return True


def liveness(owner: Owner | None, here: Owner | None) -> Liveness:
    """Return whether a process lives, as far as that can be known from here."""
    if owner is None or here is None:
        return "unknown"
    if owner.space == here.space:
        return "alive" if is_running(owner) else "dead"
    return "dead" if owner.machine == here.machine and owner.boot != here.boot else "unknown"


def booted_s() -> float | None:
    """Return when the kernel was started, in seconds as in `time.time`."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.time() - time.clock_gettime(clock)


def _start_ticks(pid: int) -> int | None:
    """Return when a process was started; None for a zombie."""
    state, *fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _machine() -> str:
    """Return the machine's id and host name: copies of a machine share the id.

    Containers may share both with others: they get a random number, as does a machine without an id.
    """
    try:
        number = read_text("/etc/machine-id")
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        number = space = ""
    if number in ("", "uninitialized") or space != _FIRST_SPACE:
        return secrets.token_hex(8)
    return f"{number} {socket.gethostname()}"


def read_text(path: str) -> str:
    """Return the contents of a file of the kernel's."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().strip()


def _hash(text: str, length: int = _HASH_LETTERS) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest(), "big")
    letters = []
    for _ in range(length):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


# --- locks --------------------------------------------------------------------------------------------


class Hold:
    """An open directory with a shared flock, where the file system has locks, which marks it as in use.

    `release` is idempotent; the lock ends with the process at the latest.
    """

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.identity = (found.st_dev, found.st_ino)  # distinguishes the directory, whatever its name
        self._begin(fd)

    def _begin(self, fd: int) -> None:
        self.fd = fd
        self.release = weakref.finalize(self, _unlock, fd, os.getpid())
        self.release.atexit = False  # a daemon thread may still write; the kernel unlocks when the process has ended

    def renamed_by(self, step: Callable[[], T], path: str) -> T:
        """Return what a step returns that renames the directory at ``path``, or raises an error and has not.

        If it fails as it would where an open directory can't be renamed, it is repeated without the hold, which is
        taken again only if that fails too.
        """
        try:
            return step()
        except (OSError, CommitError) as exc:
            fault = fault_of(exc)
            if fault is None or isinstance(fault, NotSyncedError) or fault.errno not in CANT_RENAME_OPEN:
                raise
        self.release()
        try:
            return step()
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                self._begin(_open_locked(path))
            raise


def hold(path: str) -> Hold:
    """Hold a directory; FileNotFoundError if it is not there, or is just being removed."""
    return Hold(_open_locked(path))


def _open_locked(path: str) -> int:
    fd = os.open(path, _DIRECTORY_FLAGS)
    try:
        refused = lock(fd, fcntl.LOCK_SH) == "refused"
        # Looked at again with the lock held: it may have been removed, or renamed, after it was opened.
        if refused or not os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            raise FileNotFoundError(errno.ENOENT, "it is being removed", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock(fd: int, kind: int) -> LockResult:
    """Lock a directory without waiting for others, shared or exclusively; OSError if the outcome is unknown."""
    for attempt in range(1, _LOCK_ATTEMPTS + 1):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return "refused"
        except OSError as exc:
            if exc.errno in _LOCK_UNSUPPORTED:
                return "unsupported"
            if exc.errno not in _LOCK_PASSING or (attempt == _LOCK_ATTEMPTS and exc.errno != errno.ENOLCK):
                raise
            if attempt == _LOCK_ATTEMPTS:
                logger.info("the file system gives no lock, so it counts as one without locks: %s", exc)
                return "unsupported"
            time.sleep(_LOCK_PAUSE_S)
        else:
            return "held"
    raise AssertionError("the last attempt returns or raises")


def _unlock(fd: int, pid: int) -> None:
    """Unlock and close; only in the process that has locked, since its forks share the lock."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):  # there was no lock
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing would leave it to a process that was forked meanwhile
    os.close(fd)


# --- making and removing ------------------------------------------------------------------------------


def make_new(folder: str, choose: Callable[[], str] = new_ticket) -> tuple[str, Hold]:
    """Make a temporary directory under a new name, and hold it."""
    for attempt in range(_NAME_ATTEMPTS):
        hidden = os.path.join(folder, choose())
        try:
            return hidden, _make(hidden)
        except FileExistsError:  # never use what another process has made
            if attempt == _NAME_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def make_hidden(hidden: str) -> Hold:
    """Make a temporary directory and hold it; FileExistsError if the name is taken."""
    ticket = read_ticket(os.path.basename(hidden))
    if ticket is None or ticket.owner is None or ticket.owner == this_process():
        return _make(hidden)
    # The name's owner may be dead: lock the directory before it becomes visible under that name.
    own, held = make_new(os.path.dirname(hidden))
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_empty, own)
        undo.callback(held.release)
        try:
            rename_noreplace(own, hidden)
        except OSError as exc:
            exc.filename = hidden
            if identity(hidden) != held.identity:  # else it is done, though the answer is an error
                if exc.errno in CANT_RENAME_OPEN:
                    return _make(hidden)
                raise
        undo.pop_all()
    return held


def _make(path: str) -> Hold:
    os.mkdir(path, _DIRECTORY_MODE)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_empty, path)
        try:
            held = hold(path)
        except FileNotFoundError as exc:  # a cleaner has been faster: another name is as good
            raise FileExistsError(errno.EEXIST, "another process is removing it", path) from exc
        undo.callback(held.release)
        if not _is_own(held.fd):
            raise PermissionError(errno.EPERM, "another user has put a directory in its place", path)
        undo.pop_all()
    return held


def _remove_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as exc:  # the first error counts
        logger.warning("can't remove the unfinished checkpoint %s: %s; the next run does", path, exc)


def _is_own(directory: int) -> bool:
    """Return whether a directory belongs to the user of this process, as the file system sees it."""
    owner = os.fstat(directory).st_uid
    if owner == os.geteuid():
        return True
    probe = "probe"  # a mount may map all users to one: compare with the owner of what is made here
    os.mkdir(probe, 0o700, dir_fd=directory)
    try:
        return os.stat(probe, dir_fd=directory, follow_symlinks=False).st_uid == owner
    finally:
        os.rmdir(probe, dir_fd=directory)


def sweep(hidden: str, own: tuple[int, int] | None = None) -> None:
    """Remove the directory of a save whose owner seems to be dead, if it still has this identity; None: any.

    It is renamed first: if the owner lives after all, it either publishes the whole of it, or finds it gone.
    """
    if own is not None and identity(hidden) != own:
        return
    swept = f"{hidden}{SWEPT}"
    try:
        os.rename(hidden, swept)
    except FileNotFoundError:  # it was published, or another process was faster
        return
    found = identity(swept)
    if own is None or found == own:
        remove(swept)
    elif found is not None:
        rename_noreplace(swept, hidden)


# --- contents, and sidecar files ----------------------------------------------------------------------


def sizes_in(path: str) -> dict[str, int]:
    """Return the size in bytes of each file below a directory, by its relative name."""
    sizes: dict[str, int] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                sizes |= {f"{entry.name}/{name}": size for name, size in sizes_in(entry.path).items()}
            else:
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def write_new(path: str, data: bytes, *, fsync: bool) -> None:
    """Write a file that is not there yet, such as a sidecar file."""
    # O_EXCL and O_NOFOLLOW: in a shared directory, another user may have made a link of this name.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        if fsync:
            sync_fd(fd)


def read_sidecar(path: str) -> bytes | None:
    """Return the contents of a sidecar file; None if it is not there, OSError if it can't be one."""
    try:
        return read_regular(path, most=_SIDECAR_BYTES, flags=os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
