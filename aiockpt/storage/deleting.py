"""Deleting a checkpoint, so that at no moment a part of one is under its name. All functions block."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, DeleteError
from aiockpt.storage.hold import hold
from aiockpt.storage.publish import identity, objection, objection_to, remove_own, sync_directory
from aiockpt.storage.syscalls import rename_noreplace

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.storage.base import Identity
    from aiockpt.storage.hold import Hold


def delete(
    path: str, hidden: str, fsync: bool, note: Callable[[str, Identity | None], object] = lambda *_: None
) -> None:
    """Remove a checkpoint.

    Args:
        path: where it is.
        hidden: a name beside it; should this process be killed, the rest is recognised by that.
        fsync: let it be gone durably before its files are.
        note: is told the name and the identity of what is deleted but can't be removed now, for another attempt.

    Raises:
        CheckpointNotFoundError: there is none.
        DeleteError: it is no checkpoint, or can't be removed; the message says what is left, the cause is chained.
    """
    try:
        if not os.path.lexists(path):
            raise FileNotFoundError(path)
        found = objection(path)
        if found is not None:
            raise DeleteError(f"{path} {found}; nothing was deleted")
        if os.path.isdir(path):
            _delete_directory(path, hidden, fsync, note)
        else:
            os.unlink(path)
            if fsync:
                sync_directory(os.path.dirname(path))
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc
    except OSError as exc:
        raise DeleteError(f"can't delete {path}: {exc}") from exc


def _delete_directory(path: str, hidden: str, fsync: bool, note: Callable[[str, Identity | None], object]) -> None:
    held = hold(path)
    try:
        found = objection_to(os.listdir(held.fd))  # of the one that is held, whatever comes to its place
        if found is not None:
            raise DeleteError(f"{path} {found}; nothing was deleted")
        _move(path, hidden, held)
        if fsync:
            _make_durable(path, hidden)
        try:
            remove_own(hidden, held.identity)
        except OSError as exc:
            note(hidden, held.identity)
            raise DeleteError(f"{path} is deleted, but its files can't be removed from {hidden}: {exc}") from exc
    finally:
        held.release()


def _move(path: str, hidden: str, held: Hold) -> None:
    """Rename what was looked at, and nothing else."""
    try:
        rename_noreplace(path, hidden)
    except OSError:
        if identity(hidden) != held.identity:  # on a network file system it may be done though the answer is an error
            raise
    if identity(hidden) == held.identity:
        return
    replaced = f"{path} was replaced by another directory while it was being deleted"
    try:
        rename_noreplace(hidden, path)
    except OSError as worse:
        raise DeleteError(f"{replaced}, which can't be given its name back ({worse}): it is in {hidden} now") from worse
    raise DeleteError(f"{replaced}; nothing was deleted")


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
