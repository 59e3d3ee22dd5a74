"""The removal of a checkpoint's files, and of these alone; see `aiockpt.format.belonging`. Without torch; blocks."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from aiockpt.core.wording import some_of
from aiockpt.errors import CheckpointExistsError, LoadError, printable_key
from aiockpt.format import belonging
from aiockpt.format.layouts import DOCUMENT_BYTES, Fetch, named_by, recognise_file
from aiockpt.format.manifest.manifest import decode_head
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME, OPEN_MARK, SINGLE_NAME
from aiockpt.format.recognise import is_mark
from aiockpt.storage.local.entries import LocalListing, open_regular, read_regular
from aiockpt.storage.syscalls import identity, open_directory

_PROBE = "probe"  # see `temp_dir._is_own`

_ATTEMPTS = 100
_SHOWN = 5
_UNREADABLE = frozenset(
    {errno.EIO, errno.EINVAL, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EBADMSG, errno.EUCLEAN}
)


Version: TypeAlias = tuple[int, int, int]
"""Inode, size and time of a file, which tell whether it was changed."""


class OtherThingsError(OSError):
    """A directory holds other things than a checkpoint, and so was left as it is."""


class Contents(NamedTuple):
    """The contents of a directory."""

    files: list[str]  # of the checkpoint, in the order of removal: those that describe the others are last
    folders: dict[str, frozenset[str] | None]  # of the checkpoint: what is known of their files; None: all are its own
    others: list[str]  # not of the checkpoint, sorted; directories end with "/"
    problem: str = ""  # why nothing is proven to be of a checkpoint


def look_into(directory: int, *, unfinished: bool = False, also: Collection[str] = ()) -> Contents:
    """Sort the contents of an open directory into what is proven to be of a checkpoint, and others.

    ``unfinished``: it is a temporary one, where a save may have been killed at any point. ``also``: more of its files,
    and of those in directories below; of a finished directory these alone.
    """
    # Opened anew: btrfs lists what was there when a directory was opened.
    with open_directory(".", dir_fd=directory) as now, os.scandir(now) as entries:
        states = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    is_folder = {name for name, state in states.items() if stat.S_ISDIR(state.st_mode)}
    # A pipe of such a name is not the checkpoint's, except where nobody else may write.
    is_plain = {name for name, at in states.items() if stat.S_ISREG(at.st_mode) or stat.S_ISLNK(at.st_mode)}
    files = {name: states[name].st_size for name in (states if unfinished else is_plain) if name not in is_folder}
    if unfinished and OPEN_MARK in files:
        return Contents(belonging.order_of_removal(files), dict.fromkeys(is_folder), [])
    fetch, problem, own = partial(_fetch, directory), "", set(also)
    if unfinished:
        own |= belonging.left_files(files, fetch)
    elif not also:
        own, problem = _proven(files, fetch)
    others = [name for name in states.keys() - own - is_folder if not belonging.is_still_open(name)]
    folders: dict[str, frozenset[str] | None] = {}
    for name in is_folder:
        below = frozenset(each.removeprefix(f"{name}/") for each in own if each.startswith(f"{name}/"))
        if below or (unfinished and (name == SINGLE_NAME or name.startswith(_PROBE))):
            with open_directory(name, dir_fd=directory) as folder:
                found = look_into(folder, unfinished=unfinished, also=below)
            others += [f"{name}/{other}" for other in found.others]
            folders[name] = below
        else:
            others.append(f"{name}/")
    return Contents(belonging.order_of_removal(own & files.keys()), folders, sorted(others), problem)


def _proven(files: Mapping[str, int], fetch: Fetch) -> tuple[set[str], str]:
    """Return the files that are proven to be of a checkpoint, or why none is."""
    try:
        return belonging.proven_files(files, fetch), ""
    except LoadError as exc:
        return set(), str(exc)
    except OSError as exc:
        if exc.errno not in _UNREADABLE:
            raise
        return set(), f"{printable_key(str(exc.filename))} can't be read: {exc.strerror}"


def _fetch(directory: int, name: str, offset: int, length: int) -> bytes:
    with open(open_regular(name, directory, flags=os.O_NOFOLLOW), "rb") as file:
        file.seek(offset)
        return file.read(length)


# --- looking at a path --------------------------------------------------------------------------------


def why_not_a_checkpoint(path: str, *, keep: bool = False) -> str | None:
    """Return why a path can't be replaced or deleted as a checkpoint, as the end of a sentence; None if it can.

    Empty files and directories can. Of a link only the link is replaced: its target need only look like a checkpoint.
    FileNotFoundError: nothing is there.
    ``keep``: safetensors can, beside the files of a model repository.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        if os.path.exists(path) and not _looks_like_one(path):
            return "is a link to what is no checkpoint"
        return None
    if stat.S_ISREG(mode):
        if os.path.getsize(path) and not _looks_like_one(path):
            return "is a file, but neither one of torch.save nor of safetensors"
        return None
    if not stat.S_ISDIR(mode):
        return "is neither a directory nor a file"
    with open_directory(path) as directory:
        return why_not_of_contents(directory, keep=keep)


def why_not_of_contents(directory: int, *, keep: bool = False) -> str | None:
    """Do as `why_not_a_checkpoint` for an open directory."""
    found = look_into(directory)
    kept = _kept(directory, found) if keep else {}
    others = [name for name in found.others if name not in kept]
    if others or (found.files == [MANIFEST_NAME] and not found.folders):
        why = f": {found.problem}" if found.problem else ""
        return f"is a directory that holds other things than a checkpoint ({several(others or found.files)}){why}"
    return None


def kept_beside(path: str) -> dict[str, Version]:
    """Return the files of a model repository beside the safetensors of a directory, or where there are none yet."""
    if os.path.islink(path) or not os.path.isdir(path):
        return {}
    with open_directory(path) as directory:
        return _kept(directory, look_into(directory))


def _kept(directory: int, found: Contents) -> dict[str, Version]:
    if found.files and not belonging.is_safetensors(found.files):
        return {}
    names = filter(belonging.is_of_repository, found.others)
    states = {name: os.stat(name, dir_fd=directory, follow_symlinks=False) for name in names}
    return {
        name: (state.st_ino, state.st_size, state.st_mtime_ns)
        for name, state in states.items()
        if stat.S_ISREG(state.st_mode)
    }


def several(names: Collection[str]) -> str:
    """Return the first few names, printable, and how many more there are."""
    return some_of([printable_key(name) for name in names], _SHOWN)


def is_empty(path: str) -> bool:
    """Return whether there is a file or a directory with nothing in it."""
    if os.path.islink(path):
        return False
    return not os.listdir(path) if os.path.isdir(path) else os.path.isfile(path) and not os.path.getsize(path)


def _looks_like_one(path: str) -> bool:
    """Return whether something, links followed, looks like a checkpoint, whatever is in it besides."""
    if not os.path.isdir(path) and not os.path.isfile(path):
        return False
    with LocalListing(path) as listing:
        if listing.is_file:  # by its contents: a name is no evidence here
            ((name, size),) = listing.files.items()
            fetch = listing.fetch
            return recognise_file("", size, lambda _, *place: fetch(name, *place)).is_checkpoint
        return any(map(is_mark, listing.files))


def checkpoint_above(path: str) -> str | None:
    """Return the checkpoint in whose directory a path is, links followed; None if it is in none."""
    at = os.path.realpath(os.path.dirname(path))
    while True:
        # Few of the directories above have these, so that hardly any is listed.
        if os.path.isfile(os.path.join(at, MANIFEST_NAME)) or os.path.isfile(os.path.join(at, METADATA_NAME)):
            with LocalListing(at) as listing:
                if belonging.is_one_checkpoint(listing.files):
                    return at
        at, below = os.path.dirname(at), at
        if at == below:
            return None


def replaced_by(document: str, path: str) -> set[str]:
    """Return what a new `.metadata` or `__N.metadata` replaces in a directory: the data files that the old one names.

    With `.metadata` goes its manifest. Raise CheckpointExistsError if one of the two can't be decoded.
    """
    try:
        with open_directory(path, follow=True) as directory:
            names = set(os.listdir(directory))
            if document not in names:
                return set()
            read = partial(read_regular, dir_fd=directory, most=DOCUMENT_BYTES, flags=os.O_NOFOLLOW)
            old = named_by(document, read(document))
            if document == METADATA_NAME and MANIFEST_NAME in names:
                if decode_head(read(MANIFEST_NAME)) is None:
                    raise LoadError(f"{MANIFEST_NAME} is damaged")
                old.add(MANIFEST_NAME)
            return old & names
    except (LoadError, OSError) as exc:
        raise CheckpointExistsError(
            f"{path} has a {document} that can't be replaced: {exc}. Move it away, or save under another name"
        ) from exc


# --- removing -----------------------------------------------------------------------------------------


def remove(path: str, *, also: Collection[str] | None = (), dir_fd: int | None = None) -> None:
    """Remove a temporary directory, a file or a link, if it exists; others may remove it at the same time.

    ``also`` names files in the directory that belong to the save, whatever their names; None: all do. Raises
    OtherThingsError, and removes nothing, if the directory holds other things than a checkpoint.
    """
    for _ in range(_ATTEMPTS):
        try:
            if stat.S_ISDIR(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
                _remove_directory(path, also, dir_fd)
            else:
                os.unlink(path, dir_fd=dir_fd)
        except FileNotFoundError:  # another process has removed a part of it: go on with the rest
            pass
        except OtherThingsError:
            raise
        except OSError as exc:  # a file was added at the last moment
            if exc.errno != errno.ENOTEMPTY:
                raise
        if identity(path, dir_fd) is None:
            return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)


def _remove_directory(path: str, also: Collection[str] | None, dir_fd: int | None) -> None:
    if also is None:
        shutil.rmtree(path, dir_fd=dir_fd)
        return
    with open_directory(path, dir_fd=dir_fd) as directory:
        found = look_into(directory, unfinished=True, also=also)
        if found.others:
            what = f"it holds other things than a checkpoint ({several(found.others)}), which stay there"
            raise OtherThingsError(errno.ENOTEMPTY, what, path)
        for name in (*found.folders, *found.files):
            remove(name, also=found.folders.get(name, ()), dir_fd=directory)
    os.rmdir(path, dir_fd=dir_fd)
