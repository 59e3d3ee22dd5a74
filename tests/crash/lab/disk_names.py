"""One directory of the disk model: its durable names, and the changes that a power cut may lose."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from tests.crash.lab.disk_files import Content, File

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link; it exists with its whole target, or not at all."""

    target: str

    @property
    def digest(self) -> bytes:
        """A digest of the target."""
        return hashlib.blake2b(b"link" + os.fsencode(self.target), digest_size=16).digest()


@dataclass(frozen=True)
class Folder:
    """A directory after a power cut: its names, and their contents."""

    entries: Mapping[str, Left]

    @cached_property
    def digest(self) -> bytes:
        """A digest of all names and bytes below."""
        found = hashlib.blake2b(b"folder", digest_size=16)
        for name, entry in sorted(self.entries.items()):
            found.update(os.fsencode(name) + b"\0" + entry.digest)
        return found.digest()


Left: TypeAlias = "Folder | Content | Symlink"


@dataclass(frozen=True, slots=True)
class NameChange:
    """A change of one directory that is not durable yet.

    Attributes:
        key: the number of this change among all changes of its disk; with ``ordered``, both halves of a rename between
            directories share one.
        names: the new node of each name; None if the name is removed.
        what: a description of the change.
    """

    key: int
    names: Mapping[str, Node | None]
    what: str


class Directory:
    """A directory of a `Disk`: its durable names, and the changes since, oldest first."""

    def __init__(self) -> None:
        self.durable: dict[str, Node] = {}
        self.changes: list[NameChange] = []

    def names(self, is_left: Callable[[NameChange], bool] = lambda _: True) -> dict[str, Node]:
        """Return the names if only these changes are left; by default all, as a running program sees them."""
        found: dict[str, Node | None] = dict(self.durable)
        for change in self.changes:
            if is_left(change):
                found.update(change.names)
        return {name: node for name, node in found.items() if node is not None}

    def sync(self, is_durable: Callable[[NameChange], bool] = lambda _: True) -> None:
        """Make these changes durable; the earlier changes of the same names must be among them."""
        self.durable = self.names(is_durable)
        self.changes = [change for change in self.changes if not is_durable(change)]

    def ever(self, name: str) -> Iterator[Node]:
        """Yield each node that a name may lead to after a power cut."""
        for names in (self.durable, *(change.names for change in self.changes)):
            if (node := names.get(name)) is not None:
                yield node


Node: TypeAlias = File | Directory | Symlink


@dataclass(frozen=True, slots=True)
class Pending:
    """A change that may be lost.

    Attributes:
        key: the number of this change, for `Disk.left`.
        options: the number of its possible effects; effect 0 is none, effect 1 the whole change.
        what: a description of the change, with the path.
        needs: the positions, in the list returned by `Disk.pending`, of the earlier changes that must be on the disk
            if this one is.
    """

    key: int
    options: int
    what: str
    needs: tuple[int, ...] = ()


def durable(content: Left) -> Node:
    """Return a node on which this content is durable, as the beginning of the next recording."""
    if isinstance(content, Symlink):
        return content
    if isinstance(content, Content):
        return File(content.data)
    made = Directory()
    made.durable = {name: durable(entry) for name, entry in content.entries.items()}
    return made


def write_content(content: Left, path: str) -> None:
    """Write a file or directory to a path of a real file system that does not exist yet. Blocks."""
    if isinstance(content, Symlink):
        os.symlink(content.target, path)
    elif isinstance(content, Content):
        with open(path, "xb") as file:
            file.write(content.data)
    else:
        os.mkdir(path)
        for name, entry in content.entries.items():
            write_content(entry, os.path.join(path, name))


def read_content(path: str) -> Left:
    """Return the content of a path of a real file system. Blocks."""
    if os.path.islink(path):
        return Symlink(os.readlink(path))
    if os.path.isdir(path):
        return Folder({name: read_content(os.path.join(path, name)) for name in os.listdir(path)})
    with open(path, "rb") as file:
        return Content.of(file.read())
