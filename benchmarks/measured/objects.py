"""Saves to an object store and loads from it, on this host and with a latency of each request.

The store answers from memory in a process of its own, so the cores are shared. The limit is obstore, which sends and
gets the same number of bytes in parts of the same size.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import object_server
from benchmarks.harness.measure import Runs, Sample, close, interleave, timed
from benchmarks.harness.object_server import ObjectServer
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, same_bits, size_of, transformer_state
from benchmarks.limits import machine
from benchmarks.peers.object_peers import Fsspec, ObjectPeer, OursOnObjects, PlainObstore, RunAi, S3Connector
from benchmarks.report.bars import Bar, by_name, by_prefix, compare
from benchmarks.report.report import Report, Table, median_time, most_mib, of_limit, speed, spread

OPTIONS = ("gib", "tensors", "rounds", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 3

_LATENCIES_S = (0.0, 0.03)
_OURS, _TARGET = "aiockpt", "aiockpt, into a target"
_POOL_MIB = 256


def peers(server: ObjectServer) -> list[ObjectPeer]:
    """Return all contenders."""
    return [
        PlainObstore(server),
        PlainObstore(server, is_kept=True),
        OursOnObjects(server),
        OursOnObjects(server, _TARGET, into_target=True),
        Fsspec(server),
        S3Connector(server),
        RunAi(server),
    ]


async def measure(selected: Sequence[ObjectPeer], state: State, rounds: int) -> tuple[list[Runs], list[Runs]]:
    """Save and load in rounds; return the runs of the saves, and of the loads."""
    loads: dict[tuple[str, int], Sample] = {}

    async def once(peer: ObjectPeer, number: int) -> Sample:
        peer.server.clear()
        machine.settle()
        peer.server.rules()
        _, sample = await timed(lambda: peer.save(state, "c"), "save_s")
        sample["requests"] = len(peer.server.log)
        machine.settle()
        peer.server.rules()
        found, load = await timed(lambda: peer.load(state, "c"), "load_s")
        load["requests"] = len(peer.server.log)
        if found and not same_bits(found, state):
            raise ValueError("what was read differs from what was saved")
        loads[peer.name, number] = load
        return sample

    saved = await interleave(selected, rounds, once)
    loaded = [
        Runs(
            run.name,
            run.note,
            loads.get((run.name, -1), {}),
            [loads[run.name, at] for at in range(len(run.samples))],
            run.error,
        )
        for run in saved
    ]
    for peer, run in zip(selected, saved, strict=True):
        await close(peer, run)
    return saved, loaded


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    rounds = options.rounds or ROUNDS
    report = Report("objects", vars(options), machine.facts(directory), [], [])
    for latency_s in _LATENCIES_S:
        with object_server.start(latency_s=latency_s) as server:
            given = server.options("s3")
            os.environ |= {f"AWS_{name.upper()}": given[name] for name in ("access_key_id", "secret_access_key")}
            saved, loaded = await measure(chosen(peers(server), options.only), state, rounds)
        where = f"{latency_s * 1000:.0f} ms per request"
        what = f"{size_of(state) / 2**30:.2f} GiB in {len(state)} tensors, {where}, medians of {rounds} rounds"
        report.tables += [
            Table(f"objects, save: {what}", columns("save_s", state, saved), saved, "save_s", "obstore"),
            Table(f"objects, load: {what}", columns("load_s", state, loaded), loaded, "load_s", "obstore"),
        ]
        report.bars += bars(where, saved, loaded)
    report.remarks.append("every load was compared bit for bit")
    return report


def columns(what: str, state: State, runs: Sequence[Runs]) -> dict[str, object]:
    """Return the columns of a table."""
    limit_s = by_prefix(runs, "obstore")[0].median(what) if by_prefix(runs, "obstore") else float("nan")
    return {
        "time (min..max)": spread(what),
        "GiB/s": speed(what, size_of(state)),
        "of limit": of_limit(what, limit_s),
        "requests": lambda run: f"{run.median('requests'):.0f}",
        "extra memory, MiB": most_mib("extra_bytes"),
        "p99 lag": median_time("lag_p99_s"),
    }


def bars(where: str, saved: Sequence[Runs], loaded: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    ours = by_name(saved, _OURS)
    found = [
        compare(f"save, {where}: aiockpt : obstore, speed", by_prefix(saved, "obstore, the"), ours, "save_s", 0.9),
        compare(f"save, {where}: aiockpt : FsspecWriter, speed", by_prefix(saved, "dcp, Fsspec"), ours, "save_s", 3),
        compare(f"save, {where}: aiockpt : s3torchconnector, speed", by_prefix(saved, "dcp, s3"), ours, "save_s", 2),
        Bar(f"save, {where}: extra memory", ours.most("extra_bytes") / 2**20, _POOL_MIB + 64, True, "MiB"),
        Bar(f"save, {where}: p99 lag", ours.median("lag_p99_s") * 1000, 20, True, "ms"),
    ]
    for name, limit in (_OURS, "obstore, all"), (_TARGET, "obstore, the"):
        load = by_name(loaded, name)
        found += [
            compare(f"load, {where}: {name} : {limit} bytes, speed", by_prefix(loaded, limit), load, "load_s", 0.9),
            compare(f"load, {where}: {name} : FsspecReader, speed", by_prefix(loaded, "dcp, F"), load, "load_s", 3),
            compare(f"load, {where}: {name} : s3torchconnector, speed", by_prefix(loaded, "dcp, s3"), load, "load_s"),
        ]
    return found
