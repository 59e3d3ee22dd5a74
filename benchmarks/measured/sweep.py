"""Saves by size and by number of tensors: the costs that grow with bytes, and those that grow with keys."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measure import Runs
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, random_tensor, size_of, transformer_state
from benchmarks.limits import machine, raw
from benchmarks.measured import save
from benchmarks.peers.contenders import Aiockpt, DcpAsyncSave, RawWrite, Saver, dcp_save, safetensors_save, torch_save
from benchmarks.report.bars import Bar, by_name, by_prefix, compare
from benchmarks.report.report import Report, Table, median_time, spread

OPTIONS = ("gib", "rounds", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 2

_SIZES = (1 / 32, 1 / 8, 1 / 2, 1)
_NUMBERS = (10, 100, 1_000, 10_000)
_NUMBER_SHARE = 1 / 8
_ELEMENT_BYTES = 4

Curves = dict[str, list[tuple[float, float]]]


def savers(state: State) -> list[Saver]:
    """Return the contenders that save every state."""
    return [
        RawWrite(2, raw.Arena(size_of(state))),
        Aiockpt(),
        dcp_save(2),
        DcpAsyncSave("async"),
        torch_save(),
        safetensors_save(),
    ]


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    report = Report("sweep", vars(options), machine.facts(directory), [], [])
    whole = int(options.gib * 2**30)
    by_size: Curves = {}
    for share in _SIZES:
        state = transformer_state(int(whole * share), 168)
        runs = await _measure(report, options, state, directory)
        _add(by_size, size_of(state), runs)
    by_number: Curves = {}
    nbytes = int(whole * _NUMBER_SHARE)
    for number in _NUMBERS:
        elements = max(1, nbytes // _ELEMENT_BYTES // number)
        state = {f"table.{n // 100}.{n % 100}": random_tensor(elements) for n in range(number)}
        runs = await _measure(report, options, state, directory)
        _add(by_number, number, runs)
        report.bars += _bars(number, runs)
    report.details = {"size": by_size, "number": by_number, "number_gib": nbytes / 2**30}
    return report


async def _measure(report: Report, options: Namespace, state: State, directory: Path) -> Sequence[Runs]:
    rounds = options.rounds or ROUNDS
    runs = await save.measure(chosen(savers(state), options.only), state, directory, rounds)
    columns = {"caller blocked": median_time("blocked_s"), "durable (min..max)": spread("durable_s")}
    title = f"save: {size_of(state) / 2**20:.0f} MiB in {len(state)} tensors, medians of {rounds} rounds"
    report.tables.append(Table(title, columns, runs, "durable_s", "raw"))
    return runs


def _add(curves: Curves, at: float, runs: Sequence[Runs]) -> None:
    for run in runs:
        if run.samples:
            curves.setdefault(run.name, []).append((at, run.median("durable_s")))


def _bars(number: int, runs: Sequence[Runs]) -> list[Bar]:
    peers = [run for run in runs if not run.name.startswith(("aiockpt", "raw"))]
    ours, what = by_name(runs, "aiockpt"), "durable_s"
    return [
        compare(f"{number} tensors, aiockpt : best peer, speed", peers, ours, what),
        compare(f"{number} tensors, aiockpt : raw O_DIRECT, speed", by_prefix(runs, "raw"), ours, what),
    ]
