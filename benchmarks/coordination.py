"""What rank 0 has to do for a save of very many ranks, which are only imagined.

It unpickles what each rank would send, plans, checks, encodes the index and the manifest, and pickles each answer, as
it does in a save. Only the network, the disk, and the other ranks' own work are left out. An item is one part of a
tensor that one rank writes; every rank has four objects besides. They are counted in two ways:

- in all: so many items are spread over all ranks, every tensor cut in eight parts;
- on each rank: every tensor has a part on every rank, so that there are ranks x items of them.
"""

from __future__ import annotations

import resource
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.bars import Bar
from benchmarks.imagined import Imagined
from benchmarks.imagined_ours import Coordinator
from benchmarks.imagined_torch import TorchCoordinator
from benchmarks.loglog import Line, Panel, render
from benchmarks.measure import Runs, Sample
from benchmarks.report import Report, Table, duration, median_time, number
from benchmarks.world import context

OPTIONS = ("ranks", "items", "counted", "limit", "plot", "rounds", "only")
DEFAULTS = {"ranks": "8,64,512,1024,4096"}
ROUNDS = 3

_MEMORY_BYTES = 10 << 30
_TORCH_LIMIT_S = 60
_KINDS = {"aiockpt": Coordinator, "dcp.save, plans cached": TorchCoordinator}
_PARTS = ("hear", "plan", "tell", "check", "metadata", "manifest")
_BAR_AT, _BAR_S = (1024, 10_000), 1.0


async def run(options: Namespace, directory: Path) -> Report:
    """Measure, and judge."""
    tables, bars, panels = [], [], []
    for each in [{"all": False, "each": True}[part] for part in options.counted.split(",")]:
        counted = "on each rank" if each else "in all"
        measured = list(_measure(options, directory, each=each))
        columns = {
            "first save": lambda run: duration(run.first["all_s"]),
            "later save": median_time("all_s"),
            **{part: median_time(part) for part in _PARTS},
            "index, MiB": lambda run: number(run.median("index_bytes") / 2**20, 1),
            "memory, MiB": lambda run: number(run.most("memory_bytes") / 2**20, 0),
        }
        runs = [run for _, _, run in measured]
        tables.append(
            Table(f"coordination, items counted {counted}; the columns between are of later saves", columns, runs)
        )
        bars += [
            Bar(f"{run.name}, counted {counted}: a later save", run.median("all_s"), _BAR_S, True, "s")
            for kind, world, run in measured
            if kind == "aiockpt" and ((world.ranks, world.items) == _BAR_AT or len(runs) <= 2)
        ]
        panels += [_panel(measured, counted, items) for items in _numbers(options.items)]
    if options.plot:
        options.plot.write_text(render(panels))
    return Report("coordination", vars(options), machine.facts(directory), tables, bars)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measure(options: Namespace, directory: Path, *, each: bool) -> Iterator[tuple[str, Imagined, Runs]]:
    """Measure every point; leave out what would take longer than a smaller one that took too long."""
    rounds = options.rounds or ROUNDS
    for kind in _KINDS:
        if options.only and not any(part in kind for part in options.only.split(",")):
            continue
        limit_s = options.limit if kind == "aiockpt" else min(options.limit, _TORCH_LIMIT_S)
        failed: list[Imagined] = []
        for items in _numbers(options.items):
            for ranks in _numbers(options.ranks):
                world = Imagined(ranks, items, each)
                run = Runs(f"{kind}: {ranks:,} ranks, {items:,} items")
                if any(less.ranks <= ranks and less.items <= items for less in failed):
                    run.error = "not run: a smaller one took too long or too much memory"
                else:
                    _measure_point(run, kind, world, directory, rounds, limit_s)
                    if run.error:
                        failed.append(world)
                yield kind, world, run


def _measure_point(run: Runs, kind: str, world: Imagined, directory: Path, rounds: int, limit_s: float) -> None:
    """Measure one point in a process of its own, which ends when it takes too long or too much memory."""
    processes = context()
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_work, args=(kind, world, str(directory), rounds, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while len(run.samples) < rounds and run.error is None:
            if not ours.poll(limit_s):
                run.error = f"not run to its end: a save takes longer than {limit_s:g} s"
                break
            sample = ours.recv()
            if isinstance(sample, str):
                run.error = sample
            elif run.first:
                run.samples.append(sample)
            else:
                run.first = sample
    except EOFError:
        run.error = "its process has ended"
    finally:
        process.kill()
        process.join()


def _work(kind: str, world: Imagined, directory: str, rounds: int, pipe: Connection) -> None:
    """Be the process of one point."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            rank0: Any = Coordinator(world) if kind == "aiockpt" else TorchCoordinator(world, Path(folder))
            for step in range(rounds + 1):
                spent = rank0.save(step)
                pipe.send(_sample(spent, rank0))
    except MemoryError:
        pipe.send(f"not run: needs more than {_MEMORY_BYTES >> 30} GiB")
    except Exception as exc:
        pipe.send(f"{type(exc).__name__}: {exc}")


def _sample(spent: Sample, rank0: Any) -> Sample:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**spent, "all_s": sum(spent.values()), "index_bytes": rank0.index_bytes, "memory_bytes": memory}


def _panel(measured: list[tuple[str, Imagined, Runs]], counted: str, items: int) -> Panel:
    """Show one number of items over the number of ranks."""
    lines = []
    for colour, kind in enumerate(_KINDS):
        for later in (False, True):
            points = [
                (float(world.ranks), run.median("all_s") if later else run.first["all_s"])
                for each, world, run in measured
                if each == kind and world.items == items and run.samples
            ]
            lines.append(Line(f"{kind}, {'later' if later else 'first'} save", points, colour, dashed=not later))
    title = f"rank 0's work, {items:,} items {counted}"
    return Panel(title, "ranks", "seconds", [line for line in lines if line.points], _BAR_S)
