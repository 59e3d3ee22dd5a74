"""Runs of many kill points of many scenarios in several processes, and a summary of their outcomes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.crash.consequences import Problem
from tests.crash.lab.calls import FileCall
from tests.crash.matrix import DEADLINE_S, Outcome, Point, run_live, run_points, survey
from tests.crash.scenarios import SCENARIOS
from tests.crash.zygote import Zygote

EVERY = 1 << 30
EVERY_STATE = -1  # every state of the disk: the state before a call is the one after the previous call
_SLOW = ("writer process", "two ranks", "together, writer process")
_ALL = ("first save", "overwrite")
QUICK = {
    name: EVERY_STATE if name in _ALL else 4 if name.startswith("two steps") else 5 if name.startswith(_SLOW) else 9
    for name in SCENARIOS
} | {"overwrite in two steps": 16}
QUICK |= dict.fromkeys(("two ranks, safetensors", "two ranks, compressed", "two ranks, one safetensors file"), 4)
"""The number of points of each scenario in the quick form; for the two most important ones every state of the disk."""
LIVE = ("first save", "overwrite")
_BATCH = 4
_Job = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(slots=True)
class Summary:
    """The results of many runs.

    Attributes:
        calls: the number of calls that each scenario makes.
        outcomes: the outcome of every point that was reached.
        held: how often a program was held in the middle of a save while another process saved in the same directory.
        live_problems: the problems found in these runs.
    """

    calls: dict[str, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    held: int = 0
    live_problems: list[Problem] = field(default_factory=list)

    @property
    def points(self) -> set[Point]:
        """The distinct points at calls on the file system; marks are none."""
        return {outcome.point for outcome in self.outcomes if outcome.call[0] != "mark"}

    @property
    def kinds(self) -> set[tuple[str, str]]:
        """The distinct calls on the file system: their names, and the kinds of files."""
        return {outcome.call for outcome in self.outcomes if outcome.call[0] != "mark"}

    @property
    def unfinished(self) -> int:
        """The number of killed programs that left hidden names."""
        return sum(outcome.unfinished > 0 for outcome in self.outcomes)

    @property
    def problems(self) -> Counter[str]:
        """The number of problems of each kind."""
        found = [problem.kind for outcome in self.outcomes for problem in outcome.problems]
        return Counter([*found, *(problem.kind for problem in self.live_problems)])

    def of(self, scenario: str) -> Summary:
        """Return the summary of one scenario."""
        outcomes = [outcome for outcome in self.outcomes if outcome.point.scenario == scenario]
        return Summary({scenario: self.calls[scenario]}, outcomes)

    def add(self, other: Summary) -> None:
        """Add the results of other runs."""
        self.calls |= other.calls
        self.outcomes += other.outcomes
        self.held += other.held
        self.live_problems += other.live_problems


def points_of(name: str, calls: Sequence[FileCall]) -> list[Point]:
    """Return every point of a scenario."""
    points = []
    for number, call in enumerate(calls):
        points.append(Point(name, number, "after"))
        if call.name != "mark":  # before a mark the disk is as after the previous call
            points.append(Point(name, number, "before"))
        if call.name == "write" and call.nbytes > 1:
            points.append(Point(name, number, "half"))
    return points


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """Return this many points, evenly spread, or one for every state of the disk."""
    if count == EVERY_STATE:
        return [point for point in points if point.moment != "before" or point.number == 0]
    step = max(1.0, len(points) / count)
    return [points[int(at * step)] for at in range(min(count, len(points)))]


def run(
    zygotes: Sequence[Zygote],
    root: Path,
    counts: Mapping[str, int] = QUICK,
    *,
    live: Sequence[str] = LIVE,
    seconds: float = float("inf"),
) -> Summary:
    """Survey each scenario, then kill it at the chosen points, and hold it at every fourth call.

    Args:
        zygotes: the processes that do the runs.
        root: an empty directory.
        counts: the number of points of each scenario.
        live: the scenarios to hold.
        seconds: the time after which no more runs begin.
    """
    summary, until = Summary(), time.monotonic() + seconds
    jobs: list[_Job] = []
    for name, calls in _run_jobs(zygotes, [(_survey, (root, name)) for name in counts], until):
        summary.calls[name] = len(calls)
        # At a mark only the moment after it is of interest: now the announced checkpoint must be there.
        points = [
            each for each in points_of(name, calls) if calls[each.number].name != "mark" or each.moment == "after"
        ]
        chosen = spread(points, counts[name])
        jobs += [(run_points, (root, name, chosen[at : at + _BATCH])) for at in range(0, len(chosen), _BATCH)]
        if name in live:
            jobs.append((run_live, (root, name, range(0, len(calls), 4))))
    for result in _run_jobs(zygotes, jobs, until):
        if isinstance(result, list):
            summary.outcomes += result
        else:
            summary.held += result[0]
            summary.live_problems += result[1]
    return summary


def _survey(root: Path, name: str) -> tuple[str, list[FileCall]]:
    return name, survey(root, name)


def _run_jobs(zygotes: Sequence[Zygote], jobs: Sequence[_Job], until: float) -> Iterator[Any]:
    """Run jobs in several processes at once; yield their results as they finish, in any order."""
    waiting = list(reversed(jobs))
    busy: dict[Any, Zygote] = {}
    idle = list(zygotes)
    while busy or (waiting and time.monotonic() < until):
        while waiting and idle and time.monotonic() < until:
            zygote = idle.pop()
            function, args = waiting.pop()
            zygote.send(function, *args, timeout_s=_BATCH * DEADLINE_S)
            busy[zygote.pipe] = zygote
        for pipe in connection.wait(list(busy)):
            zygote = busy.pop(pipe)
            idle.append(zygote)
            yield zygote.result()
