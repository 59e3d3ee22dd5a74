"""A training loop beside the mirror of its run at full rate, compared with the same loop alone.

The mirror copies steps from the disk as fast as it can: to a directory, and to an object store in a process of its own
on the same cores. ``CPU`` is that of this process, less that of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.engine.facade import EngineAccess
from aiockpt.format.manifest.manifest import save_id_of
from aiockpt.storage.base import Storage
from aiockpt.storage.copying import RateLimit, copy_checkpoint
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.objects.obstore import storage_for_url
from benchmarks.harness import object_server
from benchmarks.harness.measure import Runs, Sample, interleave
from benchmarks.harness.object_server import ObjectServer
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import random_tensor
from benchmarks.limits import machine
from benchmarks.measured.pace import walk
from benchmarks.measured.work import PythonLoop, Work
from benchmarks.report.bars import Bar
from benchmarks.report.report import Report, Table, duration, median_time, number

OPTIONS = ("gib", "alone", "rounds", "only")
DEFAULTS = {"gib": 0.5, "alone": 5.0}
ROUNDS = 3

_LEAST_KEPT = 0.98


class WaitingLoop(Work):
    """Waits for its device most of the time, as a loop on an accelerator does."""

    name = "waits for a device"

    def running(self) -> nullcontext[None]:
        return nullcontext()

    def step(self) -> None:
        for _ in range(1000):
            pass
        time.sleep(0.01)


@dataclass
class Beside:
    """A kind of work beside a kind of mirror."""

    work: Work
    to: str
    storage: Storage
    target: str
    server: ObjectServer | None = None
    bytes_per_s: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.work.name}, {self.to}"


async def _beside(each: Beside, source: Path, alone_s: float) -> Sample:
    """Measure the loop alone, and beside copies that follow each other."""
    save_id = save_id_of((source / ".aiockpt.json").read_bytes())
    ended = asyncio.Event()
    copied: list[int] = []

    workers = Workers(6, "mirror", nice=10)  # as those of a mirror

    def copies(access: EngineAccess, limit: RateLimit) -> Iterator[asyncio.Future[object]]:
        for count in itertools.count():
            to = each.storage.resolve(f"{each.target}/{count}")
            yield asyncio.wrap_future(
                access.call(
                    lambda _, to=to: copy_checkpoint(
                        LocalStorage(), str(source), each.storage, to, save_id, workers=workers, limit=limit
                    ),
                    "a copy",
                ).completion
            )

    async def mirror() -> float:
        started = time.perf_counter()
        with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
            for count, copy in enumerate(copies(EngineAccess(ckpt), RateLimit(each.bytes_per_s))):
                copied.append((await copy).nbytes)  # type: ignore[attr-defined]
                if each.server is not None:
                    each.server.clear()
                else:
                    await asyncio.to_thread(ckpt.delete, Path(each.target) / str(count))
                if ended.is_set():
                    break
        return time.perf_counter() - started

    def over(_: int, took_s: float) -> bool:
        return took_s >= alone_s

    with each.work.running():
        cpu_s = time.process_time()
        alone = await asyncio.to_thread(walk, each.work.step, over)
        alone_cpu_s = (time.process_time() - cpu_s) / alone.took_s
        mirroring = asyncio.ensure_future(mirror())
        cpu_s = time.process_time()
        beside = await asyncio.to_thread(walk, each.work.step, over)
        ended.set()
        took_s = await mirroring
        workers.close()
        cpu_s = time.process_time() - cpu_s
    gib = sum(copied) / 2**30
    return {
        "kept": beside.per_s / alone.per_s,
        "bytes_per_s": sum(copied) / took_s,
        "cpu_s_per_gib": max(0.0, cpu_s - alone_cpu_s * beside.took_s) / gib,
        "step_s": beside.took_s / len(beside.steps_s),
        "step_max_s": max(beside.steps_s),
    }


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    source, rounds = directory / "source", options.rounds or ROUNDS
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({f"w{at}": random_tensor(int(options.gib * 2**30) // 16) for at in range(4)}, source)
    before = set(psutil.Process().children())
    with object_server.start() as server:
        for process in set(psutil.Process().children()) - before:
            process.nice(19)  # a store is on other hosts
        bucket = storage_for_url("s3://bench", grace_s=0.0, **server.options("s3"))
        contenders = [
            beside
            for work in (WaitingLoop(), PythonLoop())
            for beside in (
                Beside(work, "a directory", LocalStorage(), str(directory / "mirror")),
                Beside(work, "an object store", bucket, "s3://bench/run", server),
                Beside(work, "an object store at 100 MiB/s", bucket, "s3://bench/run", server, 100 * 2**20),
            )
        ]

        async def once(each: Beside, _: int) -> Sample:
            machine.settle()
            return await _beside(each, source, options.alone)

        runs = await interleave(chosen(contenders, options.only), rounds, once)
    columns = {
        "steps kept": lambda run: number(run.median("kept")),
        "copied, MiB/s": lambda run: f"{run.median('bytes_per_s') / 2**20:.0f}",
        "CPU, s/GiB": lambda run: number(run.median("cpu_s_per_gib")),
        "step": median_time("step_s"),
        "longest": lambda run: duration(run.most("step_max_s")),
    }
    title = f"tiers: a loop beside a mirror at full rate, medians of {rounds} rounds of {options.alone:g} s"
    remarks = [f"the object store is a process on the same {os.cpu_count()} cores, with the lowest priority"]
    facts = machine.facts(directory)
    return Report("tiers", vars(options), facts, [Table(title, columns, runs, "step_s")], bars(runs), remarks)


def bars(runs: list[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    bounds = {run.name: _LEAST_KEPT if run.name.startswith(WaitingLoop.name) else None for run in runs}
    return [Bar(f"{run.name}: steps per second beside : alone", run.median("kept"), bounds[run.name]) for run in runs]
