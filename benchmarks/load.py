"""A large state, loaded by everybody: from the disk, and from the page cache."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks import machine, raw
from benchmarks.bars import Bar, compare, one, shortest, those
from benchmarks.loaders import Aiockpt, Loader, dcp_load, limits, safetensors_load, torch_load, torch_map
from benchmarks.measure import Lag, PeakMemory, Runs, Sample, close, interleave
from benchmarks.report import Report, Table, duration, median_time, most_mib, of_limit, speed, spread
from benchmarks.selection import chosen
from benchmarks.states import State, empty_like, same_bits, size_of, transformer_state

OPTIONS = ("gib", "tensors", "rounds", "only")
ROUNDS = 5

_MAPPED = "safetensors mmap, read"
# Those that fill memory of their own, as every other loader does.
_OWN = ("safetensors mmap, written", "safetensors pread")


def save_by_aiockpt(state: State, path: Path) -> None:
    """Save as this package does."""
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, path)


def save_by_safetensors(state: State, path: Path) -> None:
    """Save as one file of safetensors."""
    from safetensors.torch import save_file

    save_file(state, path)


WRITERS: dict[str, Callable[[State, Path], object]] = {
    "raw": lambda state, path: raw.write_direct(path, raw.Arena(64 << 20), size_of(state), threads=1),
    "aiockpt": save_by_aiockpt,
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    "state.pt": torch.save,
    "state.safetensors": save_by_safetensors,
}
"""How the file or directory of each name is made, when somebody first needs it."""


def loaders(directory: Path, arena: raw.Arena, target: State, *, cold: bool) -> list[Loader]:
    """Give everybody who can load."""
    return [
        *limits(directory / "raw", arena, direct=cold),
        Aiockpt(directory / "aiockpt"),
        Aiockpt(directory / "aiockpt", target),
        Aiockpt(directory / "dcp", target, label="aiockpt, dcp.save's files"),
        dcp_load(directory / "dcp", target),
        torch_load(directory / "state.pt"),
        *torch_map(directory / "state.pt"),
        *safetensors_load(directory / "state.safetensors"),
    ]


async def measure(
    taking_part: Sequence[Loader], state: State, target: State, rounds: int, *, cold: bool
) -> tuple[list[Runs], str]:
    """Let everybody load in rounds; what the warm-up brings is compared with what was saved.

    Returns:
        All runs, and how files were taken out of the page cache.
    """
    means = ""

    async def load_once(loader: Loader, number: int) -> Sample:
        nonlocal means
        machine.settle()
        if not loader.path.exists():
            WRITERS[loader.path.name](state, loader.path)
        if number < 0 and loader.into_target:
            for tensor in target.values():
                tensor.zero_()
        means = machine.drop_from_cache(loader.files())
        if not cold:
            machine.bring_into_cache(loader.files())
        with PeakMemory() as memory:
            async with Lag() as lag:
                started = time.perf_counter()
                loaded = await loader.load()
                took = time.perf_counter() - started
        if number < 0 and loaded is not None and not same_bits(loaded, state):
            raise ValueError("what was loaded differs from what was saved")
        return {"loaded_s": took, "extra_bytes": memory.extra_bytes, **lag.sample()}

    runs = await interleave(taking_part, rounds, load_once)
    for loader, run in zip(taking_part, runs, strict=True):
        await close(loader, run)
    return runs, means


async def run(options: Namespace, directory: Path) -> Report:
    """Measure, and judge."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    nbytes, target, arena = size_of(state), empty_like(state), raw.Arena(size_of(state))
    rounds = options.rounds or ROUNDS
    tables, found, remarks = [], [], []
    for cold in (True, False):
        kind = "cold" if cold else "cached"
        taking_part = chosen(loaders(directory, arena, target, cold=cold), options.only)
        runs, means = await measure(taking_part, state, target, rounds, cold=cold)
        title = f"load, {kind}: {nbytes / 2**30:.2f} GiB in {len(state)} tensors, medians of {rounds} rounds"
        tables.append(Table(title, columns(nbytes, shortest(runs, "raw", "loaded_s")), runs))
        found += cold_bars(runs) if cold else cached_bars(runs)
        if cold:
            remarks.append(f"cold: files taken out of the page cache by {means}")
    return Report("load", vars(options), machine.facts(directory), tables, found, remarks)


def columns(nbytes: int, limit_s: float) -> dict:
    """Give what the tables show."""
    return {
        "loaded (min..max)": spread("loaded_s"),
        "GiB/s": speed("loaded_s", nbytes),
        "of limit": of_limit("loaded_s", limit_s),
        "first": lambda run: duration(run.first["loaded_s"]),
        "extra memory, MiB": most_mib("extra_bytes"),
        "longest stall": lambda run: "-" if "raw" in run.name or "fresh" in run.name else median_time("stall_s")(run),
    }


def cold_bars(runs: Sequence[Runs]) -> list[Bar]:
    """Hold loads from the disk against the project's own figures."""
    new, target, what = one(runs, "aiockpt, new tensors"), one(runs, "aiockpt, into a target"), "loaded_s"
    limits, stock = those(runs, "raw"), those(runs, "dcp.load")
    return [
        compare("cold, aiockpt into new tensors : raw O_DIRECT read, speed", limits, new, what, 0.95),
        compare("cold, aiockpt into a target : raw O_DIRECT read, speed", limits, target, what, 0.95),
        compare("cold, aiockpt : dcp.load, both into a target, speed", stock, target, what, 2.5),
        compare("cold, aiockpt : best safetensors with memory of its own, speed", those(runs, *_OWN), new, what, 1),
        compare("cold, aiockpt : safetensors mapped, speed", those(runs, _MAPPED), new, what),
    ]


def cached_bars(runs: Sequence[Runs]) -> list[Bar]:
    """Hold loads from the page cache against the project's own figures."""
    new, target, what = one(runs, "aiockpt, new tensors"), one(runs, "aiockpt, into a target"), "loaded_s"
    fresh, touched, stock = those(runs, "fresh"), those(runs, "raw"), those(runs, "dcp.load")
    return [
        compare("cached, aiockpt : dcp.load, both into a target, speed", stock, target, what, 5),
        compare("cached, aiockpt : best safetensors with memory of its own, speed", those(runs, *_OWN), new, what, 2),
        compare("cached, aiockpt : safetensors mapped, speed", those(runs, _MAPPED), new, what),
        compare("cached, aiockpt into new tensors : raw read into fresh memory, speed", fresh, new, what),
        compare("cached, aiockpt into a target : raw read into touched memory, speed", touched, target, what),
    ]
