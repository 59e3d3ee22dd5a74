"""How fast work goes on beside a save, against the moment before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import Sample, quantile
from benchmarks.states import State
from benchmarks.writers_beside import Beside, Saving
from benchmarks.writers_work import Work


@dataclass(slots=True)
class Pace:
    """The steps of some time.

    Attributes:
        steps_s: how long each took.
        took_s: all of them, with what is between them.
    """

    steps_s: list[float] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Give the steps per second."""
        return len(self.steps_s) / self.took_s


def walk(step: Callable[[], object], over: Callable[[int, float], bool], started: float | None = None) -> Pace:
    """Step, and look after each step whether it is over.

    Args:
        step: one step.
        over: is given the number of steps and the seconds so far.
        started: since when the time counts.
    """
    pace = Pace()
    started = before = time.perf_counter() if started is None else started
    while True:
        step()
        now = time.perf_counter()
        pace.steps_s.append(now - before)
        pace.took_s, before = now - started, now
        if over(len(pace.steps_s), pace.took_s):
            return pace


def beside(work: Work, saver: Beside, state: State, path: Path, alone_s: float) -> Sample:
    """Measure the pace of work alone, then from the call of a save until it is durable.

    The call counts as a part of the first step: who calls has no time for it then.
    """
    with work.running():
        for _ in range(3):  # what was prepared ahead
            work.step()
        alone = walk(work.step, lambda _, took_s: took_s >= alone_s)
        started = time.perf_counter()
        saving = saver.begin(state, path)
        saved = walk(work.step, lambda _, took_s: saving.done() or too_long(took_s), started)
    return {**moments(saving), **compared(alone, saved, work.per_step)}


def too_long(took_s: float, limit_s: float = 300.0) -> bool:
    """Give up on a save that takes longer than any should.

    Raises:
        TimeoutError: it does.
    """
    if took_s > limit_s:
        raise TimeoutError(f"a save has not ended within {limit_s:.0f} s")
    return False


def moments(saving: Saving) -> Sample:
    """Wait for the end of a save, and give its moments."""
    return saving.finish()


def compared(alone: Pace, saved: Pace, per_step: int = 1) -> Sample:
    """Tell two paces by their rates, and what of the first is left in the second."""
    kept = saved.per_s / alone.per_s
    return {
        "alone_per_s": alone.per_s * per_step,
        "saving_per_s": saved.per_s * per_step,
        "kept": kept,
        "lost_s": max(0.0, (1 - kept) * saved.took_s),
        "longest_alone_s": max(alone.steps_s),
        "longest_s": max(saved.steps_s),
        "p99_s": quantile(saved.steps_s, 0.99),
    }
