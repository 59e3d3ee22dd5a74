"""The part of `benchmarks.crash` in which power is lost: what programs did is recorded, and replayed to each call."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bars import Bar
from benchmarks.measure import Runs
from benchmarks.report import Cell, Table, number
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
# Why nothing may be lost without a sync of these, for some programs.
_REDUNDANT = {
    "the hidden directory": "each rank syncs the names it has made; on one host rank 0 does it for all, later",
    "the parent directory": "who cleans can't know whether what was replaced is so durably; there it was",
}
_SHARED_FILES = ("two ranks, safetensors", "two ranks, one safetensors file")
_COLUMNS = ("calls", "cuts", "states", "distinct", "in part", "syncs", "needed", "next runs", "leftovers", "lost")


@dataclass(slots=True)
class Losses:
    """What was tried of one program.

    Attributes:
        counts: how many calls it has made; cuts, after how many of them power was lost, those of next runs too; states
            of the disk that were looked at, in both readings of what a sync promises; distinct ones of these, in what
            they show; cuts of which only some states were tried (in part); its syncs, and how many of these were found
            to be needed; next runs that began with what a cut had left; hidden names that these left behind; and
            promises that could be broken (lost).
        findings: each of these in words.
        idle: the syncs without which nothing was lost, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def add(self, report: Report) -> None:
        """Count what was tried."""
        self.counts.update(states=report.states, distinct=report.distinct, lost=len(report.findings))
        self.counts["in part"] += report.incomplete
        self.findings += map(str, report.findings)


def lose_power(options: Namespace, directory: Path) -> tuple[list[Table], list[Bar], list[str]]:
    """Lose power at each call; a part of `python -m benchmarks crash`.

    Args:
        options: ``full``: all programs of the crash matrix and what may happen to them before, each sync left out in
            turn, and next runs; else the few programs of the test suite. ``only``: parts of names. ``seconds``: no
            further program or next run begins after that.
        directory: where the programs save.

    Returns:
        Tables, bars (nothing lost; each careless storage found out), and what was found in words.
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
        Bar("power: careless storages not found out", missed, 0, at_most=True, unit=""),
    ]
    return [table], bars, remarks


def _explained(name: str, what: str) -> str | None:
    """Return why nothing may be lost without a sync in a program; None if nothing explains it."""
    if what == "a data file" and name in _SHARED_FILES:
        return "each rank syncs the bytes that it has written; on one host the sync of another covers them"
    return _REDUNDANT.get(what)


def _shown(what: str) -> Cell:
    return lambda runs: number(runs.median(what), digits=0)


def _sample(counts: Counter[str]) -> dict[str, float]:
    return {what: float(counts[what]) for what in _COLUMNS}


def _recordings(zygote: Zygote, folder: Path, options: Namespace) -> Iterator[tuple[str, Recording]]:
    """Record one program after the other."""
    parts = options.only.split(",") if options.only else [""]
    names = [*SCENARIOS, *INCIDENTS] if options.full else QUICK
    for at, name in enumerate(each for each in names if any(part in each for part in parts)):
        yield name, zygote.call(record if name in SCENARIOS else record_incident, name, folder / f"program-{at}")


def _losses(zygote: Zygote, recording: Recording, folder: Path, full: bool, until: float) -> Losses:
    found = Losses()
    bound = _FULL_BOUND if full else _QUICK_BOUND
    between = recording.scenario.refused  # a reader finds what is between the steps through the record
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
    """Replay storages that each lack one care; give what could be lost."""
    found: dict[str | None, str] = {}
    for at, lacks in enumerate((None, *CARES)):
        recording = zygote.call(record, "overwrite", folder / f"careless-{at}", careless(lacks))
        findings = replay(recording, bound=_DROP_BOUND, first_only=True).findings
        found[lacks] = str(findings[0]) if findings else ""
    return found
