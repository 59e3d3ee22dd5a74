"""Loads of a state that all ranks have, from an object store and from a file system, with and without sharing reads.

Every process is a rank of a gloo group on this machine. The store answers from memory in a process of its own, after a
latency. Times are from the start of the first rank to the end of the last.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import aiockpt
from benchmarks.harness import object_server
from benchmarks.harness.measure import Runs, Sample, interleave
from benchmarks.harness.object_server import ObjectServer
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, empty_like, same_bits, size_of, transformer_state
from benchmarks.limits import machine
from benchmarks.ranks.sharded import slowest_of
from benchmarks.ranks.world import Rank, World
from benchmarks.report.bars import Bar, by_name, compare
from benchmarks.report.report import Report, Table, speed, spread

OPTIONS = ("gib", "tensors", "ranks", "rounds", "only")
DEFAULTS = {"gib": 1.0, "ranks": "4"}
ROUNDS = 3

_LATENCY_S = 0.03
_ALONE, _SHARED, _AUTO = "each rank alone", "shared", "auto"


@dataclass(frozen=True)
class _Way:
    """A way to load; with ``torch.distributed``'s own words, all of them are collective."""

    name: str
    note: str
    share: Literal["auto"] | bool


_WAYS = [
    _Way(_ALONE, "share=False", share=False),
    _Way(_SHARED, "share=True", share=True),
    _Way(_AUTO, "", "auto"),
]


def prepare(rank: Rank, nbytes: int, tensors: int, path: str, options: dict[str, Any]) -> None:
    """Make a checkpointer, and on rank 0 the checkpoint."""
    rank.kept["checkpointer"] = aiockpt.SyncCheckpointer(storage_options=options)
    torch.manual_seed(0)  # the same on every rank
    rank.kept["state"] = state = transformer_state(nbytes, tensors)
    rank.kept["target"] = empty_like(state)
    if rank.rank == 0:
        with aiockpt.SyncCheckpointer(process_group=None, storage_options=options) as alone:
            alone.save(state, path)


def load_once(rank: Rank, path: str, share: Literal["auto"] | bool) -> Sample:
    """Load into tensors that are there, and compare them."""
    state, target = rank.kept["state"], rank.kept["target"]
    for tensor in target.values():
        tensor.zero_()
    begun, before = time.perf_counter(), time.process_time()
    rank.kept["checkpointer"].load(path, target, share=share)
    over, cpu_s = time.perf_counter(), time.process_time() - before
    if not same_bits(target, state):
        raise ValueError("what was read differs from what was saved")
    return {"begun": begun, "over": over, "cpu_s": cpu_s}


def close(rank: Rank) -> None:
    """End the checkpointer."""
    rank.kept["checkpointer"].close()
    rank.kept.clear()


async def _measure(world: World, server: ObjectServer | None, path: str, options: Namespace) -> list[Runs]:
    given = {} if server is None else server.options("s3")
    world.call(prepare, int(options.gib * 2**30), options.tensors, path, given)

    async def once(way: _Way, _: int) -> Sample:
        machine.settle()
        if server is not None:
            server.rules()
        sample = slowest_of(world.call(load_once, path, way.share))
        if server is not None:
            sample |= {"sent_bytes": server.sent, "requests": len(server.log)}
        return sample

    runs = await interleave(chosen(_WAYS, options.only), options.rounds or ROUNDS, once)
    world.call(close)
    return runs


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    size, rounds = int(options.ranks), options.rounds or ROUNDS
    nbytes = size_of(_state(options))
    report = Report("share", vars(options), machine.facts(directory), [], [])
    with World(size) as world:
        with object_server.start(latency_s=_LATENCY_S) as server:
            stored = await _measure(world, server, "s3://bucket/c", options)
        local = await _measure(world, None, str(directory / "shared"), options)
    machine.remove(directory / "shared")
    what = f"{size} ranks load {nbytes / 2**30:.2f} GiB, which all of them have, medians of {rounds} rounds"
    asked = {
        "bytes, of the state": lambda run: f"{run.median('sent_bytes') / nbytes:.2f}",
        "requests": lambda run: f"{run.median('requests'):.0f}",
    }
    latency = f"an object store, {_LATENCY_S * 1000:.0f} ms per request"
    report.tables += [
        Table(f"share, {latency}: {what}", {**_columns(nbytes), **asked}, stored, "all_s"),
        Table(f"share, a file system, cached: {what}", _columns(nbytes), local, "all_s"),
    ]
    sent = by_name(stored, _AUTO).most("sent_bytes") / nbytes
    report.bars.append(Bar(f"{latency}: bytes requested, of the state", sent, 1.1, at_most=True))
    for where, runs, bound in ((latency, stored, 2.0), ("a file system", local, 0.95)):
        alone, auto = by_name(runs, _ALONE), by_name(runs, _AUTO)
        report.bars.append(compare(f"{where}: auto : each rank alone, speed", [alone], auto, "all_s", bound))
    report.remarks.append("every load was compared bit for bit, after the clock had stopped")
    return report


def _state(options: Namespace) -> State:
    return transformer_state(int(options.gib * 2**30), options.tensors)


def _columns(nbytes: int) -> dict[str, Any]:
    return {
        "time (min..max)": spread("all_s"),
        "GiB/s of each rank": speed("all_s", nbytes),
        "CPU time of a rank": lambda run: f"{run.median('cpu_s'):.2f} s",
    }
