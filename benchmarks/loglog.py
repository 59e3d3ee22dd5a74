"""A plot with logarithmic axes, as SVG; so little of one that it needs no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 560, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933", "#777777")


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one kind.

    Attributes:
        label: what they are.
        points: pairs of positive numbers.
        colour: the number of a colour.
        dashed: how it is drawn.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        title: above it.
        x: what the horizontal axis is.
        y: what the vertical axis is.
        lines: what it shows.
        bar: a value of the vertical axis to mark.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    bar: float | None = None


def render(panels: Sequence[Panel]) -> str:
    """Draw plots side by side."""
    legend = max((len(panel.lines) for panel in panels), default=0) * 16 + 20
    width, height = _WIDTH * len(panels), _HEIGHT + legend
    body = "".join(
        f'<g transform="translate({_WIDTH * number},0)">{_panel(panel)}</g>' for number, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines for point in line.points]
    if not points:
        return f'<text x="{_LEFT}" y="20">{escape(panel.title)}: nothing was measured</text>'
    across = _Axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, powers=False)
    marked = [] if panel.bar is None else [panel.bar]
    up = _Axis([*(y for _, y in points), *marked], _HEIGHT - _BOTTOM, _TOP, powers=True)
    parts = [f'<text x="{_LEFT}" y="20" font-size="13" font-weight="bold">{escape(panel.title)}</text>']
    parts += [_rule(x, _TOP, x, _HEIGHT - _BOTTOM) + _label(x, _HEIGHT - _BOTTOM + 16, t) for x, t in across.ticks()]
    parts += [_rule(_LEFT, y, _WIDTH - _RIGHT, y) + _label(_LEFT - 6, y + 4, text, "end") for y, text in up.ticks()]
    parts.append(_label((_LEFT + _WIDTH) / 2, _HEIGHT - 12, panel.x))
    parts.append(f'<g transform="translate(14,{_HEIGHT / 2}) rotate(-90)">{_label(0, 0, panel.y)}</g>')
    if panel.bar is not None:
        parts.append(_rule(_LEFT, up.at(panel.bar), _WIDTH - _RIGHT, up.at(panel.bar), "black"))
    parts += [_line(line, number, across, up) for number, line in enumerate(panel.lines)]
    return "".join(parts)


class _Axis:
    """Where values are drawn.

    Args:
        values: what must have room.
        begin: where the axis begins.
        end: where it ends.
        powers: label powers of ten; else the values themselves.
    """

    def __init__(self, values: Sequence[float], begin: float, end: float, *, powers: bool) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        if powers:
            low, high = math.floor(low), math.ceil(high)
        self._low, self._span = low, max(high - low, 0.1)
        self._begin, self._length = begin, end - begin
        self._marks = [10.0**power for power in range(int(low), int(high) + 1)] if powers else sorted(set(values))

    def at(self, value: float) -> float:
        """Give the place of a value."""
        return round(self._begin + (math.log10(value) - self._low) / self._span * self._length, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Give places and labels."""
        return [(self.at(mark), f"{mark:,.0f}" if mark >= 1 else f"{mark:g}") for mark in self._marks]


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = "#dddddd") -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(line: Line, number: int, across: _Axis, up: _Axis) -> str:
    colour = _COLOURS[line.colour % len(_COLOURS)]
    style = f'stroke="{colour}" stroke-width="2"' + ' stroke-dasharray="5 4"' * line.dashed
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = " ".join(f"{x},{y}" for x, y in places)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places)
    y = _HEIGHT + 10 + 16 * number
    key = f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + 30}" y2="{y}" {style}/>' + _label(
        _LEFT + 38, y + 4, line.label, "start"
    )
    return f'<polyline points="{path}" fill="none" {style}/>{dots}{key}'
