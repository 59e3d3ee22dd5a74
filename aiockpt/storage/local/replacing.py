"""Replacement of a checkpoint in two renames, where the file system can't exchange two names.

NFS, Lustre, GPFS, FUSE and gVisor refuse renameat2(2) with RENAME_EXCHANGE. There it takes two renames, and a record of
them: a small file beside the temporary directory, which holds the name of the checkpoint. Each step is durable before
the next one begins.

==============================  ==========  =================  ==================  ===================
after the step                  the path    `.aiockpt-ID`      `-replaced`         `-replaces`
==============================  ==========  =================  ==================  ===================
all is written                  old         new                                    the name
the old one is set aside                    new                old                 the name
the new one has the name        new                            old                 the name
nothing is left to do           new
==============================  ==========  =================  ==================  ===================

After a kill in the second state the new checkpoint counts: it is complete, or the record would not exist. Readers
follow the record; deletion and orphan collection complete the replacement. The owner would do the same next, so a live
owner takes it as done. All functions block.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from aiockpt.errors import CheckpointExistsError
from aiockpt.format.belonging import finished_in
from aiockpt.storage.local.belonging import remove
from aiockpt.storage.local.entries import read_regular
from aiockpt.storage.local.retries import sync_fd
from aiockpt.storage.local.temp_dir import RECORD, REPLACED, read_ticket
from aiockpt.storage.syscalls import Identity, UnsupportedError, identity, is_overlay, rename_exchange, rename_noreplace

_NAME_BYTES = 4096
_ATTEMPTS = 100


_EXCHANGES: dict[int, bool] = {}
"""By device: whether its file system can exchange two names."""


class BetweenError(OSError):
    """A replacement failed between its two renames, and can't be undone; the record says where both checkpoints are."""


# --- abilities of the file system ---------------------------------------------------------------------


def ask_file_system(hidden: str, path: str) -> None:
    """Find out how a path can be replaced, by exchanging two directories in the temporary one, once for each mount.

    Raises CheckpointExistsError if it can't be replaced at all, OSError if it can't be found out.
    """
    device = os.stat(hidden).st_dev
    layered = is_overlay(device) and os.path.isdir(path) and not os.path.islink(path)
    if device in _EXCHANGES and not layered:
        return
    first, second = (os.path.join(hidden, name) for name in ("probe-1", "probe-2"))
    try:
        os.makedirs(os.path.join(first, "probe"))
        if layered:
            _check_layer(path, first)
        if device not in _EXCHANGES:
            _EXCHANGES[device] = _exchanges(first, second)
    finally:
        # An exchange leaves them under each other's names. What can't be removed would become a part of the checkpoint.
        for name in (os.path.join(first, "probe"), os.path.join(second, "probe"), first, second):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(name)


def _exchanges(first: str, second: str) -> bool:
    os.mkdir(second)
    try:
        rename_exchange(first, second)
    except UnsupportedError:
        os.rmdir(second)
        rename_noreplace(first, second)
        return False
    return True


def _check_layer(path: str, occupied: str) -> None:
    try:
        os.rename(path, occupied)  # can't succeed, since that is not empty; overlayfs looks at the layer first
    except OSError as exc:
        if exc.errno == errno.EXDEV:
            raise CheckpointExistsError(f"{path} can't be replaced: {explained(exc, path)}") from exc


def can_exchange(hidden: str) -> bool | None:
    """Return whether the file system can exchange two names; None if that was not tried."""
    return _EXCHANGES.get(os.stat(hidden).st_dev)


def explained(exc: OSError, path: str) -> str:
    """Return the error's text, and for directories in a lower layer of overlayfs what to do."""
    if exc.errno != errno.EXDEV:
        return str(exc)
    return (
        f"{exc}: it is in a lower layer of an overlay file system, such as the image of a container, where directories "
        f"can't be renamed. Keep checkpoints in a volume, save under another name, or remove {path} with rm -r"
    )


# --- the two steps ------------------------------------------------------------------------------------


def replace_in_steps(
    finished: str,
    hidden: str,
    path: str,
    sync: Callable[[], object] | None,
    objection: Callable[[str], str | None],
) -> None:
    """Rename the old checkpoint aside, and a finished one to its path.

    ``finished`` is ``hidden`` or the file in it; ``sync`` syncs the parent directory (None: without fsync);
    ``objection`` returns why what was set aside may not be replaced.
    """
    new, aside = identity(finished), hidden + REPLACED
    _write_record(hidden, path, fsync=sync is not None)
    sync = sync or (lambda: None)
    is_replaced = False  # another save has published at the path, and so has replaced what was set aside
    for attempt in range(_ATTEMPTS):
        try:
            sync()
            if is_replaced:
                remove(aside)
            if not os.path.lexists(aside):
                with contextlib.suppress(FileNotFoundError):  # it was deleted
                    _rename(path, aside, identity(path))
        except OSError as exc:
            _put_back(aside, path, hidden, sync, exc)
            raise
        found = objection(aside)
        if found is not None:
            _put_back(aside, path, hidden, sync, None)
            raise CheckpointExistsError(f"{path} was changed during the save, and {found}; it was left as it is")
        try:
            sync()  # each step is durable before the next: else a loss of power could leave a state without a row above
            _take_name(finished, path, new, hidden + RECORD)
        except FileExistsError as exc:
            is_replaced = is_shown(path)  # else what is there may just be deleted: look again
            if attempt == _ATTEMPTS - 1:
                raise _between(aside, exc) from exc
        except OSError as exc:
            _put_back(aside, path, hidden, sync, exc)
            raise
        else:
            return


def undo_replacement(finished: str, hidden: str, path: str) -> None:
    """Undo both renames; the caller syncs the parent directory. After an OSError it is half undone."""
    rename_noreplace(path, finished)
    if os.path.lexists(hidden + REPLACED):
        rename_noreplace(hidden + REPLACED, path)
    os.unlink(hidden + RECORD)


def _take_name(finished: str, path: str, new: Identity | None, record: str) -> None:
    try:
        with contextlib.suppress(OSError):  # an empty directory: some programs make one of any path that they are given
            os.rmdir(path)
        _rename(finished, path, new)
    except FileNotFoundError:
        # Another process may have completed it, as after a kill, and deleted or replaced it since: the record is left.
        if identity(path) != new and not os.path.lexists(record):
            raise


def _rename(source: str, target: str, own: Identity | None) -> None:
    """Rename; on a network file system it may have happened though the answer is an error."""
    try:
        rename_noreplace(source, target)
    except OSError:
        if own is None or identity(target) != own:
            raise


def _put_back(aside: str, path: str, hidden: str, sync: Callable[[], object], cause: OSError | None) -> None:
    try:
        if os.path.lexists(aside):
            _rename(aside, path, identity(aside))
            sync()
        os.unlink(hidden + RECORD)
    except OSError as worse:
        raise _between(aside, worse) from (cause or worse)


def _between(aside: str, exc: OSError) -> BetweenError:
    return BetweenError(exc.errno, f"what is replaced can't be given its name back ({exc}): it is in {aside}")


def _write_record(hidden: str, path: str, *, fsync: bool) -> None:
    """Write the record durably, except for its entry in the parent directory, which the caller syncs."""
    fd = os.open(hidden + RECORD, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
    try:
        with open(fd, "wb") as file:
            file.write(os.fsencode(os.path.basename(path)))
            file.flush()
            if fsync:
                sync_fd(fd)
    except OSError:
        with contextlib.suppress(OSError):
            remove_record(hidden)
        raise


# --- after a kill -------------------------------------------------------------------------------------


def stand_in(path: str) -> str | None:
    """Find the temporary directory of an interrupted replacement of a path where nothing is; None if there is none."""
    folder, name = os.path.split(path)
    try:
        entries = os.listdir(folder)
    except OSError:
        return None
    found = []
    for entry in entries:
        ticket = read_ticket(entry)
        if ticket is None or ticket.suffix != RECORD:
            continue
        hidden = os.path.join(folder, ticket.base)
        with contextlib.suppress(OSError):  # it was completed meanwhile
            if recorded_name(hidden) == name and is_between(hidden):
                found.append((os.stat(hidden + RECORD).st_mtime_ns, hidden))
    return max(found)[1] if found else None  # of several, the latest


def readable(hidden: str) -> str:
    """Return where a reader finds the checkpoint of an interrupted replacement: the new one, or else the old one."""
    return hidden if _new_in(hidden) == hidden else hidden + REPLACED


def is_between(hidden: str) -> bool:
    """Return whether a replacement was interrupted between its two renames, or something else has taken its path."""
    return os.path.lexists(hidden + REPLACED) and os.path.isdir(hidden) and os.path.lexists(hidden + RECORD)


def recorded_name(hidden: str) -> str:
    """Return the name in the record; OSError if there is none, or it is incomplete."""
    name = os.fsdecode(read_regular(hidden + RECORD, most=_NAME_BYTES, flags=os.O_NOFOLLOW))
    if not name or name in (".", "..") or "\0" in name or os.path.basename(name) != name:
        raise OSError(errno.EINVAL, "it is no record of a replacement", hidden + RECORD)
    return name


def complete(hidden: str, path: str, sync: Callable[[], object]) -> bool:
    """Finish an interrupted replacement: the path shows the new checkpoint, or the old one if that is incomplete.

    Return whether the path shows a checkpoint now, so that what was set aside can be removed. It must stay if something
    else is at the path.
    """
    with contextlib.suppress(OSError):
        os.rmdir(path)
    if os.path.lexists(path):
        return is_shown(path)
    source = _new_in(hidden) or hidden + REPLACED
    own = identity(source)
    try:
        _rename(source, path, own)
    except FileNotFoundError:  # a live owner has done it
        return os.path.lexists(path)
    except FileExistsError:  # another save has published there
        return is_shown(path)
    sync()
    return True


def is_shown(path: str) -> bool:
    """Return whether a path shows a checkpoint, and not something else."""
    return not os.path.isdir(path) or _new_in(path) is not None


def remove_record(hidden: str) -> None:
    """Remove the record: from now on what was set aside is an ordinary orphan."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(hidden + RECORD)


def _new_in(hidden: str) -> str | None:
    """Return the complete checkpoint of a temporary directory: itself, or the file in it; None if it is incomplete."""
    try:
        found = finished_in(os.listdir(hidden))
    except OSError:
        return None
    return os.path.join(hidden, found) if found else None if found is None else hidden
