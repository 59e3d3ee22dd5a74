import io
import os
import pty
import signal
import subprocess
import sys
import threading

import anyio
import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import aiockpt
from aiockpt.cli.demo.display import LineDisplay, loops_table
from aiockpt.cli.demo.events import Held, History, Ready, Saved, Saving, Stepped, decode, encode
from aiockpt.cli.demo.run import (
    ChildError,
    compare_checkpoints,
    compare_losses,
    remove_leftovers,
    run_child,
    workspace,
)
from aiockpt.cli.main import app

COMMAND = (sys.executable, "-m", "aiockpt", "demo", "--layers", "2", "--width", "128", "--steps", "12", "--every", "2")
TIMEOUT_S = 300


def demo_directories(temporary):
    return [name for name in os.listdir(temporary) if name.startswith("aiockpt-")]


def start(temporary, *options, **kwargs):
    environment = os.environ | {"TMPDIR": str(temporary), "COLUMNS": "200"}
    return subprocess.Popen([*COMMAND, *options], env=environment, **kwargs)


def run_demo(home, *options):
    """Run the demo; return its output and exit code."""
    process = start(home, *options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=TIMEOUT_S)[0], process.returncode
    finally:
        process.kill()
        process.wait()


def test_resumed_run_is_identical(tmp_path):
    output, code = run_demo(tmp_path, "--dir", str(tmp_path / "runs"))
    assert code == 0, output
    assert "Killed (SIGKILL) while step-0000" in output
    assert "Left behind, and now removed: .aiockpt-" in output
    assert "GPT of 0.4 million parameters, resumed from step-0000" in output
    assert "The losses of all 12 steps are identical" in output
    assert "The resumed run is identical to the one that was never interrupted." in output
    for method in ("torch.save + fsync", "aiockpt"):
        assert f"│ {method} " in output
    assert "Kept: the share of the time" in output
    names = [f"step-{step:08d}" for step in range(2, 13, 2)]
    assert demo_directories(tmp_path) == []
    assert sorted(os.listdir(tmp_path / "runs")) == ["interrupted", "uninterrupted"]
    assert sorted(os.listdir(tmp_path / "runs" / "uninterrupted")) == names
    assert sorted(os.listdir(tmp_path / "runs" / "interrupted")) == names
    with aiockpt.SyncCheckpointer() as ckpt:
        state = ckpt.load(tmp_path / "runs" / "interrupted" / names[-1])
    assert state["step"] == 12
    assert not state["losses"].isnan().any()


@pytest.mark.full
def test_runs_differ_without_the_random_numbers(tmp_path):
    output, code = run_demo(tmp_path, "--forget-rng")
    assert code == 1, output
    assert "The losses differ, first at step " in output
    assert "The resumed run differs from the one that was never interrupted." in output
    assert demo_directories(tmp_path) == []


def test_ctrl_c_on_a_terminal_leaves_no_file(tmp_path):
    terminal, other_end = pty.openpty()
    process = start(tmp_path, stdout=other_end, stderr=other_end)
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    os.close(other_end)
    try:
        seen = read_terminal(terminal, until=b"step-00000002")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        seen += read_terminal(terminal)
        assert process.wait() == 130, seen
        assert children
        assert psutil.wait_procs(children, timeout=TIMEOUT_S)[1] == []
        assert demo_directories(tmp_path) == []
        assert b"Interrupted." in seen
        assert b"Traceback" not in seen, seen.decode(errors="replace")
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        os.close(terminal)


def read_terminal(terminal, until=None):
    """Return the terminal's output up to a text, or until the other end is closed."""
    seen = b""
    while until is None or until not in seen:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # how Linux reports that the other end of a terminal is closed
            data = b""
        if not data:
            assert until is None, seen
            return seen
        seen += data
    return seen


# --- usage ----------------------------------------------------------------------------------------


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"aiockpt {aiockpt.__version__}\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "3", "--every", "2"],
        ["--width", "6"],
        ["--device", "nonsense"],
        ["--device", "meta"],
        ["--device", "cuda:99"],
        ["--steps", "many"],
    ],
)
def test_wrong_usage(options):
    assert CliRunner().invoke(app, ["demo", *options]).exit_code == 2


def test_directory_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "notes").touch()
    result = CliRunner().invoke(app, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert (tmp_path / "notes").exists()


# --- processes --------------------------------------------------------------------------------------


def run(module, *arguments, **kwargs):
    return run_child(module, arguments, lambda _: False, **kwargs)


def test_failing_process_shows_its_errors():
    with pytest.raises(ChildError, match=r"exit code 2\n(.|\n)*no-such-option"):
        run("json.tool", "--no-such-option")


def test_process_is_killed_when_an_event_can_not_be_handled():
    line = encode(Stepped(step=1, loss=0.5, elapsed_s=1.0))
    writing = ["-n", "1", "-r", "1", f"while True: print({line!r}, end=str(), flush=True)"]
    before = psutil.Process().children()
    with pytest.raises(ZeroDivisionError):
        run_child("timeit", writing, lambda _: 1 // 0)
    assert psutil.Process().children() == before


def test_silent_process_is_killed():
    with pytest.raises(ChildError, match=r"silent for 0\.5 s"):
        run("timeit", "-n", "1", "-r", "1", "-s", "import threading", "threading.Event().wait()", timeout_s=0.5)


@pytest.mark.parametrize(
    "event",
    [
        Ready(3, 100, None),
        Stepped(4, float("inf"), 0.1),
        Saving(5, "staging", 1, 2, 3),
        Held(5, 0.25),
        Saved(5, 10, 0.5, 0.75),
    ],
)
def test_event_survives_its_line(event):
    line = encode(event)
    assert line.endswith("\n")
    assert decode(line) == event


@pytest.mark.parametrize(
    "line", ["", "hello\n", "[1]", "{}", '{"event": "Nothing"}', '{"event": "Held", "more": 1}', b"\xff"]
)
def test_other_output_is_no_event(line):
    assert decode(line) is None


def test_waiting_time_leaves_out_the_last_save():
    history = History()
    for event in (Stepped(1, 0.5, 1.0), Held(1, 0.25), Held(1, 0.25), Stepped(2, 0.5, 2.0), Held(2, 8.0)):
        history.add(event)
    assert history.waiting_s() == 0.5
    slowed = History()
    for event in (Stepped(1, 0.5, 100.0), Held(1, 2.5), Stepped(2, 0.5, 100.0)):
        slowed.add(event)
    console = Console(width=80, file=io.StringIO())
    console.print(loops_table({"aiockpt": history, "torch.save": slowed}))
    rows = [line.split() for line in console.file.getvalue().splitlines() if "%" in line]
    assert [row[-2] for row in rows] == ["83.3%", "50.0%"]


# --- comparison ---------------------------------------------------------------------------------------


def test_changed_checkpoint_is_found(tmp_path):
    state = {"model": {"w": torch.zeros(1000)}, "rng": torch.arange(5, dtype=torch.uint8), "step": 3, "lr": [0.1]}
    changed = {**state, "model": {"w": state["model"]["w"].clone()}}
    changed["model"]["w"][7] = -0.0
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "a")
        ckpt.save(state, tmp_path / "b")
        ckpt.save(changed, tmp_path / "c")
    same = anyio.run(compare_checkpoints, tmp_path / "a", tmp_path / "b")
    assert (same.tensors, same.nbytes, same.differences) == (2, 4005, ())
    assert same.digests[0] == same.digests[1]
    other = anyio.run(compare_checkpoints, tmp_path / "a", tmp_path / "c")
    assert other.differences == ("model.w",)
    assert other.digests[0] != other.digests[1]


def compared(folder, first, second):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(first, folder / "first")
        ckpt.save(second, folder / "second")
    return anyio.run(compare_checkpoints, folder / "first", folder / "second")


@pytest.mark.parametrize(
    "other",
    [
        {"t": torch.zeros(2, dtype=torch.float64)},
        {"t": torch.zeros(2, 1)},
        {"t": 0.0},
        {},
        {"t": torch.zeros(2), "more": 1},
    ],
)
def test_different_states_differ(other, tmp_path):
    comparison = compared(tmp_path, {"t": torch.zeros(2)}, other)
    assert len(comparison.differences) == 1
    assert comparison.digests[0] != comparison.digests[1]


def test_nan_equals_itself(tmp_path):
    state = {"t": torch.full((2,), torch.nan), "f": float("nan"), "none": None}
    assert compared(tmp_path, state, state).differences == ()


def test_losses_are_compared_exactly():
    reference = {1: 0.5, 2: 0.25, 3: 0.125}
    assert compare_losses([(1, 0.5), (2, 0.25), (2, 0.25), (3, 0.125)], reference) is None
    assert "step 2:" in compare_losses([(1, 0.5), (2, 0.25), (2, 0.2500000001), (3, 0.125)], reference)
    assert "step 3:" in compare_losses([(1, 0.5), (2, 0.25)], reference)
    assert "step 4:" in compare_losses([(1, 0.5), (2, 0.25), (3, 0.125), (4, 0.1)], reference)


# --- directories --------------------------------------------------------------------------------------


def test_workspace_keeps_or_removes(tmp_path):
    for keep in (True, False):
        with workspace(tmp_path / "new", keep=keep) as root:
            (root / "interrupted").mkdir()
        assert (tmp_path / "new" / "interrupted").exists() is keep
        if keep:
            (tmp_path / "new" / "interrupted").rmdir()
    assert (tmp_path / "new").exists(), "it was there before"
    with workspace(tmp_path / "other", keep=False):
        pass
    assert not (tmp_path / "other").exists()


def test_only_leftovers_of_saves_are_removed(tmp_path):
    leftover = tmp_path / ".aiockpt-x.12.0123456789abcdef"
    leftover.mkdir()
    (leftover / "__0_0.distcp").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / "step-000005").mkdir()
    assert list(remove_leftovers(tmp_path)) == [(leftover.name, ["__0_0.distcp"])]
    assert sorted(os.listdir(tmp_path)) == [".git", "step-000005"]


@pytest.mark.parametrize("terminal", [True, False])
def test_sentences_wrap_at_words_on_a_terminal(terminal):
    file = io.StringIO()
    LineDisplay(Console(file=file, force_terminal=terminal, width=30)).say("word " * 20)
    lines = file.getvalue().splitlines()
    assert {word for line in lines for word in line.split()} == {"word"}
    assert all(line.startswith("  ") for line in lines)
    assert (max(map(len, lines)) <= 30) == (len(lines) > 1) == terminal
