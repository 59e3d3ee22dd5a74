"""The files of a directory that belong to a checkpoint, and the removal of these alone. Without torch; blocks.

| file | belongs |
| --- | --- |
| `.metadata`, `__N.metadata`, `.aiockpt.json`, `*.safetensors.index.json` | always |
| any file that an intact `.aiockpt.json` lists | yes |
| `*.distcp` and `*.safetensors` that one of these names | yes |
| other `*.distcp` and `*.safetensors` | if one of these is damaged, or, for `*.distcp`, if there is none |
| a `*.safetensors` that is alone | yes |
| directories, and all other files, such as `common.pt` and `metadata.json` of Megatron | never |

In a temporary directory, where a save may have been killed at any point, files of these names belong if nothing
describes them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from aiockpt.core.wording import some_of
from aiockpt.errors import LoadError, printable_key
from aiockpt.format.item.ziparchive import LEGACY_MAGIC, ZIP_MAGIC, FramingError, read_directory
from aiockpt.format.manifest.manifest import files_listed
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME, SINGLE_NAME, SUFFIX
from aiockpt.storage.syscalls import identity, open_directory

_DCP = "*.distcp"
_RANK_METADATA = re.compile(r"__[0-9]+\.metadata")
_SHARD_INDEX = ".safetensors.index.json"
_STILL_OPEN = (".nfs*", ".fuse_hidden*")  # what NFS and FUSE keep of files that were removed while they are open
_LEFT = (SINGLE_NAME, *_STILL_OPEN, ".__*_results.json", ".__*_results.json.new")  # the last ones are of Megatron
_PROBE = "probe"  # see `temp_dir._is_own`

_ATTEMPTS = 100
_SHOWN = 5
_DOCUMENT_BYTES = 1 << 28
_HEADER_BYTES = 100_000_000
_UNREADABLE = frozenset({errno.EIO, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EBADMSG, errno.EUCLEAN})


class OtherThingsError(OSError):
    """A directory holds other things than a checkpoint, and so was left as it is."""


class Contents(NamedTuple):
    """The contents of a directory."""

    files: list[str]  # of the checkpoint, in the order of removal: those that describe the others are last
    folders: list[str]  # made by a save; only in temporary directories
    others: list[str]  # not of the checkpoint, sorted; directories end with "/"


def look_into(directory: int, *, unfinished: bool = False, also: Collection[str] = ()) -> Contents:
    """Sort the contents of an open directory into the checkpoint's and others.

    ``unfinished``: it is a temporary one, where a save may have been killed at any point. ``also``: more of its files.
    """
    # Opened anew: btrfs lists what was there when a directory was opened.
    with open_directory(".", dir_fd=directory) as now, os.scandir(now) as entries:
        is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    kept = () if unfinished else _STILL_OPEN
    files = [n for n, folder in is_folder.items() if not folder and not any(fnmatchcase(n, each) for each in kept)]
    described = [name for name in files if _describes(name)]
    own = _own_files(files, {name: _contents(directory, name) for name in described}, unfinished=unfinished)
    own.update(name for name in files if name in also)
    folders, others = [], [name for name in files if name not in own]
    for name in (name for name, folder in is_folder.items() if folder):
        if unfinished and name.startswith(_PROBE):
            folders.append(name)
        elif unfinished and name == SINGLE_NAME:  # was exchanged for a file
            folders.append(name)
            with open_directory(name, dir_fd=directory) as below:
                others += [f"{name}/{other}" for other in look_into(below).others]
        else:
            others.append(f"{name}/")
    # What describes the other files goes last: if the removal is interrupted, it still tells that these belong.
    ordered = sorted(own, key=lambda name: (_describes(name), name == METADATA_NAME, name))
    return Contents(ordered, folders, sorted(others))


def _describes(name: str) -> bool:
    """Return whether a file of this name describes others."""
    return name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(_SHARD_INDEX) or bool(_RANK_METADATA.fullmatch(name))


def _own_files(files: Collection[str], documents: Mapping[str, bytes | None], *, unfinished: bool) -> set[str]:
    """Choose the files of the checkpoint; a document is one that describes others, None if it can't be read."""
    own = set(documents)
    manifest = documents.get(MANIFEST_NAME)
    listed = None if manifest is None else files_listed(manifest)
    own.update(name for name in files if name in (listed or ()))
    own.update(name for name in files if unfinished and any(fnmatchcase(name, known) for known in _LEFT))
    tensors = [name for name in files if name.endswith(SUFFIX)]
    shaped = [name for name in (*tensors, *(name for name in files if fnmatchcase(name, _DCP))) if name not in own]
    spelling = [data for name, data in documents.items() if data is not None and name != MANIFEST_NAME]
    own.update(name for name in shaped if any(each in data for data in spelling for each in _spellings(name)))
    describing = [name for name in documents if name != MANIFEST_NAME]
    if len(tensors) == 1 == len(shaped) and not describing:
        own.update(tensors)
    rest = [name for name in shaped if name not in own]
    if rest:
        if not describing and listed is None:
            own.update(name for name in rest if unfinished or MANIFEST_NAME in documents or fnmatchcase(name, _DCP))
        elif any(map(_is_damaged, documents, documents.values())):
            own.update(rest)
    return own


def _spellings(name: str) -> tuple[bytes, ...]:
    """Return how a name is written in pickles, and in JSON."""
    data = os.fsencode(name)  # after the opcodes SHORT_BINUNICODE and BINUNICODE, and in quotes
    return b"\x8c%c" % (len(data) & 255) + data, b"X" + len(data).to_bytes(4, "little") + data, b'"' + data + b'"'


def _is_damaged(name: str, data: bytes | None) -> bool:
    if data is None:
        return True
    if name == MANIFEST_NAME:
        return files_listed(data) is None
    try:
        if name.endswith(_SHARD_INDEX):
            return type(json.loads(data)["weight_map"]) is not dict
        from aiockpt.format.dcp.metadata import (
            decode_metadata,  # imports torch, which the writer process does not have
        )

        decode_metadata(data)
    except (ValueError, KeyError, TypeError, RecursionError, LoadError):
        return True
    return False


def _contents(directory: int, name: str) -> bytes | None:
    """Read a file; None if it can't be read, or is larger than anything of this kind."""
    try:  # O_NONBLOCK: to open a pipe of this name would block
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            is_sane = stat.S_ISREG(found.st_mode) and found.st_size <= _DOCUMENT_BYTES
            return file.read(found.st_size) if is_sane else None
    except OSError as exc:
        if exc.errno not in _UNREADABLE:
            raise
        return None


# --- looking at a path --------------------------------------------------------------------------------


def why_not_a_checkpoint(path: str) -> str | None:
    """Return why a path can't be replaced or deleted as a checkpoint, as the end of a sentence; None if it can.

    Empty files and directories can. Of a link only the link is replaced: its target need only look like a checkpoint.
    FileNotFoundError: nothing is there.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        if os.path.exists(path) and not _is_checkpoint(path):
            return "is a link to what is no checkpoint"
        return None
    if stat.S_ISREG(mode):
        if os.path.getsize(path) and not _is_checkpoint_file(path):
            return "is a file, but neither one of torch.save nor of safetensors"
        return None
    if not stat.S_ISDIR(mode):
        return "is neither a directory nor a file"
    with open_directory(path) as directory:
        return why_not_of_contents(directory)


def why_not_of_contents(directory: int) -> str | None:
    """Do as `why_not_a_checkpoint` for an open directory."""
    found = look_into(directory)
    if found.others or found.files == [MANIFEST_NAME]:
        return f"is a directory that holds other things than a checkpoint ({several(found.others or found.files)})"
    return None


def several(names: Collection[str]) -> str:
    """Return the first few names, printable, and how many more there are."""
    return some_of([printable_key(name) for name in names], _SHOWN)


def is_empty(path: str) -> bool:
    """Return whether there is a file or a directory with nothing in it."""
    if os.path.islink(path):
        return False
    return not os.listdir(path) if os.path.isdir(path) else os.path.isfile(path) and not os.path.getsize(path)


def _is_checkpoint(path: str) -> bool:
    """Return whether something, links followed, looks like a checkpoint, whatever is in it besides."""
    if not os.path.isdir(path):
        return os.path.isfile(path) and _is_checkpoint_file(path)
    marks = ("*.metadata", _DCP, f"*{SUFFIX}", f"*{_SHARD_INDEX}")
    return any(fnmatchcase(name, mark) for name in os.listdir(path) for mark in marks)


def _is_checkpoint_file(path: str) -> bool:
    """Return whether a file is one of ``torch.save`` or of safetensors, by its contents."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size

        def fetch(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        begin = fetch(0, 64)
        if begin[:4] == ZIP_MAGIC:
            return _is_torch_archive(size, fetch)
        if LEGACY_MAGIC in begin:
            return True
        header_bytes = int.from_bytes(begin[:8], "little")
        return begin[8:9] == b"{" and header_bytes <= _HEADER_BYTES  # the rest may be damaged


def _is_torch_archive(size: int, fetch: Callable[[int, int], bytes]) -> bool:
    try:
        names = {record.name.partition("/")[2] for record in read_directory(size, fetch)}
    except FramingError:
        if b"PK\5\6" in fetch(max(0, size - 1024), 1024):
            return False
        return b"/data.pkl" in fetch(0, 1024)  # truncated: the first record is enough
    return "data.pkl" in names and "constants.pkl" not in names  # "constants.pkl" is in compiled programs


def checkpoint_above(path: str) -> str | None:
    """Return the checkpoint in whose directory a path is, links followed; None if it is in none."""
    at = os.path.realpath(os.path.dirname(path))
    while True:
        if _is_own_directory(at):
            return at
        at, below = os.path.dirname(at), at
        if at == below:
            return None


def _is_own_directory(path: str) -> bool:
    if os.path.isfile(os.path.join(path, MANIFEST_NAME)):
        return True
    if not os.path.isfile(os.path.join(path, METADATA_NAME)):  # others have directories of that name
        return False
    return any(fnmatchcase(name, _DCP) for name in os.listdir(path))


def data_files_of(path: str, document: str) -> list[str]:
    """Return the names of the `*.distcp` files that belong to one `.metadata` or `__N.metadata` of a directory.

    They are those that it names; if it is damaged, those that no other document there names. Empty if it is not there.
    """
    with open_directory(path, follow=True) as directory:
        names = os.listdir(directory)
        if document not in names:
            return []
        documents = {name: _contents(directory, name) for name in names if _describes(name) and name != MANIFEST_NAME}
    data = [name for name in names if fnmatchcase(name, _DCP)]
    own = documents.pop(document)
    if own is not None and not _is_damaged(document, own):
        return [name for name in data if any(each in own for each in _spellings(name))]
    others = [found for found in documents.values() if found is not None]
    return [name for name in data if not any(each in other for other in others for each in _spellings(name))]


# --- removing -----------------------------------------------------------------------------------------


def remove(path: str, *, also: Collection[str] = (), dir_fd: int | None = None) -> None:
    """Remove a temporary directory, a file or a link, if it exists; others may remove it at the same time.

    ``also`` names files in the directory that belong to the save, whatever their names. Raises OtherThingsError, and
    removes nothing, if the directory holds other things than a checkpoint.
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


def _remove_directory(path: str, also: Collection[str], dir_fd: int | None) -> None:
    with open_directory(path, dir_fd=dir_fd) as directory:
        found = look_into(directory, unfinished=True, also=also)
        if found.others:
            what = f"it holds other things than a checkpoint ({several(found.others)}), which stay there"
            raise OtherThingsError(errno.ENOTEMPTY, what, path)
        for name in (*found.folders, *found.files):
            remove(name, dir_fd=directory)
    os.rmdir(path, dir_fd=dir_fd)
