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

import aiockpt
from aiockpt.cli.app import CommandError
from aiockpt.cli.demo import Config, compare, run_until_killed, show_costs
from tests.commands import invoke

PYTHON = (sys.executable,)
DEMO = ("-m", "aiockpt", "demo", "--layers", "2", "--width", "128", "--steps", "12", "--every", "2")
TIMEOUT_S = 300


def demo_directories(temporary):
    return [name for name in os.listdir(temporary) if name.startswith("aiockpt-")]


def start(temporary, *options, python=PYTHON, **kwargs):
    environment = os.environ | {"TMPDIR": str(temporary), "COLUMNS": "200"}
    return subprocess.Popen([*python, *DEMO, *options], env=environment, **kwargs)


def run_demo(python, home, *options):
    """Run the demo; return its output and exit code."""
    process = start(home, *options, python=python, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=TIMEOUT_S)[0], process.returncode
    finally:
        process.kill()
        process.wait()


@pytest.mark.docs
def test_resumed_run_is_identical(python, tmp_path):
    output, code = run_demo(python, tmp_path, "--dir", str(tmp_path / "runs"))
    assert code == 0, output
    assert "Killed (SIGKILL) while step-0000" in output
    assert "Left behind, and removed by the next run: .aiockpt-" in output
    assert "GPT of 0.4 million parameters, resumed from step-0000" in output
    assert "The resumed run is identical to the one that was never interrupted." in output
    assert "for torch.save + fsync of the same states." in output
    names = [f"step-{step:08d}" for step in range(2, 13, 2)]
    assert demo_directories(tmp_path) == []
    assert sorted(os.listdir(tmp_path / "runs")) == ["interrupted", "uninterrupted"]
    assert sorted(os.listdir(tmp_path / "runs" / "uninterrupted")) == names
    assert sorted(os.listdir(tmp_path / "runs" / "interrupted")) == names
    losses = aiockpt.load(tmp_path / "runs" / "interrupted" / names[-1])["losses"]
    assert len(losses) == 12
    assert not losses.isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("part", [b"1. Save", b"2. The same run"])
def test_ctrl_c_on_a_terminal_leaves_no_file(part, tmp_path):
    terminal, other_end = pty.openpty()
    process = start(tmp_path, stdout=other_end, stderr=other_end)
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    os.close(other_end)
    try:
        seen = read_terminal(terminal, until=part)
        seen += read_terminal(terminal, until=b"step-00000002")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        seen += read_terminal(terminal)
        assert process.wait() == 130, seen
        assert bool(children) == part.startswith(b"2")
        assert psutil.wait_procs(children, timeout=TIMEOUT_S)[1] == []
        assert demo_directories(tmp_path) == []
        assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l"), "the cursor is hidden"
        assert b"Traceback" not in seen, seen.decode(errors="replace")
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seen",
    [["1. Save"], pytest.param(["2. The same run"], marks=pytest.mark.full), ["2. The same run", "step 2:"]],
)
def test_closed_pipe_ends_the_demo_in_silence(seen, tmp_path):
    with start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            for text in seen:
                assert any(line.startswith(text) for line in process.stdout)
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(TIMEOUT_S) == 141
        finally:
            process.kill()
    assert demo_directories(tmp_path) == []


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
    result = invoke("--version")
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
def test_wrong_usage(options, tmp_path):
    assert invoke("demo", *options, "--dir", tmp_path / "runs").exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_directory_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "notes").touch()
    result = invoke("demo", "--dir", tmp_path)
    assert result.exit_code == 2
    assert (tmp_path / "notes").exists()


# --- parts ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("device", "code"), [("nonsense", 1), ("cpu", 0)])
def test_process_that_ends_otherwise_is_an_error(device, code, tmp_path):
    with pytest.raises(CommandError, match=f"ended with exit code {code}"):
        run_until_killed(Config(device=device, layers=1, width=8, steps=2, every=1), tmp_path, kill_at=3)


def test_costs_leave_out_the_last_save(capsys):
    results = [aiockpt.SaveResult(f"runs/step-{n}", 1, 0, 0, 0, {}, 0.0, 0.0, 2.0, 3.0) for n in (1, 2)]
    show_costs(results, [0.5, 8.0], [1.5, 8.0], 3.5)
    said = capsys.readouterr().out
    assert "step-1       1 B        500.0 ms  2.00 s   3.00 s              1.50 s" in said
    assert "In 1.5 s of computing, training waited 500.0 ms for aiockpt,\nand 1.50 s for torch.save" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "are bit-identical"),
        ({"w": torch.tensor([-0.0])}, "differs in 1 key, first in w."),
        ({"losses": torch.tensor([3.0, 1.5])}, "differs in 1 key, first in losses."),
    ],
)
def test_states_are_compared(change, said, tmp_path, capsys):
    state = {"w": torch.tensor([0.0]), "losses": torch.tensor([3.0, 2.0]), "lr": [0.1]}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "a")
        ckpt.save(state | change, tmp_path / "b")
    assert anyio.run(compare, tmp_path / "a", tmp_path / "b") is (not change)
    assert said in capsys.readouterr().out
