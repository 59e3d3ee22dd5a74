"""The figures in the README and in the pages on benchmarks and scale, written from the results of a full run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.figures import SAME_WORK, WHY_FASTER, faster_peers, held, rounds_of, seconds, title_of
from benchmarks.report.markdown import cell, machine_line, table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SCALE = ROOT / "aiockpt" / "docs" / "scale.md"
BENCHMARKS = ROOT / "aiockpt" / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: python -m benchmarks readme -->", "<!-- end of the figures -->"
PICTURES = {"ratios.png": "Speed as a share of the machine's limit", "training.png": "A training loop with checkpoints"}

_SHOWN = (
    "training",
    "safetensors from ranks",
    "compression",
    "in processes of their own",
    "growth",
)  # sections on the page on benchmarks

_BY_FORMULA = (
    "By the formula, for every point, whether it was simulated or not: rank 0's work, and the same with two rounds of "
    "messages, which were measured with processes that share the cores of one machine:"
)
_READ = (
    "Times, so less is better. The machine by itself: the same bytes moved by system calls or memmove alone, without "
    "CRCs and without a format. Of new memory, the kernel clears each page before its first use, so raw reads into it "
    "are a yardstick, not a limit."
)
_MORE = (
    "[benchmarks](aiockpt/docs/benchmarks.md) says how, [the results](benchmarks/results/results.md) have everything, "
    "and [scale](aiockpt/docs/scale.md) is about many ranks."
)


_ON_A_GPU = (
    (
        "[on an H100](aiockpt/docs/benchmarks.md#a-state-on-a-gpu): save, until the tensors may change (4 GiB)",
        "95 ms",
        "80 ms, copies into pinned memory",
        "96 ms, DCP's DefaultStager, no CRC",
    ),
    ("the same, until it is durable, beside training", "1.9 s", "1.8 s, raw writes", "3.5 s, torch_checkpointing"),
)
"""Rows of the last run on a GPU, which the full run has no machine for: the page says how it was measured."""


def section(results: Mapping[str, Any]) -> str:
    """Return the text between the markers of the README."""
    known = held(results)
    columns = ("", "aiockpt", "the machine by itself", "the fastest peer")
    rows = [
        (
            f"{each.claim.text} ({each.size})" if each.size else each.claim.text,
            seconds(each.ours.value),
            "" if each.limit is None else f"{seconds(each.limit.value)}, {each.claim.by_itself}",
            "" if each.best is None else f"{seconds(each.best.value)}, {cell(each.best.name)}",
        )
        for each in known
    ] + list(_ON_A_GPU)
    beaten: dict[str, dict[str, None]] = {}
    for each in known:
        if each.best is not None and each.is_beaten:
            beaten.setdefault(each.claim.why, {})[each.best.name] = None
    line = machine_line(results["machine"])
    lines = [
        f"`{results['command']}` on {results['written']}; {others(results)}. {line}. {_MORE}",
        "",
        *table(columns, rows),
        "",
        " ".join([_READ, *(f"Why {' and '.join(names)} can be faster: {why}." for why, names in beaten.items())]),
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
    model = {name: report["details"]["model"][name] for name in ("first", "later")}
    columns = ("ranks", "items each", "first save, work", "with messages", "later save, work", "with messages")
    columns += ("index", "messages, first save", "later")
    rows = [
        (
            f"{point['ranks']:,}",
            f"{point['items']:,}",
            *(
                text
                for what, cost in model.items()
                for text in (seconds(_work(cost, point["ranks"], point["items"])), seconds(point[f"{what}_s"]))
            ),
            *(size(point[what]) for what in ("index_bytes", "first_bytes", "later_bytes")),
        )
        for point in points
    ]
    shown = [0, 1, 2, *range(len(simulated["columns"]) - 4, len(simulated["columns"]))]
    done = [row for row in simulated["rows"] if not row[-1].startswith("not run")]
    missing = [row for row in simulated["rows"] if row[-1].startswith("not run")]
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
        *table([simulated["columns"][at] for at in shown], [[row[at] for at in shown] for row in done]),
        "",
        *([_missing(missing, {row[0].partition(": ")[0] for row in done}), ""] if missing else []),
        _BY_FORMULA,
        "",
        *table(columns, rows),
    ]
    return "\n".join(lines)


def _work(cost: Mapping[str, float], ranks: float, items: float) -> float:
    return cost["constant"] + cost["per_rank"] * ranks + cost["per_item"] * ranks * items


def _missing(rows: Sequence[Sequence[str]], done: Collection[str]) -> str:
    """Return a sentence on what was not run, and why; of a kind of which nothing was done (``done``) only its name."""
    reasons: dict[str, dict[str, None]] = {}
    for name, *_, why in rows:
        what = name if name.partition(": ")[0] in done else f"all of {name.partition(': ')[0]}"
        reasons.setdefault(why.removeprefix("not run: "), {})[what] = None
    return " ".join(f"Not run ({why}): {'; '.join(names)}." for why, names in reasons.items())


def benchmarks_section(results: Mapping[str, Any]) -> str:
    """Return the text between the markers of the page on benchmarks."""
    lines = [f"On {results['written']}, {others(results)}: {machine_line(results['machine'])}."]
    for name in _SHOWN:
        for shown in results["sections"].get(name, {}).get("tables", ()):
            title = title_of(shown["title"], rounds_of(shown))
            lines += ["", f"**{title}**", "", *table(shown["columns"], shown["rows"])]
    rows = [
        (
            title_of(found["title"], rounds_of(found)),
            f"{seconds(ours.value)}, {cell(ours.name)}",
            "; ".join(f"{seconds(each.value)}, {cell(each.name)}" for each in peers),
            "yes" if section in SAME_WORK else "no",
            WHY_FASTER[section],
        )
        for section, found, ours, peers in faster_peers(results)
    ]
    if rows:
        lines += ["", "**Where peers are faster, of all tables of the run**", ""]
        lines += table(("", "aiockpt", "peers", "same work", "why"), rows)
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
