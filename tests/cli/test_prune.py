import functools
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import commands
from tests.cli.checkpoints import make
from tests.cli.test_ls import save_step
from tests.places import storage_of

LOSSES = {100: 0.5, 200: 0.125, 300: 0.75, 1000: 0.25, 1100: 0.625}


@pytest.fixture
def run(anywhere):
    for step, loss in LOSSES.items():
        save_step(anywhere, step, loss=loss)
    make("dcp", anywhere / "step-5")
    make("torch", anywhere / "notes")
    return anywhere


local = pytest.mark.parametrize("anywhere", ["local"], indirect=True)


invoke = functools.partial(commands.invoke, "prune")


def steps(run):
    return {int(path.name.removeprefix("step-")) for path in run.glob("step-0*")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-latest", 2], {1000, 1100}),
        (["--keep-every", 1000], {1000, 1100}),
        (["--keep-every", 300, "--keep-every", 200], {200, 300, 1000, 1100}),
        (["--keep-best", "1:loss"], {200, 1100}),
        (["--keep-best", "1:loss:max"], {300, 1100}),
        (["--keep-within", "1s"], {1100}),
        (["--keep-within", "100000d"], set(LOSSES)),
        (["--keep-latest", 1, "--keep-every", 500, "--keep-best", "1:loss"], {200, 1000, 1100}),
    ],
)
def test_steps_that_no_policy_keeps_are_removed(options, kept, run):
    dry = invoke(run, *options, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    assert steps(run) == set(LOSSES)
    assert {each["step"] for each in json.loads(dry.stdout) if not each["would_be_removed"]} == kept
    result = invoke(run, *options)
    assert result.exit_code == 0, result.output
    assert steps(run) == kept
    assert sorted(path.name for path in run.iterdir() if path not in set(run.glob("step-0*"))) == ["notes.pt", "step-5"]
    assert f"{len(LOSSES) - len(kept)} of 5 steps removed" in result.stdout
    assert {each["step"] for each in json.loads(dry.stdout) if each["because"]} == kept


def test_reasons_are_shown(run):
    lines = [line.split() for line in invoke(run, "--keep-best", "1:loss", "-n").stdout.splitlines()]
    assert lines[1][-3:] == ["would", "be", "removed"]
    assert lines[2][-3:] == ["stays", "KeepBest(1,", "'loss')"]
    assert lines[5][-3:] == ["stays", "the", "newest"]


@local
def test_damaged_steps_stay_and_do_not_count(run):
    newest = run / "step-00001100"
    os.truncate(newest / "__0_0.distcp", 10)
    assert invoke(run, "--keep-latest", 1).exit_code == 0
    assert steps(run) == {1000, 1100}
    assert "damaged: __0_0.distcp has 10 bytes" in invoke(run, "--keep-latest", 1).stdout


@local
def test_failed_removals_are_not_reported_as_removed(run):
    (run / "step-00000200" / "mine.txt").touch()
    shutil.copytree(run, other := run.with_name("other"))
    result = invoke(run, "--keep-latest", 3)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert steps(run) == {200, 300, 1000, 1100}
    assert result.stdout.splitlines()[2].endswith("stays    it could not be removed")
    assert "1 of 5 steps removed" in result.stdout
    removed = {each["step"]: each["removed"] for each in json.loads(invoke(other, "--keep-latest", 3, "--json").stdout)}
    assert removed == {100: True, 200: False, 300: False, 1000: False, 1100: False}


@local
def test_empty_path_is_refused(run, monkeypatch):
    monkeypatch.chdir(run)
    result = invoke("", "--keep-latest", 1)
    assert (result.exit_code, result.stderr) == (3, "aiockpt: the path is empty; name a directory or a file\n")
    assert steps(run) == set(LOSSES)


def test_run_with_an_owner_allows_only_a_dry_run(run):
    lock = storage_of(run).lease(str(run))
    try:
        result = invoke(run, "--keep-latest", 1)
        assert (result.exit_code, result.stdout) == (3, "")
        assert f"process {os.getpid()}" in result.stderr
        assert result.stderr.count("\n") == 1
        assert steps(run) == set(LOSSES)
        assert invoke(run, "--keep-latest", 1, "--dry-run").exit_code == 0
    finally:
        lock.release()
    assert invoke(run, "--keep-latest", 1).exit_code == 0
    assert steps(run) == {1100}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to keep"),
        *((["--keep-best", text], "is not N:METRIC") for text in ("loss", "x:loss", "2:", ":loss", "")),
        (["--keep-best", "0:loss"], "at least 1"),
        (["--keep-within", "soon"], "is no duration"),
        (["--keep-within", "0s"], "more than 0"),
        (["--keep-latest", 0], "keep-latest"),
    ],
)
def test_usage_errors(options, message, run):
    result = invoke(run, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert steps(run) == set(LOSSES)


def test_unknown_metric_removes_nothing(run):
    result = invoke(run, "--keep-best", "1:los")
    assert (result.exit_code, result.stderr) == (3, "aiockpt: no step has the metric los; there are: loss\n")
    assert steps(run) == set(LOSSES)


def test_directory_without_steps_is_refused(tmp_path):
    (tmp_path / "step-5").mkdir()
    os.utime(tmp_path, (0, 0))
    result = invoke(tmp_path, "--keep-latest", 1)
    assert result.exit_code == 3
    assert "has no steps of a manager" in result.stderr
    assert os.stat(tmp_path).st_mtime == 0  # no file was made there, not even for a moment
    assert os.listdir(tmp_path) == ["step-5"]
    assert invoke(tmp_path / "none", "--keep-latest", 1).exit_code == 3
    assert not (tmp_path / "none").exists()


@local
def test_dry_run_does_not_import_torch(run):
    code = (
        f"import runpy, sys\nsys.argv[1:] = ['prune', {str(run)!r}, '--keep-latest', '1', '-n']\n"
        "try: runpy.run_module('aiockpt')\n"
        "except SystemExit as exc: assert exc.code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
