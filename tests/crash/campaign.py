"""Many kill points of many scenarios, by several processes at once, and what comes of them in all."""

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
EVERY_STATE = -1  # of the disk: what is there before a call is what was there after the call before
_SLOW = ("writer process", "two ranks")
_ALL = ("first save", "overwrite")
QUICK = {
    name: EVERY_STATE if name in _ALL else 4 if name.startswith("two steps") else 8 if name.startswith(_SLOW) else 13
    for name in SCENARIOS
} | {"overwrite in two steps": 13, "two ranks, safetensors": 4, "two ranks, one safetensors file": 4}
"""How many points of each scenario the quick form has: of the two that matter most, every state of the disk."""
LIVE = ("first save", "overwrite")
_BATCH = 4
_Job = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(slots=True)
class Summary:
    """What has come of many runs.

    Attributes:
        calls: how many calls each scenario makes.
        outcomes: of every point that was reached.
        held: how often a program was held with something unfinished, while another saved beside it.
        live_problems: what does not hold then.
    """

    calls: dict[str, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    held: int = 0
    live_problems: list[Problem] = field(default_factory=list)

    @property
    def points(self) -> set[Point]:
        """The distinct points at calls that the file system has seen, so not those at announcements."""
        return {outcome.point for outcome in self.outcomes if outcome.call[0] != "mark"}

    @property
    def kinds(self) -> set[tuple[str, str]]:
        """The distinct calls: their names, and the kinds of files."""
        return {outcome.call for outcome in self.outcomes if outcome.call[0] != "mark"}

    @property
    def unfinished(self) -> int:
        """How many of the killed programs have left something hidden."""
        return sum(outcome.unfinished > 0 for outcome in self.outcomes)

    @property
    def problems(self) -> Counter[str]:
        """How often each kind of problem has come up."""
        found = [problem.kind for outcome in self.outcomes for problem in outcome.problems]
        return Counter([*found, *(problem.kind for problem in self.live_problems)])

    def of(self, scenario: str) -> Summary:
        """Give the part that one scenario has."""
        outcomes = [outcome for outcome in self.outcomes if outcome.point.scenario == scenario]
        return Summary({scenario: self.calls[scenario]}, outcomes)

    def add(self, other: Summary) -> None:
        """Add what has come of other runs."""
        self.calls |= other.calls
        self.outcomes += other.outcomes
        self.held += other.held
        self.live_problems += other.live_problems


def points_of(name: str, calls: Sequence[FileCall]) -> list[Point]:
    """Give every point of a scenario."""
    points = []
    for number, call in enumerate(calls):
        points.append(Point(name, number, "after"))
        if call.name != "mark":  # before one it is as after the call before
            points.append(Point(name, number, "before"))
        if call.name == "write" and call.nbytes > 1:
            points.append(Point(name, number, "half"))
    return points


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """Choose so many, evenly, or every state."""
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
    """Survey each scenario, then kill it at the points that are chosen, and hold it at every fourth call.

    Args:
        zygotes: who does the runs.
        root: an empty directory.
        counts: how many points of each scenario.
        live: the scenarios that are held.
        seconds: when no more runs begin.
    """
    summary, until = Summary(), time.monotonic() + seconds
    jobs: list[_Job] = []
    for name, calls in _work(zygotes, [(_surveyed, (root, name)) for name in counts], until):
        summary.calls[name] = len(calls)
        # At an announcement alone the time after it tells something: what was announced must be there.
        points = [
            each for each in points_of(name, calls) if calls[each.number].name != "mark" or each.moment == "after"
        ]
        chosen = spread(points, counts[name])
        jobs += [(run_points, (root, name, chosen[at : at + _BATCH])) for at in range(0, len(chosen), _BATCH)]
        if name in live:
            jobs.append((run_live, (root, name, range(0, len(calls), 4))))
    for result in _work(zygotes, jobs, until):
        if isinstance(result, list):
            summary.outcomes += result
        else:
            summary.held += result[0]
            summary.live_problems += result[1]
    return summary


def _surveyed(root: Path, name: str) -> tuple[str, list[FileCall]]:
    return name, survey(root, name)


def _work(zygotes: Sequence[Zygote], jobs: Sequence[_Job], until: float) -> Iterator[Any]:
    """Have jobs done by several processes at once; give their results as they come, not in order."""
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
