"""Giving a finished checkpoint its final name, and what goes with it. All functions block."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from fnmatch import fnmatchcase
from typing import Literal

from aiockpt.errors import AiockptError, CheckpointExistsError, CommitError
from aiockpt.format.names import INDEX_NAME, MANIFEST_NAME, METADATA_NAME, SUFFIX
from aiockpt.storage.syscalls import UnsupportedError, rename_exchange, rename_noreplace

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
    if not os.path.islink(path) and os.path.isfile(path) and path.endswith(SUFFIX):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        raise CheckpointExistsError(
            f"{path} is not a directory, nor a {SUFFIX} file; overwrite=True replaces checkpoints only"
        )
    entries = os.listdir(path)
    others = [name for name in entries if not any(fnmatchcase(name, known) for known in _SAFETENSORS_FILES)]
    if entries and METADATA_NAME not in entries and (others or entries == [MANIFEST_NAME]):
        raise CheckpointExistsError(
            f"{path} is a directory that holds other things than a checkpoint ({min(others or entries)}); "
            "overwrite=True would delete them. Save under another name."
        )


def make_directories(path: str, fsync: bool) -> None:
    """Make a directory with its parents, each durable in its own parent."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise
        if fsync and directory != missing[0]:
            sync_directory(os.path.dirname(directory))


def sync_directory(path: str) -> None:
    """Make what was done in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sizes_in(path: str) -> dict[str, int]:
    """Give the size in bytes of each file in a directory."""
    with os.scandir(path) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}


def contents(path: str) -> bytes | None:
    """Give the contents of a file; None if it is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        return file.read()


def identity(path: str) -> tuple[int, int] | None:
    """Give what tells a directory from all others, whatever it is called; None if there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def fate_of(hidden: str, path: str, own: tuple[int, int] | None) -> Literal["open", "published", "gone"]:
    """Tell what has become of a hidden directory; None as its identity if that was never known."""
    found = identity(hidden)
    if own is None:
        return "gone" if found is None else "open"
    if found == own:
        return "open"
    return "published" if identity(path) == own else "gone"


def write_word(path: str, data: bytes) -> None:
    """Write a small file that only takes part in an agreement of running processes: it need not be durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    with open(fd, "wb") as file:
        file.write(data)


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


def sweep(hidden: str) -> None:
    """Remove an unfinished checkpoint whose owner is gone, as far as can be told.

    It gets another name first: should its owner live after all, then either it publishes the whole of it, or it
    finds that it is gone.
    """
    swept = f"{hidden}-swept"
    try:
        os.rename(hidden, swept)
    except FileNotFoundError:  # it was published, or somebody else was faster
        return
    remove(swept)


def publish(hidden: str, path: str, name: str, *, overwrite: bool, fsync: bool) -> None:
    """Give a finished checkpoint its final name, durably.

    Args:
        hidden: the directory that it was written to; it is gone afterwards.
        path: the final name.
        name: the file in ``hidden`` that is the checkpoint; empty if the directory is.
        overwrite: replace a checkpoint that is there.
        fsync: make it durable.

    Raises:
        CheckpointExistsError: something else is there.
        CommitError: with the cause chained; nothing was changed.
        NotTakenBackError: the path has changed but is not known to be durable.
    """
    finished = os.path.join(hidden, name) if name else hidden
    try:
        if fsync and not name:
            sync_directory(hidden)
        undo = _place(finished, path, overwrite)
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
            remove(hidden)
        except OSError as exc:
            logger.warning("%s was published; what it replaced could not be removed from %s: %s", path, hidden, exc)


def _place(finished: str, path: str, overwrite: bool) -> _Undo:
    """Rename to the final name; tell how that is undone."""
    try:
        rename_noreplace(finished, path)
    except FileExistsError as exc:
        if not overwrite:
            raise CheckpointExistsError(f"{path} has appeared during the save; it was left as it is") from exc
    else:
        return "rename"
    check_free(path, overwrite=True)
    try:
        rename_exchange(finished, path)
    except UnsupportedError:
        if not (os.path.isfile(finished) and os.path.isfile(path)):
            raise
        os.replace(finished, path)
        return "nothing"
    return "exchange"


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
