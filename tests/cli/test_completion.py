"""Shell completion: the console script in a process, with the environment variables that shells set."""

import os
import subprocess
import sys

import pytest

import aiockpt
from tests.cli.checkpoints import make, tensors

SCRIPT = "from aiockpt.cli.main import app; app(prog_name='aiockpt')"


def complete(*words, cwd):
    """Return the completions that bash gets for the last word."""
    environment = os.environ | {
        "_AIOCKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["aiockpt", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    for name, form in (("a/step-9", "aiockpt"), ("a/step-10", "dcp"), ("c/final", "safetensors"), ("b/old", "torch")):
        (home / name).parent.mkdir(exist_ok=True)
        make(form, home / name)
    (home / "a" / "notes.txt").touch()
    (home / "mixed" / "logs").mkdir(parents=True)
    make("dcp", home / "mixed" / "last")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({f"h.{n}.w": tensors()["head"] for n in range(3)} | {"helm": tensors()["head"]}, home / "keys")
    return home


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ve"], ["verify"]),
        (["inspect", "a/"], ["a/step-9", "a/step-10"]),
        (["verify", "a/step-9", "a/st"], ["a/step-9", "a/step-10"]),
        (["rm", "b/"], ["b/old.pt"]),
        (["inspect", "a"], []),  # directories are completed by the shell
        (["inspect", "mixed/"], []),
        (["inspect", "none/"], []),
        (["docs", "file"], ["file-format"]),
        (["inspect", "keys", "h"], ["h", "helm"]),
        (["inspect", "keys", "h."], ["h.0", "h.1", "h.2"]),
        (["inspect", "keys", "helm", "h.1"], ["h.1"]),
        (["inspect", "keys", "h.1."], ["h.1.w"]),
        (["inspect", "c/final.safetensors", "m"], ["model"]),
        (["inspect", "a/step-10", "m"], []),
        (["inspect", "a", "m"], []),
    ],
)
def test_completions_for_bash(words, expected, home):
    assert complete(*words, cwd=home) == expected


def test_completion_does_not_import_torch(home):
    code = f"import sys\ntry: exec({SCRIPT!r})\nfinally: sys.exit('torch' in sys.modules)"
    environment = os.environ | {
        "_AIOCKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": "aiockpt inspect keys h",
        "COMP_CWORD": "3",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=home, check=True, capture_output=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_each_shell(shell):
    environment = os.environ | {"_AIOCKPT_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert "_AIOCKPT_COMPLETE" in done.stdout
