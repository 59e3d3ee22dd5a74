"""A soak: a program that saves, loads and deletes for a long time, with faults and cancellations; nothing may be lost.

The quick form is some 200 saves. ``--full`` makes 1,000, and goes on until ``--seconds`` are over. The exit code is 1
if anything is lost, leaks, or ends in another way than it should. It runs from the repository, for the course is that
of the tests.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from benchmarks import machine
from benchmarks.bars import Bar
from benchmarks.measure import Runs
from benchmarks.report import Report, Table, number, shorten

OPTIONS = ("full", "seconds")
DEFAULTS = {"seconds": 300.0}
JUDGED = True  # a bar that is missed is an error

_GROWTH_MIB = 16

# In this order; others come behind them.
_COUNTS = (
    "rounds",
    "saves",
    "written",
    "failed",
    "torn",
    "cancelled",
    "skipped",
    "refused as busy",
    "waits cancelled",
    "loads",
    "deletions",
    "faults",
    "writers killed",
)


async def run(options: Namespace, directory: Path) -> Report:
    """Run it, and judge."""
    from tests.soak.course import ROUNDS, Soak  # not when the command line is made: it takes a second
    from tests.soak.gauges import growth_bytes

    logging.getLogger("aiockpt").setLevel(logging.CRITICAL)  # failures are what it is about
    soak = Soak(directory, seed=1)
    await soak.run(
        1000 if options.full else 200,
        per_round=20 if options.full else 5,
        seconds=options.seconds,
        warm_up=len(ROUNDS),
        until_time_is_over=options.full,
    )
    tally = soak.tally
    growth_mib = max(0.0, growth_bytes(tally.gauges) / 2**20)
    counts = {what: tally.counts[what] for what in _COUNTS} | tally.counts
    counts |= {"leaks": len(tally.leaks), "lost": len(tally.lost), "ended wrongly": len(tally.wrong)}
    runs = [Runs(what, samples=[{"count": float(count)}]) for what, count in counts.items()]
    table = Table("soak", {"count": lambda run: number(run.median("count"), digits=0)}, runs)
    bars = [
        Bar("lost: announced, and not there as it was", len(tally.lost), 0, at_most=True, unit=""),
        Bar("ended in another way than it should", len(tally.wrong), 0, at_most=True, unit=""),
        Bar("leaks: files, threads, processes, tasks, leases, states", len(tally.leaks), 0, at_most=True, unit=""),
        Bar("growth of resident memory after a warm-up", growth_mib, _GROWTH_MIB, at_most=True, unit="MiB"),
    ]
    remarks = [shorten(each, 1000) for each in (*tally.lost, *tally.wrong, *tally.leaks)]
    remarks.append(f"each round makes a checkpointer, in one of {len(ROUNDS)} ways; growth is from round to round")
    return Report("soak", vars(options), machine.facts(directory), [table], bars, remarks)
