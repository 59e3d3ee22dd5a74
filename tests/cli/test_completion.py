"""Shell completion: the console script in a process, with the environment variables that shells set."""

import os
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-m", "aiockpt")


def complete(*words, cwd):
    """Return the completions that bash gets for the last word."""
    environment = os.environ | {
        "_AIOCKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["aiockpt", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        COMMAND,
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_are_completed_without_torch(tmp_path):
    assert complete("ve", cwd=tmp_path) == ["verify"]
    assert complete("inspect", "a/", cwd=tmp_path) == []  # the shell completes paths
    code = "import runpy, sys\ntry: runpy.run_module('aiockpt')\nfinally: sys.exit('torch' in sys.modules)"
    environment = os.environ | {
        "_AIOCKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": "aiockpt ins",
        "COMP_CWORD": "1",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_each_shell(shell):
    environment = os.environ | {"_AIOCKPT_COMPLETE": f"source_{shell}"}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert "_AIOCKPT_COMPLETE" in done.stdout
