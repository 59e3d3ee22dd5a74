"""Rounds that end before a deadline, with the memory that each contender takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.device import Device, Pinned
from benchmarks.harness.measure import Closable, Contender, PeakMemory, Runs, Sample, close, interleave, resident_bytes
from benchmarks.limits import machine
from benchmarks.report.report import Cell, number


class Deadline:
    """The time limit of all parts of a benchmark together.

    Args:
        seconds: the time limit.

    Attributes:
        cut: remarks on parts that had fewer rounds than asked for.
    """

    OVER = "no time was left for it: allow more --seconds"

    def __init__(self, seconds: float) -> None:
        self._ends, self.cut = time.monotonic() + seconds, list[str]()

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._ends - time.monotonic()

    def part(self, share: float) -> float:
        """Return the end of a part that gets this share of the time left, as a value of `time.monotonic`."""
        return time.monotonic() + share * self.left_s()


@dataclass(slots=True)
class Bench:
    """The objects that all parts of the benchmark share.

    Attributes:
        device: the device that is measured.
        pinned: the counter of pinned memory.
        directory: the directory for checkpoints.
        deadline: the time limit.
    """

    device: Device
    pinned: Pinned
    directory: Path
    deadline: Deadline
    _kept: dict[str, Sample] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    async def rounds(
        self,
        contenders: Sequence[Contender],
        rounds: int,
        run_once: Callable[[Contender, int], Awaitable[Sample]],
        *,
        share: float,
        what: str,
    ) -> list[Runs]:
        """Run all contenders in rounds, after a warm-up; begin no round that may not end in time.

        Args:
            contenders: the contenders to run.
            rounds: the greatest number of rounds; there is always one, but a contender fails if its turn comes
                after the deadline.
            run_once: see `interleave`.
            share: the share of the time that is left.
            what: the name of this part.
        """

        async def in_time(contender: Contender, count: int) -> Sample:
            if self.deadline.left_s() < 0:
                raise TimeoutError(Deadline.OVER)
            return await run_once(contender, count)

        ends = self.deadline.part(share)
        runs = await interleave(contenders, 0, in_time)
        for count in range(rounds):
            began = time.monotonic()
            shift = count % max(1, len(contenders))
            going = [each for each in (*contenders[shift:], *contenders[:shift]) if _of(runs, each.name).error is None]
            for fresh in await interleave(going, 1, lambda each, _, n=count: in_time(each, n), warm_up=False):
                run = _of(runs, fresh.name)
                run.samples += fresh.samples
                run.error = fresh.error
            if count + 1 < rounds and 2 * time.monotonic() - began > ends:
                self.deadline.cut.append(f"{what}: {count + 1} of {rounds} rounds, to end in time")
                break
        return runs

    async def watched(self, name: str, work: Callable[[], Awaitable[Sample]]) -> Sample:
        """Run ``work``, and add the peaks of resident, device and pinned memory to its sample.

        Args:
            name: the contender and part; memory that it keeps between calls counts as its own.
            work: returns a sample.
        """
        machine.settle()
        self.device.forget_peak()
        self.pinned.forget_peak()
        before = {"device_bytes": self.device.held_bytes(), "pinned_bytes": self.pinned.held_bytes()}
        resident = resident_bytes()
        with PeakMemory() as memory:
            sample = await work()
        most = {"device_bytes": self.device.most_held_bytes(), "pinned_bytes": self.pinned.most_bytes()}
        kept = self._kept[name]
        found = {what: max(0, most[what] - before[what] + kept[what]) for what in most}
        found["extra_bytes"] = max(0, memory.extra_bytes + kept["extra_bytes"])
        machine.settle()
        kept["device_bytes"] += self.device.held_bytes() - before["device_bytes"]
        kept["pinned_bytes"] += self.pinned.held_bytes() - before["pinned_bytes"]
        kept["extra_bytes"] += resident_bytes() - resident
        return {**found, **sample}

    def forget(self, name: str) -> None:
        """Reset the memory counted as kept, after the contender was closed."""
        self._kept.pop(name, None)


def _of(runs: Sequence[Runs], name: str) -> Runs:
    return next(run for run in runs if run.name == name)


async def close_all(contenders: Sequence[Closable], runs: Sequence[Runs]) -> None:
    """Close all contenders."""
    for contender, run in zip(contenders, runs, strict=True):
        await close(contender, run)


def memory_columns() -> dict[str, Cell]:
    """Return columns with the peaks of memory, in GB."""

    def most(what: str) -> Cell:
        return lambda run: number(run.most(what) / 1e9)

    return {
        "device, GB": most("device_bytes"),
        "pinned, GB": most("pinned_bytes"),
        "resident, GB": most("extra_bytes"),
    }


def matching(contenders: Sequence[Contender], only: str | None) -> list[Contender]:
    """Return the contenders whose names contain one of the comma-separated parts; unlike `chosen`, maybe none."""
    parts = [part.strip().lower() for part in (only or "").split(",") if part.strip()]
    return [each for each in contenders if not parts or any(part in each.name.lower() for part in parts)]
