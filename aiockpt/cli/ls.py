"""``aiockpt ls``: the checkpoints in a directory. Without torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from aiockpt.cli.found import Found, look_into
from aiockpt.cli.keeping import noted_policy
from aiockpt.cli.output import Column, console, print_json, print_table, shown, size_text
from aiockpt.core.wording import time_text
from aiockpt.format.names import HIDDEN
from aiockpt.manager.owner import owner_of
from aiockpt.manager.policies import select
from aiockpt.manager.scan import StepInfo

_STYLES = {"complete": "green", "unfinished": "magenta", "damaged": "bold red"}
_COLUMNS = (
    Column("name"),
    Column("state"),
    Column("format"),
    Column("size", right=True),
    Column("saved"),
    Column("metrics"),
    Column("kept by"),
)


def ls(directory: str, *, as_json: bool = False) -> None:
    """Print the checkpoints in a directory.

    Raises:
        OSError: the directory can't be read.
    """
    path = os.path.abspath(os.path.expanduser(directory))
    contents = look_into(path)
    found, below = with_reasons(contents.found), contents.below
    owner = owner_of(path) if os.path.isdir(path) else None
    if as_json:
        facts = None if owner is None else {"host": owner.host, "pid": owner.pid, "since": _iso(owner.since)}
        records = [_record(each) for each in found]
        print_json({"directory": path, "owner": facts, "checkpoints": records, "below": below, "cut": contents.is_cut})
        return
    if owner is not None:
        console().print(f"A manager writes to this run: {shown(str(owner))}.", style="bold")
    if found:
        _print(found)
    elif not below:
        why = f": {contents.problem}" if contents.problem else ""
        console().print(f"There are no checkpoints in {shown(directory)}{why}.")
    if below:
        text = ", ".join(f"{shown(name)} ({count})" for name, count in below.items())
        console().print(f"Directories with checkpoints: {text}")
    if contents.is_cut:
        console().print("There is more: not all of it was looked at. List its subdirectories.")


def with_reasons(found: Sequence[Found]) -> list[Found]:
    """Return the checkpoints with the policies that keep them, as far as the run's manager has noted them."""
    infos = [
        StepInfo(each.step, each.path, each.state, each.nbytes, each.time, each.metrics)
        for each in found
        if each.step is not None
    ]
    policy = noted_policy(infos)
    if policy is None:
        return list(found)
    kept = select(policy, infos, time.time())
    return [each if each.step is None else replace(each, kept_by=tuple(kept.get(each.step, ()))) for each in found]


def _print(found: Sequence[Found]) -> None:
    rows = [_row(each) for each in found]
    chosen = [number for number in range(len(_COLUMNS)) if any(str(row[number]) for row in rows)]
    if all(each.format in ("aiockpt", "") for each in found):
        chosen = [number for number in chosen if number != 2]
    print_table([_COLUMNS[number] for number in chosen], [[row[number] for number in chosen] for row in rows])
    out = console()
    for each in found:
        if each.problem:
            out.print(f"{_short(each.name)}: {shown(each.problem)}", style=_STYLES[each.state])
    complete = [each for each in found if each.state == "complete"]
    total = size_text(sum(each.nbytes for each in found))
    others = f", {len(found) - len(complete)} not" if len(found) > len(complete) else ""
    out.print(f"{len(complete)} complete{others}; {total}", style="dim")


def _row(found: Found) -> list[str | Text]:
    metrics = ", ".join(f"{shown(name)} {value:.5g}" for name, value in found.metrics.items())
    name = _short(found.name)
    if os.path.islink(found.path):
        name += f" -> {shown(os.readlink(found.path))}"
    return [
        name,
        Text(found.state, style=_STYLES[found.state]),
        found.format,
        size_text(found.nbytes),
        time_text(found.time),
        metrics,
        ", ".join(map(shown, found.kept_by)),
    ]


def _short(name: str) -> str:
    """Return a name as it fits into a table: that of a temporary directory without its middle."""
    return f"{name[:12]}...{name[-8:]}" if name.startswith(HIDDEN) else shown(name)


def _record(found: Found) -> dict[str, Any]:
    return {
        "name": found.name,
        "path": found.path,
        "state": found.state,
        "format": found.format,
        "bytes": found.nbytes,
        "saved": _iso(found.time),
        "step": found.step,
        "metrics": dict(found.metrics),
        "metadata": dict(found.metadata),
        "kept_by": list(found.kept_by),
        "problem": found.problem,
    }


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()
