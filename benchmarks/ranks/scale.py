"""Coordination of very many ranks: measured with processes, simulated on rank 0, and extrapolated by a model.

Measured: rounds of messages between real processes over loopback, and the cost of a link on rank 0. Simulated: rank 0's
work. With the code of a save, it unpickles the messages of simulated ranks, plans, checks, encodes the index and the
manifest, and pickles the replies. A formula is fitted to both, compared with saves of the real processes, and evaluated
for worlds that cannot be measured. An item is a part of a tensor that one rank writes; every tensor has a part on every
rank.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from aiockpt.coordination.coordinator import coordinator_of
from benchmarks.harness import time_limits
from benchmarks.harness.measure import Runs, Sample, resident_bytes
from benchmarks.limits import machine
from benchmarks.ranks import savers
from benchmarks.ranks.imagined import Imagined
from benchmarks.ranks.imagined_ours import Coordinator
from benchmarks.ranks.imagined_torch import TorchCoordinator
from benchmarks.ranks.sharded import slowest_of
from benchmarks.ranks.world import Rank, World, context
from benchmarks.report.bars import Bar
from benchmarks.report.report import Report, Table, duration, median_time, number

OPTIONS = ("ranks", "items", "world", "limit", "rounds")
DEFAULTS = {"ranks": "8,64,512,4096,16384", "items": "100,1000,10000", "limit": 30.0}
ROUNDS = 3

_MEMORY_BYTES = 10 << 30
_DCP_RANKS = 64
_KINDS = {"aiockpt": Coordinator, "dcp.save, plans cached": TorchCoordinator}
_PARTS = ("hear", "plan", "tell", "check", "metadata", "manifest")
_ROUNDS_OF_A_SAVE = 2
_OPEN_FILES = 1024
_PAYLOAD_BYTES = 256 << 10
_ROUNDS = "two rounds of messages, later save"
_BAR_AT, _BAR_S = (512, 1000), 1.0


# --- the formula -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """A linear cost of a save, in seconds or bytes: a constant, a cost per rank, and a cost per item of all ranks.

    Attributes:
        worst: the greatest relative deviation from a fitted point.
    """

    constant: float
    per_rank: float
    per_item: float
    worst: float = 0.0

    def at(self, ranks: float, items_each: float) -> float:
        """Return the cost of a save."""
        return self.constant + self.per_rank * ranks + self.per_item * ranks * items_each


def fit(points: Sequence[tuple[float, float, float]]) -> Costs:
    """Fit costs to points (ranks, items of each rank, cost) by least relative squares; no coefficient is negative."""
    known = np.array([[1.0, ranks, ranks * items] for ranks, items, _ in points])
    costs = np.array([cost for *_, cost in points])
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(known[:, used] / costs[:, None], np.ones(len(costs)), rcond=None)
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    parts = dict(zip(used, map(float, found), strict=True))
    fitted = Costs(*(parts.get(part, 0.0) for part in range(3)))
    worst = max(abs(fitted.at(ranks, items) / cost - 1) for ranks, items, cost in points)
    return Costs(fitted.constant, fitted.per_rank, fitted.per_item, worst)


@dataclass(frozen=True, slots=True)
class Model:
    """The cost of coordinating a save: rank 0's own work, and rounds of messages.

    Attributes:
        first: rank 0's work in a first save, in seconds.
        later: rank 0's work in a later save, in seconds.
        index_bytes: the size of `.metadata`.
        first_bytes: the size of all messages to rank 0 in a first save.
        later_bytes: the size of all messages to rank 0 in a later save.
        round_s: the time of one round of small messages.
        message_s: the seconds per byte of larger messages.
    """

    first: Costs
    later: Costs
    index_bytes: Costs
    first_bytes: Costs
    later_bytes: Costs
    round_s: Costs
    message_s: float

    def save_s(self, ranks: int, items: int, *, later: bool) -> float:
        """Return the seconds that coordination adds between the call and the commit."""
        work, sent = (self.later, self.later_bytes) if later else (self.first, self.first_bytes)
        return work.at(ranks, items) + self.rounds_s(ranks) + self.message_s * sent.at(ranks, items)

    def rounds_s(self, ranks: int) -> float:
        """Return the seconds of the rounds of a save, with small messages."""
        return _ROUNDS_OF_A_SAVE * self.round_s.at(ranks, 0)


# --- measured: real processes ----------------------------------------------------------------------------


def measure_rounds(rank: Rank, count: int, payload: int) -> Sample:
    """Run rounds together with the other ranks; return the median time of a round, and the cost of the links."""

    async def decide(values: Sequence[bytes]) -> Sequence[None]:
        return [None] * len(values)

    async def run() -> Sample:
        gc.collect()
        files, memory, threads = _descriptors(), resident_bytes(), _threads()
        coordinator = coordinator_of(dist.group.WORLD, timeout_s=120)  # type: ignore[arg-type]
        took: Sample = {}
        used: Sample = {}
        for what, value in (("round_s", b""), ("large_s", bytes(payload))):
            each = []
            for number_ in range(count + 1):
                began = time.perf_counter()
                await coordinator.round(coordinator.call("save"), f"round {number_} of {what}", value, decide)
                each.append(time.perf_counter() - began)
                if not used:  # measured now: a rank that is done with the last round closes its links
                    used = {
                        "descriptors": _descriptors() - files,
                        "threads": _threads() - threads,
                        "memory_bytes": resident_bytes() - memory,
                    }
            took[what] = statistics.median(each[1:])  # the first round opens the links
        await asyncio.to_thread(coordinator.close)
        return {**took, **used}

    return rank.runner.run(run())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0


def measure_worlds(
    sizes: Sequence[int], items: int, rounds: int, directory: Path
) -> Iterator[tuple[int, Runs, Sample]]:
    """Yield measurements with real ranks: saves of tensors that have a part on every rank, and rounds of messages."""
    for size in sizes:
        run = Runs(f"{size} processes")
        run.error = time_limits.current.get().without.get(run.name)
        messages: Sample = {}
        if run.error:
            yield size, run, messages
            continue
        try:
            with time_limits.current.get().watch(run.name), World(size) as world:
                messages = world.call(measure_rounds, 10, _PAYLOAD_BYTES)[0]
                world.call(savers.prepare_tiny, items)
                for step in range(-1, rounds):
                    alone, together = (_save(world, name, directory / "save") for name in ("aiockpt, alone", "aiockpt"))
                    sample = {**messages, "alone_s": alone["rounds_s"], "save_s": together["rounds_s"]}
                    if step < 0:
                        run.first = sample
                    else:
                        run.samples.append(sample)
                world.call(savers.close_all)
        except Exception as exc:  # shown in its row
            run.error = f"{type(exc).__name__}: {exc}"
        yield size, run, messages


def _save(world: World, name: str, path: Path) -> Sample:
    try:
        return slowest_of(world.call(savers.save_once, name, path))
    finally:
        machine.remove(path)


# --- simulated: rank 0 of imagined ranks -----------------------------------------------------------------


def simulate(options: Namespace, directory: Path) -> Iterator[tuple[str, Imagined, Runs]]:
    """Yield every point; do not run a point that is larger than one that exceeded its time or memory."""
    failed: dict[str, list[Imagined]] = {kind: [] for kind in _KINDS}
    # By size: if time runs out, the small points of all kinds are there.
    for kind, items, ranks in sorted(
        product(_KINDS, _numbers(options.items), _numbers(options.ranks)), key=lambda point: point[1] * point[2]
    ):
        if kind != "aiockpt" and ranks > _DCP_RANKS:
            continue
        world = Imagined(ranks, items, each=True)
        run = Runs(f"{kind}: {ranks:,} ranks, {items:,} items each")
        if any(less.ranks <= ranks and less.items <= items for less in failed[kind]):
            run.error = "not run: a smaller one took too long or too much memory"
        elif time_limits.current.get().over:
            run.error = "not run: no time was left"
        else:
            _simulate_point(run, kind, world, directory, options.rounds or ROUNDS, options.limit)
            if run.error:
                failed[kind].append(world)
        yield kind, world, run


def _numbers(text: str) -> list[int]:
    return [int(part) for part in str(text).split(",")]


def _simulate_point(run: Runs, kind: str, world: Imagined, directory: Path, rounds: int, limit_s: float) -> None:
    """Simulate one point in a process of its own, which ends if it exceeds its time or memory."""
    processes = context()
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_work, args=(kind, world, str(directory), rounds, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while len(run.samples) < rounds and run.error is None:
            if not ours.poll(limit_s):
                run.error = f"not run to its end: takes longer than {limit_s:g} s, with the making of messages"
                break
            sample = ours.recv()
            if isinstance(sample, str):
                run.error = sample
            elif run.first:
                run.samples.append(sample)
            else:
                run.first = sample
    except EOFError:
        run.error = "its process has ended"
    finally:
        process.kill()
        process.join()


def _work(kind: str, world: Imagined, directory: str, rounds: int, pipe: Connection) -> None:
    """Run one point, in its process."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            rank0: Any = Coordinator(world) if kind == "aiockpt" else TorchCoordinator(world, Path(folder))
            for step in range(rounds + 1):
                spent = rank0.save(step)
                pipe.send(_sample(spent, rank0))
    except MemoryError:
        pipe.send(f"not run: needs more than {_MEMORY_BYTES >> 30} GiB")
    except Exception as exc:
        pipe.send(f"{type(exc).__name__}: {exc}")


def _sample(spent: Sample, rank0: Any) -> Sample:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    more = {"index_bytes": rank0.index_bytes, "sent_bytes": getattr(rank0, "sent_bytes", 0), "memory_bytes": memory}
    return {**spent, "all_s": sum(spent.values()), **more}


# --- all of it -------------------------------------------------------------------------------------------


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    items_of_real = min(_numbers(options.items))
    real = list(measure_worlds(_numbers(options.world), items_of_real, options.rounds or ROUNDS, directory))
    order = list(_KINDS)
    points = sorted(simulate(options, directory), key=lambda point: (order.index(point[0]), point[1].items))
    ours = [(world, run) for kind, world, run in points if kind == "aiockpt" and run.samples]
    messages = {size: sample for size, run, sample in real if sample}
    report = Report("scale", vars(options), machine.facts(directory), [_simulated(points)], [])
    model = model_of(ours, messages) if ours and messages else None
    if model is None:
        return report
    report.tables.insert(0, _measured(real, model, items_of_real))
    report.remarks = remarks(model, messages)
    report.bars = [
        Bar(f"{run.name}: a later save, rank 0's work", run.median("all_s"), _BAR_S, True, "s")
        for world, run in ours
        if (world.ranks, world.items) == _BAR_AT or len(ours) == 1
    ]
    report.details = {
        "model": asdict(model),
        "extrapolated": extrapolated(model, _numbers(options.ranks), _numbers(options.items)),
        "panels": panels(model, real, ours, _numbers(options.ranks), items_of_real),
    }
    return report


def model_of(ours: Sequence[tuple[Imagined, Runs]], messages: dict[int, Sample]) -> Model:
    """Fit the model to the simulated and measured points."""

    def of(what: str, *, later: bool = True) -> Costs:
        return fit([(w.ranks, w.items, run.median(what) if later else run.first[what]) for w, run in ours])

    rounds = fit([(size, 0, sample["round_s"]) for size, sample in messages.items()])
    more = [
        max(0.0, sample["large_s"] - sample["round_s"]) / ((size - 1) * _PAYLOAD_BYTES)
        for size, sample in messages.items()
        if size > 1
    ]
    return Model(
        of("all_s", later=False),
        of("all_s"),
        of("index_bytes"),
        of("sent_bytes", later=False),
        of("sent_bytes"),
        rounds,
        statistics.median(more),
    )


def _measured(real: Sequence[tuple[int, Runs, Sample]], model: Model, items: int) -> Table:
    size_of_run = {run.name: size for size, run, _ in real}
    columns = {
        "a round": median_time("round_s"),
        "of 256 KiB from each": median_time("large_s"),
        "descriptors on rank 0": lambda run: number(run.median("descriptors"), 0),
        "threads": lambda run: number(run.median("threads"), 0),
        "one rank alone": median_time("alone_s"),
        "all ranks": median_time("save_s"),
        "predicted": lambda run: duration(
            run.median("alone_s") + model.save_s(size_of_run[run.name], items, later=True)
        ),
    }
    title = f"measured: real processes, {items:,} items each; the last three: planning and committing of a later save"
    return Table(title, columns, [run for _, run, _ in real], "save_s")


def _simulated(points: Sequence[tuple[str, Imagined, Runs]]) -> Table:
    columns = {
        "first save": lambda run: duration(run.first["all_s"]),
        "later save": median_time("all_s"),
        **{part: median_time(part) for part in _PARTS},
        "index, MiB": lambda run: number(run.median("index_bytes") / 2**20, 1),
        "messages, MiB": lambda run: number(run.median("sent_bytes") / 2**20, 1),
        "memory, MiB": lambda run: number(run.most("memory_bytes") / 2**20, 0),
    }
    title = "simulated: rank 0's work with the messages of imagined ranks; the columns between are of later saves"
    return Table(title, columns, [run for *_, run in points], "all_s")


def extrapolated(model: Model, ranks: Sequence[int], items: Sequence[int]) -> list[dict[str, float]]:
    """Return the model's values for every point, measured or not."""
    return [
        {
            "ranks": size,
            "items": each,
            "first_s": model.save_s(size, each, later=False),
            "later_s": model.save_s(size, each, later=True),
            "index_bytes": model.index_bytes.at(size, each),
            "first_bytes": model.first_bytes.at(size, each),
            "later_bytes": model.later_bytes.at(size, each),
        }
        for each in items
        for size in ranks
    ]


def panels(
    model: Model,
    real: Sequence[tuple[int, Runs, Sample]],
    ours: Sequence[tuple[Imagined, Runs]],
    ranks: Sequence[int],
    items_of_real: int,
) -> list[dict[str, Any]]:
    """Return the panels of the picture: seconds and bytes by the number of ranks."""
    sizes = sorted({*ranks, *(size for size, *_ in real)})
    seconds: dict[str, list[tuple[int, float]]] = {}
    nbytes: dict[str, list[tuple[int, float]]] = {}
    worked: dict[str, list[tuple[int, float]]] = {}
    for items in sorted({world.items for world, _ in ours}):
        for later in (False, True):
            name = f"rank 0's work, {items:,} items each, {'later' if later else 'first'} save"
            cost = model.later if later else model.first
            seconds[name] = [(size, cost.at(size, items)) for size in sizes]
            worked[name] = [
                (world.ranks, run.median("all_s") if later else run.first["all_s"])
                for world, run in ours
                if world.items == items
            ]
        nbytes[f"{items:,} items each, index: later save"] = [
            (size, model.index_bytes.at(size, items) / 2**20) for size in sizes
        ]
        nbytes[f"{items:,} items each, messages: first save"] = [
            (size, model.first_bytes.at(size, items) / 2**20) for size in sizes
        ]
    seconds[_ROUNDS] = [(size, model.rounds_s(size)) for size in sizes]
    worked[_ROUNDS] = [(size, _ROUNDS_OF_A_SAVE * sample["round_s"]) for size, _, sample in real if sample]
    extra = [(size, run.median("save_s") - run.median("alone_s")) for size, run, _ in real if run.samples]
    seconds[f"measured: all of a later save, {items_of_real:,} items each"] = [each for each in extra if each[1] > 0]
    return [
        {"title": "lines: by the formula; x: what it is fitted to", "y": "seconds", "lines": seconds, "points": worked},
        {"title": "bytes on rank 0, by the formula", "y": "MiB", "lines": nbytes, "points": {}},
    ]


def remarks(model: Model, messages: dict[int, Sample]) -> list[str]:
    """Return remarks on the parts of the model, and on its fit."""
    files, memory = (
        fit([(size - 1, 0, max(1.0, sample[what])) for size, sample in messages.items()])
        for what in ("descriptors", "memory_bytes")
    )
    enough = (_OPEN_FILES - files.constant) / max(files.per_rank, 1e-9)
    first, later, rounds = model.first, model.later, model.round_s
    return [
        f"measured: a round takes {duration(rounds.constant)} and {rounds.per_rank * 1e6:.0f} us for each rank",
        f"measured: a byte of a message takes {model.message_s * 1e9:.2f} ns",
        f"measured: a link costs rank 0 {files.per_rank:.1f} descriptors and {memory.per_rank / 2**10:.0f} KiB",
        f"so, with a link for each rank, {enough:,.0f} ranks reach the limit of {_OPEN_FILES:,} open files",
        f"simulated: a later save is {later.per_rank * 1e6:.1f} us of work a rank, {_ns(later.per_item)} an item",
        f"simulated: a first save is {first.per_rank * 1e6:.1f} us of work a rank, {_ns(first.per_item)} an item",
        f"the formula of rank 0's work is off by {max(first.worst, later.worst):.0%} at most, where it was simulated",
        f"the formula of a round is off by {rounds.worst:.0%} at most, where it was measured",
        f"simulated: the index has {model.index_bytes.per_item:.0f} bytes for each item",
        f"simulated: messages of a first save have {model.first_bytes.per_item:.0f} bytes for each item",
        f"simulated: messages of a later save have {model.later_bytes.per_rank:.0f} bytes for each rank",
    ]


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:,.0f} ns"
