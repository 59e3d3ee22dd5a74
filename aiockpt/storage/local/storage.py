"""Checkpoints in a directory of a local or mounted file system.

The files are written to a temporary directory beside the final one. Each is synced, then the directory; then it is
renamed to its final name, and the parent directory is synced. So the final name shows a complete and durable
checkpoint, or nothing. A checkpoint of one file is written to such a directory too, and renamed alone.

A checkpoint that is deleted is renamed first, so that its path never shows a part of one.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiockpt.errors import CheckpointNotFoundError, DeleteError, WriteError
from aiockpt.storage.base import (
    SharedStorage,
    SharedTransaction,
    Source,
    Stamp,
    Traits,
)
from aiockpt.storage.faults import errors
from aiockpt.storage.local.belonging import (
    OtherThingsError,
    is_empty,
    remove,
    why_not_a_checkpoint,
    why_not_of_contents,
)
from aiockpt.storage.local.commit import check_free, look_at, make_parents, remove_own, sync_directory
from aiockpt.storage.local.directories import LocalDirectories
from aiockpt.storage.local.orphans import OrphanCleaner, clean
from aiockpt.storage.local.replacing import ask_file_system, complete, explained, remove_record, stand_in
from aiockpt.storage.local.retries import DEFAULT_RETRIES, Repeater, Retries, check_retries
from aiockpt.storage.local.source import open_source
from aiockpt.storage.local.temp_dir import (
    REPLACED,
    Hold,
    copy_ticket,
    hold,
    liveness,
    lock,
    make_hidden,
    make_new,
    new_ticket,
    read_ticket,
    this_process,
)
from aiockpt.storage.local.transaction import JoinedTransaction, LocalTransaction, ResumableTransaction, WritePolicy
from aiockpt.storage.syscalls import Identity, identity, open_directory, rename_noreplace

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

_ATTEMPTS = 100

logger = logging.getLogger("aiockpt")


class LocalStorage(LocalDirectories, SharedStorage):
    """Keeps each checkpoint in a directory, or in one file.

    Args:
        direct_io: write large files past the page cache, where the file system allows it.
        fsync: make files and directories durable. Without it a crash of the machine may lose a checkpoint
            that was reported as written.
        retries: how often to retry transient errors, which `aiockpt.storage.local.retries` lists. A number is that of
            the attempts after the first one; None is 0.
    """

    def __init__(
        self, *, direct_io: bool = True, fsync: bool = True, retries: Retries | int | None = DEFAULT_RETRIES
    ) -> None:
        repeater = Repeater(check_retries(retries))
        self._policy = WritePolicy(direct_io, fsync, repeater, OrphanCleaner(fsync=fsync))
        self._settled: set[str] = set()  # directories that are known to be durable
        self._checked = ""  # the path that a save has just checked, and begins to write next
        self._within = False  # may write into directories of checkpoints
        self._above = False  # unfinished checkpoints lie one level up

    def __repr__(self) -> str:
        return f"LocalStorage(direct_io={self._policy.direct_io}, fsync={self._policy.fsync})"

    def __reduce__(self) -> tuple[Any, ...]:
        policy = self._policy
        return partial(
            LocalStorage, direct_io=policy.direct_io, fsync=policy.fsync, retries=policy.repeater.retries
        ), ()

    traits = Traits(shared_files=True, folders=True, adopts=True)

    def within_checkpoints(self) -> LocalStorage:
        """Return a storage that also writes files into the directory of a checkpoint, as conversions may."""
        other = copy.copy(self)
        other._within = True
        return other

    def above(self) -> LocalStorage:
        """Return a storage whose unfinished checkpoints lie one level up, where that can be: not among the finished.

        For directories of which a program takes every entry for a checkpoint. What is replaced is replaced beside.
        """
        other = copy.copy(self)
        other._above = True
        return other

    def check(self, path: str, *, overwrite: bool) -> None:
        self._check(path, overwrite=overwrite, keep=False)

    def check_repository(self, path: str, *, overwrite: bool) -> None:
        self._check(path, overwrite=overwrite, keep=True)

    def _check(self, path: str, *, overwrite: bool, keep: bool) -> None:
        with errors(WriteError, f"look at {path}"):
            self._checked = path = self.resolve(path)
            check_free(path, overwrite=overwrite, keep=keep, within=self._within)

    def new_ticket(self, path: str) -> str:
        return new_ticket()

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        """Remove orphans beside the path, then make the temporary directory."""
        path = self.resolve(path)
        begun: list[LocalTransaction] = []

        def begin() -> None:
            hidden, held = self._make_hidden(path, ticket, overwrite)
            begun.append(LocalTransaction(self._policy, path, hidden, workers, held, held.identity, overwrite))

        try:
            await self._policy.repeater.run(f"make the directory for {path}", partial(workers.run, begin))
        except BaseException:
            for each in begun:  # the caller was cancelled, and gets none
                await each.abort()
            raise
        return begun[0]

    def _make_hidden(self, path: str, ticket: str | None, overwrite: bool) -> tuple[str, Hold]:
        # First: an orphan's space may be needed, and an interrupted replacement of this path is completed.
        folder = os.path.dirname(path)
        for each in (folder, os.path.dirname(folder)) if self._above else (folder,):
            self._policy.orphans.look(each)
        # What is above is looked at once for a save: that takes a dozen system calls, each of which gives the GIL away.
        is_checked, self._checked = self._checked == path, ""
        with errors(WriteError, f"make the directory for {path}"):
            # After that, since a replacement that was completed has put a checkpoint there.
            check_free(path, overwrite=overwrite, keep=True, within=self._within or is_checked)
            make_parents(path, self._policy.fsync, self._settled)
            # Beside the path, and so on the same file system: else the commit could not be a rename.
            if ticket is None:
                hidden, held = make_new(folder, partial(self.new_ticket, path))
                if self._above and not os.path.lexists(path):
                    upper = _beside(path, os.path.join("..", os.path.basename(hidden)))
                    with contextlib.suppress(OSError):  # another file system, or not to be written to
                        rename_noreplace(hidden, upper)
                        hidden = upper
            else:
                hidden = _beside(path, ticket)
                held = make_hidden(hidden)
            if overwrite:
                _ask(hidden, path, held)
        return hidden, held

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        path = self.resolve(path)
        hidden = _beside(path, ticket)
        held = await workers.run(_hold, hidden, path)
        if held is None:
            raise WriteError(
                f"{hidden}, which rank 0 has made for {path}, can't be seen on {socket.gethostname()}: all ranks must "
                "save to one file system that every host has mounted, or with a manager that has own_disks=True"
            )
        joined = JoinedTransaction(self._policy, path, hidden, workers, held, held.identity)
        await joined.look_for_single_file()
        return joined

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        path = self.resolve(path)
        hidden = _beside(path, ticket)
        held = await workers.run(_hold, hidden, path)
        device, _, inode = (stamp or "").partition(":")
        own = (int(device), int(inode)) if stamp else None
        taken = LocalTransaction(self._policy, path, hidden, workers, held, own, overwrite, _is_taken=True)
        await taken.look_for_single_file()
        return taken

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        path, ticket = self.resolve(path), copy_ticket(save_id)
        hidden = _beside(path, ticket)
        held = await workers.run(_hold, hidden, path)
        if held is not None:
            await workers.run(_hold_alone, held, path)
            taken = ResumableTransaction(
                self._policy, path, hidden, workers, held, held.identity, _overwrite=True, _is_taken=True
            )
            if await taken.status() != "published":
                return taken
            await taken.finalize()  # it was killed between its two renames
        making = partial(workers.run, self._make_hidden, path, ticket, overwrite=True)
        try:
            hidden, made = await self._policy.repeater.run(f"make the directory for {path}", making)
        except WriteError as exc:
            if isinstance(exc.__cause__, FileExistsError):
                raise _is_copied(path) from exc
            raise
        await workers.run(_hold_alone, made, path)
        return ResumableTransaction(self._policy, path, hidden, workers, made, made.identity, _overwrite=True)

    async def delete(self, path: str, *, workers: Workers) -> None:
        """Rename a checkpoint to a temporary name, durably, and remove it."""
        path = self.resolve(path)
        hidden, policy = _beside(path, self.new_ticket(path)), self._policy
        await workers.run(delete, path, hidden, policy.fsync, policy.orphans.add)

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        directory = self.resolve(directory)
        with errors(DeleteError, f"look for what killed processes have left in {directory}"):
            fsync = self._policy.fsync
            removed, _ = await workers.run(clean, directory, fsync=fsync, older_than_s=older_than_s)
        return removed

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await workers.run(open_source, self.resolve(path), direct_io=self._policy.direct_io)


def _ask(hidden: str, path: str, held: Hold) -> None:
    """Find out, before anything is written, whether the file system can replace what is at a path."""
    try:
        if os.path.lexists(path):
            ask_file_system(hidden, path)
    except BaseException:
        held.release()
        try:
            remove(hidden)
        except OSError as exc:  # the first error counts
            logger.warning("can't remove the unfinished checkpoint %s: %s; the next run does", hidden, exc)
        raise


def _beside(path: str, ticket: str) -> str:
    """Return the temporary directory of a ticket; WriteError if it is no ticket."""
    above, name = os.path.split(ticket)
    if above not in ("", "..", os.path.basename(path)) or not name.startswith(".") or name == "..":
        raise WriteError(f"{ticket!r} is no ticket of an unfinished checkpoint")
    return os.path.normpath(os.path.join(os.path.dirname(path), ticket))


def _hold(hidden: str, path: str) -> Hold | None:
    """Hold a temporary directory that another process has made; None if it is not there."""
    with errors(WriteError, f"look at what was written for {path}"), contextlib.suppress(FileNotFoundError):
        return hold(hidden)
    return None


def _hold_alone(held: Hold, path: str) -> None:
    """Make a hold exclusive: files that two processes make in turn would be whole by name only."""
    with errors(WriteError, f"lock what was written for {path}"):
        if lock(held.fd, fcntl.LOCK_EX) == "refused":
            held.release()
            raise _is_copied(path)


def _is_copied(path: str) -> WriteError:
    return WriteError(f"{path} is being copied by another process; wait until that has ended")


# --- deletion; all of this blocks ------------------------------------------------------------------------


Note: TypeAlias = Callable[[str, Identity | None], object]
"""Takes the name and the identity of what can't be removed now."""


def delete(path: str, hidden: str, fsync: bool, note: Note = lambda *_: None) -> None:
    """Remove a checkpoint; of a link, the link alone.

    It is renamed to ``hidden``, a temporary name beside it, by which an orphan is recognised, and that is made durable
    before its files are removed.
    """
    try:
        for attempt in range(_ATTEMPTS):
            try:
                _delete(path, hidden, fsync, note)
                break
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1 or not os.path.lexists(path):
                    raise
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc
    except OSError as exc:
        raise DeleteError(f"can't delete {path}: {explained(exc, path)}") from exc


def _delete(path: str, hidden: str, fsync: bool, note: Note) -> None:
    """Delete what is at a path; FileNotFoundError if nothing is, or it is replaced meanwhile."""
    if not os.path.lexists(path):
        _recover(path, hidden, fsync)
    own = identity(path)
    _refuse(path, look_at(path, lambda path: "is empty" if is_empty(path) else why_not_a_checkpoint(path)))
    if own is None:
        raise FileNotFoundError(path)
    if os.path.isdir(path) and not os.path.islink(path):
        _delete_directory(path, hidden, fsync, note)
    else:
        _delete_held(path, hidden, fsync, note, own)


def _recover(path: str, own: str, fsync: bool) -> None:
    """Complete a replacement that was interrupted by a kill, so that both checkpoints are removed."""
    hidden = stand_in(path)
    if hidden is None:
        raise FileNotFoundError(path)
    with open_directory(hidden) as fd:
        locked = lock(fd, fcntl.LOCK_EX)
    if complete(hidden, path, partial(sync_directory, os.path.dirname(path)) if fsync else lambda: None):
        ticket = read_ticket(os.path.basename(hidden))
        owner = None if ticket is None else ticket.owner
        if locked == "held" or (locked == "unsupported" and liveness(owner, this_process()) != "alive"):
            remove_record(hidden)  # else the save, which is still at it, learns from the record that this was done
        for rest in (hidden, hidden + REPLACED):
            with contextlib.suppress(FileNotFoundError):
                os.rename(rest, own)  # first: the save may be about to give it the path
                remove(own)


def _refuse(path: str, found: str | None) -> None:
    if found is not None:
        raise DeleteError(f"{path} {found}; nothing was deleted. Move away what is to stay, or remove it all yourself")


def _delete_directory(path: str, hidden: str, fsync: bool, note: Note) -> None:
    held = hold(path)
    try:
        found = why_not_of_contents(held.fd)  # of the directory that is held, whatever its path shows by now
        if found is not None and identity(path) != held.identity:  # it is being removed
            raise FileNotFoundError(path)
        _refuse(path, found)
        _delete_held(path, hidden, fsync, note, held.identity, held)
    finally:
        held.release()


def _delete_held(
    path: str, hidden: str, fsync: bool, note: Note, own: Identity | None, held: Hold | None = None
) -> None:
    """Delete what was checked: it has the identity ``own``, and is ``held`` if it is a directory."""
    move = partial(_move, path, hidden, own)
    moved = move() if held is None else held.renamed_by(move, path)
    found = None if held is None or moved != own else why_not_a_checkpoint(hidden)
    if found is not None:  # a file was added at the last moment
        _move_back(path, hidden, f"{path} {found}")
    if fsync:
        _make_durable(path, hidden)
    try:
        remove_own(hidden, moved)
    except OSError as exc:
        if not isinstance(exc, OtherThingsError):
            note(hidden, moved)
        raise DeleteError(f"{path} is deleted, but its files can't be removed from {hidden}: {exc}") from exc


def _move(path: str, hidden: str, own: Identity | None) -> Identity | None:
    """Rename what was checked, and nothing else; return the identity of what is to be removed."""
    try:
        rename_noreplace(path, hidden)
    except OSError:
        if identity(hidden) != own:  # on a network file system it may be done though the answer is an error
            raise
    moved = identity(hidden)
    if moved != own:
        _move_back(path, hidden, f"{path} was replaced by something else while it was being deleted")
    return moved


def _move_back(path: str, hidden: str, reason: str) -> None:
    """Undo the rename, and raise DeleteError with the reason; return if a save has replaced what was moved."""
    try:
        rename_noreplace(hidden, path)
    except OSError as worse:
        if isinstance(worse, FileExistsError) and why_not_a_checkpoint(hidden) is None:
            return
        raise DeleteError(f"{reason}, which can't be given its name back ({worse}): it is in {hidden} now") from worse
    raise DeleteError(f"{reason}; nothing was deleted")


def _make_durable(path: str, hidden: str) -> None:
    try:
        sync_directory(os.path.dirname(path))
    except OSError as exc:
        try:
            rename_noreplace(hidden, path)
        except OSError as worse:
            raise DeleteError(
                f"{path} can't be deleted durably ({exc}), nor be given its name back ({worse}): it is in {hidden} now"
            ) from exc
        raise
