"""Very many very small tensors: the cost per tensor, also beside a thread that needs the GIL."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.measure import Runs, Sample
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, empty_like, small_state
from benchmarks.limits import machine
from benchmarks.measured.load import measure as measure_loads
from benchmarks.measured.save import measure
from benchmarks.peers.contenders import Aiockpt, dcp_save, safetensors_save, torch_save
from benchmarks.peers.loaders import Aiockpt as AiockptLoader
from benchmarks.peers.loaders import Loader, safetensors_load, torch_load
from benchmarks.report.bars import Bar, by_name, by_prefix, compare
from benchmarks.report.report import Report, Table, duration, median_time, most_mib, spread

OPTIONS = ("count", "nbytes", "rounds", "only")
ROUNDS = 2

NEW, TARGET = "aiockpt, new tensors", "aiockpt, into a target"
BESIDE = ", beside a busy thread"


@contextmanager
def busy_thread() -> Iterator[None]:
    """Count in a thread that never blocks, and releases the GIL only when another thread requests it."""
    over = False

    def count() -> None:
        number = 0
        while not over:
            number += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


class Beside(AiockptLoader):
    """A load beside a busy thread."""

    async def measured(self) -> tuple[State | None, Sample]:
        with busy_thread():
            return await super().measured()


def loaders(directory: Path, target: State) -> list[Loader]:
    """Return the contenders that load; dcp.load is left out, because it would take minutes."""
    return [
        AiockptLoader(directory / "aiockpt", name=NEW),
        AiockptLoader(directory / "aiockpt", target, name=TARGET),
        Beside(directory / "aiockpt", name=NEW + BESIDE),
        Beside(directory / "aiockpt", target, name=TARGET + BESIDE),
        torch_load(directory / "state.pt"),
        *safetensors_load(directory / "state.safetensors"),
    ]


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = small_state(options.count, options.nbytes)
    savers = [Aiockpt(), dcp_save(1), torch_save(), safetensors_save()]
    rounds = options.rounds or ROUNDS
    runs = await measure(chosen(savers, options.only), state, directory, rounds)
    columns = {
        "caller blocked": median_time("blocked_s"),
        "planned": median_time("planned_s"),
        "staged": median_time("staged_s"),
        "durable (min..max)": spread("durable_s"),
        "first save": lambda run: duration(run.first["durable_s"]),
        "extra memory, MiB": most_mib("extra_bytes"),
        "longest stall": median_time("stall_s"),
    }
    title = f"{len(state)} tensors of {options.nbytes} bytes, medians of {rounds} rounds"
    target = empty_like(state)
    loads, _ = await measure_loads(chosen(loaders(directory, target), options.only), state, target, rounds, cold=False)
    load_columns = {"loaded (min..max)": spread("loaded_s"), "extra memory, MiB": most_mib("extra_bytes")}
    return Report(
        "small",
        vars(options),
        machine.facts(directory),
        [
            Table(f"small: {title}", columns, runs, "durable_s"),
            Table(f"small, load: {title}, from the page cache", load_columns, loads, "loaded_s"),
        ],
        [*bars(runs), *load_bars(loads)],
        remarks(runs),
    )


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare saves with the project's targets."""
    ours, what = by_name(runs, "aiockpt"), "durable_s"
    peers = by_prefix(runs, "torch", "safetensors")
    return [
        compare("aiockpt : dcp.save with its defaults, speed", by_prefix(runs, "dcp.save"), ours, what, 10),
        Bar("aiockpt, later saves: planned in", ours.median("planned_s") * 1e3, 50, True, "ms"),
        Bar("aiockpt: the caller is blocked for", ours.median("blocked_s") * 1e3, 100, True, "ms"),
        *(compare(f"aiockpt : {peer.name}, speed", [peer], ours, what) for peer in peers),
    ]


def load_bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare loads with the project's targets."""
    found, what = [], "loaded_s"
    for name in (NEW, TARGET):
        alone, beside = by_name(runs, name), by_name(runs, name + BESIDE)
        found += [
            Bar(f"{name}: loaded in", alone.median(what), 2, True, "s"),
            compare(f"{name}{BESIDE} : alone, time", [beside], alone, what, 3, at_most=True),
        ]
    return found


def remarks(runs: Sequence[Runs]) -> list[str]:
    """Return a remark on the first save, which plans, unlike later ones."""
    first = by_name(runs, "aiockpt").first
    moments = {"captured": "captured_s", "planned": "planned_s", "staged": "staged_s", "written": "written_s"}
    if not first:
        return []
    return ["aiockpt, first save: " + ", ".join(f"{name} {duration(first[what])}" for name, what in moments.items())]
