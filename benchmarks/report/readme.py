"""The figures in the README and in the pages on benchmarks and scale, written from the results of a full run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.figures import held, seconds
from benchmarks.report.markdown import cell, machine_line, table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SCALE = ROOT / "aiockpt" / "docs" / "scale.md"
BENCHMARKS = ROOT / "aiockpt" / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: python -m benchmarks readme -->", "<!-- end of the figures -->"
PICTURES = {"ratios.png": "Speed as a share of the machine's limit", "training.png": "A training loop with checkpoints"}

_SHOWN = ("training", "safetensors from ranks", "compression")  # sections on the page on benchmarks

_MORE = (
    "[benchmarks](aiockpt/docs/benchmarks.md) says how, [the results](benchmarks/results/results.md) have everything, "
    "and [scale](aiockpt/docs/scale.md) is about many ranks."
)


def section(results: Mapping[str, Any]) -> str:
    """Return the text between the markers of the README."""
    columns = ("", "aiockpt", "of the machine's limit", "best peer")
    rows = [
        (
            known.claim.text,
            seconds(known.ours.value),
            ""
            if known.limit is None
            else f"{known.limit.value / known.ours.value:.2f} of {seconds(known.limit.value)}",
            "" if known.best is None else f"{seconds(known.best.value)}, {cell(known.best.name)}",
        )
        for known in held(results)
    ]
    line = machine_line(results["machine"])
    lines = [
        f"One run of `{results['command']}` on {results['written']}, medians; {others(results)}. {line}. {_MORE}",
        "",
        *table(columns, rows),
        "",
        " ".join(f"![{title}](benchmarks/results/{name})" for name, title in PICTURES.items()),
    ]
    return "\n".join(lines)


def others(results: Mapping[str, Any]) -> str:
    """Return a remark on the load by other programs, which shows how far the figures can be trusted."""
    shares = [
        report["machine"]["share_of_cores_used_by_others"]
        for report in results["sections"].values()
        if "share_of_cores_used_by_others" in report.get("machine", {})
    ]
    return f"other programs used {max(shares, default=0):.0%} of the cores at most"


def scale_section(results: Mapping[str, Any]) -> str:
    """Return the text between the markers of the page on scale."""
    report = results["sections"]["scale"]
    measured, simulated = report["tables"]
    points = report["details"]["extrapolated"]
    columns = ("ranks", "items each", "first save", "later save", "index", "messages, first save", "later")
    rows = [
        (
            f"{point['ranks']:,}",
            f"{point['items']:,}",
            seconds(point["first_s"]),
            seconds(point["later_s"]),
            *(size(point[what]) for what in ("index_bytes", "first_bytes", "later_bytes")),
        )
        for point in points
    ]
    simulated_columns = [0, 1, 2, *range(len(simulated["columns"]) - 4, len(simulated["columns"]))]
    lines = [
        f"On {results['written']}, {others(results)}: {machine_line(results['machine'])}.",
        "",
        *(f"- {remark}" for remark in report["remarks"]),
        "",
        "![coordination by ranks](scale.png)",
        "",
        "Measured with real processes on this machine:",
        "",
        *table(measured["columns"], measured["rows"]),
        "",
        "Simulated, with the real code of rank 0:",
        "",
        *table(
            [simulated["columns"][at] for at in simulated_columns],
            [[row[at] for at in simulated_columns] for row in simulated["rows"]],
        ),
        "",
        "By the model, for every point, whether it was simulated or not:",
        "",
        *table(columns, rows),
    ]
    return "\n".join(lines)


def benchmarks_section(results: Mapping[str, Any]) -> str:
    """Return the text between the markers of the page on benchmarks."""
    lines = [f"On {results['written']}, {others(results)}: {machine_line(results['machine'])}."]
    for name in _SHOWN:
        for shown in results["sections"].get(name, {}).get("tables", ()):
            lines += ["", f"**{shown['title']}**", "", *table(shown["columns"], shown["rows"])]
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Format a number of bytes."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def with_section(text: str, content: str) -> str:
    """Return a page with the text between its markers replaced.

    Raises:
        ValueError: if the page has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page needs the lines {BEGIN} and {END}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def rewrite(directory: Path) -> int:
    """Rewrite the figures of every page that has some; return the exit code."""
    results = json.loads((directory / "results.json").read_text())
    for page, content_of in PAGES.items():
        page.write_text(with_section(page.read_text(), content_of(results)))
        print(f"{page.relative_to(ROOT)}: written from {directory / 'results.json'}")
    shutil.copyfile(directory / "scale.png", SCALE.with_name("scale.png"))  # the wheel has the pages, not the results
    return 0


PAGES = {README: section, SCALE: scale_section, BENCHMARKS: benchmarks_section}
"""For each page with figures, the function that returns them."""
