"""A model of a disk: what was asked of it, what of that is durable, and what a power cut may leave.

Pure: nothing here touches a file system. Calls (`tests.crash.lab.calls.FileCall`) are applied one after the other; at
any moment `Disk.pending` gives the changes that may still be lost, and `Disk.left` what is on the disk when a choice
of them is.

What a sync makes durable is read strictly, as POSIX has it, with ``ordered=False``:

- fsync of a file: its bytes and its size; not its name.
- fsync of a directory: the names in it; not the files themselves, and no name in any other directory.
- Without: each write is there, or not, or torn at a border of blocks, or has changed the size alone (zeros); each
  change of a directory is there or not, in any order, but that changes of the same name come in theirs. Two files,
  two directories, a file and its name have nothing to do with each other.

What every reading has to allow, for no program could replace anything safely otherwise: a change of one directory,
that is a name made, removed, renamed, or exchanged with another of the same directory, is done or not done, and
nothing in between. A rename or an exchange between two directories is two changes, one in each, and either alone may
be there: both names, or none. And a directory that had its name when the recording began keeps it: whether those
above are durable is the business of who made them.

With ``ordered=True`` it is read as journaling file systems do it (ext4, XFS, btrfs): changes of directories come to the
disk in the order in which they were made, also those between two directories at once, so that what is left is always
the state of all directories at one moment; a sync of a directory takes along all that was done before its last change.
Bytes of files that were not synced may be missing all the same. What is left in this reading could also be left in
the strict one, so that who is safe in that is safe in both.

A sync that has failed makes nothing durable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.crash.lab.disk_files import LOST, WHOLE, DataChange, File, block_borders
from tests.crash.lab.disk_names import Directory, Folder, NameChange, Pending, Symlink, durable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tests.crash.lab.calls import FileCall
    from tests.crash.lab.disk_names import Left, Node

_KEEP_SIZE = 1


@dataclass
class Disk:
    """What was asked of a disk below one directory, and what of that is durable.

    Args:
        ordered: how the word of the file system is read; see the module.
        borders: where a write of bytes from one offset to another may be torn.
    """

    ordered: bool = False
    borders: Callable[[int, int], Sequence[int]] = block_borders
    root: Directory = field(default_factory=Directory)

    def __post_init__(self) -> None:
        self._keys = 0
        self._numbers: dict[int, Node] = {}

    @classmethod
    def after(cls, calls: Iterable[FileCall], root: str, *, ordered: bool = False) -> Disk:
        """Give an empty disk that was asked this."""
        disk = cls(ordered)
        for call in calls:
            disk.apply(call, root)
        return disk

    @classmethod
    def holding(cls, content: Folder, *, ordered: bool = False) -> Disk:
        """Give a disk on which this is durable."""
        root = durable(content)
        return cls(ordered, root=root) if isinstance(root, Directory) else cls(ordered)

    # --- what is asked of it -----------------------------------------------------------------------------------

    def apply(self, call: FileCall, root: str) -> None:
        """Do what a call has done below ``root``. Those that failed, and marks, do nothing.

        Raises:
            ValueError: it is one that the model doesn't know.
        """
        if call.result < 0 or call.name == "mark":
            return
        path = _below(call.path, root)
        if call.name in ("rename", "exchange", "link"):
            self._move(call.name, path, _below(call.to, root))
        elif call.name in ("write", "truncate", "allocate", "sync"):
            self._to_node(call, path)
        elif call.name == "create":
            self._create(call, path)
        elif call.name == "mkdir":
            self._numbers[call.inode] = made = Directory()
            self._set(path, made, f"the directory {path}")
        elif call.name == "symlink":
            self._set(path, Symlink(call.to), f"the link {path}")
        else:
            self._set(path, None, f"the removal of {path}")

    def forget_numbers(self) -> None:
        """Find what comes by its path alone, for its calls are of another file system with the same content."""
        self._numbers.clear()

    def _create(self, call: FileCall, path: str) -> None:
        if call.flags & getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY:
            raise ValueError(f"a file without a name in {path}: the model has names only")
        node = self._at(path)
        if node is None:
            node = File()
            self._set(path, node, f"the name {path}")
        elif isinstance(node, File) and call.flags & os.O_TRUNC:
            node.add(DataChange.resize(self._key(), 0))
        self._numbers[call.inode] = node

    def _to_node(self, call: FileCall, path: str) -> None:
        node = self._numbers.get(call.inode) if call.inode else None
        node = node or self._at(path)
        if node is None or isinstance(node, Symlink):
            raise ValueError(f"{call}: the model has no such file")
        if call.name == "sync":
            self._sync(node)
        elif isinstance(node, Directory):
            raise ValueError(f"{call}: that is a directory")
        elif call.name == "write":
            if len(call.data) != call.result:
                raise ValueError(f"{call}: it was recorded without its bytes")
            if call.data:  # nothing written at an offset behind the end does not move the end
                node.add(DataChange.write(self._key(), call.offset, call.data, self.borders))
        elif call.name == "truncate":
            node.add(DataChange.resize(self._key(), call.nbytes))
        elif call.flags & ~_KEEP_SIZE:
            raise ValueError(f"{call}: the model can't do that to a file's space")
        elif not call.flags:
            node.add(DataChange.grow(self._key(), call.offset + call.nbytes))

    def _sync(self, node: File | Directory) -> None:
        if isinstance(node, File) or not node.changes or not self.ordered:
            node.sync()
            return
        last = node.changes[-1].key
        for _, found in list(self._reachable(self.root, "", lambda _: True, set())):
            if isinstance(found, Directory):
                found.sync(lambda change: change.key <= last)

    def _move(self, name: str, path: str, to: str) -> None:
        node, other = self._at(path), self._at(to)
        if node is None or (other is None and name == "exchange"):
            raise ValueError(f"{name} {path} {to}: the model has no such file")
        if node is other:
            return
        what = f"the {name} of {path} to {to}"
        before = {"rename": None, "exchange": other, "link": node}[name]
        parents = [self._parent(each) for each in (path, to)]
        changes = [(_name(path), before), (_name(to), node)]
        key = self._key()
        if parents[0] is parents[1] or name == "link":
            self._change(parents[1], dict(changes) if name != "link" else dict(changes[1:]), what, key)
            return
        halves = ("", "") if self.ordered else (" in the one directory", " in the other directory")
        for parent, change, half in zip(parents, changes, halves, strict=True):
            self._change(parent, dict([change]), what + half, key)
            key = key if self.ordered else self._key()

    def _set(self, path: str, node: Node | None, what: str) -> None:
        self._change(self._parent(path), {_name(path): node}, what, self._key())

    def _change(self, directory: Directory, names: Mapping[str, Node | None], what: str, key: int) -> None:
        directory.changes.append(NameChange(key, names, what))

    def _key(self) -> int:
        self._keys += 1
        return self._keys

    def _parent(self, path: str) -> Directory:
        parent = self._at(os.path.dirname(path))
        if not isinstance(parent, Directory) or not path:
            raise ValueError(f"{path or 'the root'}: the model has no directory that it is in")
        return parent

    def _at(self, path: str) -> Node | None:
        node: Node | None = self.root
        for part in filter(None, path.split("/")):
            node = node.names().get(part) if isinstance(node, Directory) else None
        return node

    # --- what may be left of it --------------------------------------------------------------------------------

    def pending(self, shown: Callable[[str], bool] = lambda _: True) -> list[Pending]:
        """Give the changes that may be lost, in their order, of what can be reached under shown names.

        Args:
            shown: tells whether a name, and what is below it, matters. Changes of other names that none of those
                needs are left out: `left` takes them for lost.
        """
        found: dict[int, Pending] = {}
        named: list[tuple[Directory, NameChange]] = []
        for path, node in self._reachable(self.root, "", shown, set()):
            if isinstance(node, File):
                for data in node.changes:
                    found[data.key] = Pending(data.key, len(data.options), f"{data.what} of {path}")
            elif isinstance(node, Directory):
                named += [(node, change) for change in node.changes]
        named.sort(key=lambda pair: pair[1].key)
        needs = {change.key: self._needs(directory, change, named) for directory, change in named}
        found.update({change.key: Pending(change.key, 2, change.what) for change in _that_matter(named, needs, shown)})
        position = {key: number for number, key in enumerate(sorted(found))}
        return [
            Pending(key, each.options, each.what, tuple(position[other] for other in needs.get(key, ())))
            for key, each in sorted(found.items())
        ]

    def left(self, choice: Mapping[int, int], shown: Callable[[str], bool] = lambda _: True) -> Folder:
        """Give what is on the disk when so much of each change is left.

        Args:
            choice: the option of each `Pending.key`; those that are missing are lost.
            shown: other names, and what is below them, are left out.
        """
        found = self._left(self.root, choice, shown)
        assert isinstance(found, Folder)
        return found

    def live(self) -> Folder:
        """Give what a running program sees."""
        return self.left({pending.key: WHOLE for pending in self.pending()})

    def _left(self, node: Node, choice: Mapping[int, int], shown: Callable[[str], bool]) -> Left:
        if isinstance(node, File):
            return node.left([choice.get(change.key, LOST) for change in node.changes])
        if isinstance(node, Symlink):
            return node
        names = node.names(lambda change: choice.get(change.key, LOST) != LOST)
        return Folder({name: self._left(each, choice, shown) for name, each in names.items() if shown(name)})

    def _needs(
        self, directory: Directory, change: NameChange, named: Sequence[tuple[Directory, NameChange]]
    ) -> list[int]:
        """Give the keys of the changes without which this one can't be on the disk."""
        if self.ordered:
            return sorted({other.key for _, other in named if other.key < change.key})
        return [
            other.key
            for other in directory.changes
            if other.key < change.key and not other.names.keys().isdisjoint(change.names)
        ]

    def _reachable(
        self, node: Node, path: str, shown: Callable[[str], bool], seen: set[int]
    ) -> Iterator[tuple[str, Node]]:
        """Give all that may be found from a node on after a power cut, each once."""
        if id(node) in seen:
            return
        seen.add(id(node))
        yield path, node
        if isinstance(node, Directory):
            for name in dict.fromkeys([*node.durable, *(name for each in node.changes for name in each.names)]):
                for child in node.ever(name) if shown(name) else ():
                    yield from self._reachable(child, f"{path}/{name}", shown, seen)


def _that_matter(
    named: Sequence[tuple[Directory, NameChange]], needs: Mapping[int, Sequence[int]], shown: Callable[[str], bool]
) -> list[NameChange]:
    """Choose the changes of shown names, and those that these need."""
    wanted: set[int] = set()
    for _, change in reversed(named):  # what is needed is earlier
        if change.key in wanted or any(map(shown, change.names)):
            wanted.add(change.key)
            wanted.update(needs[change.key])
    return [change for _, change in named if change.key in wanted]


def _name(path: str) -> str:
    return os.path.basename(path)


def _below(path: str, root: str) -> str:
    """Give a path relative to the root."""
    if path == root:
        return ""
    if not path.startswith(f"{root}/"):
        raise ValueError(f"{path} is not below {root}: what goes on there the model doesn't know")
    return path[len(root) + 1 :]
