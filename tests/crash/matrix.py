"""Kill points: runs of a scenario that is killed at one call, each with a check of the directory afterwards.

A point has a scenario, the number of a call, and a moment: before the call, halfway through a write, or after the
call. Two runs may order the calls of their threads differently, so the outcome of a run records which call it was.
The functions fork; call them in a zygote, see `tests.crash.zygote`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.crash.consequences import Problem, check, compare, contents, hidden, run_next
from tests.crash.lab.calls import FileCall
from tests.crash.lab.tracer import Kill, Trace, Tracer, TracerTimeoutError
from tests.crash.promises import Allowed, allowed_after
from tests.crash.scenarios import SCENARIOS, Scenario, prepare
from tests.crash.zygote import forked

Moment = Literal["before", "half", "after"]

BLOCK_BYTES = 4096
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Point:
    """One moment in a run of a scenario at which to kill it."""

    scenario: str
    number: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a point.

    Attributes:
        call: the name of the call, and the kind of its file.
        unfinished: the number of hidden names that the killed program left.
        problems: the violated guarantees.
    """

    point: Point
    call: tuple[str, str]
    unfinished: int
    problems: tuple[Problem, ...]


def kind_of(call: FileCall) -> str:
    """Return the kind of the file of a call."""
    if call.name == "mark":
        return call.data.decode().split()[0]
    parts = call.path.split("/")
    above = next((at for at, part in enumerate(parts) if part.startswith(".aiockpt-")), None)
    if call.name in ("rename", "exchange"):
        return "to the final name" if not os.path.basename(call.to).startswith(".") else "to a hidden name"
    if above is None:
        return "directory above"
    if above == len(parts) - 1:
        return "word" if re.search(r"-(part|fate|word)\b", parts[-1]) else "hidden directory"
    return re.sub(r"\d+", "N", parts[-1]) if parts[-1].startswith((".", "_", "model", "optim")) else "single file"


def survey(root: Path, name: str, scenario: Scenario | None = None) -> list[FileCall]:
    """Run a scenario without a kill, check its result, and return its calls.

    Raises:
        AssertionError: a guarantee is violated even without a kill.
    """
    scenario = scenario or SCENARIOS[name]
    with _prepared(root, name, scenario) as folder:
        trace = _trace(scenario, folder)
        problems = [*_wrong_exits(trace, killed=False), *forked(check, scenario, folder, _allowed(scenario, trace))]
        if problems:
            raise AssertionError(f"{name}, without a kill: {problems}")
    return [replace(call, data=call.data if call.name == "mark" else b"") for call in trace.calls]


def run_points(root: Path, name: str, points: Sequence[Point], scenario: Scenario | None = None) -> list[Outcome]:
    """Run a scenario once for each point; return the outcomes of the points that were reached."""
    outcomes = (_run_point(root, name, scenario or SCENARIOS[name], point) for point in points)
    return [outcome for outcome in outcomes if outcome is not None]


def _run_point(root: Path, name: str, scenario: Scenario, point: Point) -> Outcome | None:
    seen: list[FileCall] = []

    def decide(number: int, call: FileCall) -> Kill | None:
        if number != point.number or (point.moment == "half" and (call.name != "write" or call.nbytes < 2)):
            return None
        seen.append(call)
        if point.moment != "half":
            return Kill(point.moment, scenario.whom)
        half = call.nbytes // 2
        return Kill("after", scenario.whom, nbytes=half if half < BLOCK_BYTES else half - half % BLOCK_BYTES)

    with _prepared(root, name, scenario) as folder:
        try:
            trace = _trace(scenario, folder, decide)
        except TracerTimeoutError as exc:
            return Outcome(point, (seen[0].name, kind_of(seen[0])), 0, (Problem("hang", str(exc)),))
        if -signal.SIGKILL not in trace.exits.values():
            return None  # this run had fewer calls, or no process to kill
        unfinished = len(hidden(folder))
        problems = _wrong_exits(trace, killed=True) + forked(check, scenario, folder, _allowed(scenario, trace))
    return Outcome(point, (seen[0].name, kind_of(seen[0])), unfinished, tuple(problems))


def run_live(
    root: Path, name: str, numbers: Sequence[int], scenario: Scenario | None = None
) -> tuple[int, list[Problem]]:
    """Hold a scenario at each of these calls while another process saves in the same directory; then resume it.

    Returns:
        The number of holds at which the held process had unfinished files, and the problems.
    """
    scenario = scenario or SCENARIOS[name]
    problems: list[Problem] = []
    held = 0
    reached: list[int] = []

    def decide(number: int, call: FileCall) -> None:
        nonlocal held
        if number in numbers:
            reached.append(number)
            before = own()
            held += bool(before)
            problems.extend(forked(run_next, scenario, folder, [f"beside-{number}"]))
            if own() != before:
                problems.append(Problem("live", f"{set(before)} was touched at {call}"))

    def own() -> dict[str, tuple[int, bytes]]:
        """Return the unfinished files, without those of a dead process: these may be removed at any time."""
        return {path: facts for path, facts in contents(folder).items() if path not in orphans}

    with _prepared(root, name, scenario) as folder:
        orphans = set(contents(folder))
        trace = _trace(scenario, folder, decide)
        allowed = _allowed(scenario, trace) | {scenario.file(f"beside-{number}"): {19} for number in reached}
        problems += _wrong_exits(trace, killed=False) + forked(compare, scenario, folder, allowed)
    return held, problems


@contextmanager
def _prepared(root: Path, name: str, scenario: Scenario) -> Iterator[Path]:
    """Yield a directory with the initial checkpoints; they are made once and copied for each run."""
    own = root / f"{''.join(filter(str.isalnum, name))}-{os.getpid()}"
    if not own.exists():
        own.mkdir()
        forked(prepare, scenario, own / "before")
    folder = own / "run"
    shutil.copytree(own / "before", folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _trace(scenario: Scenario, folder: Path, decide: Callable[[int, FileCall], Any] | None = None) -> Trace:
    tracer = Tracer(folder, deadline_s=DEADLINE_S)
    return tracer.run(partial(scenario.run, folder, tracer.mark), decide)


def _allowed(scenario: Scenario, trace: Trace) -> Allowed:
    promise = "staged" if scenario.staged_is_promise else "written"
    return allowed_after(trace.marks, scenario.before, promise=promise)


def _wrong_exits(trace: Trace, *, killed: bool) -> list[Problem]:
    known = {0, -signal.SIGKILL} if killed else {0}
    if trace.error or not set(trace.exits.values()) <= known:
        return [Problem("program", f"exit codes {trace.exits} {trace.error}")]
    return []
