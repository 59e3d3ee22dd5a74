"""Results as cards for notebooks: a table of facts, and the timeline as a small picture (SVG). Light and dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from aiockpt.errors import printable_key
from aiockpt.telemetry.timeline import TimelineEvent, lane_name, lanes_of

COLORS = {
    "capture": "#d97706",
    "plan": "#8b5cf6",
    "stage": "#2f81d8",
    "seal": "#0d9488",
    "create": "#94a3b8",
    "write": "#3f9b46",
    "sync": "#c2557a",
    "encode": "#b45309",
    "commit": "#e0533d",
    "documents": "#a3a13a",
    "publish": "#d946a6",
    "open": "#d97706",
    "objects": "#0d9488",
    "load_state_dict": "#c2557a",
    "read": "#2f81d8",
    "check": "#2f81d8",
    "assemble": "#3f9b46",
}
"""Colors of the kinds of work, which can be told apart on white and on black."""
OTHER = "#8a8f98"
_WIDTH, _ROW, _LEFT = 640, 14, 150
_LANES = 24


def size_text(nbytes: float) -> str:
    """Return a number of bytes in the largest fitting unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def time_text(seconds: float) -> str:
    """Return a duration."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def card(title: str, path: str, facts: Mapping[str, str], events: Sequence[TimelineEvent], notes: str = "") -> str:
    """Return HTML. Everything in it is escaped; its colors are those around it, so that it fits every theme."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    head = f"<b>{html.escape(title)}</b> <code>{html.escape(printable_key(path))}</code>"
    note = f"<pre>{html.escape(notes)}</pre>" if notes else ""
    return f"<div>{head}<table>{rows}</table>{note}{_picture(events)}</div>"


def _picture(events: Sequence[TimelineEvent]) -> str:
    """Return an SVG with a row for each thread."""
    if not events:
        return ""
    pid, total = events[0].pid, max(event.end_s for event in events) or 1e-9
    lanes = lanes_of(events)
    shown = {lane: number for number, lane in enumerate(lanes[:_LANES])}
    scale = (_WIDTH - _LEFT) / total
    height = _ROW * (len(shown) + 1)
    parts = [
        f"<text x='0' y='{_ROW * number + 11}'>{html.escape(lane_name(lane, pid)[:24])}</text>"
        for lane, number in shown.items()
    ]
    parts += [
        f"<rect x='{x:.1f}' y='{_ROW * shown[lane] + 2}' width='{max(stop - x, 0.7):.1f}' height='{_ROW - 4}' "
        f"fill='{COLORS.get(name, OTHER)}'><title>{html.escape(f'{name}: {text}')}</title></rect>"
        for lane, name, x, stop, text in _bars(events, shown, scale)
    ]
    more = f", and {len(lanes) - len(shown)} more threads" if len(lanes) > len(shown) else ""
    kinds = dict.fromkeys(event.name for event in events)
    x = 70.0 + 6 * len(more)
    for name in kinds:
        parts.append(
            f"<text x='{x:.0f}' y='{height - 3}'>"
            f"<tspan fill='{COLORS.get(name, OTHER)}'>&#9632;</tspan> {html.escape(name)}</text>"
        )
        x += 5.2 * len(name) + 17
    parts.append(f"<text x='0' y='{height - 3}'>{html.escape(time_text(total) + more)}</text>")
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' role='img' aria-label='timeline' "
        f"style='font:10px sans-serif;max-width:100%' fill='currentColor'>{''.join(parts)}</svg>"
    )


def _bars(
    events: Sequence[TimelineEvent], lanes: Mapping[tuple[int, str], int], scale: float
) -> list[tuple[tuple[int, str], str, float, float, str]]:
    """Return a bar for each event; those of one kind that nearly touch in the picture become one."""
    # Up to 100,000 events are recorded: with a bar for each, the picture would have over ten megabytes.
    runs: dict[tuple[tuple[int, str], str], list[tuple[float, float, int, int]]] = {}
    for event in events:
        lane = (event.pid, event.thread)
        if lane not in lanes:
            continue
        x, stop = _LEFT + event.start_s * scale, _LEFT + event.end_s * scale
        mine, begin, count, nbytes = runs.setdefault((lane, event.name), []), x, 0, 0
        if mine and x - mine[-1][1] <= 1.0:
            begin, end, count, nbytes = mine.pop()
            stop = max(end, stop)
        mine.append((begin, stop, count + 1, nbytes + event.nbytes))
    bars = []
    for (lane, name), mine in runs.items():
        for x, stop, count, nbytes in mine:
            times = f"{count} x, " if count > 1 else ""
            bars.append((lane, name, x, stop, f"{times}{size_text(nbytes)}, {time_text((stop - x) / scale)}"))
    return bars
