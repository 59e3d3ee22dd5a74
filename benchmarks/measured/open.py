"""Opening a checkpoint of very many tensors: the time until its keys are known, and one entry was looked up.

The stock checkpoint has metadata that DCP planned and wrote, over aiockpt's data files: dcp.save would take long for so
many tensors, and its metadata would be the same. ``--load`` also loads the whole state with every contender, cached.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.harness.measure import Runs, Sample, close, interleave, timed
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, empty_like, size_of, small_state
from benchmarks.limits import machine
from benchmarks.measured import load
from benchmarks.peers.checkpoints import make
from benchmarks.peers.loaders import Aiockpt as AiockptLoader
from benchmarks.peers.loaders import Loader, dcp_load, safetensors_load, torch_load
from benchmarks.peers.openers import (
    METADATA,
    Aiockpt,
    Opener,
    make_plain,
    make_stock,
    read_metadata,
    safe_open,
    torch_map,
)
from benchmarks.ranks import savers
from benchmarks.ranks.world import World
from benchmarks.report.bars import Bar, by_name, compare
from benchmarks.report.report import Report, Table, duration, median_time, most_mib, number, spread

OPTIONS = ("count", "nbytes", "rounds", "only", "load")
ROUNDS = 3
LOAD_ROUNDS = 1  # some contenders take minutes

_OURS, _STOCK, _RANKS = "aiockpt, own checkpoint", "dcp read_metadata", "aiockpt, own of several ranks"
_SIZE = 4


def make_all(state: State, directory: Path) -> None:
    """Write all checkpoints that are opened."""
    for name in ("aiockpt", "state.pt", "state.safetensors"):
        make(state, directory / name)
    make_plain(directory / "aiockpt", directory / "plain")
    make_stock(directory / "aiockpt", directory / "stock", state)
    with World(_SIZE) as world:
        world.call(savers.save_parts, len(state), next(iter(state.values())).nbytes, directory / "ranks")


def openers(directory: Path) -> list[Opener]:
    """Return all contenders."""
    own, plain, stock = (directory / name for name in ("aiockpt", "plain", "stock"))
    return [
        Aiockpt(own, _OURS),
        Aiockpt(directory / "ranks", _RANKS, f"as many items, {_SIZE} of each tensor", ranks=_SIZE),
        Aiockpt(plain, "aiockpt, own without a manifest", "its .metadata"),
        Aiockpt(stock, "aiockpt, stock checkpoint", "DCP's .metadata"),
        read_metadata(stock, _STOCK, "unpickles DCP's .metadata"),
        read_metadata(plain, "dcp read_metadata, our .metadata", "unpickles ours"),
        safe_open(directory / "state.safetensors"),
        torch_map(directory / "state.pt"),
    ]


async def measure(selected: Sequence[Opener], state: State, rounds: int, *, cold: bool) -> tuple[list[Runs], str]:
    """Open in rounds.

    Returns:
        All runs, and the means by which files were dropped from the page cache.
    """
    names, (elements,) = list(state), next(iter(state.values())).shape
    means = ""

    async def open_once(opener: Opener, _number: int) -> Sample:
        nonlocal means
        machine.settle()
        means = machine.drop_from_cache(opener.files())
        if not cold:
            machine.bring_into_cache(opener.files())
        count = len(names) // opener.ranks
        key, expected = names[count // 2], (count, (elements * opener.ranks,))
        async with AsyncExitStack() as stack:
            found, sample = await timed(functools.partial(opener.open, key, stack), "opened_s")
        if found != expected:
            raise ValueError(f"found {found[0]} keys and the shape {found[1]}; saved were {expected}")
        return sample

    return await interleave(selected, rounds, open_once), means


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = small_state(options.count, options.nbytes)
    make_all(state, directory)
    selected, rounds = chosen(openers(directory), options.only), options.rounds or ROUNDS
    report = Report("open", vars(options), machine.facts(directory), [], [])
    for cold in (True, False):
        kind = "cold" if cold else "cached"
        runs, means = await measure(selected, state, rounds, cold=cold)
        title = f"open, {kind}: {len(state)} tensors of {options.nbytes} bytes, medians of {rounds} rounds"
        report.tables.append(Table(title, columns(), runs, "opened_s"))
        report.bars += bars(kind, runs)
    report.remarks = [f"cold: files taken out of the page cache by {means}", sizes(directory)]
    for opener, last in zip(selected, runs, strict=True):
        await close(opener, last)
    if options.load:
        await load_all(report, state, directory, options)
    return report


def columns() -> dict:
    """Return the columns of the tables of opening."""
    return {
        "opened (min..max)": spread("opened_s"),
        "first": lambda run: duration(run.first["opened_s"]),
        "asked for, MiB": lambda run: number(run.median("asked_bytes") / 2**20),
        "from the disk, MiB": lambda run: number(run.median("disk_bytes") / 2**20),
        "extra memory, MiB": most_mib("extra_bytes"),
        "longest stall": median_time("stall_s"),
    }


def sizes(directory: Path) -> str:
    """Return a remark on the sizes of the metadata files."""
    files = [directory / name / METADATA for name in ("aiockpt", "stock")]
    files += [file for file in sorted((directory / "aiockpt").glob(".*")) if file.name != METADATA]
    return "MiB: " + ", ".join(
        f"{file.relative_to(directory)} {number(file.stat().st_size / 2**20, digits=1)}" for file in files
    )


def bars(kind: str, runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    ours, stock, what = by_name(runs, _OURS), by_name(runs, _STOCK), "opened_s"
    rest = [run for run in runs if run.name.startswith(("safetensors", "torch"))]
    return [
        compare(f"{kind}, aiockpt : unpickling DCP's .metadata, speed", [stock], ours, what, 3),
        compare(
            f"{kind}, aiockpt with the stock checkpoint : unpickling the same .metadata, speed",
            [stock],
            by_name(runs, "aiockpt, stock checkpoint"),
            what,
        ),
        compare(
            f"{kind}, aiockpt with {_SIZE} ranks' checkpoint : one process's", [ours], by_name(runs, _RANKS), what, 0.9
        ),
        *(compare(f"{kind}, aiockpt : {run.name}, speed", [run], ours, what) for run in rest),
    ]


def loaders(directory: Path, target: State) -> list[Loader]:
    """Return the contenders that load the whole state."""
    mapped_and_read, _, read = safetensors_load(directory / "state.safetensors")
    return [
        AiockptLoader(directory / "aiockpt", name="aiockpt, new tensors"),
        AiockptLoader(directory / "aiockpt", target, name="aiockpt, into a target"),
        AiockptLoader(directory / "stock", target, name="aiockpt, stock checkpoint", note="into a target"),
        dcp_load(directory / "stock", target),
        torch_load(directory / "state.pt"),
        mapped_and_read,
        read,
    ]


async def load_all(report: Report, state: State, directory: Path, options: Namespace) -> None:
    """Load the whole state with every contender, and add the table and bars to the report."""
    target = empty_like(state)
    rounds = options.rounds or LOAD_ROUNDS
    selected = chosen(loaders(directory, target), options.only)
    runs, _ = await load.measure(selected, state, target, rounds, cold=False)
    title = f"open, loading the whole, cached: {size_of(state) / 2**20:.0f} MiB, medians of {rounds} rounds"
    shown = {
        "loaded (min..max)": spread("loaded_s"),
        "first": lambda run: duration(run.first["loaded_s"]),
        "extra memory, MiB": most_mib("extra_bytes"),
        "longest stall": median_time("stall_s"),
    }
    report.tables.append(Table(title, shown, runs, "loaded_s"))
    new, target_runs, what = by_name(runs, "aiockpt, new tensors"), by_name(runs, "aiockpt, into a target"), "loaded_s"
    report.bars += [
        compare(
            "loading, aiockpt : dcp.load, both into a target, speed",
            [by_name(runs, "dcp.load, into a target")],
            target_runs,
            what,
        ),
        compare("loading, aiockpt : torch.load, speed", [by_name(runs, "torch.load")], new, what),
        compare("loading, aiockpt : safetensors, speed", [by_name(runs, "safetensors pread")], new, what),
    ]
