"""Very many very small tensors: where the cost for each tensor shows."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.bars import Bar, compare, one, those
from benchmarks.contenders import Aiockpt, dcp_save, safetensors_save, torch_save
from benchmarks.measure import Runs
from benchmarks.report import Report, Table, duration, median_time, most_mib, spread
from benchmarks.save import measure
from benchmarks.selection import chosen
from benchmarks.states import small_state

OPTIONS = ("count", "nbytes", "rounds", "only")
ROUNDS = 2


async def run(options: Namespace, directory: Path) -> Report:
    """Measure, and judge."""
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
    title = f"small: {len(state)} tensors of {options.nbytes} bytes, medians of {rounds} rounds"
    return Report(
        "small",
        vars(options),
        machine.facts(directory),
        [Table(title, columns, runs, "durable_s")],
        bars(runs),
        remarks(runs),
    )


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Hold the figures against the project's own."""
    ours, what = one(runs, "aiockpt"), "durable_s"
    peers = those(runs, "torch", "safetensors")
    return [
        compare("aiockpt : dcp.save with its defaults, speed", those(runs, "dcp.save"), ours, what, 10),
        Bar("aiockpt, later saves: planned in", ours.median("planned_s") * 1e3, 50, True, "ms"),
        Bar("aiockpt: the caller is blocked for", ours.median("blocked_s") * 1e3, 100, True, "ms"),
        *(compare(f"aiockpt : {peer.name}, speed", [peer], ours, what) for peer in peers),
    ]


def remarks(runs: Sequence[Runs]) -> list[str]:
    """Tell the first save of a structure, which plans, apart from later ones."""
    first = one(runs, "aiockpt").first
    moments = {"captured": "captured_s", "planned": "planned_s", "staged": "staged_s", "written": "written_s"}
    if not first:
        return []
    return ["aiockpt, first save: " + ", ".join(f"{name} {duration(first[what])}" for name, what in moments.items())]
