"""The keys of a checkpoint as a tree of lines: alike siblings folded, chains of single children joined. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from aiockpt.reading.info import ObjectInfo, TensorInfo

Info = TensorInfo | ObjectInfo

_FOLDED = 3  # numbered siblings from which on they are folded


@dataclass(eq=False, slots=True)
class Node:
    """A part of the keys' names: what is stored under it itself, and the parts below."""

    name: str
    leaf: Info | None = None
    children: dict[str, Node] = field(default_factory=dict)
    tensors: int = 0  # in and below it
    objects: int = 0
    nbytes: int = 0
    shape_id: int = 0  # equal for nodes that have the same below them, whatever their own names


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tree.

    Attributes:
        depth: how deep it is, 0 for the top.
        label: the name, or several names of a chain or of folded siblings.
        node: the node, or the first of the folded ones.
        times: how many siblings are folded into it, and into its ancestors together.
        is_cut: whether something is below it that is not shown.
    """

    depth: int
    label: str
    node: Node
    times: int = 1
    is_cut: bool = False


def build(infos: Iterable[Info]) -> Node:
    """Return the root of the tree of these keys, whose names are taken apart at dots."""
    root = Node("")
    counted: set[str] = set()  # of tied tensors, one
    for info in infos:
        path = [root]
        for part in info.key.split("."):
            at = path[-1].children
            node = at.get(part)
            if node is None:
                node = at[part] = Node(part)
            path.append(node)
        path[-1].leaf = info
        if isinstance(info, TensorInfo):
            home = info.tied_to or info.key
            nbytes = 0 if home in counted else info.nbytes
            counted.add(home)
            for node in path:
                node.tensors += 1
                node.nbytes += nbytes
        else:
            for node in path:
                node.objects += 1
    for node in list(_walk(root)):
        if len(node.children) > 1 and all(name.isdecimal() for name in node.children):
            node.children = dict(sorted(node.children.items(), key=lambda child: int(child[0])))
    _compare(root)
    return root


def _compare(root: Node) -> None:
    """Number what the nodes have below them, from the leaves up."""
    known: dict[object, int] = {}
    for node in reversed(list(_walk(root))):
        below = tuple([(child.name, child.shape_id) for child in node.children.values()])
        leaf = (node.leaf.dtype, node.leaf.shape) if isinstance(node.leaf, TensorInfo) else node.leaf is not None
        node.shape_id = known.setdefault((leaf, below), len(known))


def _walk(root: Node) -> Iterator[Node]:
    """Yield a node and its descendants, each parent before its children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


def lines(root: Node, *, depth: int | None = None, fold: bool = True) -> Iterator[Line]:
    """Yield the lines from top to bottom; ``depth``: the most levels, None for all."""
    waiting = [Line(0, label, node, times) for label, node, times in reversed(_groups(root, 1, fold=fold))]
    while waiting:
        line = waiting.pop()
        below = _groups(line.node, line.times, fold=fold)
        while len(below) == 1 and line.node.leaf is None and below[0][2] == line.times:
            label, node, times = below[0]
            line = Line(line.depth, f"{line.label}.{label}", node, times)
            below = _groups(node, times, fold=fold)
        if below and depth is not None and line.depth + 1 >= depth:
            yield Line(line.depth, line.label, line.node, line.times, is_cut=True)
            continue
        yield line
        waiting.extend(Line(line.depth + 1, label, node, times) for label, node, times in reversed(below))


def _groups(node: Node, times: int, *, fold: bool) -> list[tuple[str, Node, int]]:
    """Return the children, numbered ones that are alike and follow each other as one."""
    children = list(node.children.values())
    if not fold or len(children) < _FOLDED:
        return [(child.name, child, times) for child in children]
    found: list[tuple[str, Node, int]] = []
    numbered = [(child.name.isdecimal(), child.shape_id) for child in children]
    at = 0
    for (is_number, _), run in groupby(numbered):
        count = len(list(run))
        group: Sequence[Node] = children[at : at + count]
        at += count
        if is_number and count >= _FOLDED:
            found.append((f"{group[0].name}..{group[-1].name}", group[0], times * count))
        else:
            found.extend((child.name, child, times) for child in group)
    return found


def fitting_depth(root: Node, most: int, *, fold: bool = True) -> int | None:
    """Return the most levels that have so many lines at most, but at least one level; None if all have."""
    counts: list[int] = []
    for line in lines(root, fold=fold):
        counts.extend([0] * (line.depth + 1 - len(counts)))
        counts[line.depth] += 1
    total = 0
    for depth, count in enumerate(counts):
        total += count
        if total > most:
            return max(1, depth)
    return None
