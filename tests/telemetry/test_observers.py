"""Observers, and the progress callables of loads: the calls they get, and that they can't do harm."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.engine import reports
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.states import assert_same, large_state

WAIT_S = 60


class Recorder(aiockpt.Observer):
    """Records every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self.threads: set[str] = set()
        self.came = threading.Condition()

    def _note(self, what: str, event: Any, more: Any = None) -> None:
        with self.came:
            self.calls.append((what, event, more))
            self.threads.add(threading.current_thread().name)
            self.came.notify_all()

    def wait_for(self, what: str) -> None:
        with self.came:
            assert self.came.wait_for(lambda: what in [name for name, *_ in self.calls], WAIT_S)

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def save_started(self, event: aiockpt.SaveEvent) -> None:
        self._note("save_started", event, value.get(None))

    def staged(self, event: aiockpt.SaveEvent) -> None:
        self._note("staged", event)

    def written(self, event: aiockpt.SaveEvent, result: aiockpt.SaveResult) -> None:
        self._note("written", event, result)

    def failed(self, event: aiockpt.SaveEvent, error: BaseException) -> None:
        self._note("failed", event, error)

    def cancelled(self, event: aiockpt.SaveEvent, error: BaseException) -> None:
        self._note("cancelled", event, error)

    def skipped(self, event: aiockpt.SaveEvent, error: BaseException) -> None:
        self._note("skipped", event, error)

    def loaded(self, event: aiockpt.CallEvent, result: aiockpt.LoadResult | None) -> None:
        self._note("loaded", event, result)

    def deleted(self, event: aiockpt.CallEvent) -> None:
        self._note("deleted", event)


value: contextvars.ContextVar[str] = contextvars.ContextVar("value")


@pytest.mark.asyncio
async def test_the_life_of_a_save(tmp_path: Path) -> None:
    seen = Recorder()
    value.set("of the caller")
    before = time.time()
    async with aiockpt.AsyncCheckpointer(observers=[seen]) as ckpt:
        first = await ckpt.save(large_state(), tmp_path / "a")
        second = await ckpt.save({"x": 1}, tmp_path / "b")
        await ckpt.load(tmp_path / "a")
        await ckpt.delete(tmp_path / "b")
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            await ckpt.load(tmp_path / "b")
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            await ckpt.delete(tmp_path / "b")
        loaded = ckpt.last_load
    assert seen.names == [*["save_started", "staged", "written"] * 2, "loaded", "deleted", "loaded", "deleted"]
    assert seen.threads == {"aiockpt-observers"}
    events = [event for _, event, _ in seen.calls]
    assert [events[0].number + 1] * 3 == [event.number for event in events[3:6]]
    assert len({event.number for event in events[:3]}) == 1
    assert [event.path for event in events] == [str(tmp_path / name) for name in "aaabbbabbb"]
    assert [event.nbytes for event in events[:3]] == [0, first.nbytes, first.nbytes]
    assert all(before <= event.time <= time.time() for event in events)
    assert 0 < events[0].elapsed_s < events[1].elapsed_s < events[2].elapsed_s
    assert [more for _, _, more in seen.calls[:3]] == ["of the caller", None, first]
    assert [more for _, _, more in seen.calls[3:7]] == ["of the caller", None, second, loaded]
    assert [type(event.error) for event in events[6:]] == [
        type(None),
        type(None),
        aiockpt.CheckpointNotFoundError,
        aiockpt.CheckpointNotFoundError,
    ]


@pytest.mark.asyncio
async def test_cancelled_skipped_and_failed_saves(tmp_path: Path) -> None:
    seen = Recorder()
    gate = GatedStorage(LocalStorage(), ["create"])
    async with aiockpt.AsyncCheckpointer(observers=[seen], on_busy="skip") as ckpt:
        held = ckpt.save({"x": 1}, tmp_path / "held", storage=gate)
        skipped = ckpt.save({"x": 1}, tmp_path / "skipped")
        assert skipped.skipped
        cancelling = held.cancel()
        gate.open("create")
        assert await cancelling
        error = OSError(28, "No space left on device")
        failing = ckpt.save({"x": 1}, tmp_path / "failing", storage=FaultyStorage(LocalStorage(), "write", error))
        with pytest.raises(aiockpt.WriteError):
            await failing
    outcomes = [(name, Path(event.path).name, type(more)) for name, event, more in seen.calls if name != "staged"]
    assert (
        outcomes
        == [
            ("save_started", "held", type(None)),
            ("skipped", "skipped", aiockpt.SaveSkippedError),
            ("cancelled", "held", aiockpt.SaveCancelledError),
            ("save_started", "failing", type(None)),
            ("failed", "failing", aiockpt.WriteError),
        ]
        or outcomes[1][0] == "save_started"
    )


@pytest.mark.asyncio
async def test_a_blocking_observer_delays_nothing(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(Recorder):
        def save_started(self, event: aiockpt.SaveEvent) -> None:
            assert gate.wait(WAIT_S)
            super().save_started(event)

    seen = Slow()
    ckpt = aiockpt.AsyncCheckpointer(observers=[seen])
    for name in "ab":
        await ckpt.save({"x": 1}, tmp_path / name)
        await ckpt.load(tmp_path / name)
    assert seen.calls == []
    gate.set()
    await ckpt.aclose()
    assert seen.names == ["save_started", "staged", "written", "loaded"] * 2


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_ever_for_an_observer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "END_S", 0.05)
    gate = threading.Event()

    class Hung(aiockpt.Observer):
        def written(self, event: aiockpt.SaveEvent, result: aiockpt.SaveResult) -> None:
            assert gate.wait(WAIT_S)

    async with aiockpt.AsyncCheckpointer(observers=[Hung()]) as ckpt:
        await ckpt.save({"x": 1}, tmp_path / "c")
    assert "left behind" in caplog.text
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "aiockpt-observers":
            thread.join(WAIT_S)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_errors_of_observers_are_logged(
    kind: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(aiockpt.Observer):
        def staged(self, event: aiockpt.SaveEvent) -> None:
            raise kind("a defect of the observer")

    seen = Recorder()
    with aiockpt.SyncCheckpointer(observers=[Broken(), seen]) as ckpt:
        assert ckpt.save({"x": 1}, tmp_path / "c").error is None
    assert "a defect of the observer" in caplog.text
    assert seen.names == ["save_started", "staged", "written"]


def test_too_many_calls_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "MOST_CALLS", 4)
    gate = threading.Event()

    class Slow(Recorder):
        def save_started(self, event: aiockpt.SaveEvent) -> None:
            assert gate.wait(WAIT_S)
            super().save_started(event)

    seen = Slow()
    with aiockpt.SyncCheckpointer(observers=[seen]) as ckpt:
        for number in range(5):
            ckpt.save({"x": 1}, tmp_path / str(number))
        gate.set()
    assert seen.names == ["save_started", "staged", "written", "save_started"]
    assert caplog.text.count("further ones are dropped") == 1


def test_an_observer_may_load_and_verify_but_not_save_or_close(tmp_path: Path) -> None:
    found: list[object] = []

    class Uses(Recorder):
        def written(self, event: aiockpt.SaveEvent, result: aiockpt.SaveResult) -> None:
            found.append(ckpt.load(event.path))
            found.append(ckpt.verify(event.path).ok)
            for call in (ckpt.close, lambda: ckpt.save({"x": 1}, tmp_path / "d")):
                try:
                    call()
                except aiockpt.SaveError as exc:
                    found.append(str(exc))
            super().written(event, result)

    seen = Uses()
    with aiockpt.SyncCheckpointer(observers=[seen]) as ckpt:
        ckpt.save({"x": 1}, tmp_path / "c")
        seen.wait_for("written")
    assert found[:2] == [{"x": 1}, True]
    assert ["an observer" in str(text) for text in found[2:]] == [True, True]


def test_observers_are_checked() -> None:
    with pytest.raises(TypeError, match="observers must be a list of"):
        aiockpt.AsyncCheckpointer(observers=[print])  # type: ignore[list-item]


def test_without_observers_there_is_no_thread_for_them(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": 1}, tmp_path / "c")
        ckpt.load(tmp_path / "c")
        names = {thread.name for thread in threading.enumerate()}
    assert not names & {"aiockpt-observers", "aiockpt-progress"}


# --- progress of loads ----------------------------------------------------------------------------------


def check_progress(events: list[aiockpt.ProgressEvent], path: Path) -> None:
    assert {event.path for event in events} == {str(path)}
    assert [event.phase for event in events] == ["reading"] * (len(events) - 1) + ["done"]
    assert [event.done_bytes for event in events] == sorted(event.done_bytes for event in events)
    assert [event.elapsed_s for event in events] == sorted(event.elapsed_s for event in events)
    assert events[-1].done_bytes == events[-1].total_bytes > 0
    assert all(event.result is None for event in events[:-1])


@pytest.mark.asyncio
@pytest.mark.parametrize("into", [False, True])
async def test_the_progress_of_a_load(into: bool, tmp_path: Path) -> None:
    state = large_state(20) | {"words": ["a", {"b": 1.5}]}
    events: list[aiockpt.ProgressEvent] = []
    threads: set[str] = set()

    def note(event: aiockpt.ProgressEvent) -> None:
        events.append(event)
        threads.add(threading.current_thread().name)

    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "c")
        target = {name: torch.zeros_like(t) if isinstance(t, torch.Tensor) else None for name, t in state.items()}
        got = await ckpt.load(tmp_path / "c", target if into else None, progress=note)
        result = ckpt.last_load
    assert_same(state, got)
    check_progress(events, tmp_path / "c")
    assert events[-1].result is result
    assert events[-1].what == "load"
    assert threads == {"aiockpt-progress"}


def test_the_progress_of_a_verification(tmp_path: Path) -> None:
    events: list[aiockpt.ProgressEvent] = []
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(large_state(20), tmp_path / "c")
        report = ckpt.verify(tmp_path / "c", progress=events.append)
        plain = ckpt.load(tmp_path / "c", progress=events.append)
    at = [event.what for event in events].index("load")
    check_progress(events[:at], tmp_path / "c")
    check_progress(events[at:], tmp_path / "c")
    assert events[at - 1].result is report
    assert plain


def test_progress_of_failed_loads(tmp_path: Path) -> None:
    events: list[aiockpt.ProgressEvent] = []
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": 1}, tmp_path / "c")
        for call in (
            lambda: ckpt.load(tmp_path / "d", progress=events.append),
            lambda: ckpt.load(tmp_path / "c", {"y": 1}, progress=events.append),
            lambda: ckpt.verify(tmp_path / "d", progress=events.append),
        ):
            with pytest.raises(aiockpt.LoadError):
                call()
    assert [event.phase for event in events if event.phase != "reading"] == ["failed"] * 3
    assert all(event.result is None for event in events)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_progress_callable_that_fails_or_blocks(
    kind: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    gate = threading.Event()

    def fail(event: aiockpt.ProgressEvent) -> None:
        calls.append(event.phase)
        raise kind("a defect of the callable")

    def block(event: aiockpt.ProgressEvent) -> None:
        assert gate.wait(WAIT_S)
        calls.append(event.phase)

    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(large_state(20), tmp_path / "c")
        assert ckpt.load(tmp_path / "c", progress=fail)
        assert ckpt.load(tmp_path / "c", progress=block)
        gate.set()
    assert calls[-1] == "done"
    assert set(calls[:-1]) == {"reading"}
    assert len(calls) <= 4  # one of `fail`; and at most two wait behind a call of `block`
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "a defect of the callable" in caplog.text


def test_progress_must_be_callable(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        for call in (ckpt.load, ckpt.verify):
            with pytest.raises(TypeError, match="progress must be a function"):
                call(tmp_path, progress=True)


# --- progress of saves, for threads -----------------------------------------------------------------------


def test_a_thread_iterates_over_the_progress_of_a_save(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(large_state(20), tmp_path / "c")
        events = list(save.progress())
        assert [event.phase for event in events][-1] == "committed"
        assert list(save.progress()) == events
        assert save.state == "committed"
        fault = FaultyStorage(LocalStorage(), "write", OSError(5, "Input/output error"))
        failing = ckpt.submit(large_state(20), tmp_path / "d", storage=fault)
        assert all(event.phase != "committed" for event in failing.progress())
        assert failing.state == "failed"
        assert not failing.observed
        with pytest.raises(aiockpt.WriteError):
            ckpt.submit({"x": 1}, tmp_path / "e")
