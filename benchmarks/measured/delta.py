"""Delta saves: a state of which most is frozen, and one that changes wholly, with a base and without."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiockpt
from benchmarks.harness.measure import Runs
from benchmarks.harness.states import State, random_tensor, same_bits, size_of
from benchmarks.limits import machine
from benchmarks.report.bars import Bar, by_name
from benchmarks.report.report import Report, Table, median_time, number

OPTIONS = ("gib", "tensors", "rounds")
DEFAULTS = {"tensors": 128}
GIB = 1.0
ROUNDS = 9  # with the first save ten steps

_FULL, _FROZEN, _ALL = "without a base", "base, 90 % frozen", "base, all changes"
_CHANGED = 10  # one tensor of so many changes
_WARM_UP = 2  # saves of each contender, of which the first is a full one: what changes is learned
_STAGING_BYTES = 1 << 30


@dataclass(slots=True)
class Series:
    """The saves of one contender, each a step of a run.

    Attributes:
        state: what is saved; several may have one.
        base: of each save.
        paths: the checkpoints that are there.
    """

    runs: Runs
    state: State
    base: str | None
    paths: list[Path] = field(default_factory=list)

    def save(self, ckpt: aiockpt.SyncCheckpointer, path: Path) -> dict[str, float]:
        """Save a step, and measure it."""
        machine.settle()
        begin = time.perf_counter()
        result = ckpt.save(self.state, path, base=self.base)
        took = time.perf_counter() - begin
        if self.base is None or self.runs.name == _ALL:  # nothing is shared
            for each in self.paths:
                machine.remove(each)
            self.paths.clear()
        self.paths.append(path)
        return {"save_s": took, "staged_s": result.staged_s, "written": result.bytes_written / result.nbytes}


def stored_bytes(paths: Sequence[Path]) -> int:
    """Return the bytes that checkpoints take together, each shared file once."""
    files = {each.stat().st_ino: each.stat().st_size for path in paths for each in path.iterdir()}
    return sum(files.values())


def measure(state: State, changing: State, directory: Path, rounds: int) -> list[Series]:
    """Save with each contender, in rounds, and change the states in between; the last checkpoints are compared."""
    every = [
        Series(Runs(_FULL), state, None),
        Series(Runs(_FROZEN, f"one of {_CHANGED} tensors changes"), state, "auto"),
        Series(Runs(_ALL), changing, "auto"),
    ]
    checkpointers = [aiockpt.SyncCheckpointer(process_group=None, staging_bytes=_STAGING_BYTES) for _ in every]
    try:
        for step in range(_WARM_UP + rounds):
            for tensor in (*list(state.values())[::_CHANGED], *changing.values()):
                tensor += 1
            for number_of, (series, ckpt) in enumerate(zip(every, checkpointers, strict=True)):
                sample = series.save(ckpt, directory / f"{number_of}-{step}")
                if step >= _WARM_UP:
                    series.runs.samples.append(sample)
        for series, ckpt in zip(every, checkpointers, strict=True):
            if not same_bits(ckpt.load(series.paths[-1]), series.state):
                raise ValueError("what was loaded differs from what was saved")
    finally:
        for ckpt in checkpointers:
            ckpt.close()
    return every


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    nbytes = int((options.gib or GIB) * 2**30)

    def draw() -> State:
        return {f"layers.{n:03}": random_tensor(nbytes // 4 // options.tensors) for n in range(options.tensors)}

    every = measure(state := draw(), draw(), directory, options.rounds or ROUNDS)
    runs = [series.runs for series in every]
    columns = {
        "save": median_time("save_s"),
        "staged": median_time("staged_s"),
        "written": lambda run: number(run.median("written"), digits=3),
    }
    title = f"delta: {size_of(state) / 2**30:.2f} GiB in {len(state)} tensors"
    full, frozen, all_changes = (by_name(runs, name) for name in (_FULL, _FROZEN, _ALL))
    steps = every[1].paths
    share = stored_bytes(steps) / stored_bytes(every[0].paths)

    def of_full(text: str, series: Runs, what: str, bound: float) -> Bar:
        best = series.least(what) / full.least(what)
        return Bar(text, series.median(what) / full.median(what), bound, at_most=True, of_best=best)

    bars = [
        Bar("90 % frozen: bytes written", frozen.median("written"), 0.12, at_most=True),
        of_full("90 % frozen: time, of a full save", frozen, "save_s", 0.3),
        of_full("90 % frozen: staged, of a full save", frozen, "staged_s", 1.0),
        Bar(
            f"90 % frozen: bytes of {len(steps)} steps, of one", share, 2.0 if len(steps) <= 11 else None, at_most=True
        ),
        of_full("all changes: time, of a full save", all_changes, "save_s", 1.05),
    ]
    remarks = [f"medians from the {_WARM_UP + 1}rd save of each on; files are synced; written: the share of the bytes"]
    table = Table(title, columns, runs, "save_s")
    return Report("delta", vars(options), machine.facts(directory), [table], bars, remarks)
