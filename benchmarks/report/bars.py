"""The project's targets: ratios of times that were measured in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.markup import escape

from benchmarks.harness.measure import Runs


@dataclass(frozen=True, slots=True)
class Bar:
    """A target, and the value that was measured.

    Attributes:
        text: the two things that are compared.
        measured: a ratio of medians, or a value in ``unit``; NaN if a run for it is missing.
        bound: the target; None if the value is only shown.
        at_most: whether the bound is an upper bound.
        unit: the unit of ``measured`` and ``bound``.
        of_best: the ratio of the best rounds, the ones that other programs disturbed least; never judged.
    """

    text: str
    measured: float
    bound: float | None = None
    at_most: bool = False
    unit: str = "x"
    of_best: float = math.nan

    @property
    def passed(self) -> bool | None:
        """Whether the target is met; None if there is no bound or no measurement."""
        if self.bound is None or math.isnan(self.measured):
            return None
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def __str__(self) -> str:
        verdict = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[dim] -- [/]"}[self.passed]
        measured = "not measured" if math.isnan(self.measured) else f"{self.measured:.2f} {self.unit}"
        bound = "no bar" if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:g} {self.unit}"
        of_best = "" if math.isnan(self.of_best) else f" [dim](best rounds: {self.of_best:.2f} {self.unit})[/]"
        return f"{verdict} {measured:>12} {f'({bound})':<12} {escape(self.text)}{of_best}"


def compare(
    text: str, others: Sequence[Runs], ours: Runs, what: str, bound: float | None = None, *, at_most: bool = False
) -> Bar:
    """Return a bar on the time of the fastest other contender, divided by ours."""

    def ratio(time_of: Callable[[Runs], float]) -> float:
        times = [time for other in others if not math.isnan(time := time_of(other))]
        return min(times, default=math.nan) / time_of(ours)

    return Bar(text, ratio(lambda run: run.median(what)), bound, at_most, of_best=ratio(lambda run: run.least(what)))


def by_prefix(runs: Sequence[Runs], *prefixes: str) -> list[Runs]:
    """Return the runs whose names begin with one of the prefixes."""
    return [run for run in runs if run.name.startswith(prefixes)]


def by_name(runs: Sequence[Runs], name: str) -> Runs:
    """Return the runs of the contender of this name; empty ones if it was left out."""
    return next((run for run in runs if run.name == name), Runs(name))


def shortest(runs: Sequence[Runs], prefix: str, what: str) -> float:
    """Return the shortest median of the runs whose names begin with the prefix; NaN if there is none."""
    medians = [run.median(what) for run in by_prefix(runs, prefix)]
    return min((median for median in medians if not math.isnan(median)), default=math.nan)


def first_of(run: Runs) -> Runs:
    """Return runs whose only round is the warm-up, which does not count otherwise."""
    return Runs(run.name, samples=[run.first] if run.first else [])
