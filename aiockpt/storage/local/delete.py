"""Deletion of a checkpoint: renamed first, so that its path never shows a part of one. All functions block."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, DeleteError
from aiockpt.storage.local.belonging import (
    OtherThingsError,
    is_empty,
    remove,
    why_not_a_checkpoint,
    why_not_of_contents,
)
from aiockpt.storage.local.commit import look_at, remove_own, sync_directory
from aiockpt.storage.local.replacing import complete, explained, remove_record, stand_in
from aiockpt.storage.local.temp_dir import REPLACED, hold, liveness, lock, read_ticket, this_process
from aiockpt.storage.syscalls import identity, open_directory, rename_noreplace

if TYPE_CHECKING:
    from aiockpt.storage.base import Identity

_ATTEMPTS = 100


def delete(
    path: str, hidden: str, fsync: bool, note: Callable[[str, Identity | None], object] = lambda *_: None
) -> None:
    """Remove a checkpoint; of a link, the link alone.

    It is renamed to ``hidden``, a temporary name beside it, by which an orphan is recognised, and that is made durable
    before its files are removed. ``note`` is called with the name and the identity of what can't be removed now.
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


def _delete(path: str, hidden: str, fsync: bool, note: Callable[[str, Identity | None], object]) -> None:
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


def _delete_directory(path: str, hidden: str, fsync: bool, note: Callable[[str, Identity | None], object]) -> None:
    held = hold(path)
    try:
        found = why_not_of_contents(held.fd)  # of the directory that is held, whatever its path shows by now
        if found is not None and identity(path) != held.identity:  # it is being removed
            raise FileNotFoundError(path)
        _refuse(path, found)
        _delete_held(path, hidden, fsync, note, held.identity, held.fd)
    finally:
        held.release()


def _delete_held(
    path: str,
    hidden: str,
    fsync: bool,
    note: Callable[[str, Identity | None], object],
    own: Identity | None,
    directory: int | None = None,
) -> None:
    """Delete what was checked: it has the identity ``own``, and is open as ``directory`` if it is one."""
    moved = _move(path, hidden, own)
    found = None if directory is None or moved != own else why_not_of_contents(directory)
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
