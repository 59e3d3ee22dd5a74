"""Displays of saves, loads and verifications: their text, and their end after each outcome."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.live import Live

import aiockpt
import aiockpt.progress
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.polling import until
from tests.states import large_state

WAIT_S = 60
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def ends_with_cursor(text: str) -> bool:
    """Return whether the last control code for the cursor shows it."""
    return text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A stream that claims to be a terminal of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


def test_save_in_a_terminal(tmp_path: Path, terminal: io.StringIO) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(large_state(20), tmp_path / "step-[red]7")  # not rich markup
        shown = aiockpt.progress.bar(save, file=terminal)
        assert shown.join(WAIT_S)
    text = terminal.getvalue()
    assert "save step-[red]7" in text
    assert text.rstrip().removesuffix(SHOW_CURSOR).rstrip().endswith("written")
    assert "10.0/10.0 MiB" in text
    assert ends_with_cursor(text)


def test_nothing_is_shown_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with aiockpt.SyncCheckpointer() as ckpt:
        for where in (stream, None):
            save = ckpt.submit({"x": 1}, tmp_path / f"c{where is None}")
            assert aiockpt.progress.bar(save, file=where).join(WAIT_S)
            ckpt.load(save.path, progress=aiockpt.progress.bar(file=where))
    assert (stream.getvalue(), *capsys.readouterr()) == ("", "", "")


def test_force_shows_a_bar_without_a_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit({"x": 1}, tmp_path / "c")
        assert aiockpt.progress.bar(save, file=stream, force=True).join(WAIT_S)
    assert "save c" in stream.getvalue()


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "skipped"])
def test_save_that_does_not_succeed(outcome: str, tmp_path: Path, terminal: io.StringIO) -> None:
    gate = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(on_busy="skip") as ckpt:
        if outcome == "failed":
            fault = FaultyStorage(LocalStorage(), "write", OSError(5, "Input/output error"))
            save = ckpt.submit(large_state(20), tmp_path / "c", storage=fault)
            shown = aiockpt.progress.bar(save, file=terminal)
            assert shown.join(WAIT_S)
            assert not save.observed
            with pytest.raises(aiockpt.WriteError):  # a display does not observe the failure, so it is raised here
                ckpt.submit({"x": 1}, tmp_path / "d")
        else:
            held = ckpt.submit(large_state(20), tmp_path / "c", storage=gate)
            save = ckpt.submit({"x": 1}, tmp_path / "d") if outcome == "skipped" else held
            shown = aiockpt.progress.bar(save, file=terminal)
            cancelled = held.cancel()
            gate.open("create")
            assert cancelled.result(WAIT_S)
            assert shown.join(WAIT_S)
    text = terminal.getvalue()
    assert outcome in text
    assert ends_with_cursor(text)


def test_concurrent_saves_share_the_terminal(tmp_path: Path, terminal: io.StringIO) -> None:
    gate = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer() as ckpt:
        shown = aiockpt.progress.bar(file=terminal)
        for name in "ab":
            shown.follow(ckpt.submit(large_state(20), tmp_path / name, storage=gate if name == "a" else None))
        assert not shown.join(0)
        gate.open("create")
        assert shown.join(WAIT_S)
        shown.follow(ckpt.submit({"x": 1}, tmp_path / "c"))
        assert shown.join(WAIT_S)
    text = terminal.getvalue()
    assert [f"save {name}" in text for name in "abc"] == [True] * 3
    assert ends_with_cursor(text)


def test_display_drops_finished_saves(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        shown = aiockpt.progress.log(level=logging.DEBUG)
        for number in range(3):
            shown.follow(ckpt.submit({"x": 1}, tmp_path / str(number)))
            assert len(shown._threads) == 1
            shown._threads[0].join(WAIT_S)
        assert shown.join(WAIT_S)


def test_terminal_bar_does_not_redirect_stdout(tmp_path: Path, terminal: io.StringIO) -> None:
    before, gate = (sys.stdout, sys.stderr), GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        shown = aiockpt.progress.bar(ckpt.submit({"x": 1}, tmp_path / "c", storage=gate), file=terminal)
        until(lambda: "save c" in terminal.getvalue())
        meanwhile = sys.stdout, sys.stderr
        gate.open("commit")
        assert shown.join(WAIT_S)
    assert meanwhile == before


def test_bar_beside_a_live_display_of_the_program(tmp_path: Path, terminal: io.StringIO) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, Live("mine", console=Console(file=terminal, force_terminal=True)):
        save = ckpt.submit(large_state(20), tmp_path / "c")
        shown = aiockpt.progress.bar(save, file=terminal)
        assert shown.join(WAIT_S)
        ckpt.load(tmp_path / "c", progress=aiockpt.progress.bar(file=terminal))
    assert ends_with_cursor(terminal.getvalue())


def test_loads_and_verifications_in_a_terminal(tmp_path: Path, terminal: io.StringIO) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(large_state(20), tmp_path / "c")
        shown = aiockpt.progress.bar(file=terminal)
        ckpt.load(tmp_path / "c", progress=shown)
        ckpt.verify(tmp_path / "c", progress=shown)
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            ckpt.load(tmp_path / "d", progress=shown)
    text = terminal.getvalue()
    assert [what in text for what in ("load c", "verify c", "load d", "done", "failed")] == [True] * 5
    assert ends_with_cursor(text)


def test_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt.progress")
    with aiockpt.SyncCheckpointer(on_failure="warn") as ckpt:
        assert aiockpt.progress.log(ckpt.submit(large_state(20), tmp_path / "c")).join(WAIT_S)
        lines = aiockpt.progress.log(every_s=0.0)
        ckpt.load(tmp_path / "c", progress=lines)
        ckpt.verify(tmp_path / "c", progress=lines)
        fault = FaultyStorage(LocalStorage(), "write", OSError(5, "Input/output error"))
        failing = ckpt.submit(large_state(20), tmp_path / "d", storage=fault)
        assert aiockpt.progress.log(failing, level=logging.DEBUG).join(WAIT_S)
    said = [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "aiockpt.progress"]
    saved = [text for _, text in said if text.startswith("save c")]
    assert saved[0] == "save c: 0 % of 10.0 MiB, planned"
    assert saved[1].startswith("save c: written, 10.0 MiB in ")
    assert len(saved) == 2  # by default, one line every ten seconds
    assert any(text.startswith("load c: done, 10.0 MiB in ") for _, text in said)
    assert any(text.startswith("verify c: done, 10.0 MiB in ") for _, text in said)
    assert (logging.WARNING, "save d: failed") in said


def in_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize("ok", [True, False])
def test_text_bars_in_notebooks(
    ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    in_notebook(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # no ipywidgets
    with aiockpt.SyncCheckpointer(on_failure="warn") as ckpt:
        fault = FaultyStorage(LocalStorage(), "finish", OSError(5, "Input/output error"))
        save = ckpt.submit(large_state(20), tmp_path / "c", storage=None if ok else fault)
        assert aiockpt.progress.bar(save).join(WAIT_S)
    text = capsys.readouterr().err
    assert "save c: 100%" in text
    assert ("written" if ok else "failed") in text


def test_missing_tqdm_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_notebook(monkeypatch)
    for name in ("tqdm", "tqdm.std", "tqdm.notebook"):
        monkeypatch.setitem(sys.modules, name, None)
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit({"x": 1}, tmp_path / "c")
        with pytest.raises(ImportError, match=r"pip install 'aiockpt\[notebook\]'"):
            aiockpt.progress.bar(save)
