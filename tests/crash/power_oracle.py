"""Every state that a power cut may leave of a short history, found by trying all subsets of its changes.

An oracle for `tests.crash.lab.disk`, so it shares no code and works differently. It keeps all changes: a sync marks the
changes that must be there. Each byte of a write, and the new size, is a change of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash.lab.calls import FileCall

_ROOT = 0


@dataclass
class _Atom:
    """A change that is there or not: of names of a directory, or of a byte or the size of a file."""

    time: int
    node: int
    names: dict[str, int | None] = field(default_factory=dict)
    byte: tuple[int, int] | None = None
    grow: int | None = None
    size: int | None = None
    must: bool = False


class _History:
    def __init__(self, root: str, ordered: bool) -> None:
        self.atoms: list[_Atom] = []
        self.is_file: dict[int, bool] = {_ROOT: False}
        self._root = root
        self._ordered = ordered
        self._time = 0

    def add(self, call: FileCall) -> None:
        self._time += 1
        path = os.path.relpath(call.path, self._root)
        if call.name == "sync":
            self._sync(self._node(path))
        elif call.name in ("create", "mkdir"):
            node = self._node(path)
            if node is None:
                node = len(self.is_file)
                self.is_file[node] = call.name == "create"
                self._name(path, node)
            elif call.flags & os.O_TRUNC:
                self._atom(node, size=0)
        elif call.name == "truncate":
            self._atom(self._node(path), size=call.nbytes)
        elif call.name == "allocate":
            self._atom(self._node(path), grow=call.nbytes)
        elif call.name == "write" and call.data:
            node, end = self._node(path), call.offset + len(call.data)
            for at, value in enumerate(call.data, call.offset):
                self._atom(node, byte=(at, value))
            self._atom(node, grow=end)
        elif call.name in ("unlink", "rmdir"):
            self._name(path, None)
        elif call.name != "write":
            self._two(call.name, path, os.path.relpath(call.to, self._root))

    def _two(self, name: str, path: str, to: str) -> None:
        node, other = self._node(path), self._node(to)
        if node == other:
            return
        if name == "link":
            self._name(to, node)
            return
        parents = [self._node(os.path.dirname(each)) for each in (path, to)]
        names = [os.path.basename(each) for each in (path, to)]
        values = [other if name == "exchange" else None, node]
        if parents[0] == parents[1]:
            self._atom(parents[0], names=dict(zip(names, values, strict=True)))
        else:
            for parent, each, value in zip(parents, names, values, strict=True):
                self._atom(parent, names={each: value})

    def _name(self, path: str, node: int | None) -> None:
        self._atom(self._node(os.path.dirname(path)), names={os.path.basename(path): node})

    def _atom(self, node: int | None, **what: Any) -> None:
        assert node is not None
        self.atoms.append(_Atom(self._time, node, **what))

    def _sync(self, node: int | None) -> None:
        own = [atom for atom in self.atoms if atom.node == node]
        for atom in own:
            atom.must = True
        if own and self._ordered and not self.is_file[own[0].node]:
            for atom in self.atoms:
                atom.must |= not self.is_file[atom.node] and atom.time <= own[-1].time

    def _node(self, path: str) -> int | None:
        tree = self.tree([True] * len(self.atoms))
        node: int | None = _ROOT
        for part in [each for each in path.split("/") if each not in ("", ".")]:
            node = tree[node].get(part) if node is not None and not self.is_file[node] else None
        return node

    # --- after a power cut -----------------------------------------------------------------------------------

    def tree(self, there: Sequence[bool]) -> dict[int, Any]:
        """Apply the changes that are there; return the names of each directory, and the bytes of each file."""
        nodes: dict[int, Any] = {node: bytearray() if is_file else {} for node, is_file in self.is_file.items()}
        for atom in itertools.compress(self.atoms, there):
            found = nodes[atom.node]
            if not self.is_file[atom.node]:
                found.update(atom.names)
                for name in [name for name, node in found.items() if node is None]:
                    del found[name]
                continue
            if atom.size is not None:
                del found[atom.size :]
            at, value = atom.byte or (0, None)
            end = max(atom.grow or 0, atom.size or 0, at + 1 if atom.byte else 0)
            found.extend(bytes(max(0, end - len(found))))
            if value is not None:
                found[at] = value
        return nodes

    def subsets(self) -> Iterator[list[bool]]:
        for there in itertools.product(*([True] if atom.must else [False, True] for atom in self.atoms)):
            if self._is_possible(there):
                yield list(there)

    def _is_possible(self, there: Sequence[bool]) -> bool:
        names = [(atom, left) for atom, left in zip(self.atoms, there, strict=True) if not self.is_file[atom.node]]
        for (one, first), (other, second) in itertools.combinations(names, 2):
            if self._ordered and one.time == other.time and first != second:
                return False
            related = self._ordered or (one.node == other.node and not one.names.keys().isdisjoint(other.names))
            if related and second and not first:
                return False
        return True

    def shown(self, node: int, nodes: dict[int, Any]) -> Any:
        if self.is_file[node]:
            return bytes(nodes[node])
        return tuple((name, self.shown(each, nodes)) for name, each in sorted(nodes[node].items()))


def left_by_brute_force(calls: Sequence[FileCall], root: str, *, ordered: bool) -> set[Any]:
    """Return every state that may be left, as nested tuples of names and bytes."""
    history = _History(root, ordered)
    for call in calls:
        history.add(call)
    return {history.shown(_ROOT, history.tree(there)) for there in history.subsets()}
