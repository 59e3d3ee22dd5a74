"""``aiockpt inspect``: the keys of a checkpoint as a tree, or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Span, Text

import aiockpt
from aiockpt.cli.app import CommandError
from aiockpt.cli.found import find
from aiockpt.cli.html.page import html_page
from aiockpt.cli.output import bar, console, dtype_text, facts_of, print_json, print_table, shape_text, shown, size_text
from aiockpt.cli.statistics import Figures, Survey, small_values, survey
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.wording import plural
from aiockpt.format.keys import hint, matching
from aiockpt.reading.info import ObjectInfo, TensorInfo, stored_bytes, value_text
from aiockpt.reading.reader import CheckpointReader
from aiockpt.storage.local.directories import LocalDirectories

# --- the tree -----------------------------------------------------------------------------------------


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
    """A line of the tree."""

    depth: int  # how deep it is, 0 for the top
    label: str  # the name, or several names of a chain or of folded siblings
    node: Node  # the node, or the first of the folded ones
    times: int = 1  # how many siblings are folded into it, and into its ancestors together
    is_cut: bool = False  # whether something is below it that is not shown


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


def lines_of(root: Node, *, depth: int | None = None, fold: bool = True) -> Iterator[Line]:
    """Yield the lines from top to bottom; ``depth``: the most levels, None for all."""
    waiting = _below(Line(-1, "", root), fold=fold)[::-1]
    while waiting:
        line = waiting.pop()
        below = _below(line, fold=fold)
        while len(below) == 1 and line.node.leaf is None and below[0].times == line.times:
            line = replace(below[0], depth=line.depth, label=f"{line.label}.{below[0].label}")
            below = _below(line, fold=fold)
        if below and depth is not None and line.depth + 1 >= depth:
            yield replace(line, is_cut=True)
            continue
        yield line
        waiting.extend(reversed(below))


def _below(line: Line, *, fold: bool) -> list[Line]:
    """Return the lines of the children, numbered ones that are alike and follow each other as one."""
    found: list[Line] = []
    for (is_number, _), run in groupby(
        line.node.children.values(), lambda child: (child.name.isdecimal(), child.shape_id)
    ):
        group = list(run)
        if fold and is_number and len(group) >= _FOLDED:
            label = f"{group[0].name}..{group[-1].name}"
            found.append(Line(line.depth + 1, label, group[0], line.times * len(group)))
        else:
            found.extend(Line(line.depth + 1, child.name, child, line.times) for child in group)
    return found


def fitting_depth(root: Node, most: int, *, fold: bool = True) -> int | None:
    """Return the most levels that have so many lines at most, but at least one level; None if all have."""
    counts = Counter(line.depth for line in lines_of(root, fold=fold))
    total = 0
    for depth in range(len(counts)):
        total += counts[depth]
        if total > most:
            return max(1, depth)
    return None


# --- the command --------------------------------------------------------------------------------------


_LINES = 100  # shown on a terminal before levels are left out
_TITLES = ("min", "max", "mean", "nan")


@dataclass(slots=True)
class Chosen:
    """The keys of a checkpoint that are shown, and what is known of them."""

    reader: CheckpointReader
    infos: dict[str, TensorInfo | ObjectInfo]
    statistics: dict[str, Figures | None] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)  # objects that can't be read

    @property
    def tensors(self) -> list[TensorInfo]:
        """The tensors."""
        return [info for info in self.infos.values() if isinstance(info, TensorInfo)]


async def inspect(
    path: str, keys: Sequence[str], *, stats: bool, depth: int | None, everything: bool, as_json: bool, trust: bool
) -> None:
    """Print the keys of a checkpoint."""
    async with aiockpt.open(path, trust=trust) as reader:
        chosen = _choose(reader, keys)
        if stats:
            chosen.statistics = {key: found.figures for key, found in (await _surveys(reader, chosen)).items()}
        if as_json:
            print_json(_document(chosen))
            return
        out = console()
        fold = not (everything or stats)
        with gc_pause():
            root = build(chosen.infos.values())
            if depth is None and not everything and out.is_terminal:
                depth = fitting_depth(root, _LINES, fold=fold)
            lines = list(lines_of(root, depth=depth, fold=fold))
        leaves = [line.node.leaf for line in lines if line.node.leaf is not None and not line.is_cut]
        chosen.values, chosen.damaged = await small_values(reader, leaves)
        _print_head(chosen)
        _print_tree(lines, chosen)
    if any(line.is_cut for line in lines):
        out.print(f"\nLevels below {depth} are not shown; --all shows everything.", style="dim")


async def write_page(path: str, keys: Sequence[str], target: str, *, stats: bool, trust: bool) -> None:
    """Write the keys of a checkpoint into a page for browsers, a file of the file system."""
    file = Path(LocalDirectories().resolve(target))
    _check_file(file)
    async with aiockpt.open(path, trust=trust) as reader:
        chosen = _choose(reader, keys)
        surveys = await _surveys(reader, chosen, histograms=True) if stats else {}
        values, _ = await small_values(reader, chosen.infos.values())
        with gc_pause():
            infos = chosen.infos.values()
            page = html_page(reader.path, reader.format, reader.metadata, infos, surveys, values, reader.files)
    part = file.with_name(f"{file.name}.part")
    part.write_text(page, encoding="utf-8")
    part.replace(file)
    console().print(f"{shown(str(file))}: {size_text(len(page))}")


async def _surveys(reader: CheckpointReader, chosen: Chosen, *, histograms: bool = False) -> dict[str, Survey]:
    """Read the tensors, under a bar."""
    found: dict[str, Survey] = {}
    with bar("reading", sum(info.nbytes for info in chosen.tensors)) as shown_bar:
        async for info, each in survey(reader, chosen.tensors, histograms=histograms):
            found[info.key] = each
            shown_bar.advance(info.nbytes)
    return found


def _check_file(file: Path) -> None:
    """Refuse to replace a checkpoint by a page."""
    if file.is_dir():
        raise CommandError(f"{file} is a directory; name the file to write")
    if not file.absolute().parent.is_dir():
        raise CommandError(f"{file.parent} is no directory; make it, or name another file")
    if file.exists() and find(str(file)):
        raise CommandError(f"{file} is a checkpoint; choose another name for the page")


def _choose(reader: CheckpointReader, patterns: Sequence[str]) -> Chosen:
    found, unmatched = matching(reader.keys(), patterns) if patterns else (reader, ())
    if unmatched:
        raise CommandError(
            f"{reader.path} has no key that matches {unmatched[0]}; omit KEY to see all.{hint(unmatched, reader)}"
        )
    with gc_pause():
        return Chosen(reader, {key: reader[key] for key in reader if key in found})


# --- JSON -----------------------------------------------------------------------------------------------


def _document(chosen: Chosen) -> dict[str, Any]:
    return {
        "path": chosen.reader.path,
        "format": chosen.reader.format,
        "metadata": chosen.reader.metadata,
        "beside": chosen.reader.beside,
        "tensors": len(chosen.tensors),
        "objects": len(chosen.infos) - len(chosen.tensors),
        "bytes": stored_bytes(chosen.tensors),
        "dtypes": _dtypes(chosen.tensors),
        "keys": [_record(info, chosen) for info in chosen.infos.values()],
    }


def _record(info: TensorInfo | ObjectInfo, chosen: Chosen) -> dict[str, Any]:
    if isinstance(info, ObjectInfo):
        return {"key": info.key, **facts_of(info), "file": info.file, "offset": info.offset}
    chunks = [
        {"file": c.file, "offset": c.offset, "bytes": c.nbytes, "offsets": c.offsets, "sizes": c.sizes}
        for c in info.chunks
    ]
    record = {"key": info.key, **facts_of(info), "tied_to": info.tied_to, "chunks": chunks}
    if info.key in chosen.statistics:
        record["stats"] = chosen.statistics[info.key]
    return record


def _dtypes(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """Return the bytes of each dtype, the largest first."""
    counts: Counter[str] = Counter()
    for info in {info.tied_to or info.key: info for info in tensors}.values():
        counts[dtype_text(info)] += info.nbytes
    return dict(counts.most_common())


# --- text -----------------------------------------------------------------------------------------------


def _print_head(chosen: Chosen) -> None:
    out, reader, tensors = console(), chosen.reader, chosen.tensors
    objects = len(chosen.infos) - len(tensors)
    total = stored_bytes(tensors)
    out.print(shown(reader.path), style="bold")
    dtypes = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in _dtypes(tensors).items())
    kinds = f" ({dtypes})" if dtypes else ""
    out.print(
        f"{reader.format}: {plural(len(tensors), 'tensor')}, {size_text(total)}{kinds}; {plural(objects, 'object')}"
    )
    if reader.metadata:
        out.print(f"metadata: {shown(json.dumps(reader.metadata, ensure_ascii=False))}")
    if reader.beside:
        out.print(f"not read: {shown(', '.join(reader.beside))}")
    out.print()


def _print_tree(lines: Sequence[Line], chosen: Chosen) -> None:
    rows = [_row(line, chosen) for line in lines]
    named = [row for row in rows if row[1]]  # a container has no dtype: its name has the room of that, and of a shape
    widths = [max((cell_len(row[at]) for row in named), default=0) + 2 for at in (0, 1)]
    is_terminal = console().is_terminal
    table: list[list[str | Text]] = []
    for line, (label, kind, shape, *numbers) in zip(lines, rows, strict=True):
        gaps = [" " * (width - cell_len(text)) for width, text in zip(widths, (label, kind), strict=True)]
        head = f"{label}{gaps[0]}{kind}{gaps[1]}{shape}" if kind else label
        if not is_terminal:  # where a long list is written in no time
            table.append([head, *numbers])
            continue
        spans = [Span(0, len(label), "bold")] if line.node.children else []
        spans += [Span(len(label), len(label) + len(gaps[0]) + len(kind), "magenta")] if kind else []
        is_bad = len(numbers) > 1 and numbers[-1] not in ("0", "?")
        table.append([Text(head, spans=spans), *numbers[:-1], Text(numbers[-1], "bold red") if is_bad else numbers[-1]])
    print_table(("", ">", *(f">{title}" for title in (_TITLES if chosen.statistics else ()))), table)


def _row(line: Line, chosen: Chosen) -> tuple[str, ...]:
    """Return the name, the dtype or type, the shape or value, the size, and statistics if there are any."""
    leaf, nbytes = line.node.leaf, line.node.nbytes
    label, size = "  " * line.depth + shown(line.label), ""
    kind = shape = ""
    figures: tuple[str, ...] = ()
    if leaf is None or line.is_cut:
        noun, number = ("tensor", line.node.tensors) if line.node.tensors else ("object", line.node.objects)
        kind = plural(number * line.times, noun) if line.is_cut else ""
        size = _size(nbytes, line.times) if line.node.tensors else ""
    elif isinstance(leaf, TensorInfo):
        kind = dtype_text(leaf)
        shape = shape_text(leaf, value_text(chosen.values[leaf.key]) if leaf.key in chosen.values else "")
        size = "tied" if leaf.tied_to else _size(leaf.nbytes, line.times)
        figures = _figures(chosen.statistics[leaf.key]) if chosen.statistics else ()
    elif leaf.key in chosen.values:
        value = chosen.values[leaf.key]
        kind, shape = type(value).__name__, shown(value_text(value))
    else:
        kind, shape = "object", "damaged" if leaf.key in chosen.damaged else ""
        size = size_text(leaf.nbytes) if leaf.file else ""
    return label, kind, shape, size, *figures


def _size(nbytes: int, times: int) -> str:
    if not nbytes:
        return "" if times > 1 else "0 B"
    return f"{times} x {size_text(nbytes)}" if times > 1 else size_text(nbytes)


def _figures(figures: Figures | None) -> tuple[str, ...]:
    if figures is None:
        return "?", "?", "?", "?"
    *bounds, nan = figures.values()
    return (*("" if value is None else f"{value:.4g}" for value in bounds), str(nan))
