"""Giving a finished checkpoint its final name, and what goes with it. All functions block."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from aiockpt.errors import AiockptError, CheckpointExistsError, CommitError
from aiockpt.storage.local.belonging import OtherThingsError, checkpoint_above, remove, why_not_a_checkpoint
from aiockpt.storage.local.replacing import (
    BetweenError,
    can_exchange,
    explained,
    remove_record,
    replace_in_steps,
    undo_replacement,
)
from aiockpt.storage.local.temp_names import REPLACED
from aiockpt.storage.syscalls import UnsupportedError, identity, rename_exchange, rename_noreplace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_ATTEMPTS = 100

# Of file systems whose directories can't be synced, or not by who saves; such a one has made nothing there.
_NOT_OURS_TO_SYNC = frozenset({errno.EINVAL, errno.EROFS, errno.EACCES, errno.EPERM})

_Undo = Literal["rename", "exchange", "steps", "nothing"]

Rest: TypeAlias = tuple[str, tuple[int, int] | None]
"""A hidden directory that is still there, and its identity."""

logger = logging.getLogger("aiockpt")


class CommitUncertainError(Exception):
    """A checkpoint was published, is not known to be durable, and could not be taken back."""


def check_free(path: str, *, overwrite: bool) -> None:
    """Look whether a path is free, or holds what may be overwritten.

    Raises:
        CheckpointExistsError: it is not and does not, or is within a checkpoint.
    """
    above = checkpoint_above(path)
    if above is not None:
        raise CheckpointExistsError(
            f"{path} is in the directory of a checkpoint, {above}, which is replaced and deleted as one; save beside it"
        )
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise CheckpointExistsError(
            f"{path} exists already; save under another name, or pass overwrite=True to replace it"
        )
    check_replaceable(path)


def check_replaceable(path: str) -> None:
    """Look whether what is at a path is a checkpoint and nothing else.

    Raises:
        CheckpointExistsError: it is not.
    """
    found = why_not_a_checkpoint(path)
    if found is not None:
        raise CheckpointExistsError(
            f"{path} {found}; overwrite=True replaces a checkpoint and nothing else. Move that away, or save under "
            "another name."
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
        _settle(path)
        if settled is not None:
            settled.add(path)
    for directory in reversed(missing):
        _make_directory(directory)
        if fsync:
            sync_directory(os.path.dirname(directory))


def _settle(path: str) -> None:
    """Make a directory durable that somebody may just have made, or have been killed before it was."""
    above = os.path.dirname(path)
    if os.stat(path).st_dev != os.stat(above).st_dev:  # a mount point, which mkdir does not make
        return
    try:
        sync_directory(above)
    except OSError as exc:
        if exc.errno not in _NOT_OURS_TO_SYNC:
            raise


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def sync_directory(path: str) -> None:
    """Make what was done in a directory durable."""
    with _opened(path) as fd:
        sync_fd(fd)


def sync_fd(fd: int) -> None:
    """Make what was done in an open directory durable; an error that has come through here is that of an fsync."""
    os.fsync(fd)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_own(path: str, own: tuple[int, int] | None, also: Collection[str] = ()) -> None:
    """Remove a hidden directory, unless it is no longer the one with this identity; None: whatever it is.

    Raises:
        OSError: see `remove`.
    """
    found = identity(path)
    if own is not None and found not in (None, own):
        raise FileExistsError(errno.EEXIST, "somebody has put another directory in its place", path)
    remove(path, also=also)


def publish(
    hidden: str,
    path: str,
    name: str,
    *,
    overwrite: bool,
    fsync: bool,
    own: tuple[int, int] | None = None,
    check: Callable[[], object] = lambda: None,
) -> Rest | None:
    """Give a finished checkpoint its final name, durably.

    Args:
        hidden: the directory that it was written to; it is gone afterwards.
        path: the final name.
        name: the file in ``hidden`` that is the checkpoint; empty if the directory is.
        overwrite: replace a checkpoint that is there.
        fsync: make it durable.
        own: the identity of ``hidden``; None if it is not known.
        check: is called right before the name is given, and may raise an error instead.

    Returns:
        See `remove_rest`.

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
        # Opened before, for once it has its name there must be nothing left to fail but the fsync.
        with _opened(os.path.dirname(path)) if fsync else contextlib.nullcontext() as parent:
            check()
            undo, replaced = _place(
                finished, hidden, path, overwrite, None if parent is None else partial(sync_fd, parent)
            )
            if parent is not None:
                _make_durable(parent, hidden, finished, path, undo)
    except AiockptError:
        raise
    except BetweenError as exc:
        raise CommitUncertainError(
            f"{path} is not complete under its name: {exc}. Loading it finds what is in {hidden}, and the next save of "
            "another process beside it gives that its name"
        ) from exc.__cause__
    except OSError as exc:
        raise CommitError(f"can't publish {path}: {explained(exc, path)}") from exc
    rest = remove_replaced(path, hidden, replaced) if undo == "steps" else None
    return (remove_rest(path, hidden, own if name else replaced) if name or undo == "exchange" else None) or rest


def remove_rest(path: str, hidden: str, own: tuple[int, int] | None) -> Rest | None:
    """Remove the hidden directory of what was published, with what that has replaced.

    Returns:
        What can't be removed now, and its identity, for another attempt; None if nothing is left.
    """
    try:
        remove_own(hidden, own)
    except OSError as exc:
        logger.warning("%s was published; what it replaced could not be removed from %s: %s", path, hidden, exc)
        return None if isinstance(exc, FileExistsError | OtherThingsError) else (hidden, own)
    return None


def remove_replaced(path: str, hidden: str, own: tuple[int, int] | None) -> Rest | None:
    """Remove what was set aside for what was published; see `remove_rest`."""
    try:
        remove_record(hidden)
    except OSError as exc:
        logger.warning("%s was published; the record of that can't be removed: %s", path, exc)
    return remove_rest(path, hidden + REPLACED, own)


def _place(
    finished: str, hidden: str, path: str, overwrite: bool, sync: Callable[[], object] | None
) -> tuple[_Undo, tuple[int, int] | None]:
    """Rename to the final name; tell how that is undone, and the identity of what had it before."""
    new = identity(finished)
    for attempt in range(_ATTEMPTS):
        try:
            rename_noreplace(finished, path)
        except FileExistsError as exc:
            if not overwrite:
                raise CheckpointExistsError(f"{path} has appeared during the save; it was left as it is") from exc
        else:
            return "rename", None
        try:
            checked = identity(path)
            check_replaceable(path)
            if can_exchange(hidden) is False:
                raise UnsupportedError(errno.EINVAL, "the file system has refused an exchange before", path)
            rename_exchange(finished, path)
        except UnsupportedError:
            if os.path.isfile(finished) and os.path.isfile(path):
                os.replace(finished, path)
                return "nothing", None
            replace_in_steps(finished, hidden, path, sync, partial(_objection_now, checked=checked))
            return "steps", checked
        except FileNotFoundError:  # it has been deleted just now, unless it is done though the answer is an error
            if attempt == _ATTEMPTS - 1 or identity(path) == new:
                raise
        else:
            # Another checkpoint may be replaced as well; as it is not what was checked, it will not be removed. A link
            # that was checked may lead nowhere from here.
            found = _objection_now(finished, checked)
            if found is None:
                return "exchange", checked
            _give_back(finished, path)
            raise CheckpointExistsError(f"{path} was changed during the save, and {found}; it was left as it is")
    raise AssertionError("the last attempt returns or raises")


def _objection_now(replaced: str, checked: tuple[int, int] | None) -> str | None:
    """Do as `why_not_a_checkpoint` for what has just been replaced; it may be gone already."""
    if identity(replaced) == checked and os.path.islink(replaced):
        return None
    try:
        return why_not_a_checkpoint(replaced) if os.path.lexists(replaced) else None
    except OSError as exc:
        return f"can't be looked at any more ({exc})"


def _give_back(finished: str, path: str) -> None:
    """Undo the exchange for what had come there since it was looked at."""
    try:
        rename_exchange(finished, path)
    except OSError as exc:
        raise CommitUncertainError(
            f"{path} was published in place of what somebody had just put there, which is in {finished} now and can't "
            f"be given its name back ({exc})"
        ) from exc


def _make_durable(parent: int, hidden: str, finished: str, path: str, undo: _Undo) -> None:
    try:
        sync_fd(parent)
    except OSError as exc:
        _take_back(parent, hidden, finished, path, undo, exc)
        raise


def _take_back(parent: int, hidden: str, finished: str, path: str, undo: _Undo, cause: OSError) -> None:
    if undo == "nothing":
        remove_rest(path, hidden, None)
        raise CommitUncertainError(f"{path} was replaced but can't be made durable ({cause})") from cause
    try:
        if undo == "exchange":
            rename_exchange(finished, path)
        elif undo == "steps":
            undo_replacement(finished, hidden, path)
        elif identity(finished) == identity(path):  # both are names of one file, of which a rename would leave both
            os.unlink(path)
        else:
            os.rename(path, finished)
    except OSError as worse:
        raise CommitUncertainError(
            f"{path} was published but can't be made durable ({cause}), nor be taken back ({worse}); "
            f"{hidden} was left as it is"
        ) from cause
    try:
        sync_fd(parent)
    except OSError as worse:  # after a loss of power it may be there, so it has to stay whole
        raise CommitUncertainError(
            f"{path} could not be made durable ({cause}) and was taken back, which can't be made durable either "
            f"({worse}); {hidden} was left as it is"
        ) from cause
