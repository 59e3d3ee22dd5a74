"""Simulated loss of power: a program's system calls are recorded, and replayed up to each call.

It is a part of `benchmarks.crash.campaigns`.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.measure import Runs
from benchmarks.report.bars import Bar
from benchmarks.report.report import Cell, Table, number
from tests.crash.lab.power import Report
from tests.crash.power_doubles import CARES, careless
from tests.crash.power_incidents import INCIDENTS, record_incident
from tests.crash.power_next import next_runs
from tests.crash.power_recordings import Recording, drop_each_sync, record, replay, replays, run
from tests.crash.scenarios import SCENARIOS
from tests.crash.zygote import Zygote

QUICK = ("first save", "overwrite", "several in flight", "deleting older ones")

_QUICK_BOUND = 1_000
_FULL_BOUND = 20_000
_DROP_BOUND = 200
_NEXT_RUNS = 30
# The syncs that some programs do not need, with the reason.
_REDUNDANT = {
    "the hidden directory": "each rank syncs the names it has created; on one host rank 0 syncs them all, later",
    "the parent directory": "a cleaning run cannot know whether a replacement is durable; in this program it was",
}
_SHARED_FILES = ("two ranks, safetensors", "two ranks, one safetensors file")
_COLUMNS = ("calls", "cuts", "states", "distinct", "in part", "syncs", "needed", "next runs", "leftovers", "lost")


@dataclass(slots=True)
class Losses:
    """The results of one program.

    Attributes:
        counts: numbers by name. ``calls``: system calls of the program. ``cuts``: calls after which power was lost,
            also in next runs. ``states``: states of the disk that were checked, for both readings of what a sync
            promises. ``distinct``: states that differ in what a reader finds. ``in part``: cuts of which only some
            states were tried. ``syncs``: syncs of the program. ``needed``: syncs without which something was lost.
            ``next runs``: runs that started from the disk that a cut had left. ``leftovers``: hidden names that next
            runs left. ``lost``: broken promises.
        findings: the broken promises, in words.
        idle: the syncs that were not needed, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def add(self, report: Report) -> None:
        """Add the numbers and findings of a report."""
        self.counts.update(states=report.states, distinct=report.distinct, lost=len(report.findings))
        self.counts["in part"] += report.incomplete
        self.findings += map(str, report.findings)


def lose_power(options: Namespace, directory: Path) -> tuple[list[Table], list[Bar], list[str]]:
    """Lose power after each call; a part of `python -m benchmarks crash`.

    Args:
        options: ``full``: replay all programs of the crash matrix and all incidents, leave each sync out in turn, and
            start next runs; else replay the few programs of the test suite. ``only``: parts of programs' names.
            ``seconds``: the time after which no further program or next run begins.
        directory: the directory in which the programs save.

    Returns:
        Tables, bars (nothing lost; each careless storage detected), and the findings in words.
    """
    until = time.monotonic() + options.seconds
    losses: dict[str, Losses] = {}
    with Zygote() as zygote:
        for name, recording in _recordings(zygote, directory, options):
            losses[name] = _losses(zygote, recording, directory / f"next-{len(losses)}", options.full, until)
            if time.monotonic() > until:
                break
        careless_ones = _careless(zygote, directory)
    whole = sum((each.counts for each in losses.values()), Counter[str]())
    runs = [Runs(name, samples=[_sample(each.counts)]) for name, each in losses.items()]
    columns = {what: _shown(what) for what in _COLUMNS}
    table = Table("crash: power lost after a call", columns, [*runs, Runs("all", samples=[_sample(whole)])])
    remarks = [f"{name}: {finding}" for name, each in losses.items() for finding in each.findings]
    idle = [(name, what) for name, each in losses.items() for what in each.idle]
    remarks += [f"{name}: not needed: the sync of {what}: {_explained(name, what) or 'why?'}" for name, what in idle]
    remarks += [
        f"a storage without {lacks or 'a fault'}: {found or 'nothing'}" for lacks, found in careless_ones.items()
    ]
    unexplained = sum(not _explained(name, what) for name, what in idle)
    missed = sum(bool(found) != (lacks is not None) for lacks, found in careless_ones.items())
    bars = [
        Bar("power: promises that could be broken", whole["lost"], 0, at_most=True, unit=""),
        Bar("power: left behind by the next run", whole["leftovers"], 0, at_most=True, unit=""),
        Bar("power: syncs that nothing explains", unexplained, 0, at_most=True, unit=""),
        Bar("power: careless storages not detected", missed, 0, at_most=True, unit=""),
    ]
    return [table], bars, remarks


def _explained(name: str, what: str) -> str | None:
    """Return the reason why a program does not need a sync; None if there is none."""
    if what == "a data file" and name in _SHARED_FILES:
        return "each rank syncs the bytes that it has written; on one host the sync of another rank covers them"
    return _REDUNDANT.get(what)


def _shown(what: str) -> Cell:
    return lambda runs: number(runs.median(what), digits=0)


def _sample(counts: Counter[str]) -> dict[str, float]:
    return {what: float(counts[what]) for what in _COLUMNS}


def _recordings(zygote: Zygote, folder: Path, options: Namespace) -> Iterator[tuple[str, Recording]]:
    """Yield the name and the recording of each program."""
    parts = options.only.split(",") if options.only else [""]
    names = [*SCENARIOS, *INCIDENTS] if options.full else QUICK
    for at, name in enumerate(each for each in names if any(part in each for part in parts)):
        yield name, zygote.call(record if name in SCENARIOS else record_incident, name, folder / f"program-{at}")


def _losses(zygote: Zygote, recording: Recording, folder: Path, full: bool, until: float) -> Losses:
    found = Losses()
    bound = _FULL_BOUND if full else _QUICK_BOUND
    between = recording.scenario.refused  # between two renames, a reader finds the checkpoint through the hidden record
    found.add(replay(recording, ordered=True, bound=bound, through_hidden=between))
    with replays(recording.scenario, bound=bound, through_hidden=between) as replaying:
        report = run(replaying, recording)
        found.add(report)
        found.counts.update(calls=report.calls, cuts=report.cuts)
        if full and not report.findings:
            folder.mkdir()
            for end in next_runs(zygote, replaying, recording, folder, count=_NEXT_RUNS):
                found.add(end.report)
                found.counts.update(cuts=end.report.cuts, leftovers=len(end.leftovers))
                found.counts["next runs"] += 1
                if time.monotonic() > until:
                    break
    found.counts["syncs"] = sum(call.name == "sync" for call in recording.calls)
    for dropped in drop_each_sync(recording, bound=_DROP_BOUND, first_only=True) if full else ():
        found.counts["needed"] += dropped.needed
        found.idle += [] if dropped.needed else [dropped.what]
    return found


def _careless(zygote: Zygote, folder: Path) -> dict[str | None, str]:
    """Replay a careful storage, and storages that each leave out one precaution; return the first loss of each."""
    found: dict[str | None, str] = {}
    for at, lacks in enumerate((None, *CARES)):
        recording = zygote.call(record, "overwrite", folder / f"careless-{at}", careless(lacks))
        findings = replay(recording, bound=_DROP_BOUND, first_only=True).findings
        found[lacks] = str(findings[0]) if findings else ""
    return found
