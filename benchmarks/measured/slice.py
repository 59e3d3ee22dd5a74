"""Reads of parts of large tensors from the disk: their time, and the bytes that they move.

Opening the files does not count here; ``open`` measures it. Bytes asked for are those of read calls. Bytes from the
disk are whole pages, with readahead and mapped pages.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.harness.measure import Runs, Sample, close, interleave, timed
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, random_tensor, same_bits, size_of
from benchmarks.limits import machine, raw
from benchmarks.peers.checkpoints import make
from benchmarks.peers.slicers import Aiockpt, DcpLoad, Index, RawRead, Safetensors, Slicer, TorchMap
from benchmarks.report.bars import Bar, by_name, by_prefix, compare
from benchmarks.report.report import Cell, Report, Table, duration, most_mib, number, spread

OPTIONS = ("gib", "tensors", "rounds", "only")
DEFAULTS = {"gib": 0.5, "tensors": 8}
ROUNDS = 5

_COLUMNS = 4096
_PARTS = 64
_OURS, _STOCK = "aiockpt, own files", "aiockpt, dcp.save's files"


def wide_state(nbytes: int, tensors: int) -> State:
    """Return fp32 matrices of 4096 columns, of about ``nbytes`` in all."""
    rows = max(_PARTS, nbytes // tensors // (4 * _COLUMNS))
    return {f"layers.{number}.weight": random_tensor(rows, _COLUMNS) for number in range(tensors)}


def parts(rows: int, columns: int) -> dict[str, Index]:
    """Return the parts to read, by name."""
    everything, few = slice(0, columns), max(1, rows // _PARTS)
    middle, quarter, half = rows // 2 + 3, columns // 4 + 5, columns // 2 + 5
    return {
        "the first rows": (slice(0, few), everything),
        "rows in the middle": (slice(middle, middle + few), everything),
        "rows and columns": (slice(rows // 4, rows // 4 + max(1, rows // 8)), slice(quarter, quarter + columns // 4)),
        "a band of columns": (slice(0, rows), slice(half, half + columns // 16)),
    }


def slicers(directory: Path, state: State, arena: raw.Arena) -> list[Slicer]:
    """Return all contenders."""
    return [
        RawRead(directory / "raw", state, arena, span=False),
        RawRead(directory / "raw", state, arena, span=True),
        Aiockpt(directory / "aiockpt", _OURS),
        Aiockpt(directory / "dcp", _STOCK),
        DcpLoad(directory / "dcp", state),
        TorchMap(directory / "state.pt"),
        Safetensors(directory / "state.safetensors"),
    ]


async def measure(selected: Sequence[Slicer], state: State, index: Index, rounds: int) -> tuple[list[Runs], str]:
    """Read a part in rounds, each time from the disk; compare it with the saved state.

    Returns:
        All runs, and the means by which files were dropped from the page cache.
    """
    expected = {name: tensor[index] for name, tensor in state.items()}
    means = ""

    async def read_once(slicer: Slicer, _number: int) -> Sample:
        nonlocal means
        make(state, slicer.path)
        machine.settle()
        means = machine.drop_from_cache(slicer.files())
        async with AsyncExitStack() as stack:
            await slicer.open(stack)
            part, sample = await timed(lambda: slicer.read(index), "read_s")
        if part is not None and not same_bits(part, expected):
            raise ValueError("what was read differs from what was saved")
        return sample if slicer.asks else {**sample, "asked_bytes": math.nan}

    return await interleave(selected, rounds, read_once), means


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = wide_state(int(options.gib * 2**30), options.tensors)
    selected = chosen(slicers(directory, state, raw.Arena(size_of(state))), options.only)
    rounds = options.rounds or ROUNDS
    rows, columns = next(iter(state.values())).shape
    report = Report("slice", vars(options), machine.facts(directory), [], [])
    for name, index in parts(rows, columns).items():
        runs, means = await measure(selected, state, index, rounds)
        own_bytes = size_of({key: tensor[index] for key, tensor in state.items()})
        shape = ", ".join(f"{part.start}:{part.stop}" for part in index)
        title = (
            f"slice, {name}: [{shape}] of {len(state)} tensors of {rows} x {columns}, {own_bytes / 2**20:.2f} of "
            f"{size_of(state) / 2**20:.0f} MiB, cold, medians of {rounds} rounds"
        )
        report.tables.append(Table(title, columns_of(own_bytes), runs, "read_s", "raw"))
        report.bars += bars(name, runs, own_bytes)
        report.remarks = [f"cold: files taken out of the page cache by {means}"]
    for slicer, last in zip(selected, runs, strict=True):
        await close(slicer, last)
    return report


def columns_of(own_bytes: int) -> dict[str, Cell]:
    """Return the columns of the tables."""
    return {
        "read (min..max)": spread("read_s"),
        "first": lambda run: duration(run.first["read_s"]),
        "asked for, MiB": lambda run: number(run.median("asked_bytes") / 2**20),
        "of the part": lambda run: _times(run, "asked_bytes", own_bytes),
        "from the disk, MiB": lambda run: number(run.median("disk_bytes") / 2**20),
        "of it": lambda run: _times(run, "disk_bytes", own_bytes),
        "extra memory, MiB": most_mib("extra_bytes"),
    }


def _times(run: Runs, what: str, own_bytes: int) -> str:
    ratio = number(run.median(what) / own_bytes)
    return ratio if ratio == "-" else f"{ratio} x"


def bars(part: str, runs: Sequence[Runs], own_bytes: int) -> list[Bar]:
    """Compare the figures with the project's targets."""
    ours, what = by_name(runs, _OURS), "read_s"
    # Narrow columns are read with the gaps between them.
    asked = [
        Bar(f"{part}, {run.name}: bytes asked for : its own", run.median("asked_bytes") / own_bytes, 1.1, at_most=True)
        for run in (ours, by_name(runs, _STOCK))
        if part != "a band of columns"
    ]
    others = {
        "the better raw read": by_prefix(runs, "raw"),
        "dcp.load": by_prefix(runs, "dcp.load"),
        "safetensors": by_prefix(runs, "safetensors"),
        "torch.load mapped": by_prefix(runs, "torch.load"),
    }
    return asked + [compare(f"{part}, aiockpt : {name}, speed", run, ours, what) for name, run in others.items()]
