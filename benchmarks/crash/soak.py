"""A soak test: saves, loads and deletions for a long time, with faults and cancellations; nothing may be lost.

By default it makes some 200 saves; with ``--full`` at least 1,000, until ``--seconds`` are over. The exit code is 1 if
something is lost, leaks, or ends in an unexpected way. Run it from the repository: it uses the soak test's course.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from benchmarks.harness.measure import Runs
from benchmarks.limits import machine
from benchmarks.report.bars import Bar
from benchmarks.report.report import Report, Table, number, shorten

OPTIONS = ("full", "seconds")
DEFAULTS = {"seconds": 300.0}
JUDGED = True  # a missed bar makes the exit code 1

_GROWTH_MIB = 16

# These counts come first in the table, in this order.
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
    """Run the soak, and return its report."""
    from tests.soak.course import ROUNDS, Soak  # imported late: it takes a second
    from tests.soak.gauges import growth_bytes

    logging.getLogger("aiockpt").setLevel(logging.CRITICAL)  # failures are part of the test
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
        Bar("lost: announced, but missing or different", len(tally.lost), 0, at_most=True, unit=""),
        Bar("ended in an unexpected way", len(tally.wrong), 0, at_most=True, unit=""),
        Bar("leaks: files, threads, processes, tasks, leases, states", len(tally.leaks), 0, at_most=True, unit=""),
        Bar("growth of resident memory after a warm-up", growth_mib, _GROWTH_MIB, at_most=True, unit="MiB"),
    ]
    remarks = [shorten(each, 1000) for each in (*tally.lost, *tally.wrong, *tally.leaks)]
    remarks.append(f"each round creates a checkpointer in one of {len(ROUNDS)} ways; growth is between rounds")
    return Report("soak", vars(options), machine.facts(directory), [table], bars, remarks)
