"""Results as Markdown: the machine, every table, and the targets with what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report.figures import rounds_of, title_of

RULES = (
    "Everybody runs once in each round, in an order that rotates; a first run does not count; cells are medians.",
    "Every saved state was loaded back, and every loaded one compared, bit for bit: a row with figures was right.",
    "Peers run with the best settings their documentation names.",
    "Files that a peer does not sync are synced for it before the clock stops, or the note says what is missing.",
)


def document(results: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the page with all results of a run."""
    lines = [
        f"# Results of {results['written']}",
        "",
        machine_line(results["machine"]),
        "",
        f"`{results['command']}`",
        "",
    ]
    lines += [f"- {rule}" for rule in RULES]
    lines += ["", *(f"![{picture.partition('.')[0]}]({picture})" for picture in pictures), ""]
    for name, report in results["sections"].items():
        lines += [f"## {name}", ""]
        if "failed" in report:
            lines += [f"Failed: {cell(report['failed'])}", ""]
        for each in report["tables"]:
            title = title_of(each["title"], rounds_of(each))
            lines += [f"**{title}**", "", *table(each["columns"], each["rows"]), ""]
        lines += [f"- {remark}" for remark in report.get("remarks", ())]
        if report["bars"]:
            lines += ["", *table(("compared", "measured", "asked", "held"), map(_bar, report["bars"])), ""]
    return "\n".join(lines) + "\n"


def machine_line(facts: Mapping[str, Any]) -> str:
    """Describe a machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB of memory, "
        f"{facts['file_system']}, {facts['platform']}, Python {facts['python']}; {versions}"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"| --- |{' ---: |' * (len(columns) - 2)} --- |",
        *(f"| {' | '.join(map(cell, row))} |" for row in rows),
    ]


def cell(text: str) -> str:
    """Return a text in one line, its vertical bars escaped, so that it stays in its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _bar(bar: Mapping[str, Any]) -> tuple[str, str, str, str]:
    measured, bound, unit = bar["measured"], bar["bound"], bar["unit"]
    asked = "" if bound is None else f"{'<=' if bar['at_most'] else '>='} {bound:g} {unit}"
    held = {True: "yes", False: "no", None: ""}[bar["passed"]]
    return bar["text"], "-" if measured is None else f"{measured:.2f} {unit}", asked, held
