"""Pictures of timelines, drawn by matplotlib into memory."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

import aiockpt
import aiockpt.plots
from aiockpt import SaveResult
from tests.drawing import warm
from tests.states import large_state


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    warm()


@pytest.fixture(autouse=True)
def pyplot(monkeypatch: pytest.MonkeyPatch):
    """The module pyplot. All figures are closed after the test."""
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_timeline_of_a_save(writer: str, tmp_path: Path, pyplot) -> None:
    with aiockpt.SyncCheckpointer(writer=writer, chunk_bytes=1 << 20) as ckpt:
        result = ckpt.save(large_state(20), tmp_path / "c")
    ax = aiockpt.plots.timeline(result)
    events = result.timeline()
    drawn = {}
    for bars in ax.collections:
        drawn.setdefault(bars.get_facecolor()[0].tobytes(), []).extend(bars.get_paths())
    assert sum(map(len, drawn.values())) == len(events)
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert len(rows) == len({(event.pid, event.thread) for event in events})
    assert rows[0] == "MainThread"
    assert any(row.startswith("writer: io") for row in rows) == (writer == "process")
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(legend) == sorted({event.name for event in events})
    for name in ("stage", "write"):
        first = next(event for event in events if event.name == name)
        boxes = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
        (row,) = {
            round(box.y0 + 0.4)
            for box in boxes
            if box.x0 == pytest.approx(first.start_s) and box.x1 == pytest.approx(first.end_s)
        }
        assert rows[row].removeprefix("writer: ") in first.thread
    file = io.BytesIO()
    ax.figure.savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_load_and_verification_on_given_axes(tmp_path: Path, pyplot) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(1 << 20)}, tmp_path / "c")
        ckpt.load(tmp_path / "c")
        report = ckpt.verify(tmp_path / "c")
    _, (upper, lower) = pyplot.subplots(2)
    assert aiockpt.plots.timeline(ckpt.last_load, upper) is upper
    assert aiockpt.plots.timeline(report, ax=lower) is lower
    assert upper.get_title().startswith("4.0 MiB in ")


def test_result_without_events_is_refused() -> None:
    with pytest.raises(ValueError, match="no events"):
        aiockpt.plots.timeline(SaveResult.of_failure("c", OSError(), 1.0))


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        result = ckpt.save({"x": 1}, tmp_path / "c")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'aiockpt\[plots\]'"):
        aiockpt.plots.timeline(result)
