"""The filters of a save, ``include=`` and ``exclude=``: which leaves of a state are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.errors import SaveError
from aiockpt.format.keys import check_patterns, containers_within, hint, matching

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from aiockpt.planning.flatten import FlatState

    Filter = str | Sequence[str] | Callable[[str, Any], bool]


def filter_leaves(
    flat: FlatState, include: Filter | None, exclude: Filter | None, *, may_be_empty: bool = False
) -> None:
    """Drop the leaves that a save is not to have: those that ``include`` does not choose, and those of ``exclude``.

    Raise ValueError if a pattern matches neither a leaf nor an empty container; or if no leaf is left, unless that may
    be.
    """
    if include is None and exclude is None:
        return
    names = dict.fromkeys(flat.names).keys()
    # Names of containers without leaves, such as the state of a new optimizer.
    empty = {".".join(map(str, record["path"])) for record in flat.containers}  # type: ignore[arg-type]
    kept = set(names) if include is None else _chosen("include", include, flat, empty)
    if exclude is not None:
        kept -= _chosen("exclude", exclude, flat, empty)
    if names and not kept and not may_be_empty:
        raise ValueError("include and exclude leave nothing of the state to save")
    flat.containers = containers_within(flat.containers, flat.names, flat.paths, kept)  # type: ignore[arg-type, assignment]
    rows = [row for row in zip(flat.names, flat.paths, flat.leaves, strict=True) if row[0] in kept]
    flat.names, flat.paths, flat.leaves = ([row[column] for row in rows] for column in range(3))  # type: ignore[assignment]


def _chosen(option: str, rule: Filter, flat: FlatState, empty: Collection[str]) -> set[str]:
    """Return the names that an option chooses."""
    if callable(rule):
        return {name for name, leaf in zip(flat.names, flat.leaves, strict=True) if _asked(option, rule, name, leaf)}
    found, unmatched = matching(dict.fromkeys(flat.names).keys(), check_patterns(rule, option) or ())
    unmatched = tuple(pattern for pattern in unmatched if pattern not in empty)
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
