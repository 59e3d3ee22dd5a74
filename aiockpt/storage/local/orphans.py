"""Orphan collection: temporary directories of saves and deletions whose process was killed.

An orphan is removed when its owner is proven to be dead, and no other process holds it: the writer process of a killed
trainer, and the other ranks of a save, hold a shared flock (see `aiockpt.storage.local.temp_dir`). The owner is dead if

- it is of this kernel and namespace, and its pid does not exist or belongs to a later process;
- it is of an earlier boot of this machine, and nothing was changed since that boot ended.

Orphans of other machines and of other containers can't be classified here, since locks may count within one mount only.
They stay until the caller says how old is old enough. Without locks that holds for this namespace too, since the writer
process of a dead owner may live. All functions block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from aiockpt.core.dataclasses import dataclass
from aiockpt.errors import printable_key
from aiockpt.storage.local.belonging import OtherThingsError, look_into, remove, several
from aiockpt.storage.local.commit import remove_own
from aiockpt.storage.local.replacing import complete, is_between, recorded_name
from aiockpt.storage.local.temp_dir import (
    CANT_RENAME_OPEN,
    RECORD,
    REPLACED,
    SWEPT,
    Owner,
    Ticket,
    booted_s,
    liveness,
    lock,
    read_ticket,
    this_process,
)
from aiockpt.storage.syscalls import open_directory

OrphanStatus = Literal["dead", "rebooted", "old", "unknown"]
"""To be removed: the owner is dead, or is of an earlier boot, or the orphan is as old as was asked for. To be kept: the
owner is not known here."""

_QUIET_S = 60.0

T = TypeVar("T")

logger = logging.getLogger("aiockpt")


class _InUseError(Exception):
    """Another process holds it."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts by which orphans are classified."""

    here: Owner | None  # this process; None if that is not known
    now_s: float  # as in `time.time`
    booted_s: float | None = None  # when this machine was started; None if that is not known
    older_than_s: float | None = None  # the age from which on unknown owners' orphans are removed too; None: never

    def is_old(self, changed_s: float) -> bool:
        """Return whether the last change is as old as was asked for."""
        return self.older_than_s is not None and changed_s < self.now_s - self.older_than_s


def classify(owner: Owner | None, changed_s: float, by: HostFacts) -> OrphanStatus:
    """Classify an unlocked orphan by its owner and its last change."""
    quiet = changed_s < by.now_s - _QUIET_S
    if owner is not None and by.here is not None:
        if owner.space == by.here.space:
            return "dead"  # a running owner is recognised before, by its process
        earlier = owner.machine == by.here.machine and owner.boot != by.here.boot
        if earlier and by.booted_s is not None and changed_s < by.booted_s and quiet:
            return "rebooted"
    return "old" if by.is_old(changed_s) else "unknown"


class OrphanCleaner:
    """Removes the orphans in the directories that one storage saves to, once for each directory."""

    def __init__(self, *, fsync: bool) -> None:
        self._fsync = fsync  # make a checkpoint durable before the one that it replaced is removed
        self._looked: set[str] = set()
        self._own: dict[str, tuple[int, int] | None] = {}  # what this process could not remove, with its identity

    def add(self, hidden: str, identity: tuple[int, int] | None) -> None:
        """Note a directory that this process could not remove, for another attempt."""
        self._own[hidden] = identity

    def look_again(self, directory: str) -> None:
        """Make the next `look` at a directory list it again."""
        self._looked.discard(directory)

    def look(self, directory: str) -> None:
        """Remove proven orphans, if the directory was not cleaned yet; failures are logged."""
        for hidden, identity in list(self._own.items()):
            if os.path.dirname(hidden) == directory:
                self._try_again(hidden, identity)
        if directory in self._looked:
            return
        self._looked.add(directory)
        try:
            removed, later = clean(directory, fsync=self._fsync)
        except NotADirectoryError:
            return  # which the save will say
        except OSError as exc:
            logger.warning("can't look for what killed processes have left in %s: %s", directory, exc)
            return
        if removed:
            logger.info("removed what killed processes had left: %s", ", ".join(map(printable_key, removed)))
        if later:
            self.look_again(directory)

    def _try_again(self, hidden: str, identity: tuple[int, int] | None) -> None:
        try:
            remove_own(hidden, identity)
        except OSError as exc:
            if isinstance(exc, OtherThingsError):  # a user has to look at it; reported once
                self._own.pop(hidden, None)
            logger.warning("can't remove the unfinished checkpoint %s: %s", printable_key(hidden), exc)
        else:
            self._own.pop(hidden, None)


def clean(directory: str, *, fsync: bool, older_than_s: float | None = None) -> tuple[list[str], bool]:
    """Remove the orphans in a directory; log what can't be removed.

    Returns the paths that were removed, and whether a later attempt may remove more.
    """
    try:
        with open_directory(directory, follow=True) as fd:
            by = HostFacts(this_process(), time.time(), booted_s(), older_than_s)
            return _Cleaning(fd, directory, by, fsync=fsync).run()
    except FileNotFoundError:
        return [], False


class _Cleaning:
    """One pass over a directory. All names are looked up in the open directory, and links are never followed."""

    def __init__(self, fd: int, directory: str, by: HostFacts, *, fsync: bool) -> None:
        self._fd = fd
        self._directory = directory
        self._by = by
        self._fsync = fsync
        self._removed: list[str] = []
        self._later = False

    def run(self) -> tuple[list[str], bool]:
        groups: dict[str, list[Ticket]] = defaultdict(list)
        for name in os.listdir(self._fd):
            ticket = read_ticket(name)
            if ticket is not None:
                groups[ticket.base].append(ticket)
        for base, tickets in sorted(groups.items()):
            try:
                self._clean(base, sorted(tickets, key=lambda ticket: ticket.suffix))
            except _InUseError as exc:
                self._later = True
                logger.debug("%s stays: %s", printable_key(self._path(base)), exc)
            except OSError as exc:
                logger.warning(
                    "can't remove what a killed process has left, %s: %s", printable_key(self._path(base)), exc
                )
        return [self._path(name) for name in self._removed], self._later

    def _clean(self, base: str, tickets: list[Ticket]) -> None:
        """Remove the directories of a ticket, then their sidecar files, which are useless without them."""
        owner = tickets[0].owner
        if liveness(owner, self._by.here) == "alive":
            return
        names = [base + ticket.suffix for ticket in tickets]
        if is_between(self._path(base)) and not self._settle(base, owner):
            return
        for name in names:
            if stat.S_ISDIR(self._mode(name)):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    self._clean_directory(name, owner)
        if any(stat.S_ISDIR(self._mode(name)) for name in (base, base + SWEPT, base + REPLACED)):
            return
        for name in names:
            mode = self._mode(name)
            if stat.S_ISREG(mode) or (name in (base, base + REPLACED) and stat.S_ISLNK(mode)):
                with contextlib.suppress(FileNotFoundError):
                    self._clean_file(name, owner, replaced=name in (base, base + REPLACED))

    def _settle(self, base: str, owner: Owner | None) -> bool:
        """Complete an interrupted replacement; return whether what it has set aside may be removed.

        The owner does not matter, since a path without its checkpoint is of no use; but a live owner may be about to do
        the same, so a recent one is left to it.
        """
        with open_directory(base, dir_fd=self._fd) as fd:
            record = os.stat(base + RECORD, dir_fd=self._fd, follow_symlinks=False)
            if not (self._is_own(base, os.fstat(fd)) and self._is_own(base + RECORD, record)):
                return False
            is_quiet = record.st_mtime < self._by.now_s - _QUIET_S
            if classify(owner, record.st_mtime, self._by) == "unknown" and not is_quiet:
                return False
            if lock(fd, fcntl.LOCK_EX) == "refused":
                raise _InUseError("another process works at it")
            path = self._path(recorded_name(self._path(base)))
            if not self._renamed_by(partial(complete, self._path(base), path, self._sync), fd):
                raise OSError(
                    errno.EEXIST, f"{printable_key(path)} is no checkpoint, so what belongs there stays", base
                )
            logger.info("completed the replacement of %s, which was interrupted", printable_key(path))
        return True

    def _sync(self) -> None:
        if self._fsync:
            os.fsync(self._fd)

    def _clean_directory(self, name: str, owner: Owner | None) -> None:
        with open_directory(name, dir_fd=self._fd) as fd:
            if not self._is_own(name, os.fstat(fd)):
                return
            # An unknown one is not locked, not even for a moment: its maker may be about to take its own lock.
            if self._status(name, owner, _changed_s(fd)) == "unknown":
                return
            locked = lock(fd, fcntl.LOCK_EX)
            if locked == "refused":
                raise _InUseError("another process works at it, or removes it")
            changed_s = _changed_s(fd)  # again, as a process that held it until now may have written
            status = self._status(name, owner, changed_s)
            # Without locks it is not known whether the writer process of a dead trainer lives.
            unsure = status == "dead" and locked == "unsupported" and not self._by.is_old(changed_s)
            if status == "unknown" or unsure:
                return
            others = look_into(fd, unfinished=True).others
            if others:
                raise OSError(errno.ENOTEMPTY, f"it holds other things than a checkpoint ({several(others)})", name)
            self._sync()  # it may have been replaced: make that durable first
            self._take(name, fd)
            self._removed.append(name)

    def _take(self, name: str, fd: int) -> None:
        """Rename an open directory, then remove it: if it is in use after all, its owner finds it gone, or whole."""
        swept, own = name if name.endswith(SWEPT) else name + SWEPT, os.fstat(fd)
        self._renamed_by(partial(os.rename, name, swept, src_dir_fd=self._fd, dst_dir_fd=self._fd), fd)
        if not os.path.samestat(own, os.stat(swept, dir_fd=self._fd, follow_symlinks=False)):
            if swept != name:
                os.rename(swept, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            raise _InUseError("another directory has come to its place")
        remove(swept, dir_fd=self._fd)

    def _renamed_by(self, step: Callable[[], T], fd: int) -> T:
        """Return what a step returns that renames an open directory, which is closed first where that is needed."""
        try:
            return step()
        except OSError as exc:
            if exc.errno not in CANT_RENAME_OPEN:
                raise
        os.dup2(self._fd, fd, inheritable=False)  # closes the directory; the caller closes the number
        return step()

    def _clean_file(self, name: str, owner: Owner | None, *, replaced: bool) -> None:
        found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        if not self._is_own(name, found) or self._status(name, owner, found.st_mtime) == "unknown":
            return
        if self._fsync and replaced:  # a file or a link, which something has replaced
            os.fsync(self._fd)
        os.unlink(name, dir_fd=self._fd)
        self._removed.append(name)

    def _status(self, name: str, owner: Owner | None, changed_s: float) -> OrphanStatus:
        status = classify(owner, changed_s, self._by)
        if status == "unknown":
            logger.debug("%s stays: it is not known here whether its owner lives", printable_key(self._path(name)))
        return status

    def _is_own(self, name: str, found: os.stat_result) -> bool:
        if found.st_uid == os.geteuid():
            return True
        logger.debug("%s stays: it belongs to user %d", printable_key(self._path(name)), found.st_uid)
        return False

    def _mode(self, name: str) -> int:
        """Return the mode of what has this name; 0 for nothing."""
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _changed_s(fd: int) -> float:
    """Return when anything in or below a directory was changed last."""
    changed_s = os.fstat(fd).st_mtime
    for _, folders, files, below in os.fwalk(".", dir_fd=fd):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                changed_s = max(changed_s, os.stat(name, dir_fd=below, follow_symlinks=False).st_mtime)
    return changed_s
