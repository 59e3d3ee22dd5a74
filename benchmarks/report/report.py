"""The report of a benchmark: tables, bars that were met or missed, and all figures as JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.harness.measure import Runs
from benchmarks.report.bars import Bar

Cell = Callable[[Runs], str]


@dataclass(slots=True)
class Table:
    """A table with a row for each contender.

    Attributes:
        columns: the columns between name and note: for each title a function that returns a cell.
        metric: the main metric, which is compared.
        limit: the prefix of the names of the rows that are the machine's limit.
    """

    title: str
    columns: dict[str, Cell]
    runs: Sequence[Runs]
    metric: str = ""
    limit: str = ""

    def render(self) -> RichTable:
        """Return the table for the terminal."""
        table = RichTable(title=self.title, title_justify="left", header_style="bold")
        table.add_column("", no_wrap=True)
        for name in self.columns:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("note")
        for run, (name, *cells, note) in zip(self.runs, self.rows(), strict=True):
            table.add_row(escape(name), *cells, f"[red]{escape(note)}[/]" if run.error else escape(note))
        return table

    def rows(self) -> list[list[str]]:
        """Return the texts of every row: name, cells, and note or error."""
        return [
            [
                run.name,
                *(cell(run) if run.samples else "-" for cell in self.columns.values()),
                shorten(run.error) if run.error else run.note,
            ]
            for run in self.runs
        ]

    def figures(self) -> dict[str, object]:
        """Return the table and all its samples, for JSON."""
        return {
            "title": self.title,
            "metric": self.metric,
            "limit": self.limit,
            "columns": ["", *self.columns, "note"],
            "rows": self.rows(),
            "runs": [_figures(run) for run in self.runs],
        }


@dataclass(slots=True)
class Report:
    """The results of one benchmark."""

    benchmark: str
    options: dict[str, object]
    machine: dict[str, object]
    tables: list[Table]
    bars: list[Bar]
    remarks: list[str] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)
    """Further data for pictures."""

    def show(self) -> None:
        """Print the report."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=200)
        for table in self.tables:
            console.print(table.render())
        for remark in self.remarks:
            console.print(escape(remark), style="dim")
        for bar in self.bars:
            console.print(str(bar), highlight=False)

    def write(self, path: Path) -> None:
        """Write the figures of all rounds as JSON."""
        content = {
            "benchmark": self.benchmark,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "options": {name: value for name, value in self.options.items() if not isinstance(value, Path)},
            "machine": self.machine,
            "tables": [table.figures() for table in self.tables],
            "bars": [{**asdict(bar), "passed": bar.passed} for bar in self.bars],
            "remarks": self.remarks,
            "details": self.details,
        }
        path.write_text(json.dumps(_without_nan(content), indent=1, default=str) + "\n")


def _figures(run: Runs) -> dict[str, object]:
    measured = {name for sample in run.samples for name in sample}
    return {**asdict(run), "medians": {name: run.median(name) for name in sorted(measured)}}


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# --- cells ---------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format a time, in seconds or milliseconds."""
    if math.isnan(seconds):
        return "-"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e3:.1f} ms"
    )


def median_time(what: str) -> Cell:
    """Return a cell with the median of a time."""
    return lambda run: duration(run.median(what))


def spread(what: str) -> Cell:
    """Return a cell with the median of a time, the shortest and the longest."""

    def show(run: Runs) -> str:
        values = run.values(what)
        return f"{duration(run.median(what))} ({min(values):.2f}..{max(values):.2f})" if values else "-"

    return show


def speed(what: str, nbytes: int) -> Cell:
    """Return a cell with the speed in GiB/s, by the median time."""
    return lambda run: number(nbytes / run.median(what) / 2**30)


def of_limit(what: str, limit_s: float) -> Cell:
    """Return a cell with the speed as a share of the limit's."""
    return lambda run: number(limit_s / run.median(what))


def most_mib(what: str) -> Cell:
    """Return a cell with the greatest size in MiB, the warm-up included."""
    return lambda run: number(run.most(what) / 2**20, digits=0)


def number(value: float, digits: int = 2) -> str:
    """Format a number; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def shorten(text: str, limit: int = 160) -> str:
    """Return the beginning of a long error, and its last line, which often states the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    brief = lines[0] if len(lines) < 2 else f"{lines[0][: limit // 2]} ... {lines[-1]}"
    return brief if len(brief) <= limit else f"{brief[:limit]}..."
