"""The time until tensors may change, against a plain copy of the same bytes."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, raw
from benchmarks.bars import Bar, compare, first_of, one, shortest, those
from benchmarks.contenders import PrewarmedAiockpt, Saver
from benchmarks.measure import Runs, Sample
from benchmarks.report import Report, Table, duration, of_limit, speed, spread
from benchmarks.save import measure
from benchmarks.selection import chosen
from benchmarks.states import State, size_of, transformer_state

OPTIONS = ("gib", "tensors", "rounds", "only")
ROUNDS = 5


class Memmove(Saver):
    """The limit: every tensor copied into touched memory."""

    def __init__(self, threads: int, arena: raw.Arena) -> None:
        self.name = f"memmove, {threads} thread{'s' * (threads > 1)}"
        self._threads, self._arena = threads, arena

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        raw.copy_state(state, self._arena, self._threads)
        return {"staged_s": time.perf_counter() - started}


async def run(options: Namespace, directory: Path) -> Report:
    """Measure, and judge."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    nbytes = size_of(state)
    arena = raw.Arena(nbytes)
    rounds = options.rounds or ROUNDS
    savers = chosen([Memmove(1, arena), Memmove(2, arena), PrewarmedAiockpt()], options.only)
    runs = await measure(savers, state, directory, rounds)
    columns = {
        "staged (min..max)": spread("staged_s"),
        "GiB/s": speed("staged_s", nbytes),
        "of limit": of_limit("staged_s", shortest(runs, "memmove", "staged_s")),
        "first": lambda run: duration(run.first["staged_s"]),
    }
    title = f"stage: {nbytes / 2**30:.2f} GiB in {len(state)} tensors, medians of {rounds} rounds"
    return Report("stage", vars(options), machine.facts(directory), [Table(title, columns, runs)], bars(runs))


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Hold the figures against the project's own."""
    ours, what = one(runs, PrewarmedAiockpt.name), "staged_s"
    plain, either = those(runs, "memmove, 1 thread"), those(runs, "memmove")
    return [
        compare("aiockpt : memmove in one thread, speed", plain, ours, what, 0.9),
        compare("aiockpt : memmove in the better number of threads, speed", either, ours, what, 0.9),
        compare("aiockpt, first save : memmove in one thread, speed", plain, first_of(ours), what),
    ]
