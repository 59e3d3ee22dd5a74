"""Saves and loads of a sharded state by several processes, and the coordination cost of a later save.

Every process is a rank of a gloo group on this machine. Times are from the start of the first rank to the end of the
last. For the cost of coordination, very small tensors are saved repeatedly: by all ranks, and by one rank alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Runs, Sample, interleave
from benchmarks.harness.selection import chosen
from benchmarks.limits import machine
from benchmarks.ranks import savers
from benchmarks.ranks.savers import Member
from benchmarks.ranks.world import World
from benchmarks.report.bars import Bar, by_name, by_prefix, compare, shortest
from benchmarks.report.report import Report, Table, duration, median_time, of_limit, speed, spread

OPTIONS = ("gib", "tensors", "count", "ranks", "rounds", "only")
DEFAULTS = {"count": 1000, "ranks": "1,2,4"}
ROUNDS = 5

_LATER_MS = 50


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    tables: list[Table] = []
    bars: list[Bar] = []
    for size in [int(part) for part in str(options.ranks).split(",")]:
        with World(size) as world:
            contest = _Contest(world, directory, options)
            for part in (contest.large, contest.tiny) if size > 1 else (contest.large,):
                found, judged = await part()
                tables += found
                bars += judged
    return Report(
        "ranks",
        vars(options),
        machine.facts(directory),
        tables,
        bars,
        [
            "rounds, on the slowest rank: from when the caller goes on until planned, and from written until committed",
            "rounds: the index, the renaming and the syncs are in them",
            "alone: one rank saves plain tensors, as many bytes under as many keys, and agrees with nobody",
        ],
    )


class _Contest:
    """The measurements with one number of ranks."""

    def __init__(self, world: World, directory: Path, options: Namespace) -> None:
        self._world, self._directory, self._options = world, directory, options
        self._rounds = options.rounds or ROUNDS

    async def large(self) -> tuple[list[Table], list[Bar]]:
        """Save and load a large state."""
        size, options = self._world.size, self._options
        nbytes = int(options.gib * 2**30)
        members = self._members(savers.prepare, nbytes // size * size, options.tensors)
        saved = await interleave(members, self._rounds, self._save)
        loaders = [member for member in members if member.loads]
        paths = {member.name: self._keep(member) for member in loaders}
        loaded = await interleave(loaders, self._rounds, lambda member, _: self._load(member, paths))
        for path in paths.values():
            machine.remove(path)
        self._world.call(savers.close_all)
        title = f"{size} rank{'s' * (size > 1)}, {options.gib:.3g} GiB in all, medians of {self._rounds} rounds"
        shown = {
            "caller blocked": median_time("blocked_s"),
            "staged": median_time("staged_s"),
            "first save": lambda run: duration(run.first["all_s"]),
            **_durations("durable", saved, nbytes),
        }
        tables = [
            Table(f"save: {title}", shown, saved, "all_s", "raw"),
            Table(f"load: {title}", _durations("loaded", loaded, nbytes), loaded, "all_s", "raw"),
        ]
        return tables, [*_bars("save", size, saved), *_bars("load", size, loaded)]

    async def tiny(self) -> tuple[list[Table], list[Bar]]:
        """Save very small tensors repeatedly."""
        size, count = self._world.size, self._options.count
        members = self._members(savers.prepare_tiny, count)
        runs = await interleave(members, self._rounds, self._save)
        self._world.call(savers.close_all)
        columns = {
            "durable (min..max)": spread("all_s"),
            "caller blocked": median_time("blocked_s"),
            "planned": median_time("planned_s"),
            "written to committed": median_time("ended_s"),
            "both": median_time("rounds_s"),
            "first save": lambda run: duration(run.first["all_s"]),
        }
        table = Table(f"later saves: {size} ranks, {count} keys sharded over all", columns, runs, "all_s")
        return [table], _later_bars(size, runs)

    def _members(self, prepare: Callable[..., Any], *args: Any) -> list[Member]:
        known = self._world.call(prepare, *args)[0]
        return chosen([Member(*each) for each in known], self._options.only)

    async def _save(self, member: Member, number: int) -> Sample:
        self._world.call(_settle)
        path = self._directory / f"save-{number}"
        try:
            sample = slowest_of(self._world.call(savers.save_once, member.name, path))
            self._world.call(savers.check, member.name, path)
            return sample
        finally:
            machine.remove(path)

    def _keep(self, member: Member) -> Path:
        path = self._directory / f"load-{member.name.replace(' ', '-')}"
        self._world.call(savers.save_once, member.name, path)
        return path

    async def _load(self, member: Member, paths: dict[str, Path]) -> Sample:
        self._world.call(_settle)
        path = paths[member.name]
        machine.drop_from_cache(machine.files_under(path))
        return slowest_of(self._world.call(savers.load_once, member.name, path))


def _settle(_rank: object) -> None:
    machine.settle()


def slowest_of(samples: list[Sample]) -> Sample:
    """Return the slowest rank's value of each moment, and the time from the first start to the last end."""
    names = [name for name in samples[0] if name not in ("begun", "over")]
    whole = max(each["over"] for each in samples) - min(each["begun"] for each in samples)
    return {**{name: max(each.get(name, 0.0) for each in samples) for name in names}, "all_s": whole}


def _durations(what: str, runs: list[Runs], nbytes: int) -> dict:
    return {
        f"{what} (min..max)": spread("all_s"),
        "GiB/s": speed("all_s", nbytes),
        "of limit": of_limit("all_s", shortest(runs, "raw", "all_s")),
    }


def _bars(verb: str, size: int, runs: list[Runs]) -> list[Bar]:
    ours, what = by_name(runs, "aiockpt"), "all_s"
    text = f"{size} rank{'s' * (size > 1)}, {verb}, aiockpt : "
    peers = [run for run in runs if run.name.startswith("dcp")]
    limit = compare(f"{text}raw O_DIRECT, speed", by_prefix(runs, "raw"), ours, what, 0.95)
    return [limit, *(compare(f"{text}{peer.name}, speed", [peer], ours, what) for peer in peers)]


def _later_bars(size: int, runs: list[Runs]) -> list[Bar]:
    ours = by_name(runs, "aiockpt")
    more = [_more(f"{size} ranks, later save: ", run, by_name(runs, alone)) for run, alone in _pairs(runs)]
    direct = Bar(f"{size} ranks, aiockpt, later save: in rounds", ours.median("rounds_s") * 1e3, _LATER_MS, True, "ms")
    return [direct, *more]


def _pairs(runs: list[Runs]) -> list[tuple[Runs, str]]:
    alone = {run.name.partition(",")[0]: run.name for run in runs if run.name.endswith("alone")}
    pairs = [(run, alone.get(run.name.partition(",")[0], "")) for run in runs if not run.name.endswith("alone")]
    return [(run, name) for run, name in pairs if name]


def _more(text: str, run: Runs, alone: Runs) -> Bar:
    """Return a bar on the extra time of all ranks over one rank alone."""
    extra = (run.median("all_s") - alone.median("all_s")) * 1e3
    best = (run.least("all_s") - alone.least("all_s")) * 1e3
    bound = _LATER_MS if run.name == "aiockpt" else None
    return Bar(f"{text}{run.name} more than alone", extra, bound, True, "ms", of_best=best)
