"""Pictures of results: shares of the limit, the timeline of a save, scaling, training, coordination."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.figures import OURS, Figure, figures, rounds_of, seconds, tables, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

OURS_COLOUR, PEER_COLOUR, LIMIT_COLOUR = "#2563eb", "#9ca3af", "#d1d5db"
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563", "#84cc16", "#f472b6")
_STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}
_BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_LONG_TITLE = 10.5  # points, of one that is as wide as its panel
_MOST = 12

_RATIOS = (
    ("durable save", "save", "save"),
    ("load from the disk", "load", "load, cold"),
    ("load from the page cache", "load", "load, cached"),
    ("load in a new process, cached", "new process", "new process, cached"),
)


def draw(results: Mapping[str, Any], directory: Path) -> list[str]:
    """Draw every picture that the results have figures for; return their names, none without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return []
    mpl.use("Agg")
    from matplotlib import pyplot

    drawn = []
    with mpl.rc_context(_STYLE):
        for name, picture in PICTURES.items():
            canvas = picture(results)
            if canvas is not None:
                canvas.savefig(directory / name, dpi=110, bbox_inches="tight")
                pyplot.close(canvas)
                drawn.append(name)
    return drawn


def _canvas(rows: int, columns: int, width: float, height: float) -> tuple[Canvas, list[Axes]]:
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    return canvas, [each for row in axes for each in row]


# --- shares of the limit ---------------------------------------------------------------------------------


def ratios(results: Mapping[str, Any]) -> Canvas | None:
    """Draw each contender's speed as a share of the limit."""
    panels = [
        (title_of(f"{title}, {_size_in(table)}medians of 0 rounds", rounds_of(table)), best_of(_with_ratio(table)))
        for title, section, begin in _RATIOS
        for table in tables(results, section, begin)[:1]
    ]
    panels = [(title, bars) for title, bars in panels if bars]
    if not panels:
        return None
    rows = -(-len(panels) // 2)
    canvas, axes = _canvas(rows, min(2, len(panels)), 12, 1.2 + 3.4 * rows)
    for (title, known), axis in zip(panels, axes, strict=False):
        _bars(axis, known, [each.ratio or 0 for each in known], [seconds(each.value) for each in known])
        axis.axvline(1, color="black", linewidth=1)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=_LONG_TITLE)
        into_new = max(each.ratio or 0 for each in known) > 1.05  # no limit: the kernel clears pages one by one
        axis.set_xlabel(
            "speed, compared with raw I/O into new memory in two threads (the line)"
            if into_new
            else "share of the limit's speed (the line: raw I/O of the same bytes)"
        )
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return canvas


def _size_in(table: Mapping[str, Any]) -> str:
    """Return the size that a table's title names, with a comma behind it."""
    found = re.search(r"[0-9.]+ [GM]iB", table["title"])
    return f"{found[0]}, " if found else ""


def _with_ratio(table: Mapping[str, Any]) -> list[Figure]:
    return [each for each in figures(table) if each.ratio is not None]


def best_of(known: Sequence[Figure], most: int = _MOST) -> list[Figure]:
    """Return the fastest contenders, the fastest first, without limits and contenders that only map."""
    return sorted((each for each in known if not each.is_limit and not each.only_maps), key=lambda each: each.value)[
        :most
    ]


def _bars(axis: Axes, known: Sequence[Figure], lengths: Sequence[float], texts: Sequence[str]) -> None:
    places = range(len(known))
    axis.barh(places, lengths, color=[OURS_COLOUR if each.ours else PEER_COLOUR for each in known])
    axis.set_yticks(places, [each.name for each in known])
    axis.invert_yaxis()
    for place, length, text in zip(places, lengths, texts, strict=True):
        axis.text(length, place, f" {length:.2f}  ({text})", va="center", fontsize=8.5, bbox=_BEHIND_TEXT, zorder=5)
    axis.set_xlim(0, max([*lengths, 1]) * 1.35)


# --- a save's timeline -----------------------------------------------------------------------------------


def timeline(results: Mapping[str, Any]) -> Canvas | None:
    """Draw the events of each thread and each file of one save."""
    events = results["sections"].get("save", {}).get("details", {}).get("timeline")
    if not events:
        return None
    lanes = list(dict.fromkeys(event["lane"] for event in events))
    kinds = list(dict.fromkeys(event["kind"] for event in events))
    canvas, (axis, *_) = _canvas(1, 1, 12, 1.6 + 0.34 * len(lanes))
    for number, kind in enumerate(kinds):
        for lane, spans in _spans(events, kind).items():
            place = lanes.index(lane)
            axis.broken_barh(
                [(begin * 1e3, max(end - begin, 1e-5) * 1e3) for begin, end in spans],
                (place - 0.4, 0.8),
                color=COLOURS[number % len(COLOURS)],
                label=kind,
                edgecolor="white",
                linewidth=0.3,
            )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds since the call")
    size = next(map(_size_in, tables(results, "save")), "")
    axis.set_title(f"{size}saved durably once: what each thread does", loc="left", fontweight="bold")
    shown = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(shown.values(), shown.keys(), loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return canvas


def _spans(events: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[tuple[float, float]]]:
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["kind"] == kind:
            spans[event["lane"]].append((event["begin_s"], event["end_s"]))
    return spans


# --- scaling ---------------------------------------------------------------------------------------------


def scaling(results: Mapping[str, Any]) -> Canvas | None:
    """Draw the speed by size, and the time by the number of tensors."""
    points = results["sections"].get("by size and number", {}).get("details", {})
    if not points:
        return None
    canvas, axes = _canvas(1, 2, 12, 4.4)
    _lines(axes[0], points["size"], "MiB of state", "GiB/s, durable", lambda size, s: (size / 2**20, size / 2**30 / s))
    _lines(axes[1], points["number"], "tensors", "seconds, durable", lambda number, s: (number, s))
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")  # without a zero
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[0].set_title("speed of a save, by size", loc="left", fontweight="bold")
    title = f"time of a save of {points['number_gib'] * 1024:.0f} MiB, by number of tensors"
    axes[1].set_title(title, loc="left", fontweight="bold")
    axes[1].legend(frameon=False, fontsize=9)
    return canvas


def _lines(
    axis: Axes,
    curves: Mapping[str, Sequence[Sequence[float]]],
    x: str,
    y: str,
    place: Callable[[float, float], tuple[float, float]],
) -> None:
    peers = iter(COLOURS[1:])
    for name, points in curves.items():
        places = [place(at, value) for at, value in points]
        raw = name.startswith("raw")
        axis.plot(
            [each[0] for each in places],
            [each[1] for each in places],
            marker="o",
            label=name,
            color="black" if raw else OURS_COLOUR if name.startswith(OURS) else next(peers, PEER_COLOUR),
            linestyle="--" if raw else "-",
        )
    axis.set_xscale("log")
    # Where something was measured: the labels of a logarithmic axis overlap within a decade.
    ticks = sorted({place(at, value)[0] for points in curves.values() for at, value in points})
    axis.set_xticks(ticks, [f"{each:,.0f}" for each in ticks])
    axis.minorticks_off()
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)


# --- training --------------------------------------------------------------------------------------------


def training(results: Mapping[str, Any]) -> Canvas | None:
    """Draw the throughput that a training loop keeps during saves, and its longest step of all rounds."""
    for table in tables(results, "training")[:1]:
        whole = figures(table, "train_s")
        alone = next((each.value for each in whole if each.name == "no checkpoints"), None)
        if alone is None:
            return None
        known = sorted((each for each in whole if not each.is_limit), key=lambda each: each.value)
        canvas, axes = _canvas(1, 2, 12, 1.4 + 0.34 * len(known))
        _bars(axes[0], known, [alone / each.value for each in known], [seconds(each.value) for each in known])
        axes[0].axvline(1, color="black", linewidth=1)
        axes[0].set_xlabel("steps per second, as a share of those without checkpoints")
        title = title_of(f"throughput kept, {_size_in(table)}medians of 0 rounds", rounds_of(table))
        axes[0].set_title(title, loc="left", fontweight="bold", fontsize=_LONG_TITLE)
        step = {run["name"]: _most(run, "step_max_s") * 1e3 for run in table["runs"] if run["samples"]}
        lengths = [step[each.name] for each in known]
        axes[1].barh(range(len(known)), lengths, color=[OURS_COLOUR if each.ours else PEER_COLOUR for each in known])
        axes[1].axvline(step["no checkpoints"], color="black", linewidth=1)
        for place, length in enumerate(lengths):
            axes[1].text(length, place, f" {length:.0f} ms", va="center", fontsize=8.5, bbox=_BEHIND_TEXT)
        axes[1].set_yticks([])
        axes[1].invert_yaxis()
        axes[1].set_xlim(0, max(lengths) * 1.15)
        axes[1].set_xlabel("ms, of all rounds, the first included; the line: without checkpoints")
        axes[1].set_title("longest step", loc="left", fontweight="bold", fontsize=_LONG_TITLE)
        return canvas
    return None


def _most(run: Mapping[str, Any], metric: str) -> float:
    """Return the greatest value of all rounds, as the tables do: also of the first, which does not count otherwise."""
    return max(sample[metric] for sample in (*run["samples"], run["first"]) if metric in sample)


# --- coordination ----------------------------------------------------------------------------------------


def scale(results: Mapping[str, Any]) -> Canvas | None:
    """Draw the cost of coordination by ranks: measured, simulated, and by the formula.

    A line is the formula, and crosses of its colour are what it was fitted to.
    """
    details = results["sections"].get("scale", {}).get("details", {})
    if not details:
        return None
    panels = details["panels"]
    canvas, axes = _canvas(1, len(panels), 12, 4.6)
    for panel, axis in zip(panels, axes, strict=True):
        for number, (name, points) in enumerate(panel["lines"].items()):
            axis.plot(
                [at for at, _ in points],
                [value for _, value in points],
                marker="o" if "measured" in name else None,
                linestyle="none" if "measured" in name else "-" if "later" in name else "--",
                label=name,
                color=COLOURS[number % len(COLOURS)],
            )
            if panel["points"].get(name):
                fitted = zip(*panel["points"][name], strict=True)
                axis.plot(*fitted, marker="x", linestyle="none", color=COLOURS[number % len(COLOURS)])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({point[0] for points in panel["lines"].values() for point in points})
        axis.set_xticks(
            ticks[:: max(1, len(ticks) // 6)], [f"{each:,.0f}" for each in ticks[:: max(1, len(ticks) // 6)]]
        )
        axis.minorticks_off()
        axis.set_xlabel("ranks")
        axis.set_ylabel(panel["y"])
        axis.set_title(panel["title"], loc="left", fontweight="bold", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    return canvas


PICTURES: Mapping[str, Callable[[Mapping[str, Any]], Canvas | None]] = {
    "ratios.png": ratios,
    "timeline.png": timeline,
    "scaling.png": scaling,
    "training.png": training,
    "scale.png": scale,
}
