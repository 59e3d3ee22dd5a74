"""``aiockpt ls``: the checkpoints in a directory. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from aiockpt.cli.found import Found, look_into
from aiockpt.cli.output import console, print_json, print_table, shown, size_text
from aiockpt.core.wording import time_text
from aiockpt.format.names import HIDDEN
from aiockpt.manager.scan import NO_STEP, StepInfo, StepNames, scan
from aiockpt.manager.tiers import is_mirrored
from aiockpt.storage.base import Directories
from aiockpt.storage.registry import directories_for

_MOST_NAMES = 20  # of directories in which no checkpoint was found
_STYLES = {"complete": "green", "unfinished": "magenta", "damaged": "bold red"}


def ls(directory: str, *, names: StepNames, mirror: str | None = None, as_json: bool = False) -> None:
    """Print the checkpoints in a directory; with ``mirror``, whether that one has each step, and what only it has.

    Raises:
        OSError: the directory, or the mirror, can't be read.
    """
    place, path = directories_for(directory)
    contents = look_into(path, names=names)
    found, below = contents.found, contents.below
    there = None if mirror is None else {info.step: info for info in scan(mirror, names=names)}
    only_there = [step for step in there or () if step not in {each.info.step for each in found}]
    owner = place.owner_of(path)
    if as_json:
        facts = None if owner is None else {"host": owner.host, "pid": owner.pid, "since": _iso(owner.since)}
        records = [_record(each) | ({} if there is None else {"mirror": _state_there(each, there)}) for each in found]
        record = {"directory": path, "owner": facts, "checkpoints": records, "below": below, "cut": contents.is_cut}
        print_json(record | ({} if there is None else {"only_in_mirror": only_there}))
        return
    if owner is not None:
        console().print(f"A manager writes to this run: {shown(str(owner))}.", style="bold")
    if found:
        _print(place, found, there)
    elif not below:
        why = f": {contents.problem}" if contents.problem else ""
        console().print(f"There are no checkpoints in {shown(path)}{why}.")
    if only_there:
        console().print(f"Only the mirror has step {', '.join(map(str, only_there))}.")
    if below:
        text = ", ".join(f"{shown(name)} ({count})" for name, count in below.items())
        console().print(f"Directories with checkpoints: {text}")
    if not found and (below_them := ", ".join(map(shown, contents.folders[:_MOST_NAMES]))):
        console().print(f"Directories that may have some further below: {below_them}")
    if contents.is_cut:
        console().print("There is more: not all of it was looked at. List its subdirectories.")


def _state_there(found: Found, there: Mapping[int, StepInfo]) -> str:
    """Return the state of a step in the mirror; empty for what is no step."""
    info = found.info
    if info.step == NO_STEP:
        return ""
    if info.step not in there:
        return "missing"
    state = there[info.step].state
    return "another save" if state == "complete" and info.save_id and not is_mirrored(info, there) else state


def _print(place: Directories, found: Sequence[Found], there: Mapping[int, StepInfo] | None) -> None:
    has_others = any(each.format not in ("aiockpt", "") for each in found)
    states = ["" if there is None else _state_there(each, there) for each in found]
    rows = [
        _row(place, each, each.format if has_others else "", state) for each, state in zip(found, states, strict=True)
    ]
    titles = ("name", "state", "mirror", "format", ">size", ">shared", "saved", "metrics")
    print_table(titles, rows)
    out = console()
    for each in found:
        if each.info.problem:
            text = f"{_short(each.name)}: {shown(each.info.problem)}"
            out.print(text, style=_STYLES[each.info.state])
    complete = [each for each in found if each.info.state == "complete"]
    total = size_text(sum(each.info.nbytes for each in found))
    others = f", {len(found) - len(complete)} not" if len(found) > len(complete) else ""
    out.print(f"{len(complete)} complete{others}; {total}", style="dim")


def _row(place: Directories, found: Found, form: str, mirror: str) -> list[str | Text]:
    metrics = ", ".join(f"{shown(name)} {value:.5g}" for name, value in found.info.metrics.items())
    name, shared = _short(found.name), found.shared_bytes
    if (target := place.link(found.info.path)) is not None:
        name += f" -> {shown(target)}"
    return [
        name,
        Text(found.info.state, style=_STYLES[found.info.state]),
        Text(mirror, style=_STYLES.get(mirror, "")) if mirror else "",
        form,
        size_text(found.info.nbytes),
        size_text(shared) if shared else "",
        time_text(found.info.time),
        metrics,
    ]


def _short(name: str) -> str:
    """Return a name as it fits into a table: that of a temporary directory without its middle."""
    return f"{name[:12]}...{name[-8:]}" if name.startswith(HIDDEN) else shown(name)


def _record(found: Found) -> dict[str, Any]:
    return {
        "name": found.name,
        "path": found.info.path,
        "state": found.info.state,
        "format": found.format,
        "bytes": found.info.nbytes,
        "shared_bytes": found.shared_bytes,
        "saved": _iso(found.info.time),
        "step": None if found.info.step == NO_STEP else found.info.step,
        "metrics": dict(found.info.metrics),
        "metadata": dict(found.info.metadata),
        "problem": found.info.problem,
    }


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()
