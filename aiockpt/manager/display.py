"""How a run shows itself in a notebook."""

from __future__ import annotations

import html
from datetime import datetime
from typing import TYPE_CHECKING

from aiockpt.errors import printable_key
from aiockpt.telemetry.card import size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from aiockpt.manager.scan import StepInfo

_SHOWN = 20


def html_table(
    title: str, infos: Sequence[StepInfo], kept: Mapping[int, Sequence[str]], pinned: Collection[int]
) -> str:
    """Return a table of the last steps: state, size, time, metrics, and the policies that keep each."""
    metrics = sorted({name for info in infos for name in info.metrics})
    rows = [_row(info, metrics, kept, pinned) for info in infos[-_SHOWN:]]
    head = "".join(
        f"<th>{html.escape(printable_key(name))}</th>"
        for name in ("step", "state", "size", "saved", *metrics, "kept by")
    )
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    earlier = f"<p>and {len(infos) - len(rows)} earlier ones</p>" if len(infos) > len(rows) else ""
    return f"<p><b>{html.escape(printable_key(title))}</b></p><table><tr>{head}</tr>{body}</table>{earlier}"


def _row(
    info: StepInfo, metrics: Sequence[str], kept: Mapping[int, Sequence[str]], pinned: Collection[int]
) -> list[str]:
    saved = datetime.fromtimestamp(info.time).astimezone().isoformat(" ", "seconds")
    values = [f"{info.metrics[name]:.6g}" if name in info.metrics else "" for name in metrics]
    reasons = [*kept.get(info.step, ()), *(["a pin"] if info.step in pinned else [])]
    state = f"{info.state}: {info.problem}" if info.problem else info.state
    return [str(info.step), state, size_text(info.nbytes), saved, *values, ", ".join(reasons)]
