"""What a power cut may leave of one directory: its durable names, and changes that nobody has made durable."""

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
    """A symbolic link; it is there with all that it says, or not."""

    target: str

    @property
    def digest(self) -> bytes:
        """What tells it from others."""
        return hashlib.blake2b(b"link" + os.fsencode(self.target), digest_size=16).digest()


@dataclass(frozen=True)
class Folder:
    """A directory as it is left: names, and what they lead to."""

    entries: Mapping[str, Left]

    @cached_property
    def digest(self) -> bytes:
        """What tells it from others: names and all bytes."""
        found = hashlib.blake2b(b"folder", digest_size=16)
        for name, entry in sorted(self.entries.items()):
            found.update(os.fsencode(name) + b"\0" + entry.digest)
        return found.digest()


Left: TypeAlias = "Folder | Content | Symlink"


@dataclass(frozen=True, slots=True)
class NameChange:
    """A change of one directory, on its way to the disk.

    Attributes:
        key: its number among all changes of its disk; with ``ordered``, both of a rename between directories have one.
        names: what the names lead to from then on; None for nothing.
        what: says it in words.
    """

    key: int
    names: Mapping[str, Node | None]
    what: str


class Directory:
    """A directory of a `Disk`: the durable names, and the changes since, in their order."""

    def __init__(self) -> None:
        self.durable: dict[str, Node] = {}
        self.changes: list[NameChange] = []

    def names(self, is_left: Callable[[NameChange], bool] = lambda _: True) -> dict[str, Node]:
        """Give the names when these changes are left; without, as a running program sees them."""
        found: dict[str, Node | None] = dict(self.durable)
        for change in self.changes:
            if is_left(change):
                found.update(change.names)
        return {name: node for name, node in found.items() if node is not None}

    def sync(self, is_durable: Callable[[NameChange], bool] = lambda _: True) -> None:
        """Make changes durable; of those with the same names the first ones first."""
        self.durable = self.names(is_durable)
        self.changes = [change for change in self.changes if not is_durable(change)]

    def ever(self, name: str) -> Iterator[Node]:
        """Give all that a name may lead to after a power cut."""
        for names in (self.durable, *(change.names for change in self.changes)):
            if (node := names.get(name)) is not None:
                yield node


Node: TypeAlias = File | Directory | Symlink


@dataclass(frozen=True, slots=True)
class Pending:
    """A change that may be lost.

    Attributes:
        key: names it for `Disk.left`.
        options: in how many ways it may be left; 0 is not at all, 1 is whole.
        what: says it in words, with the path.
        needs: the positions, among those that it was given with, of earlier ones without which it can't be left.
    """

    key: int
    options: int
    what: str
    needs: tuple[int, ...] = ()


def durable(content: Left) -> Node:
    """Make what is left of a file or directory durable, as the beginning of another recording."""
    if isinstance(content, Symlink):
        return content
    if isinstance(content, Content):
        return File(content.data)
    made = Directory()
    made.durable = {name: durable(entry) for name, entry in content.entries.items()}
    return made


def put(content: Left, path: str) -> None:
    """Write what is left of a file or directory to a path of a real file system, where nothing is. Blocks."""
    if isinstance(content, Symlink):
        os.symlink(content.target, path)
    elif isinstance(content, Content):
        with open(path, "xb") as file:
            file.write(content.data)
    else:
        os.mkdir(path)
        for name, entry in content.entries.items():
            put(entry, os.path.join(path, name))


def taken(path: str) -> Left:
    """Read what is at a path of a real file system. Blocks."""
    if os.path.islink(path):
        return Symlink(os.readlink(path))
    if os.path.isdir(path):
        return Folder({name: taken(os.path.join(path, name)) for name in os.listdir(path)})
    with open(path, "rb") as file:
        return Content.of(file.read())
