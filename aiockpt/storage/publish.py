"""Giving a finished checkpoint its final name, and what goes with it. All functions block."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from aiockpt.errors import AiockptError, CheckpointExistsError, CommitError
from aiockpt.format.names import INDEX_NAME, MANIFEST_NAME, METADATA_NAME, SUFFIX
from aiockpt.storage.syscalls import UnsupportedError, rename_exchange, rename_noreplace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_SAFETENSORS_FILES = (f"*{SUFFIX}", INDEX_NAME, MANIFEST_NAME)

_ATTEMPTS = 100

_Undo = Literal["rename", "exchange", "nothing"]

logger = logging.getLogger("aiockpt")


class NotTakenBackError(Exception):
    """A checkpoint was published, is not known to be durable, and could not be taken back."""


def check_free(path: str, *, overwrite: bool) -> None:
    """Look whether a path is free, or holds what may be overwritten.

    Raises:
        CheckpointExistsError: it is not and does not.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise CheckpointExistsError(
            f"{path} exists already; save under another name, or pass overwrite=True to replace it"
        )
    found = objection(path)
    if found is not None:
        raise CheckpointExistsError(
            f"{path} {found}; overwrite=True replaces checkpoints only. Save under another name."
        )


def objection(path: str) -> str | None:
    """Say why what is at a path can't be taken for a checkpoint; None if it can."""
    if not os.path.islink(path) and os.path.isfile(path) and path.endswith(SUFFIX):
        return None
    if os.path.islink(path) or not os.path.isdir(path):
        return f"is not a directory, nor a {SUFFIX} file"
    entries = os.listdir(path)
    others = [name for name in entries if not any(fnmatchcase(name, known) for known in _SAFETENSORS_FILES)]
    if entries and METADATA_NAME not in entries and (others or entries == [MANIFEST_NAME]):
        return f"is a directory that holds other things than a checkpoint ({min(others or entries)})"
    return None


def could_be_unfinished(names: Collection[str]) -> bool:
    """Tell whether a directory with these names in it may be a checkpoint, or the beginning or the rest of one."""
    return METADATA_NAME in names or all(
        any(fnmatchcase(name, known) for known in (*_SAFETENSORS_FILES, "*.distcp")) for name in names
    )


def make_directories(path: str, fsync: bool) -> None:
    """Make a directory with its parents, each of these durable in its own parent."""
    make_parents(path, fsync)
    _make_directory(path)


def make_parents(path: str, fsync: bool, settled: set[str] | None = None) -> None:
    """Make the directories above a path, each durable in its own parent.

    Args:
        path: the path.
        fsync: make them durable.
        settled: directories that were found there and are known to be durable; is added to.
    """
    missing = []
    path = os.path.dirname(path)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    if fsync and (settled is None or path not in settled):
        # Somebody may just have made it, or have been killed before it was durable.
        with contextlib.suppress(PermissionError):  # what may not be read was not made by who saves
            sync_directory(os.path.dirname(path))
        if settled is not None:
            settled.add(path)
    for directory in reversed(missing):
        _make_directory(directory)
        if fsync:
            sync_directory(os.path.dirname(directory))


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def sync_directory(path: str) -> None:
    """Make what was done in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def identity(path: str) -> tuple[int, int] | None:
    """Give what tells a directory from all others, whatever it is called; None if there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove(path: str) -> None:
    """Remove a directory with all that is in it, or a file, if it is there; others may be at it at the same time."""
    for _ in range(_ATTEMPTS):
        if not os.path.lexists(path):
            return
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:  # somebody else was faster with a part of it: go on with the rest
            continue
        except OSError as exc:  # somebody has put a last file there
            if exc.errno != errno.ENOTEMPTY:
                raise
    if os.path.lexists(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)


def remove_own(path: str, own: tuple[int, int] | None) -> None:
    """Remove a hidden directory, unless it is no longer the one with this identity; None: whatever it is."""
    found = identity(path)
    if own is not None and found not in (None, own):
        raise FileExistsError(errno.EEXIST, "somebody has put another directory in its place", path)
    remove(path)


def publish(
    hidden: str,
    path: str,
    name: str,
    *,
    overwrite: bool,
    fsync: bool,
    own: tuple[int, int] | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Give a finished checkpoint its final name, durably.

    Args:
        hidden: the directory that it was written to; it is gone afterwards.
        path: the final name.
        name: the file in ``hidden`` that is the checkpoint; empty if the directory is.
        overwrite: replace a checkpoint that is there.
        fsync: make it durable.
        own: the identity of ``hidden``; None if it is not known.
        check: is called right before the name is given, and may raise an error instead.

    Raises:
        CheckpointExistsError: something else is there.
        CommitError: with the cause chained; nothing was changed.
        NotTakenBackError: the path has changed but is not known to be durable.
    """
    finished = os.path.join(hidden, name) if name else hidden
    try:
        if own is not None and identity(hidden) != own:
            raise CommitError(
                f"{path} can't be published: {hidden} is no longer the directory that it was written to; somebody has "
                "removed or replaced it"
            )
        if fsync and not name:
            sync_directory(hidden)
        check()
        undo, replaced = _place(finished, path, overwrite)
        try:
            if fsync:
                sync_directory(os.path.dirname(path))
        except OSError as exc:
            _take_back(hidden, finished, path, undo, exc)
            raise
    except AiockptError:
        raise
    except UnsupportedError as exc:
        raise CommitError(
            f"the file system of {path} can't replace a checkpoint atomically ({exc}); save under another name"
        ) from exc
    except OSError as exc:
        raise CommitError(f"can't publish {path}: {exc}") from exc
    if name or undo == "exchange":
        try:
            remove_own(hidden, own if name else replaced)
        except OSError as exc:
            logger.warning("%s was published; what it replaced could not be removed from %s: %s", path, hidden, exc)


def _place(finished: str, path: str, overwrite: bool) -> tuple[_Undo, tuple[int, int] | None]:
    """Rename to the final name; tell how that is undone, and the identity of what was exchanged for it."""
    for attempt in range(_ATTEMPTS):
        try:
            rename_noreplace(finished, path)
        except FileExistsError as exc:
            if not overwrite:
                raise CheckpointExistsError(f"{path} has appeared during the save; it was left as it is") from exc
        else:
            return "rename", None
        try:
            check_free(path, overwrite=True)
            replaced = identity(path)
            rename_exchange(finished, path)
        except UnsupportedError:
            if not (os.path.isfile(finished) and os.path.isfile(path)):
                raise
            os.replace(finished, path)
            return "nothing", None
        except FileNotFoundError:  # it has been deleted just now
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return "exchange", replaced
    raise AssertionError("the last attempt returns or raises")


def _take_back(hidden: str, finished: str, path: str, undo: _Undo, cause: OSError) -> None:
    if undo == "nothing":
        remove(hidden)
        raise NotTakenBackError(f"{path} was replaced but can't be made durable ({cause})") from cause
    try:
        rename_exchange(finished, path) if undo == "exchange" else os.rename(path, finished)
    except OSError as worse:
        raise NotTakenBackError(
            f"{path} was published but can't be made durable ({cause}), nor be taken back ({worse}); "
            f"{hidden} was left as it is"
        ) from cause
    try:
        sync_directory(os.path.dirname(path))
    except OSError as worse:  # after a loss of power it may be there, so it has to stay whole
        raise NotTakenBackError(
            f"{path} could not be made durable ({cause}) and was taken back, which can't be made durable either "
            f"({worse}); {hidden} was left as it is"
        ) from cause
