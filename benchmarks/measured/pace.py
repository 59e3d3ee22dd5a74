"""The pace of work beside a save, compared with the pace just before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.measure import Sample, quantile
from benchmarks.harness.states import State
from benchmarks.measured.work import Work
from benchmarks.peers.beside import Beside, Saving


@dataclass(slots=True)
class Pace:
    """The steps of a period of time.

    Attributes:
        steps_s: the seconds of each step.
        took_s: the seconds of the whole period.
    """

    steps_s: list[float] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def per_s(self) -> float:
        """The steps per second."""
        return len(self.steps_s) / self.took_s


def walk(step: Callable[[], object], over: Callable[[int, float], bool], started: float | None = None) -> Pace:
    """Run steps until ``over`` returns true.

    Args:
        step: runs one step.
        over: called after each step with the number of steps and the seconds so far.
        started: the start of the period, as a value of `time.perf_counter`; None for now.
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
    """Measure the pace of work alone, then the pace from the call of a save until it is durable.

    The call counts as a part of the first step, since it delays that step.
    """
    with work.running():
        for _ in range(3):  # these steps use samples that were prepared ahead
            work.step()
        alone = walk(work.step, lambda _, took_s: took_s >= alone_s)
        started = time.perf_counter()
        saving = saver.begin(state, path)
        saved = walk(work.step, lambda _, took_s: saving.done() or too_long(took_s), started)
    return {**moments(saving), **compared(alone, saved, work.per_step)}


def too_long(took_s: float, limit_s: float = 300.0) -> bool:
    """Raise if a save takes too long; else return False.

    Raises:
        TimeoutError: if ``took_s`` exceeds the limit.
    """
    if took_s > limit_s:
        raise TimeoutError(f"a save has not ended within {limit_s:.0f} s")
    return False


def moments(saving: Saving) -> Sample:
    """Wait for the end of a save; return its moments."""
    return saving.finish()


def compared(alone: Pace, saved: Pace, per_step: int = 1) -> Sample:
    """Return the rates of two paces, the share that is kept, and the longest steps."""
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
