"""The removal of a checkpoint's files, and of these alone; see `aiockpt.format.belonging`. Without torch; blocks."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from aiockpt.core.wording import some_of
from aiockpt.errors import printable_key
from aiockpt.format import belonging
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME, OPEN_MARK, SINGLE_NAME
from aiockpt.format.recognise import DOCUMENT_BYTES, recognise
from aiockpt.storage.local.entries import LocalListing, read_regular
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


def look_into(directory: int, *, unfinished: bool = False, also: Collection[str] = ()) -> Contents:
    """Sort the contents of an open directory into the checkpoint's and others.

    ``unfinished``: it is a temporary one, where a save may have been killed at any point. ``also``: more of its files,
    and of those in directories below.
    """
    # Opened anew: btrfs lists what was there when a directory was opened.
    with open_directory(".", dir_fd=directory) as now, os.scandir(now) as entries:
        listed = list(entries)
    is_folder = {entry.name for entry in listed if entry.is_dir(follow_symlinks=False)}
    # A pipe of such a name is not the checkpoint's, except where nobody else may write.
    files = [
        entry.name
        for entry in listed
        if entry.name not in is_folder and (unfinished or entry.is_symlink() or entry.is_file(follow_symlinks=False))
    ]
    if unfinished and OPEN_MARK in files:
        return Contents(belonging.order_of_removal(files), dict.fromkeys(is_folder), [])
    documents = {name: _contents(directory, name) for name in belonging.documents_in(files)}
    own = belonging.own_files(files, documents, unfinished=unfinished)
    own.update(name for name in files if name in also)
    rest = [entry.name for entry in listed if entry.name not in own and entry.name not in is_folder]
    others = [name for name in rest if not belonging.is_still_open(name)]
    folders: dict[str, frozenset[str] | None] = {}
    known = {*also, *belonging.listed_in(documents)}
    for name in is_folder:
        below = frozenset(each.removeprefix(f"{name}/") for each in known if each.startswith(f"{name}/"))
        if below or (unfinished and (name == SINGLE_NAME or name.startswith(_PROBE))):
            with open_directory(name, dir_fd=directory) as folder:
                # What a file was exchanged for is finished.
                found = look_into(folder, unfinished=unfinished and name != SINGLE_NAME, also=below)
            others += [f"{name}/{other}" for other in found.others]
            folders[name] = below
        else:
            others.append(f"{name}/")
    return Contents(belonging.order_of_removal(own), folders, sorted(others))


def _contents(directory: int, name: str) -> bytes | None:
    """Read a document; None if it can't be read, or is larger than anything of this kind."""
    try:
        return read_regular(name, directory, most=DOCUMENT_BYTES, flags=os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno not in _UNREADABLE:
            raise
        return None


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
        return f"is a directory that holds other things than a checkpoint ({several(others or found.files)})"
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
            return bool(recognise({"": size}, lambda _, *place: fetch(name, *place), alone=True).layout)
        return belonging.has_marks(listing.files)


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


def data_files_of(path: str, document: str) -> list[str]:
    """Return the data files that belong to one `.metadata` or `__N.metadata` of a directory; see `format.belonging`.

    Empty if it is not there.
    """
    with open_directory(path, follow=True) as directory:
        names = os.listdir(directory)
        documents = {name: _contents(directory, name) for name in names if belonging.describes(name)}
    return belonging.data_files_of(document, names, documents) if document in names else []


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
