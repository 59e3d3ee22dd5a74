"""The examples of docs/cli.md, run by a shell, and its tables of commands and exit codes."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from importlib.resources import files

import pytest
import torch

import aiockpt
from tests.commands import invoke, program

PAGE = (files("aiockpt") / "docs" / "cli.md").read_text(encoding="utf-8")
TIMEOUT_S = 300


def examples():
    """Yield each command of the page with its expected output."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = example.partition("\n")
            yield command, output


@pytest.fixture(scope="module")
def home(python, tmp_path_factory):
    """Directory with the run and the commands that the examples use."""
    home = tmp_path_factory.mktemp("home")
    keep = [aiockpt.KeepLatest(2), aiockpt.KeepBest(1, "loss")]
    with aiockpt.SyncCheckpointManager(home / "runs" / "a", keep=keep) as run:
        for step, loss in ((100, 0.75), (200, 0.25), (300, 0.5), (400, 0.375)):
            model = {f"layers.{n}.{part}": torch.randn(8, 4) for n in range(12) for part in ("q", "k")}
            run.save(step, {"model": {**model, "head": torch.ones(3)}, "step": step}, metrics={"loss": loss})
    (home / "bin").mkdir()
    for name, command in (("aiockpt", [*python, "-m", "aiockpt"]), ("python", [sys.executable])):
        (home / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    return home


@pytest.mark.slow
def test_examples_print_the_output_on_the_page(home):
    environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    checker = doctest.OutputChecker()
    commands = list(examples())
    assert len(commands) >= 10
    for command, expected in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert checker.check_output(expected, done.stdout, doctest.ELLIPSIS), f"{command}\n{done.stdout}"


def test_each_command_has_a_row():
    names = {command.name or command.callback.__name__ for command in program().registered_commands}
    assert set(re.findall(r"^\| `aiockpt (\w+)", PAGE, re.MULTILINE)) == names


def test_each_exit_code_has_a_row():
    listed = invoke("--help").stdout.partition("Exit codes")[2].partition("╭")[0]
    rows = set(re.findall(r"^\| ([0-9]+) \|", PAGE, re.MULTILINE))
    assert rows == {*re.findall(r"\b[0-9]+\b", listed), "141"}  # of what nobody reads
