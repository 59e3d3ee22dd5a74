"""Crash tests: programs that save are killed, lose power, get errors and are cancelled; no announced save may be lost.

By default it does the same as the tests. ``--full`` tries everything, again and again until ``--seconds`` are over.
The exit code is 1 if a check fails. Run it from the repository: it uses the scenarios of the tests.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Runs
from benchmarks.limits import machine
from benchmarks.report.bars import Bar
from benchmarks.report.report import Cell, Report, Table, number, shorten
from tests.crash import campaign
from tests.crash.campaign import Summary
from tests.crash.scenarios import SCENARIOS
from tests.crash.zygote import Zygote

OPTIONS = ("full", "part", "only", "seconds")
DEFAULTS = {"seconds": 900.0}
JUDGED = True  # a missed bar makes the exit code 1

_POINTS = 200
_WRONG = {
    "lost": "announced, but not there",
    "broken": "listed, but can't be loaded",
    "mixed": "loaded, but differs from every saved state",
    "stray": "listed, but never saved",
    "next run": "the next run could not save",
    "leftover": "left over, and not removed by the next run",
    "live": "files of another live process were touched",
    "program": "ended in an unexpected way",
    "hang": "did not end",
}

Part = tuple[list[Table], list[Bar], list[str]]


def _shown(what: str) -> Cell:
    return lambda run: number(run.median(what), digits=0)


def kill(options: Namespace, directory: Path) -> Part:
    """Kill programs before, during and after every call."""
    until = time.monotonic() + options.seconds
    names = [name for name in SCENARIOS if not options.only or any(each in name for each in options.only.split(","))]
    counts = {name: campaign.EVERY if options.full else campaign.QUICK[name] for name in names}
    live = names if options.full else [name for name in campaign.LIVE if name in names]
    whole, rounds = Summary(), 0
    with Zygote() as one, Zygote() as other:
        while not rounds or (options.full and time.monotonic() < until):
            root = directory / f"round-{rounds}"
            root.mkdir()
            seconds = until - time.monotonic() if rounds else math.inf
            whole.add(campaign.run((one, other), root, counts, live=live, seconds=seconds))
            rounds += 1
    runs = [Runs(name, samples=[_sample(whole.of(name))]) for name in names]
    runs.append(Runs("all", f"{rounds} rounds", samples=[_sample(whole)]))
    columns = {"calls": _shown("calls"), "runs": _shown("runs"), "points": _shown("points")}
    columns |= {"kinds": _shown("kinds")} | {kind: _shown(kind) for kind in _WRONG}
    bars = [Bar(f"{kind}: {what}", whole.problems[kind], 0, at_most=True, unit="") for kind, what in _WRONG.items()]
    if not options.only:
        bars.append(Bar("distinct kill points", len(whole.points), _POINTS, unit=""))
    remarks = [f"programs held in the middle of a save while another program saved: {whole.held}"]
    remarks += [f"{outcome.point} {outcome.call}: {outcome.problems}" for outcome in whole.outcomes if outcome.problems]
    remarks += [str(problem) for problem in whole.live_problems]
    title = "crash: killed at a call; points: distinct kill points, kinds: distinct calls and kinds of files"
    return [Table(title, columns, runs)], bars, [shorten(each, 1000) for each in remarks]


def _sample(summary: Summary) -> dict[str, float]:
    wrong: Counter[str] = summary.problems
    return {
        "calls": sum(summary.calls.values()),
        "runs": len(summary.outcomes),
        "points": len(summary.points),
        "kinds": len(summary.kinds),
        **{kind: wrong[kind] for kind in _WRONG},
    }


def faults(options: Namespace, directory: Path) -> Part:
    """Inject faults into system calls."""
    from benchmarks.crash.faults import run_faults  # needs the tests' dependencies

    return _counted("faults: system calls that fail", run_faults(full=options.full, folder=directory))


def cancel(options: Namespace, directory: Path) -> Part:
    """Cancel saves, and the coroutines that wait for them."""
    from benchmarks.crash.cancel import run_cancels  # needs the tests' dependencies

    with ThreadPoolExecutor(1) as thread:  # run_cancels starts event loops of its own
        counts = thread.submit(run_cancels, full=options.full, folder=directory, seconds=options.seconds).result()
    return _counted("cancel: saves and their waiters, cancelled at random moments", counts)


def power(options: Namespace, directory: Path) -> Part:
    """Simulate a loss of power."""
    from benchmarks.crash.power import lose_power  # needs the tests' dependencies

    return lose_power(options, directory)


def _counted(title: str, counts: Any) -> Part:
    """Return a table of numbers and of lengths of lists, and bars that demand zero lost and zero wrong."""
    sample = {
        each.name: float(value if isinstance(value := getattr(counts, each.name), int | float) else len(value))
        for each in fields(counts)
    }
    table = Table(title, {name: _shown(name) for name in sample}, [Runs("all", samples=[sample])])
    judged = [name for name in ("lost", "wrong") if name in sample]
    bars = [Bar(f"{title}: {name}", sample[name], 0, at_most=True, unit="") for name in judged]
    return [table], bars, [shorten(str(each), 1000) for each in counts.wrong]


def fuzz(options: Namespace, directory: Path) -> Part:
    """Read hostile checkpoints."""
    from benchmarks.crash.fuzz import run_fuzz  # needs the tests' dependencies

    counts = run_fuzz(full=options.full, folder=directory, seconds=options.seconds)
    return _counted("fuzz: hostile checkpoints", counts)


def rounds(options: Namespace, directory: Path) -> Part:
    """Strike one of several ranks, once, at every step of their rounds."""
    from tests.ranks.strikes import run_strikes  # needs the tests' dependencies

    counts = run_strikes(full=options.full, folder=directory, seconds=options.seconds, most=24)
    return _counted("rounds: passing faults of one rank of several", counts)


PARTS: dict[str, Callable[[Namespace, Path], Part]] = {
    "kill": kill,
    "power": power,
    "faults": faults,
    "cancel": cancel,
    "fuzz": fuzz,
    "rounds": rounds,
}
_TRIED = {
    "kill": ("kill points", "points"),
    "power": ("disks after lost power", "distinct"),
    "faults": ("faults", "faults"),
    "cancel": ("cancels", "cancels"),
    "fuzz": ("inputs tried", "tried"),
    "rounds": ("faults in rounds", "struck"),
}


def _summary(found: dict[str, Part]) -> Table:
    """Return a table with the number of tries and of failures of each part."""
    rows = []
    for name, (tables, bars, _) in found.items():
        what, column = _TRIED[name]
        whole = tables[0].runs[-1]  # the last row is the sum
        wrong = sum(bar.measured for bar in bars if bar.at_most)
        rows.append(Runs(what, samples=[{"tried": whole.median(column), "lost or wrong": wrong}]))
    return Table("crash: summary", {what: _shown(what) for what in ("tried", "lost or wrong")}, rows)


async def run(options: Namespace, directory: Path) -> Report:
    """Run the parts, and return one report."""
    wanted: Sequence[str] = options.part.split(",") if options.part else list(PARTS)
    found: dict[str, Part] = {}
    for name in (name for name in PARTS if any(each in name for each in wanted)):
        folder = directory / name
        folder.mkdir()
        found[name] = PARTS[name](options, folder)
    tables = [table for tables, _, _ in found.values() for table in tables]
    bars = [bar for _, bars, _ in found.values() for bar in bars]
    remarks = [remark for _, _, remarks in found.values() for remark in remarks]
    return Report("crash", vars(options), machine.facts(directory), [*tables, _summary(found)], bars, remarks)
