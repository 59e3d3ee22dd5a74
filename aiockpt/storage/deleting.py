"""Deleting a checkpoint, so that at no moment a part of one is under its name. All functions block."""

from __future__ import annotations

import os

from aiockpt.errors import CheckpointNotFoundError, DeleteError
from aiockpt.storage.hold import hold
from aiockpt.storage.publish import objection, remove, sync_directory
from aiockpt.storage.syscalls import rename_noreplace


def delete(path: str, hidden: str, fsync: bool) -> None:
    """Remove a checkpoint.

    Args:
        path: where it is.
        hidden: a name beside it; should this process be killed, the rest is recognised by that.
        fsync: let it be gone durably before its files are.

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
            _delete_directory(path, hidden, fsync)
        else:
            os.unlink(path)
            if fsync:
                sync_directory(os.path.dirname(path))
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc
    except OSError as exc:
        raise DeleteError(f"can't delete {path}: {exc}") from exc


def _delete_directory(path: str, hidden: str, fsync: bool) -> None:
    held = hold(path)
    try:
        rename_noreplace(path, hidden)
        if fsync:
            _make_durable(path, hidden)
        try:
            remove(hidden)
        except OSError as exc:
            raise DeleteError(f"{path} is deleted, but its files can't be removed from {hidden}: {exc}") from exc
    finally:
        held.release()


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
