"""Which keys of a checkpoint are meant: names, names of containers, and glob patterns."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from aiockpt.format.index import ObjPath

_MAGIC = re.compile(r"[*?\[]")


def check_patterns(keys: object) -> tuple[str, ...] | None:
    """Copy what a caller gave as keys.

    Raises:
        TypeError: it is neither None, nor text, nor texts.
    """
    if keys is None:
        return None
    if isinstance(keys, str):
        return (keys,)
    patterns = tuple(keys) if hasattr(keys, "__iter__") else (keys,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"keys must be names and patterns such as 'model.*', not {type(pattern).__name__}")
    return patterns


def matching(names: Collection[str], patterns: Iterable[str]) -> tuple[set[str], tuple[str, ...]]:
    """Find the names that are meant.

    A pattern is a name; or the name of a container, which means everything in it; or a glob pattern with ``*``,
    ``?`` and ``[...]``, which match dots as well.

    Args:
        names: all names there are.
        patterns: what is wanted.

    Returns:
        The names, and the patterns that match none.
    """
    found: set[str] = set()
    unmatched: list[str] = []
    for pattern in patterns:
        if pattern in names:
            found.add(pattern)
            continue
        prefix = pattern + "."
        hits = {name for name in names if name.startswith(prefix)}
        if not hits and _MAGIC.search(pattern):
            matches = re.compile(fnmatch.translate(pattern)).match
            hits = {name for name in names if matches(name)}
        found |= hits
        if not hits:
            unmatched.append(pattern)
    return found, tuple(unmatched)


def containers_within(
    containers: Sequence[dict[str, object]], names: Sequence[str], paths: Sequence[ObjPath], kept: Collection[str]
) -> list[dict[str, object]]:
    """Give the container records that still mean something when only some leaves are kept.

    Args:
        containers: the records of the whole state dict.
        names: the names of all its leaves, in order.
        paths: their paths.
        kept: the names that are kept.
    """
    before = [0]
    around: set[tuple[object, ...]] = set()  # containers of what is kept
    cut: set[tuple[object, ...]] = set()  # containers of what is left out
    for name, path in zip(names, paths, strict=True):
        before.append(before[-1] + (name in kept))
        (around if name in kept else cut).update(path[:depth] for depth in range(len(path)))
    whole = around - cut
    found: list[dict[str, object]] = []
    for record in containers:
        path = tuple(record["path"])  # type: ignore[arg-type]
        at = min(int(record["at"]), len(names))  # type: ignore[call-overload]
        # An empty one has no leaves to be known by: it belongs to what is kept as a whole around it.
        if path in around or any(path[:depth] in whole for depth in range(len(path))):
            found.append({**record, "at": before[at]})
    return found
