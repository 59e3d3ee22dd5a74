"""Figures from the results: each contender's time, and its ratio to the limit and to the best peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "aiockpt"
LIMITS = ("raw", "CRC", "copy", "fresh", "memmove", "idle", "no save", "no checkpoints")


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


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the README's table.

    Attributes:
        text: the operation.
        section: the section of the results.
        title: the beginning of the table's title.
        ours: the name of aiockpt's row.
        metric: the compared metric; None for the table's own.
        peers: prefixes of the peers' names; empty for all rows that are not aiockpt's.
        limit: the prefix of the names of the limit's rows; None for the table's own.
    """

    text: str
    section: str
    title: str
    ours: str
    metric: str | None = None
    peers: tuple[str, ...] = ()
    limit: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """The figures of a claim."""

    claim: Claim
    ours: Figure
    best: Figure | None
    limit: Figure | None


CLAIMS: Sequence[Claim] = (
    Claim("durable save", "save", "save", "aiockpt"),
    Claim(
        "until tensors may change",
        "save",
        "save",
        "aiockpt, prewarmed",
        "staged_s",
        ("dcp.async", "torch_check", "orbax"),
        "memmove",
    ),
    Claim("load from the disk", "load", "load, cold", "aiockpt, new tensors"),
    Claim("load in a new process, from the disk", "new process", "new process, cold", "aiockpt, new tensors"),
    Claim("load in a new process, cached", "new process", "new process, cached", "aiockpt, new tensors"),
)


def held(results: Mapping[str, Any], claims: Sequence[Claim] = CLAIMS) -> list[Held]:
    """Return the figures of every claim that was measured."""
    found = []
    for claim in claims:
        for table in tables(results, claim.section, claim.title)[:1]:
            known = figures(table, claim.metric)
            ours = next((each for each in known if each.name == claim.ours), None)
            peers = [each for each in known if not each.ours and not each.is_limit and not each.only_maps]
            peers = [each for each in peers if not claim.peers or each.name.startswith(claim.peers)]
            limit = claim.limit or table["limit"]
            limits = [each for each in known if limit and each.name.startswith(limit)]
            if ours is not None:
                best, limit = (min(group, key=lambda each: each.value, default=None) for group in (peers, limits))
                found.append(Held(claim, ours, best, limit))
    return found


def seconds(value: float) -> str:
    """Format a time."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"
