"""Loads of a large state: from the disk, and from the page cache.

The first load of each contender is shown, but does not count: it fills fresh memory. Later loads are faster if the
allocator returns memory that was used before. `new-process` measures loads that always fill fresh memory.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measure import Runs, Sample, close, interleave
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, empty_like, read_pages, size_of, transformer_state, write_pages
from benchmarks.limits import machine, raw
from benchmarks.peers.checkpoints import make
from benchmarks.peers.loaders import (
    READ,
    WRITTEN,
    Aiockpt,
    Loader,
    dcp_load,
    limits,
    safetensors_load,
    torch_load,
    torch_map,
)
from benchmarks.peers.streamers import TorchCheckpointing, fastsafetensors_load, runai_load
from benchmarks.report.bars import Bar, by_name, by_prefix, compare, shortest
from benchmarks.report.report import Report, Table, duration, median_time, most_mib, number, of_limit, speed, spread

OPTIONS = ("gib", "tensors", "rounds", "only")
ROUNDS = 5

_LIMITS = ("raw", "CRC", "fresh")
_MAPPED = "safetensors mmap, read"
# The safetensors contenders that fill memory of their own, as all other loaders do.
_OWN = ("safetensors mmap, written", "safetensors pread")


def ours(directory: Path, target: State) -> list[Loader]:
    """Return the contenders of this package."""
    own, stock = directory / "aiockpt", directory / "dcp"
    return [
        Aiockpt(own, name="aiockpt, new tensors"),
        Aiockpt(own, target, name="aiockpt, into a target"),
        Aiockpt(own, name="aiockpt, new tensors, no CRC", note="verify=False", verify=False),
        Aiockpt(own, name="aiockpt mmap, read", note=READ, use=read_pages, mmap=True),
        Aiockpt(own, name="aiockpt mmap, written", note=WRITTEN, use=write_pages, mmap=True),
        Aiockpt(stock, target, name="aiockpt, dcp.save's files"),
        Aiockpt(directory / "state.safetensors", name="aiockpt, a file of safetensors", note="has no CRC"),
        Aiockpt(directory / "state.pt", name="aiockpt, a file of torch.save"),
    ]


def loaders(directory: Path, arena: raw.Arena, target: State, *, cold: bool) -> list[Loader]:
    """Return all contenders."""
    return [
        *limits(directory / "raw", arena, direct=cold),
        *ours(directory, target),
        dcp_load(directory / "dcp", target),
        torch_load(directory / "state.pt"),
        *torch_map(directory / "state.pt"),
        *safetensors_load(directory / "state.safetensors"),
        runai_load(directory / "state.safetensors"),
        fastsafetensors_load(directory / "state.safetensors", direct=cold),
        TorchCheckpointing(directory / "torch_checkpointing", direct=cold),
        TorchCheckpointing(directory / "torch_checkpointing", target, direct=cold),
    ]


async def measure(
    selected: Sequence[Loader], state: State, target: State, rounds: int, *, cold: bool
) -> tuple[list[Runs], str]:
    """Load in rounds; compare each loaded state with the saved one.

    Returns:
        All runs, and the means by which files were dropped from the page cache.
    """
    means = ""

    async def load_once(loader: Loader, _number: int) -> Sample:
        nonlocal means
        machine.settle()
        make(state, loader.path)
        if loader.into_target:
            for tensor in target.values():
                tensor.zero_()
        await loader.prepare()
        means = machine.drop_from_cache(loader.files())
        if not cold:
            machine.bring_into_cache(loader.files())
        loaded, sample = await loader.measured()
        if not loader.matches(loaded, state):
            raise ValueError("what was loaded differs from what was saved")
        return sample

    runs = await interleave(selected, rounds, load_once)
    for loader, run in zip(selected, runs, strict=True):
        await close(loader, run)
    return runs, means


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    nbytes, target, arena = size_of(state), empty_like(state), raw.Arena(size_of(state))
    rounds = options.rounds or ROUNDS
    tables, found, remarks = [], [], []
    for cold in (True, False):
        kind = "cold" if cold else "cached"
        selected = chosen(loaders(directory, arena, target, cold=cold), options.only)
        runs, means = await measure(selected, state, target, rounds, cold=cold)
        title = f"load, {kind}: {nbytes / 2**30:.2f} GiB in {len(state)} tensors, medians of {rounds} rounds"
        tables.append(Table(title, columns(nbytes, shortest(runs, "raw", "loaded_s")), runs, "loaded_s", "raw"))
        found += cold_bars(runs) if cold else cached_bars(runs)
        if cold:
            remarks.append(f"cold: files taken out of the page cache by {means}")
    remarks.append("first: the load that doesn't count, into memory that nobody had used before")
    return Report("load", vars(options), machine.facts(directory), tables, found, remarks)


def columns(nbytes: int, limit_s: float) -> dict:
    """Return the columns of the tables."""
    return {
        "loaded (min..max)": spread("loaded_s"),
        "GiB/s": speed("loaded_s", nbytes),
        "of limit": of_limit("loaded_s", limit_s),
        "first": lambda run: duration(run.first["loaded_s"]),
        "from the disk": lambda run: f"{number(run.median('disk_bytes') / nbytes)} x",
        "extra memory, MiB": most_mib("extra_bytes"),
        "longest stall": lambda run: (
            "-" if run.name.startswith(("raw", "CRC", "fresh")) else median_time("stall_s")(run)
        ),
    }


def cold_bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare loads from the disk with the project's targets."""
    new, target, what = by_name(runs, "aiockpt, new tensors"), by_name(runs, "aiockpt, into a target"), "loaded_s"
    limits, stock = by_prefix(runs, "raw"), by_prefix(runs, "dcp.load")
    return [
        compare("cold, aiockpt into new tensors : raw O_DIRECT read, speed", limits, new, what, 0.95),
        compare("cold, aiockpt into a target : raw O_DIRECT read, speed", limits, target, what, 0.95),
        compare("cold, aiockpt : dcp.load, both into a target, speed", stock, target, what, 2.5),
        compare("cold, aiockpt : best safetensors with memory of its own, speed", by_prefix(runs, *_OWN), new, what, 1),
        compare("cold, aiockpt into a target : raw read and CRC, speed", by_prefix(runs, "CRC, raw"), target, what),
        *shown("cold", runs),
    ]


def cached_bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare loads from the page cache with the project's targets."""
    new, target, what = by_name(runs, "aiockpt, new tensors"), by_name(runs, "aiockpt, into a target"), "loaded_s"
    touched, stock = by_prefix(runs, "raw"), by_prefix(runs, "dcp.load")
    return [
        compare("cached, aiockpt : dcp.load, both into a target, speed", stock, target, what, 5),
        compare(
            "cached, aiockpt : best safetensors with memory of its own, speed", by_prefix(runs, *_OWN), new, what, 2
        ),
        compare("cached, aiockpt into a target : raw read into touched memory, speed", touched, target, what),
        compare("cached, aiockpt into a target : raw read and CRC, speed", by_prefix(runs, "CRC, raw"), target, what),
        *shown("cached", runs),
    ]


def shown(kind: str, runs: Sequence[Runs]) -> list[Bar]:
    """Return comparisons without a target."""
    new, what = by_name(runs, "aiockpt, new tensors"), "loaded_s"
    fresh, own = by_prefix(runs, "fresh"), by_prefix(runs, *_OWN)
    streamers = ("Run:ai streamer", "fastsafetensors", "torch_checkpointing, new tensors")
    return [
        compare(f"{kind}, aiockpt into new tensors : raw read into fresh memory, speed", fresh, new, what),
        compare(
            f"{kind}, aiockpt mapped : safetensors mapped, both read, speed",
            by_prefix(runs, _MAPPED),
            by_name(runs, "aiockpt mmap, read"),
            what,
        ),
        compare(
            f"{kind}, aiockpt with a file of safetensors : best safetensors, memory of its own, speed",
            own,
            by_name(runs, "aiockpt, a file of safetensors"),
            what,
        ),
        compare(
            f"{kind}, aiockpt with a file of torch.save : torch.load, speed",
            [by_name(runs, "torch.load")],
            by_name(runs, "aiockpt, a file of torch.save"),
            what,
        ),
        *(compare(f"{kind}, aiockpt : {name}, speed", [by_name(runs, name)], new, what) for name in streamers),
    ]
