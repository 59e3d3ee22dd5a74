"""Measurements: memory, the lag of the caller's loop, and rounds that treat all contenders alike."""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, TypeVar

from benchmarks.harness import time_limits

Sample = dict[str, float]
"""The measurements of one run; times in seconds, sizes in bytes."""

Result = TypeVar("Result")

_PROC = Path("/proc/self")


class Lag:
    """The lag of the running loop: a task sleeps for a millisecond, again and again.

    Attributes:
        late_s: for each sleep, the seconds by which it took longer than a millisecond.
    """

    PERIOD_S = 0.001

    def __init__(self) -> None:
        self.late_s: list[float] = []

    async def __aenter__(self) -> Self:
        self._ticker = asyncio.create_task(self._tick())
        await asyncio.sleep(5 * self.PERIOD_S)  # so that the ticker runs when the measurement begins
        self.late_s.clear()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.sleep(2 * self.PERIOD_S)  # so that the ticker notices a loop that was held until now
        self._ticker.cancel()

    async def _tick(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(self.PERIOD_S)
            now = time.perf_counter()
            self.late_s.append(now - before - self.PERIOD_S)
            before = now

    def sample(self) -> Sample:
        """Return the median, the 99th percentile and the longest lag."""
        return lateness(self.late_s)


def lateness(late_s: Sequence[float]) -> Sample:
    """Return the median, the 99th percentile and the longest lag as a sample."""
    return {"lag_p50_s": quantile(late_s, 0.5), "lag_p99_s": quantile(late_s, 0.99), "stall_s": max(late_s)}


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


class PeakMemory:
    """The peak of this process's resident memory above its value at the start; mapped pages count.

    Attributes:
        extra_bytes: the difference; NaN where /proc does not have it.
    """

    extra_bytes = math.nan

    def __enter__(self) -> Self:
        self._before = resident_bytes()
        if not math.isnan(self._before):
            (_PROC / "clear_refs").write_text("5")  # resets the high-water mark
        return self

    def __exit__(self, *_error: object) -> None:
        self.extra_bytes = max(0, _status_bytes("VmHWM") - self._before)


def resident_bytes() -> float:
    """Return the resident memory of this process; NaN where /proc does not have it."""
    return _status_bytes("VmRSS")


def _status_bytes(field_name: str) -> float:
    if not (_PROC / "clear_refs").exists():
        return math.nan
    lines = (_PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field_name}:"))


class Transfers:
    """The bytes that this process reads, in all of its threads.

    Attributes:
        asked_bytes: bytes that read calls returned, from the page cache or from the disk; without mapped pages.
        disk_bytes: bytes that came from the disk: whole pages, with mapped pages and readahead.
    """

    asked_bytes = disk_bytes = math.nan

    def __enter__(self) -> Self:
        self._before = _transferred()
        return self

    def __exit__(self, *_error: object) -> None:
        now = _transferred()
        self.asked_bytes = now["rchar"] - self._before["rchar"]
        self.disk_bytes = now["read_bytes"] - self._before["read_bytes"]


def _transferred() -> dict[str, float]:
    file = _PROC / "io"
    if not file.exists():
        return {"rchar": math.nan, "read_bytes": math.nan}
    return {name: int(value) for name, value in (line.split(": ") for line in file.read_text().splitlines())}


async def timed(work: Callable[[], Awaitable[Result]], what: str) -> tuple[Result, Sample]:
    """Await a coroutine function once; measure its time, the lag of the loop, its memory and its reads.

    Returns:
        Its result, and a sample with its time as ``what``.
    """
    with PeakMemory() as memory:
        async with Lag() as lag:
            with Transfers() as transfers:
                started = time.perf_counter()
                result = await work()
                took = time.perf_counter() - started
    read = {"asked_bytes": transfers.asked_bytes, "disk_bytes": transfers.disk_bytes}
    return result, {what: took, "extra_bytes": memory.extra_bytes, **read, **lag.sample()}


class Named(Protocol):
    """A contender in a benchmark."""

    name: str
    note: str


class Closable(Protocol):
    """A contender that keeps something between rounds."""

    async def close(self) -> None:
        """Release what is kept."""


Contender = TypeVar("Contender", bound=Named)


@dataclass
class Runs:
    """All measurements of one contender.

    Attributes:
        first: the warm-up, which does not count: its memory is fresh, and nothing is cached.
        samples: one sample for each round.
        error: the reason why there are no more samples; None if all rounds ran.
    """

    name: str
    note: str = ""
    first: Sample = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    def values(self, what: str) -> list[float]:
        """Return the value of each round."""
        return [sample[what] for sample in self.samples if what in sample]

    def median(self, what: str) -> float:
        """Return the median of the rounds; NaN if there is none."""
        values = self.values(what)
        return statistics.median(values) if values else math.nan

    def least(self, what: str) -> float:
        """Return the smallest value of the rounds; NaN if there is none."""
        return min(self.values(what), default=math.nan)

    def most(self, what: str) -> float:
        """Return the greatest value of all rounds, the warm-up included; NaN if there is none."""
        return max(
            [value for sample in (self.first, *self.samples) if (value := sample.get(what)) is not None] or [math.nan]
        )


async def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    run_once: Callable[[Contender, int], Awaitable[Sample]],
    *,
    warm_up: bool = True,
) -> list[Runs]:
    """Run each contender once per round, in an order that rotates; the first round runs even if the time is over.

    Args:
        contenders: the contenders to run.
        rounds: the number of rounds, without the warm-up.
        run_once: runs one contender; its second argument is the number of the round, -1 for the warm-up.
        warm_up: whether a warm-up comes first.
    """
    allowed = time_limits.current.get()
    runs = {each.name: Runs(each.name, each.note, error=allowed.without.get(each.name)) for each in contenders}
    for number in range(-1 if warm_up else 0, rounds):
        if number > 0 and allowed.over:
            break
        shift = max(number, 0) % max(1, len(contenders))
        for contender in (*contenders[shift:], *contenders[:shift]):
            await _run_one(contender, runs[contender.name], number, run_once)
    return list(runs.values())


async def close(contender: Closable, runs: Runs) -> None:
    """Close a contender; a failure shows in its row, unless an earlier one does."""
    try:
        with time_limits.current.get().watch(runs.name):
            await contender.close()
    except Exception as exc:
        runs.error = runs.error or f"closing: {type(exc).__name__}: {exc}"


async def _run_one(
    contender: Contender, runs: Runs, number: int, run_once: Callable[[Contender, int], Awaitable[Sample]]
) -> None:
    if runs.error is not None:
        return
    print(f"{'warm-up' if number < 0 else f'round {number + 1}'}: {contender.name}", file=sys.stderr, flush=True)
    try:
        with time_limits.current.get().watch(contender.name):
            sample = await run_once(contender, number)
    except Exception as exc:  # shown in its row
        runs.error = f"{type(exc).__name__}: {exc}"
        return
    if number < 0:
        runs.first = sample
    else:
        runs.samples.append(sample)
