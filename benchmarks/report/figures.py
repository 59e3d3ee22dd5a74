"""Figures from the results: each contender's time, and its ratio to the limit and to the best peer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "aiockpt"
LIMITS = ("raw", "CRC", "copy", "fresh", "memmove", "idle", "thread pool", "no save", "no checkpoints")


@dataclass(frozen=True, slots=True)
class Figure:
    """A contender's median, with its smallest and greatest value.

    Attributes:
        name: the contender's name.
        value: the median.
        least: the smallest value of all rounds.
        most: the greatest value of all rounds.
        ratio: the limit's value divided by this one; None without a limit.
    """

    name: str
    value: float
    least: float
    most: float
    ratio: float | None = None

    @property
    def ours(self) -> bool:
        """Whether the contender is aiockpt."""
        return self.name.startswith(OURS)

    @property
    def only_maps(self) -> bool:
        """Whether the contender maps the page cache and copies nothing."""
        return self.name.endswith("mmap, read")

    @property
    def is_limit(self) -> bool:
        """Whether it is the machine's limit."""
        return self.name.startswith(LIMITS)


def tables(results: Mapping[str, Any], section: str, title: str = "") -> list[Mapping[str, Any]]:
    """Return the tables of a section whose titles begin with ``title``."""
    found = results["sections"].get(section, {"tables": []})["tables"]
    return [table for table in found if table["title"].startswith(title)]


def figures(table: Mapping[str, Any], metric: str | None = None) -> list[Figure]:
    """Return the figures of all contenders of a table, in its main metric or another, with ratios to its limit."""
    metric = metric or table["metric"]
    measured = list(_measured(table, metric))
    limits = [each.value for each in measured if table["limit"] and each.name.startswith(table["limit"])]
    best = min(limits, default=None)
    if best is None:
        return measured
    return [Figure(each.name, each.value, each.least, each.most, best / each.value) for each in measured]


def _measured(table: Mapping[str, Any], metric: str) -> Iterator[Figure]:
    for run in table["runs"]:
        values = [value for sample in run["samples"] if (value := sample.get(metric)) is not None]
        if values and run["medians"].get(metric) is not None:
            yield Figure(run["name"], run["medians"][metric], min(values), max(values))


def title_of(title: str, counts: Collection[int]) -> str:
    """Return a table's title with the number of rounds that were measured, which time may have cut."""
    least, most = min(counts, default=0), max(counts, default=0)
    if not most:
        return title
    rounds = "one round" if most == 1 else f"medians of {f'{least} to ' * (least < most)}{most} rounds"
    return re.sub(r"medians of \d+ rounds?", rounds, title)


def rounds_of(table: Mapping[str, Any]) -> set[int]:
    """Return the numbers of rounds of a table's rows that were measured."""
    return {len(run["samples"]) for run in table["runs"]} - {0}


# --- claims ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the README's table.

    Attributes:
        text: the operation; the table's size is added.
        section: the section of the results.
        title: the beginning of the table's title.
        ours: the name of aiockpt's row.
        by_itself: what the machine does in the time of the limit; empty if no limit of this work was measured.
        metric: the compared metric; None for the table's own.
        peers: prefixes of the peers' names; empty for all rows that are not aiockpt's.
        limit: the prefix of the names of the limit's rows; None for the table's own.
        why: why a peer can be faster.
    """

    text: str
    section: str
    title: str
    ours: str
    by_itself: str = ""
    metric: str | None = None
    peers: tuple[str, ...] = ()
    limit: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """The figures of a claim."""

    claim: Claim
    size: str
    ours: Figure
    best: Figure | None
    limit: Figure | None

    @property
    def is_beaten(self) -> bool:
        """Whether the best peer is faster."""
        return self.best is not None and self.best.value < self.ours.value


NO_CHECK = "no bytes are checked; aiockpt computes and compares the CRC of each tensor"

CLAIMS: Sequence[Claim] = (
    Claim("save, until it is durable", "save", "save", "aiockpt", "raw writes"),
    Claim(
        "save, until the tensors may change",
        "save",
        "save",
        "aiockpt, prewarmed",
        "memmove",
        "staged_s",
        ("dcp.async", "torch_check", "orbax"),
        "memmove",
        "the program waits in the call for all of it; aiockpt's call returns after about a millisecond",
    ),
    Claim(
        "load from the disk, into new tensors",
        "load",
        "load, cold",
        "aiockpt, new tensors",
        "raw reads into memory in use",
        why=NO_CHECK,
    ),
    Claim(
        "resume: load from the disk into a model's tensors, in a new process",
        "new process",
        "new process, cold",
        "aiockpt, into a target",
        peers=("dcp.load, into",),
    ),
    Claim(
        "load from the disk into new tensors, in a new process",
        "new process",
        "new process, cold",
        "aiockpt, new tensors",
        "raw reads into new memory",
        why=NO_CHECK,
    ),
    Claim(
        "the same, from the page cache",
        "new process",
        "new process, cached",
        "aiockpt, new tensors",
        "raw reads into new memory",
        why=NO_CHECK,
    ),
)

WHY_FASTER: Mapping[str, str] = {
    "load": NO_CHECK,
    "new process": NO_CHECK,
    "startup": "no threads are started, and nothing is synced",
    "slice": "the file is mapped, and the kernel reads all of it ahead, on one thread",
    "open": "one file, and no bytes are checked; aiockpt checks the framing and the CRC of each tensor",
    "small tensors": "one file, and no bytes are checked; aiockpt checks the framing and the CRC of each tensor",
    "model states": NO_CHECK,
    "in processes of their own": "one file, one thread, and safetensors computes and compares no CRC",
    "by size and number": "one thread, in safetensors no CRC; here copy, CRC and write of a chunk follow each other",
}
"""For a section of the results, why a peer can be faster than aiockpt."""

SAME_WORK = frozenset({"slice"})
"""The sections whose peers do all that aiockpt does: no reader can check a part of a tensor."""


def held(results: Mapping[str, Any], claims: Sequence[Claim] = CLAIMS) -> list[Held]:
    """Return the figures of every claim that was measured."""
    found = []
    for claim in claims:
        for table in tables(results, claim.section, claim.title)[:1]:
            known = figures(table, claim.metric)
            ours = next((each for each in known if each.name == claim.ours), None)
            peers = [each for each in _peers(known) if not claim.peers or each.name.startswith(claim.peers)]
            limit = claim.limit or table["limit"]
            limits = [each for each in known if claim.by_itself and limit and each.name.startswith(limit)]
            if ours is not None:
                best, limit = (min(group, key=lambda each: each.value, default=None) for group in (peers, limits))
                size = re.search(r"[\d.]+ [GM]iB", table["title"])
                found.append(Held(claim, size[0] if size else "", ours, best, limit))
    return found


def _peers(known: Sequence[Figure]) -> list[Figure]:
    return [each for each in known if not each.ours and not each.is_limit and not each.only_maps]


def faster_peers(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Figure, list[Figure]]]:
    """Return each table in which peers are faster than aiockpt's first row: its section, that row, and the peers.

    The first row is that of the defaults, into new tensors; peers that load into a target do less.
    """
    found = []
    for section, report in results["sections"].items():
        for table in report["tables"]:
            known = figures(table) if table["metric"] else []
            ours = next((each for each in known if each.ours), None)
            alike = [each for each in _peers(known) if not each.name.endswith("into a target")]
            faster = [] if ours is None else [each for each in alike if each.value < ours.value]
            if ours is not None and faster:
                found.append((section, table, ours, sorted(faster, key=lambda each: each.value)))
    return found


def seconds(value: float) -> str:
    """Format a time."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"
