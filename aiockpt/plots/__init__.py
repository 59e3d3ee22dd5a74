"""Pictures of results, by matplotlib: ``pip install 'aiockpt[plots]'``."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from aiockpt.telemetry.card import COLORS, OTHER, size_text, time_text
from aiockpt.telemetry.timeline import Timed, TimelineEvent, lane_name, lanes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["timeline"]

_ROW_INCHES = 0.28


def timeline(result: Timed, ax: Axes | None = None) -> Axes:
    """Draw what each thread did and when: a row for each thread, a color for each kind of work.

    Args:
        result: a `SaveResult`, `LoadResult` or `VerifyReport`.
        ax: where to draw; None: on a new figure.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
        ValueError: the result has no events, as of a save that has failed.
    """
    events = result.timeline()
    if not events:
        raise ValueError("there is nothing to draw: the result has no events")
    lanes = lanes_of(events)
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as exc:
            raise ImportError("plots need matplotlib: pip install 'aiockpt[plots]'") from exc
        _, ax = pyplot.subplots(figsize=(10, 1.4 + _ROW_INCHES * len(lanes)), layout="constrained")
    bars: dict[str, dict[int, list[TimelineEvent]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        bars[event.name][lanes.index((event.pid, event.thread))].append(event)
    for name, rows in bars.items():
        color = COLORS.get(name, OTHER)
        for number, (row, group) in enumerate(rows.items()):
            ax.broken_barh(
                [(event.start_s, event.duration_s) for event in group],
                (row - 0.4, 0.8),
                facecolors=color,
                edgecolors=color,  # so that the shortest ones can be seen
                linewidth=0.4,
                # once: the legend lists every label
                label=name if number == 0 else None,
            )
    ax.set_yticks(range(len(lanes)), [lane_name(lane, result.recording.pid) for lane in lanes])
    # Downwards: the first thread at the top, as in the card.
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, max(event.end_s for event in events))
    ax.set_xlabel("seconds since the call")
    ax.set_title(_title(events), fontsize="medium")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return ax


def _title(events: list[TimelineEvent]) -> str:
    moved = sum(event.nbytes for event in events if event.name in ("write", "read"))
    took = max(event.end_s for event in events)
    return f"{size_text(moved)} in {time_text(took)}" if moved else time_text(took)
