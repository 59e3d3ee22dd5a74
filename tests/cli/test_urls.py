"""The commands on checkpoints in a storage that is no file system."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import aiockpt
from aiockpt.cli.main import app
from tests.cli.checkpoints import tensors
from tests.states import assert_same


def _run(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def _json(*arguments: str, code: int = 0) -> Any:
    return json.loads(_run(*arguments, "--json", code=code).stdout)


@pytest.fixture
def run(server_url: str) -> str:
    """Return the URL of a run of four steps, the second of which has the least loss."""
    directory = f"{server_url}/runs/a"
    with aiockpt.SyncCheckpointManager(directory, keep=aiockpt.KeepLatest(9)) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
            manager.save(step, {**tensors(), "step": step}, metrics={"loss": loss})
    return directory


def test_ls_lists_a_run_and_what_is_above_it(run: str) -> None:
    found = _json("ls", run)
    assert found["directory"] == run
    assert [each["step"] for each in found["checkpoints"]] == [0, 1, 2, 3]
    assert {each["state"] for each in found["checkpoints"]} == {"complete"}
    assert [each["metrics"]["loss"] for each in found["checkpoints"]] == [3.0, 1.0, 2.0, 4.0]
    assert found["checkpoints"][0]["kept_by"]
    assert "step-00000002" in _run("ls", run).stdout
    assert [each["name"] for each in _json("ls", f"{run}/step-00000003")["checkpoints"]] == ["step-00000003"]


def test_ls_shows_who_writes_to_a_run(run: str) -> None:
    assert _json("ls", run)["owner"] is None
    with aiockpt.SyncCheckpointManager(run) as manager:
        manager.restore({**tensors(), "step": 0})
        assert _json("ls", run)["owner"]["pid"]
        refused = _run("prune", run, "--keep-latest", "1", code=3)
        assert "process" in refused.output


def test_prune_keeps_the_best_and_the_newest(run: str) -> None:
    records = _json("prune", run, "--keep-best", "1:loss")
    assert [each["step"] for each in records if each["removed"]] == [0, 2]
    assert [each["step"] for each in _json("ls", run)["checkpoints"]] == [1, 3]


def test_rm_removes_one(run: str) -> None:
    assert "removed" in _run("rm", "--yes", f"{run}/step-00000001").stdout
    assert [each["step"] for each in _json("ls", run)["checkpoints"]] == [0, 2, 3]
    assert "no checkpoint" in _run("rm", "--yes", f"{run}/step-00000001", code=3).output


def test_verify_walks_a_run(run: str) -> None:
    reports = _json("verify", run)
    assert [each["path"] for each in reports] == [f"{run}/step-{step:08}" for step in range(4)]
    assert all(each["ok"] for each in reports)


def test_inspect_and_diff_read_one(run: str) -> None:
    one, other = f"{run}/step-00000000", f"{run}/step-00000003"
    shown = _json("inspect", one)
    assert {each["key"] for each in shown["keys"]} == {*tensors(), "step"}
    assert "model" in _run("inspect", one).stdout
    different = _json("diff", one, other, code=1)
    assert [each["key"] for each in different["changed"]] == ["step"]


def test_convert_and_extract_read_and_write(run: str, tmp_path: Any) -> None:
    one = f"{run}/step-00000002"
    _run("convert", one, str(tmp_path / "local"))
    assert_same({**tensors(), "step": 2}, aiockpt.load(tmp_path / "local"))
    _run("extract", one, "head", "--output", f"{run}-head.pt")
    assert torch.equal(aiockpt.load(f"{run}-head.pt")["head"], tensors()["head"])
    assert "exists already" in _run("convert", one, f"{run}-head.pt", code=3).output
    assert "lies in the other" in _run("convert", one, f"{one}/inner", code=3).output


def test_clean_finds_nothing(run: str) -> None:
    assert _json("clean", run) == {"removed": [], "left": []}


@pytest.mark.parametrize("command", ["ls", "verify", "inspect", "clean"])
def test_an_unknown_scheme_says_what_is_known(command: str) -> None:
    done = _run(command, "nowhere://bucket/run", code=3)
    assert "no storage is registered for nowhere://" in done.output
    assert "Traceback" not in done.output
