"""The tables that the demo ends with."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from aiockpt.cli.demo.display import GIB, MIB, checkpoint_name
from aiockpt.cli.demo.events import Measured
from aiockpt.cli.demo.history import History


def saves_table(history: History) -> Table:
    """Tabulate the saves of a run."""
    table = _table("Saves while training", "checkpoint", "training held", "staged", "durable", "size", "speed")
    for step, saved in sorted(history.saved.items()):
        table.add_row(
            checkpoint_name(step),
            _ms(history.held_s.get(step, 0.0)),
            _ms(saved.staged_s),
            _ms(saved.written_s),
            f"{saved.nbytes / MIB:.0f} MiB",
            f"{saved.nbytes / saved.written_s / GIB:.2f} GiB/s",
        )
    return table


def methods_table(measured: Sequence[Measured], nbytes: int) -> Table:
    """Tabulate ways to save the same state, each with the medians of its times."""
    table = _table("The same state, with nothing else going on", "method", "call returns", "staged", "durable", "speed")
    for method in dict.fromkeys(one.method for one in measured):
        times = [one for one in measured if one.method == method]
        written = median(one.written_s for one in times)
        table.add_row(
            method,
            _ms(median(one.returned_s for one in times)),
            _ms(median(one.staged_s for one in times)),
            _ms(written),
            f"{nbytes / written / GIB:.2f} GiB/s",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
