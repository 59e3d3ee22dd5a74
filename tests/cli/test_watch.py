"""``aiockpt watch``: the command that it runs, and its end."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import aiockpt
from tests.commands import succeed
from tests.manager.runs import state_of


def test_step_and_path_are_in_the_environment_and_never_in_the_command(tmp_path: Path) -> None:
    run, out = tmp_path / "a run; touch $(oops) 'x", tmp_path / "out"
    with aiockpt.SyncCheckpointManager(run, names="step-{}") as manager:
        manager.save(3, state_of(3))
    command = f'printf "%s %s" "$AIOCKPT_STEP" "$AIOCKPT_PATH" > {shlex.quote(str(out))}'
    assert succeed("watch", run, "--names", "step-{}", "--once", "--exec", command, code=0).splitlines() == [
        f"3  {run}/step-3"
    ]
    assert out.read_text() == f"3 {run}/step-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.name, "out"]


def test_a_failed_command_is_a_problem(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as manager:
        manager.save(3, state_of(3))
    assert "failed for step 3: exit code 7" in succeed("watch", tmp_path, "--once", "--exec", "exit 7", code=1)


def test_ctrl_c_ends_it_and_the_command(tmp_path: Path) -> None:
    """The next version comes while the program waits; a terminal's Ctrl-C reaches the command too."""
    command = [sys.executable, "-m", "aiockpt", "watch", str(tmp_path), "--exec", "echo $AIOCKPT_STEP runs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for step in (1, 2):
                with aiockpt.SyncCheckpointManager(tmp_path) as manager:
                    manager.save(step, state_of(step))
                while f"{step} runs" not in process.stdout.readline():
                    assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()
