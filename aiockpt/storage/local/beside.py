"""Checkpoints whose files get into a directory that may hold other files. All functions block.

The ranks of ``dcp.save`` write to one hidden directory, whose name is the same on all of them. It is beside the final
path if nothing exists there; if a directory exists there, it is inside that. In the first case one rename commits the
checkpoint. In the second case its files are moved into the directory under unused names, and `.metadata`, which makes
them a checkpoint, is moved last, atomically. Other files in the directory stay.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Mapping

from aiockpt.errors import CheckpointExistsError, CommitError, WriteError
from aiockpt.format.names import HIDDEN, MANIFEST_NAME, METADATA_NAME
from aiockpt.storage.faults import errors
from aiockpt.storage.local.belonging import remove, replaced_by
from aiockpt.storage.local.commit import NotDurableError, Publication, make_directories, remove_own, sync_directory
from aiockpt.storage.local.temp_dir import Hold, shared_ticket, spelled, write_new
from aiockpt.storage.syscalls import identity, rename_noreplace

_DATA = ".distcp"


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata file: of all ranks together (None), or of a rank that saves alone."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def _hidden(path: str, rank: int | None) -> tuple[str, str]:
    """Return the two possible paths of the hidden directory: beside the final path, and inside it."""
    beside = os.path.join(os.path.dirname(path), shared_ticket(os.path.basename(path)))
    return beside, os.path.join(path, f"{HIDDEN}dcp" if rank is None else spelled(f"{HIDDEN}dcp-{rank}"))


def begin(path: str, rank: int | None, *, fsync: bool, keep: bool = False) -> str:
    """Create the hidden directory of all ranks (None), or of a rank that saves alone, and return it.

    An unfinished save is discarded, unless ``keep``: then another rank may have created the directory for this save.
    """
    beside, within = _hidden(path, rank)
    if os.path.isdir(path):
        replaced_by(metadata_name(rank), path)  # raises now, not when all is written, if it can't be replaced
    with errors(WriteError, f"make a directory for the files of {path}"):
        if rank is not None:
            make_directories(path, fsync)
            remove(within)
            os.mkdir(within)
            return within
        if not keep:
            remove(beside)
            remove(within)
        hidden = within if os.path.isdir(path) and not os.path.isdir(beside) else beside
        make_directories(hidden, fsync)
        return hidden


def find(path: str, rank: int | None) -> str:
    """Return the hidden directory that `begin` has created, maybe on another rank."""
    for hidden in _hidden(path, rank)[1:] if rank is not None else _hidden(path, rank):
        if os.path.isdir(hidden):
            return hidden
    raise WriteError(
        f"the directory for the files of {path}, which the coordinating rank makes, is not there on this rank; all "
        "ranks must write to one file system"
    )


def ticket_of(path: str, rank: int | None) -> str:
    """Return the ticket by which a rank joins those that write to that directory."""
    return os.path.relpath(find(path, rank), os.path.dirname(path))


def remove_files(path: str, rank: int | None, prefix: str) -> None:
    """Remove the files of one rank from the hidden directory, as far as that works."""
    with contextlib.suppress(WriteError, OSError):
        hidden = find(path, rank)
        for name in os.listdir(hidden):
            if name.startswith(prefix):
                os.unlink(os.path.join(hidden, name))


def names_for(files: Iterable[str], hidden: str, path: str) -> dict[str, str]:
    """Return the final name of each file: its own, or another one if that is in use."""
    there = set(os.listdir(hidden))
    taken = set(os.listdir(path)) if os.path.isdir(path) else set()
    stamp = uuid.uuid4().hex[:8]
    names: dict[str, str] = {}
    for name in files:
        if name not in there:
            raise WriteError(f"{os.path.join(hidden, name)}, which a rank has written, is not there: it was removed")
        names[name] = name if name not in taken else f"{name.removesuffix(_DATA)}_{stamp}{_DATA}"
    return names


def write_metadata(hidden: str, name: str, data: bytes, *, fsync: bool) -> None:
    """Write the metadata into the hidden directory."""
    path = os.path.join(hidden, name)
    with errors(WriteError, f"write {path}"):
        write_new(path, data, fsync=fsync)


def publish(
    hidden: str, path: str, names: Mapping[str, str], last: str, *, overwrite: bool = False, fsync: bool = True
) -> None:
    """Commit the hidden directory, which is removed.

    ``names`` has the final name of each file but ``last``, the metadata that makes them a checkpoint. Raise
    CheckpointExistsError if the path holds something that may not be replaced, and CommitError if the commit fails;
    what was at the path before is then unchanged.
    """
    with errors(CommitError, f"publish {path}"):
        for name in os.listdir(hidden):
            if name not in names and name != last:
                remove(os.path.join(hidden, name))  # left by an earlier save that did not finish
        if not os.path.isdir(path):
            try:
                Publication(hidden, path, "", False, fsync, identity(hidden)).attempt()
            except CheckpointExistsError:
                if not os.path.isdir(path):
                    raise
            except NotDurableError as exc:
                raise CommitError(str(exc)) from exc.__cause__
            else:  # else the directory was created meanwhile
                return
        if fsync:
            sync_directory(hidden)
        _move_in(hidden, path, names, last, overwrite=overwrite, fsync=fsync)


def _move_in(hidden: str, path: str, names: Mapping[str, str], last: str, *, overwrite: bool, fsync: bool) -> None:
    """Move the files into a directory; if that fails, none of them stays there."""
    metadata = os.path.join(path, last)
    if not os.path.isdir(path) or (os.path.lexists(metadata) and not overwrite):
        raise CheckpointExistsError(f"{path} exists already; save under another name, or pass overwrite=True")
    old = replaced_by(last, path)
    moved: list[str] = []
    try:
        for name, final in names.items():
            rename_noreplace(os.path.join(hidden, name), os.path.join(path, final))
            moved.append(os.path.join(path, final))
        if fsync:
            sync_directory(path)
        if MANIFEST_NAME in old:
            remove(os.path.join(path, MANIFEST_NAME))  # it describes the checkpoint that is replaced
        if os.path.lexists(metadata):
            os.replace(os.path.join(hidden, last), metadata)
            moved.clear()  # what was replaced can't come back
        else:
            rename_noreplace(os.path.join(hidden, last), metadata)
            moved.append(metadata)
        if fsync:
            sync_directory(path)
    except BaseException as exc:
        for file in reversed(moved):
            with contextlib.suppress(OSError):  # the first error counts
                remove(file)
        if isinstance(exc, FileExistsError):
            raise CheckpointExistsError(f"files of a checkpoint have appeared in {path} meanwhile") from exc
        raise
    # Not before the new metadata is durable: until then, these files are the checkpoint.
    for name in old - {*names.values(), MANIFEST_NAME}:
        remove(os.path.join(path, name))
    remove(hidden)


def discard(hidden: str, held: Hold | None = None) -> None:
    """Remove the hidden directory; what can't be removed is left to the next save.

    ``held`` is a hold of it, and is released: another directory that has taken the name stays. None: remove any.
    """
    with contextlib.suppress(OSError):
        remove_own(hidden, None if held is None else held.identity)
    if held is not None:
        held.release()
