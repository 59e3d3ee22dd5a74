"""A model of a disk: the calls made on it, which of their effects are durable, and what a power cut may leave.

Pure: nothing here touches a file system. Calls (`tests.crash.lab.calls.FileCall`) are applied one after the other. At
any moment `Disk.pending` returns the changes that may still be lost, and `Disk.left` the content of the disk for one
choice of lost changes.

With ``ordered=False`` durability follows POSIX strictly:

- fsync of a file makes its bytes and its size durable, but not its name.
- fsync of a directory makes the names in it durable, but not the files themselves, nor names in other directories.
- Without fsync a write may be complete, missing, torn at a block boundary, or reduced to the new size (zeros). A
  change of a directory may be there or missing, in any order, except that changes of the same name keep their order.
  Two files, two directories, and a file and its name are independent.
- A rename or an exchange between two directories is two changes, one in each, and either alone may be there: both
  names, or none.

With ``ordered=True`` durability follows journaling file systems (ext4, XFS, btrfs). Changes of directories reach the
disk in the order in which they were made, and a rename between two directories is atomic, so what is left is always
the state of all directories at one moment. A sync of a directory also makes the changes of all other directories
before its own last change durable. Bytes of files that were not synced may still be missing. The strict mode permits
every state that this mode permits, so a program that is safe under the strict mode is safe under both.

In both modes a change within one directory (a name created, removed, renamed, or exchanged with another) is atomic:
otherwise no program could replace a file safely. A directory that existed when the recording began keeps its name:
making it durable was up to its creator. A failed sync makes nothing durable.
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
    """The calls made on a disk below one directory, and which of their effects are durable.

    Args:
        ordered: the durability mode; see the module.
        borders: returns the offsets at which a write from one offset to another may be torn.
    """

    ordered: bool = False
    borders: Callable[[int, int], Sequence[int]] = block_borders
    root: Directory = field(default_factory=Directory)

    def __post_init__(self) -> None:
        self._keys = 0
        self._numbers: dict[int, Node] = {}

    @classmethod
    def after(cls, calls: Iterable[FileCall], root: str, *, ordered: bool = False) -> Disk:
        """Return an initially empty disk to which these calls were applied."""
        disk = cls(ordered)
        for call in calls:
            disk.apply(call, root)
        return disk

    @classmethod
    def holding(cls, content: Folder, *, ordered: bool = False) -> Disk:
        """Return a disk on which this content is durable."""
        root = durable(content)
        return cls(ordered, root=root) if isinstance(root, Directory) else cls(ordered)

    # --- calls -------------------------------------------------------------------------------------------------

    def apply(self, call: FileCall, root: str) -> None:
        """Apply the effect of a call below ``root``. Failed calls and marks have none.

        Raises:
            ValueError: the model does not support this call.
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

    def _create(self, call: FileCall, path: str) -> None:
        if call.flags & getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY:
            raise ValueError(f"a file without a name in {path}: the model does not support O_TMPFILE")
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
            raise ValueError(f"{call}: no such file in the model")
        if call.name == "sync":
            self._sync(node)
        elif isinstance(node, Directory):
            raise ValueError(f"{call}: it is a directory in the model")
        elif call.name == "write":
            if len(call.data) != call.result:
                raise ValueError(f"{call}: recorded without its bytes")
            if call.data:  # an empty write at an offset past the end does not move the end
                node.add(DataChange.write(self._key(), call.offset, call.data, self.borders))
        elif call.name == "truncate":
            node.add(DataChange.resize(self._key(), call.nbytes))
        elif call.flags & ~_KEEP_SIZE:
            raise ValueError(f"{call}: the model does not support this mode of fallocate")
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
            raise ValueError(f"{name} {path} {to}: no such file in the model")
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
            raise ValueError(f"{path or 'the root'}: its directory is not in the model")
        return parent

    def _at(self, path: str) -> Node | None:
        node: Node | None = self.root
        for part in filter(None, path.split("/")):
            node = node.names().get(part) if isinstance(node, Directory) else None
        return node

    # --- after a power cut -------------------------------------------------------------------------------------

    def pending(self, shown: Callable[[str], bool] = lambda _: True) -> list[Pending]:
        """Return the changes that may be lost, oldest first, of everything reachable under shown names.

        Args:
            shown: returns whether a name, and everything below it, matters. Changes of other names are left out
                unless a change that matters needs them; `left` treats them as lost.
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
        found.update({change.key: Pending(change.key, 2, change.what) for change in _relevant(named, needs, shown)})
        position = {key: number for number, key in enumerate(sorted(found))}
        return [
            Pending(key, each.options, each.what, tuple(position[other] for other in needs.get(key, ())))
            for key, each in sorted(found.items())
        ]

    def left(self, choice: Mapping[int, int], shown: Callable[[str], bool] = lambda _: True) -> Folder:
        """Return the content of the disk if this much of each change is left.

        Args:
            choice: the option of each `Pending.key`; a missing key means lost.
            shown: returns whether a name belongs to the result; other names, and everything below them, do not.
        """
        found = self._left(self.root, choice, shown)
        assert isinstance(found, Folder)
        return found

    def live(self) -> Folder:
        """Return the content that a running program sees."""
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
        """Return the keys of the changes that must be on the disk if this one is."""
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
        """Yield each node that may be reachable from this one after a power cut, once."""
        if id(node) in seen:
            return
        seen.add(id(node))
        yield path, node
        if isinstance(node, Directory):
            for name in dict.fromkeys([*node.durable, *(name for each in node.changes for name in each.names)]):
                for child in node.ever(name) if shown(name) else ():
                    yield from self._reachable(child, f"{path}/{name}", shown, seen)


def _relevant(
    named: Sequence[tuple[Directory, NameChange]], needs: Mapping[int, Sequence[int]], shown: Callable[[str], bool]
) -> list[NameChange]:
    """Return the changes of shown names, and the changes that they need."""
    wanted: set[int] = set()
    for _, change in reversed(named):  # a change only needs earlier ones
        if change.key in wanted or any(map(shown, change.names)):
            wanted.add(change.key)
            wanted.update(needs[change.key])
    return [change for _, change in named if change.key in wanted]


def _name(path: str) -> str:
    return os.path.basename(path)


def _below(path: str, root: str) -> str:
    """Return a path relative to the root."""
    if path == root:
        return ""
    if not path.startswith(f"{root}/"):
        raise ValueError(f"{path} is not below {root}: the model does not cover it")
    return path[len(root) + 1 :]
