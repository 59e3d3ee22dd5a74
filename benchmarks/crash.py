"""Programs that save are killed, refused and disturbed, everywhere: nothing announced may be lost.

The quick form is that of the tests. ``--full`` tries everything, over and over until ``--seconds`` are over. The
exit code is 1 if anything does not hold. It runs from the repository, for it uses the scenarios of the tests.
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

from benchmarks import machine
from benchmarks.bars import Bar
from benchmarks.measure import Runs
from benchmarks.report import Cell, Report, Table, number, shorten
from tests.crash import campaign
from tests.crash.campaign import Summary
from tests.crash.scenarios import SCENARIOS
from tests.crash.zygote import Zygote

OPTIONS = ("full", "part", "only", "seconds")
DEFAULTS = {"seconds": 900.0}
JUDGED = True  # a bar that is missed is an error

_POINTS = 200
_WRONG = {
    "lost": "announced, and not there",
    "broken": "listed, but can't be loaded",
    "mixed": "loaded, but no state that was saved",
    "stray": "listed, but never saved",
    "next run": "the next run could not save",
    "leftover": "left, and not removed by the next run",
    "live": "files of another live process were touched",
    "program": "ended in another way than it should",
    "hang": "did not end",
}

Part = tuple[list[Table], list[Bar], list[str]]


def _shown(what: str) -> Cell:
    return lambda run: number(run.median(what), digits=0)


def kill(options: Namespace, directory: Path) -> Part:
    """Kill programs before, in the midst of, and after every call."""
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
    remarks = [f"held beside another program that saved, with something unfinished: {whole.held} times"]
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
    """Let system calls fail."""
    from benchmarks.crash_faults import run_faults  # needs what the tests need

    return _counted("faults: calls that fail, in every way", run_faults(full=options.full, folder=directory))


def cancel(options: Namespace, directory: Path) -> Part:
    """Call saves off, and leave them."""
    from benchmarks.crash_cancel import run_cancels  # needs what the tests need

    with ThreadPoolExecutor(1) as thread:  # it has event loops of its own
        counts = thread.submit(run_cancels, full=options.full, folder=directory, seconds=options.seconds).result()
    return _counted("cancel: saves called off, or left by who waits, at random moments", counts)


def power(options: Namespace, directory: Path) -> Part:
    """Let the machine lose power."""
    from benchmarks.crash_power import lose_power  # needs what the tests need

    return lose_power(options, directory)


def _counted(title: str, counts: Any) -> Part:
    """Show numbers, and how many there are of what is listed; what is lost or wrong has to be nothing."""
    sample = {
        each.name: float(value if isinstance(value := getattr(counts, each.name), int | float) else len(value))
        for each in fields(counts)
    }
    table = Table(title, {name: _shown(name) for name in sample}, [Runs("all", samples=[sample])])
    judged = [name for name in ("lost", "wrong") if name in sample]
    bars = [Bar(f"{title}: {name}", sample[name], 0, at_most=True, unit="") for name in judged]
    return [table], bars, [shorten(str(each), 1000) for each in counts.wrong]


def fuzz(options: Namespace, directory: Path) -> Part:
    """Read what was made to harm."""
    from benchmarks.crash_fuzz import run_fuzz  # needs what the tests need

    counts = run_fuzz(full=options.full, folder=directory, seconds=options.seconds)
    return _counted("fuzz: checkpoints that were made to harm", counts)


PARTS: dict[str, Callable[[Namespace, Path], Part]] = {
    "kill": kill,
    "power": power,
    "faults": faults,
    "cancel": cancel,
    "fuzz": fuzz,
}
_TRIED = {
    "kill": ("kill points", "points"),
    "power": ("disks after lost power", "distinct"),
    "faults": ("faults", "faults"),
    "cancel": ("cancels", "cancels"),
    "fuzz": ("inputs tried", "tried"),
}


def _summary(found: dict[str, Part]) -> Table:
    """Sum up what was tried in each part, and how much of it went wrong."""
    rows = []
    for name, (tables, bars, _) in found.items():
        what, column = _TRIED[name]
        whole = tables[0].runs[-1]  # the last row has all
        wrong = sum(bar.measured for bar in bars if bar.at_most)
        rows.append(Runs(what, samples=[{"tried": whole.median(column), "lost or wrong": wrong}]))
    return Table("crash: all in all", {what: _shown(what) for what in ("tried", "lost or wrong")}, rows)


async def run(options: Namespace, directory: Path) -> Report:
    """Run the parts, and judge."""
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
