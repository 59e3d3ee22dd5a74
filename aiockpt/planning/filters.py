"""The filters of a save, ``include=`` and ``exclude=``: which leaves of a state are saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiockpt.errors import SaveError
from aiockpt.format.keys import check_patterns, chooser, containers_within, hint, matching
from aiockpt.planning.flatten import FlatState, joined

if TYPE_CHECKING:
    from aiockpt.format.index import ObjPath

    Filter = str | Sequence[str] | Callable[[str, Any], bool]


def filter_leaves(
    flat: FlatState, include: Filter | None, exclude: Filter | None, *, may_be_empty: bool = False
) -> None:
    """Drop the leaves that a save is not to have: those that ``include`` does not choose, and those of ``exclude``.

    Raise ValueError if a pattern matches neither a leaf nor an empty container; or if no leaf is left, unless
    ``may_be_empty``.
    """
    if include is None and exclude is None:
        return
    names = dict.fromkeys(flat.names).keys()
    empty = _empty_containers(flat)
    kept = {*names, *empty} if include is None else _chosen("include", include, flat, empty)
    if exclude is not None:
        kept -= _chosen("exclude", exclude, flat, empty)
    if names and names.isdisjoint(kept) and not may_be_empty:
        raise ValueError("include and exclude leave nothing of the state to save")
    # Functions are not asked about containers: empty ones go with what is around them.
    named = () if callable(exclude) else [path for name, path in empty.items() if name in kept]
    flat.containers = containers_within(flat.containers, flat.names, flat.paths, kept, named)  # type: ignore[arg-type, assignment]
    rows = [row for row in zip(flat.names, flat.paths, flat.leaves, strict=True) if row[0] in kept]
    flat.names, flat.paths, flat.leaves = ([row[column] for row in rows] for column in range(3))  # type: ignore[assignment]


def recorded(**filters: Filter | None) -> dict[str, list[str] | bool]:
    """Return filters as JSON for a later load; True for a function, and nothing for what the save will refuse."""
    made: dict[str, list[str] | bool] = {}
    for option, rule in filters.items():
        with contextlib.suppress(TypeError):
            if rule is not None:
                made[option] = True if callable(rule) else list(check_patterns(rule, option) or ())
    return made


def needed_with(filters: Mapping[str, list[str] | bool]) -> Callable[[str], bool]:
    """Return whether a key must be in a checkpoint that was saved with these filters; after a function, none must."""
    if True in filters.values():
        return lambda name: False
    rules = {option: chooser(rule) for option, rule in filters.items() if isinstance(rule, list)}
    included, excluded = rules.get("include", chooser(["*"])), rules.get("exclude", chooser(()))
    # With a dot: a container is left out by a pattern of all that is in it, such as 'optim.*'.
    return lambda name: included(name) and not (excluded(name) or excluded(f"{name}."))


def _empty_containers(flat: FlatState) -> dict[str, ObjPath]:
    """Return the names and paths of the containers without leaves, such as the state of a new optimizer."""
    empty: dict[str, ObjPath] = {}
    for record in flat.containers:
        path: ObjPath = tuple(record["path"])  # type: ignore[arg-type]
        at: int = record["at"]  # type: ignore[assignment]
        if not any(leaf[: len(path)] == path for leaf in flat.paths[at : at + 1]):
            empty[joined(path)] = path
    return empty


def _chosen(option: str, rule: Filter, flat: FlatState, empty: Mapping[str, ObjPath]) -> set[str]:
    """Return the names that an option chooses; those of empty containers too, if it is not a function."""
    if callable(rule):
        return {name for name, leaf in zip(flat.names, flat.leaves, strict=True) if _asked(option, rule, name, leaf)}
    found, unmatched = matching({*flat.names, *empty}, check_patterns(rule, option) or ())
    chosen = found.intersection(empty)  # each of them brings the empty containers inside it
    found.update(n for n, path in empty.items() if any(joined(path[:depth]) in chosen for depth in range(len(path))))
    if unmatched:
        raise ValueError(
            f"{option} has {', '.join(map(repr, unmatched[:10]))}, which matches nothing in the state."
            f"{hint(unmatched, flat.names, found)} Patterns are dotted names, names of containers, and globs such as "
            "'model.*.weight'"
        )
    return found


def _asked(option: str, function: Callable[[str, Any], bool], name: str, leaf: Any) -> bool:
    try:
        return bool(function(name, leaf))
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:
        raise SaveError(f"the function given as {option} failed for {name}: {type(exc).__name__}: {exc}") from exc
