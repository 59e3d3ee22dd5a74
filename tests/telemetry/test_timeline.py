"""Timelines: the work of each thread, in order and in bytes; their trace files and their display."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import aiockpt
from aiockpt import TimelineEvent
from aiockpt.core import spans
from aiockpt.errors import CorruptCheckpointError
from aiockpt.storage import LocalStorage
from aiockpt.telemetry.card import card
from aiockpt.telemetry.timeline import lanes_of, trace_of
from aiockpt.testing import FaultyStorage
from tests.states import large_state, training_state

CHUNK = 1 << 20


def state() -> dict[str, object]:
    return {**training_state(), **large_state(20)}


def files_of(events: list[TimelineEvent], name: str) -> dict[str, list[TimelineEvent]]:
    """Return the events of a kind by file, in order."""
    found = defaultdict(list)
    for event in events:
        if event.name == name:
            found[event.file].append(event)
    return dict(found)


def check_save(result: aiockpt.SaveResult) -> list[TimelineEvent]:
    """Check what must hold for every save; return its events."""
    events = result.timeline()
    assert [event.start_s for event in events] == sorted(event.start_s for event in events)
    assert all(0 <= event.start_s <= event.end_s for event in events)
    kinds = {name: files_of(events, name) for name in ("stage", "seal", "write", "sync")}
    sizes = {name: nbytes for name, nbytes in result.files.items() if name != ".metadata"}
    for name in ("stage", "seal", "write"):
        assert {file: sum(e.nbytes for e in group) for file, group in kinds[name].items()} == sizes, name
    for file, size in sizes.items():
        staged, sealed, written = (kinds[name][file] for name in ("stage", "seal", "write"))
        assert len(staged) == len(sealed) == len(written) == -(-size // CHUNK)
        for stage, seal, write in zip(sorted(staged, key=lambda e: e.end_s), sealed, written, strict=True):
            assert stage.end_s <= seal.start_s
            assert seal.end_s <= write.start_s
        (sync,) = kinds["sync"][file]
        assert written[-1].end_s <= sync.start_s
        assert staged[0].end_s <= sealed[0].start_s
    (capture,) = (event for event in events if event.name == "capture")
    (publish,) = (event for event in events if event.name == "publish")
    assert events[0] == capture
    assert capture.start_s == 0
    assert capture.thread == "MainThread"
    assert publish.start_s >= max(event.end_s for event in events if event.name in ("stage", "write", "sync"))
    return events


@pytest.mark.asyncio
@pytest.mark.parametrize("staging_bytes", [2 * CHUNK, None])
async def test_a_save_in_threads(staging_bytes: int | None, tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=staging_bytes) as ckpt:
        result = await ckpt.save(state(), tmp_path / "c")
        again = await ckpt.save(state(), tmp_path / "d")
    for each in (result, again):
        events = check_save(each)
        assert {event.pid for event in events} == {os.getpid()}
        pools = {"stage": "aiockpt-copy", "seal": "aiockpt-seal", "write": "aiockpt-io", "sync": "aiockpt-io"}
        for event in events:
            assert event.thread.startswith(pools.get(event.name, "")), event
        assert {event.name for event in events} >= {"plan", "create", "documents", "commit"}


@pytest.mark.asyncio
async def test_a_save_by_a_writer_process(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, writer="process") as ckpt:
        result = await ckpt.save(state(), tmp_path / "c")
    events = check_save(result)
    ours = {event.name for event in events if event.pid == os.getpid()}
    theirs = {event.name for event in events if event.pid != os.getpid()}
    assert ours == {"capture", "plan", "stage", "commit"}
    assert theirs == {"seal", "create", "write", "sync", "documents", "publish"}
    assert len({event.pid for event in events}) == 2


def test_a_save_at_the_fallback_and_one_that_failed(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), "finish", OSError(5, "Input/output error"))
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, fallback_path=tmp_path / "spare") as ckpt:
        moved = ckpt.save(state(), tmp_path / "c", storage=storage)
        assert moved.fallback_error is not None
        written = [event for event in moved.timeline() if event.name == "write"]
        assert sum(event.nbytes for event in written) > moved.nbytes  # the bytes of the first attempt too
    with aiockpt.SyncCheckpointer(on_failure="warn") as ckpt:
        failed = ckpt.save(
            {"x": torch.ones(3)}, tmp_path / "d", storage=FaultyStorage(LocalStorage(), "begin", OSError(5, "x"))
        )
    assert failed.error is not None
    assert failed.timeline() == []


@pytest.mark.asyncio
async def test_compressed_items_are_encoded(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        result = await ckpt.save({"x": torch.zeros(3 * CHUNK // 4)}, tmp_path / "c", compress="zstd")
    events = result.timeline()
    names = [event.name for event in events]
    assert names.index("seal") < names.index("encode") < names.index("write")
    assert sum(event.nbytes for event in events if event.name == "write") == result.nbytes < CHUNK


def test_a_load_and_a_verification(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        assert ckpt.last_load is None
        saved = ckpt.save(state(), tmp_path / "c")
        loaded = ckpt.load(tmp_path / "c")
        result = ckpt.last_load
        assert result is not None
        assert (result.path, result.tensors) == (str(tmp_path / "c"), saved.tensors)
        assert result.nbytes >= saved.tensor_bytes
        events = result.timeline()
        reads = [event for event in events if event.name == "read"]
        assert {event.file for event in reads} <= set(saved.files)
        assert (
            sum(event.nbytes for event in reads) + sum(e.nbytes for e in events if e.name == "objects") == result.nbytes
        )
        assert all(event.thread.startswith("aiockpt-load") for event in reads)
        assert events[0].name == "open"
        assert max(event.end_s for event in events) <= result.loaded_s
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            ckpt.load(tmp_path / "d")
        assert ckpt.last_load is result
        model = torch.nn.Linear(3, 4)
        ckpt.save({"model": model}, tmp_path / "e")
        ckpt.load(tmp_path / "e", {"model": model})
        assert [e.thread for e in ckpt.last_load.timeline() if e.name == "load_state_dict"] == ["MainThread"]
        report = ckpt.verify(tmp_path / "c")
    assert loaded.keys() == state().keys()
    assert {event.name for event in report.timeline()} == {"open", "plan", "check"}


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spans, "MOST", 5)
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        assert len(ckpt.save(state(), tmp_path / "c").timeline()) == 5


def test_the_threads_of_a_pool_have_adjacent_lanes() -> None:
    names = ["MainThread", "io_10", "copy_1", "io_9", "copy_0"]
    events = [event("write", name, 0, 1) for name in names] + [event("write", "io_2", 0, 1, pid=2)]
    assert lanes_of(events) == [
        (1, "MainThread"),
        (1, "io_9"),
        (1, "io_10"),
        (1, "copy_0"),
        (1, "copy_1"),
        (2, "io_2"),
    ]


# --- Chrome's trace format ------------------------------------------------------------------------------


def test_the_trace_file_has_the_published_structure(tmp_path: Path) -> None:
    """See https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)."""
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, writer="process") as ckpt:
        result = ckpt.save(state(), tmp_path / "c")
    result.chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    work = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(work) + len(names) == len(trace["traceEvents"])
    for event, timed in zip(work, result.timeline(), strict=True):
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"] == timed.name
        assert event["ts"] == pytest.approx(timed.start_s * 1e6)
        assert event["dur"] == pytest.approx(timed.duration_s * 1e6)
        assert event["args"] == {"bytes": timed.nbytes, "file": timed.file}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert [threads[e["pid"], e["tid"]] for e in work] == [timed.thread for timed in result.timeline()]
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert processes.pop(os.getpid()) == "aiockpt"
    assert list(processes.values()) == ["aiockpt writer process"]
    assert {e["name"] for e in names} == {"process_name", "thread_name", "thread_sort_index"}


def test_an_empty_trace() -> None:
    assert trace_of([], 1) == {"traceEvents": [], "displayTimeUnit": "ms"}


# --- in notebooks ---------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects tags and texts, and checks that every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


HOSTILE = "<script>alert('&\"')</script>"


def event(name: str, thread: str, start: float, end: float, nbytes: int = 0, pid: int = 1) -> TimelineEvent:
    return TimelineEvent(name, thread, pid, start, end, nbytes, "f")


def test_everything_in_a_card_is_escaped() -> None:
    page = card(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [event(HOSTILE, HOSTILE, 0, 1)], HOSTILE)
    found = Tags(page)
    assert "script" not in found.tags
    assert found.texts.count(HOSTILE) >= 5


def test_the_picture_of_a_timeline() -> None:
    events = [event("stage", "copy", n / 10, n / 10 + 0.05, 100) for n in range(10)]
    events += [event("write", "io", 0.5, 1.0, 7, pid=2), event("write", "other", 0.0, 1.0)]
    svg = re.search(r"<svg.*</svg>", card("saved", "p", {}, events))
    assert svg
    root = ElementTree.fromstring(svg[0].replace("&#9632;", ""))
    bars = root.findall("rect")
    assert len(bars) == 12
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert max(widths) == pytest.approx(2 * sorted(widths)[-2], rel=0.01)
    texts = [node.text for node in root.findall("text")]
    assert texts[:3] == ["copy", "writer: io", "other"]
    assert "stage: 100 B, 50.0 ms" in [bar.findtext("title") for bar in bars]
    assert "prefers-color-scheme" not in svg[0]
    assert root.get("fill") == "currentColor"


def test_a_picture_of_many_events_is_small() -> None:
    events = [event("stage", f"t{n % 40}", n / 1e5, (n + 40) / 1e5, 100) for n in range(100_000)]
    page = card("saved", "p", {}, events)
    assert len(page) < 100_000
    assert "16 more threads" in page


def test_results_are_displayed(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(on_failure="warn") as ckpt:
        saved = ckpt.save({"x": torch.ones(300, 1024)}, tmp_path / "a<b")
        ckpt.load(tmp_path / "a<b")
        report = ckpt.verify(tmp_path / "a<b")
        failed = ckpt.save({"x": 1}, "/proc/nowhere/c")
    assert ckpt.last_load is not None
    for value, words in (
        (saved, ["saved", "1.2 MiB", "staged after", "1 ("]),
        (ckpt.last_load, ["loaded", "1.2 MiB"]),
        (report, ["verified: sound", "aiockpt", "1.2 MiB"]),
    ):
        page = value._repr_html_()
        assert {"svg", "table"} <= Tags(page).tags
        assert "a&lt;b" in page
        for word in words:
            assert word in page, word
    assert "not saved" in failed._repr_html_()
    assert "/proc/nowhere" in failed._repr_html_()


def test_a_report_with_errors_lists_them(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(300)}, tmp_path / "c")
        (file,) = (tmp_path / "c").glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[700] ^= 1
        file.write_bytes(data)
        report = ckpt.verify(tmp_path / "c")
    with pytest.raises(CorruptCheckpointError):
        report.raise_if_bad()
    page = report._repr_html_()
    assert "error" in page
    assert file.name in page
