"""Delta saves: a state of which most is frozen, and one that changes wholly, with a base and without; their readers.

Readers follow a run in memory by `watch`, of which 1 % or all changes from version to version.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiockpt
from benchmarks.harness.measure import Runs
from benchmarks.harness.states import State, random_tensor, same_bits, size_of
from benchmarks.limits import machine
from benchmarks.report.bars import Bar, by_name
from benchmarks.report.report import Report, Table, median_time, number, spread

OPTIONS = ("gib", "tensors", "rounds")
DEFAULTS = {"tensors": 128}
GIB = 1.0
ROUNDS = 8  # with those that warm up ten steps

_FULL, _FROZEN, _ALL = "without a base", "base, 90 % frozen", "base, all changes"
_CHANGED = 10  # one tensor of so many changes
_WARM_UP = 2  # saves of each contender, of which the first is a full one: what changes is learned
_STAGING_BYTES = 1 << 30
_FOLLOWED_GIB = 1.0  # at most
_FOLLOWED_TENSORS = 1000
_PART, _WHOLE, _PLAIN = "watch, 1 % changes", "watch, all changes", "plain load of all"


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
        Series(Runs(_FULL), changing, None),  # the same memory as the last one
        Series(Runs(_FROZEN, f"one of {_CHANGED} tensors changes"), state, "auto"),
        Series(Runs(_ALL), changing, "auto"),
    ]
    checkpointers = [aiockpt.SyncCheckpointer(process_group=None, staging_bytes=_STAGING_BYTES) for _ in every]
    try:
        for step in range(_WARM_UP + rounds):
            for tensor in (*list(state.values())[::_CHANGED], *changing.values()):
                tensor += 1
            turns = list(enumerate(zip(every, checkpointers, strict=True)))
            # Who comes first finds the disk at rest.
            for number_of, (series, ckpt) in turns[step % len(turns) :] + turns[: step % len(turns)]:
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


def follow(nbytes: int, rounds: int) -> list[Runs]:
    """Load the versions of a run in memory, in place: by a watch, and all of them once more by a plain load."""
    size = max(nbytes // 4 // _FOLLOWED_TENSORS, 1)
    state = {f"layers.{n:03}": random_tensor(size) for n in range(_FOLLOWED_TENSORS)}
    part, whole, plain = runs = [Runs(_PART), Runs(_WHOLE), Runs(_PLAIN)]
    target, other = ({name: tensor.clone() for name, tensor in state.items()} for _ in range(2))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory,
        aiockpt.SyncCheckpointManager(directory, process_group=None, fsync=False) as run,
        aiockpt.SyncCheckpointer(process_group=None) as ckpt,
        aiockpt.watch_sync(directory, poll_s=0.001) as watch,
    ):
        versions = iter(watch)
        for step in range(2 * rounds + 1):
            for tensor in list(state.values())[:: 100 if step % 2 else 1]:
                tensor += 1
            run.save(step, state, hashes=True)
            version = next(versions)  # which closes the one before: now, and not while loading, its memory is freed
            if step:
                machine.remove(Path(run.path_of(step - 1)))
            ckpt.load(version.path, other)  # for the kernel, the first to read pages pays more
            sample = _timed(lambda version=version: version.load(target))
            if step % 2:
                part.samples.append(sample)
            elif step:  # the first has nothing to compare with
                whole.samples.append(sample)
                plain.samples.append(_timed(lambda version=version: ckpt.load(version.path, other)))
        versions.close()
        if not same_bits(target, state):
            raise ValueError("what was loaded differs from what was saved")
    return runs


def _timed(load: Callable[[], object]) -> dict[str, float]:
    begin, cpu = time.perf_counter(), time.process_time()
    load()
    return {"load_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    nbytes = int((options.gib or GIB) * 2**30)

    def draw() -> State:
        return {f"layers.{n:03}": random_tensor(nbytes // 4 // options.tensors) for n in range(options.tensors)}

    every = measure(state := draw(), draw(), directory, options.rounds or ROUNDS)
    readers = follow(min(nbytes, int(_FOLLOWED_GIB * 2**30)), options.rounds or ROUNDS)
    runs = [series.runs for series in every]
    columns = {
        "save": spread("save_s"),
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
    remarks = [
        f"save: median, shortest and longest, from the {_WARM_UP + 1}rd save of each on; each round another one begins",
        "files are synced; written: the share of the bytes",
    ]
    part, whole, plain = (by_name(readers, name) for name in (_PART, _WHOLE, _PLAIN))
    is_whole = nbytes >= _FOLLOWED_GIB * 2**30
    bars += [
        Bar(
            "watch: a version of which 1 % has changed",
            1e3 * part.median("load_s"),
            40.0 if is_whole else None,
            at_most=True,
            unit="ms",
            of_best=1e3 * part.least("load_s"),
        ),
        Bar(
            "watch: all has changed: time, of a plain load",
            whole.median("load_s") / plain.median("load_s"),
            1.1 if is_whole else None,
            at_most=True,
            of_best=whole.least("load_s") / plain.least("load_s"),
        ),
        Bar(
            "watch: all has changed: CPU, of a plain load",
            whole.median("cpu_s") / plain.median("cpu_s"),
            1.1 if is_whole else None,
            at_most=True,
            of_best=whole.least("cpu_s") / plain.least("cpu_s"),
        ),
    ]
    table = Table(title, columns, runs, "save_s")
    columns = {"load": median_time("load_s"), "CPU": median_time("cpu_s")}
    following = Table(f"follow: {_FOLLOWED_TENSORS} tensors in memory", columns, readers, "load_s")
    return Report("delta", vars(options), machine.facts(directory), [table, following], bars, remarks)
