"""A GPU: staging, the optimizer step during a save, training beside a save, and saves and loads end to end."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu import hold, stage, train, whole
from benchmarks.gpu.device import Device, Pinned
from benchmarks.gpu.rounds import Bench, Deadline
from benchmarks.gpu.training import Training
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import size_of
from benchmarks.limits import machine
from benchmarks.report.bars import Bar
from benchmarks.report.report import Report, Table

OPTIONS = ("gib", "device", "rounds", "only", "part", "alone", "seconds")
DEFAULTS = {"gib": 8.0, "alone": 2.0}

_DRY_GIB = 0.05


def possible() -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark.

    Attributes:
        name: its name for `--part`.
        run: returns its table and bars.
    """

    name: str
    run: Callable[[], Awaitable[tuple[Table, list[Bar]]]]
    note: str = ""


def parts(options: Namespace, bench: Bench, training: Training) -> list[Part]:
    """Return all parts, in the order in which they run."""
    nbytes = size_of(training.state)
    size = f"{nbytes / 2**30:.2f} GiB in {len(training.state)} tensors"
    only = options.only

    async def measure_staging() -> tuple[Table, list[Bar]]:
        runs = await stage.measure(bench, training.state, options.rounds or stage.ROUNDS, only)
        return stage.table(runs, nbytes, size), stage.bars(runs)

    async def measure_hold() -> tuple[Table, list[Bar]]:
        runs = await hold.measure(bench, training, options.rounds or hold.ROUNDS, only)
        return hold.table(runs, size), hold.bars(runs)

    async def measure_training() -> tuple[Table, list[Bar]]:
        runs = await train.measure(bench, training, options.rounds or train.ROUNDS, only, options.alone)
        return train.table(runs, nbytes, training, size), train.bars(runs)

    async def measure_whole() -> tuple[Table, list[Bar]]:
        runs = await whole.measure(bench, training, options.rounds or whole.ROUNDS, only)
        return whole.table(runs, nbytes, size), whole.bars(runs)

    return [
        Part("staging", measure_staging),
        Part("hold", measure_hold),
        Part("training", measure_training),
        Part("whole", measure_whole),
    ]


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report.

    Raises:
        SystemExit: if there is no GPU, and no dry run was asked for.
    """
    if options.device == "cuda" and not possible():
        raise SystemExit("torch sees no GPU here; --device=cpu runs the same code, small, to see that it works")
    device = Device(options.device)
    gib = options.gib if device.is_gpu else min(options.gib, _DRY_GIB)
    if not device.is_gpu:
        torch.set_num_threads(1)
    deadline = Deadline(options.seconds)
    with Pinned(device) as pinned:
        bench = Bench(device, pinned, directory, deadline)
        training = Training(device, int(gib * 2**30))
        measured = [await part.run() for part in chosen(parts(options, bench, training), options.part)]
    tables = [table for table, _ in measured if table.runs]
    bars = [bar for _, found in measured for bar in found]
    facts = {**machine.facts(directory), **device.describe()}
    return Report("gpu", vars(options), facts, tables, bars, [*remarks(device), *deadline.cut])


def remarks(device: Device) -> list[str]:
    """Return the meaning of the columns, and the peers that are missing."""
    said = [
        "step held: the time that optimizer.step() and the wait before it held the program, less that without a save",
        "host ahead: the program did not wait for the gradients, so the device still computes them",
        "kept: the pace from the call until durable, as a share of the pace just before; the call counts",
        "device: peak of the tensors' memory above that without a save; pinned, resident: peaks of this process",
    ]
    if importlib.util.find_spec("torch_checkpointing") is None:
        said.append("torch_checkpointing is not installed, and was left out")
    if not device.is_gpu:
        said.append("a dry run on the CPU: its figures say nothing")
    return said
