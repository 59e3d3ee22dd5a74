"""``aiockpt mirror`` and the column of ``aiockpt ls --mirror``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.manager.scan import scan
from tests.commands import succeed as invoke
from tests.manager.runs import flip, state_of


@pytest.fixture
def here(tmp_path: Path) -> Path:
    with aiockpt.SyncCheckpointManager(tmp_path / "here") as run:
        for step in (1, 2):
            run.save(step, state_of(step))
    return tmp_path / "here"


def test_missing_steps_are_copied(here: Path, anywhere: Any) -> None:
    there = anywhere / "there"
    assert invoke("mirror", here, there).count("step-0000000") == 2
    assert [info.save_id for info in scan(there)] == [info.save_id for info in scan(here)]
    assert "The mirror has everything" in invoke("mirror", here, there)
    with aiockpt.SyncCheckpointManager(here) as run:
        run.save(3, {"x": torch.ones(3)})
        (record,) = json.loads(invoke("mirror", here, there, "--bandwidth", "1G", "--json"))
    assert record["sent_bytes"] == record["bytes"] > 0
    assert record["error"] is None


def test_steps_with_names_of_their_own(tmp_path: Path, anywhere: Any) -> None:
    here, there, named = tmp_path / "here", anywhere / "there", ("--names", "checkpoint-{}")
    with aiockpt.SyncCheckpointManager(here, names="checkpoint-{}") as run:
        for step in (5, 10):
            run.save(step, state_of(step))
    assert "has no steps to copy" in invoke("mirror", here, there, code=3)
    assert invoke("mirror", here, there, *named).count("checkpoint-") == 2
    found = json.loads(invoke("ls", here, "--mirror", there, "--json", *named))["checkpoints"]
    assert [(each["step"], each["mirror"]) for each in found] == [(5, "complete"), (10, "complete")]
    assert "such as step-00000100" in invoke("prune", here, "--keep-latest", 1, code=3)
    invoke("prune", here, "--keep-latest", 1, *named)
    assert json.loads(invoke("ls", here, "--mirror", there, "--json", *named))["only_in_mirror"] == [5]
    for wrong in ("checkpoint", "{}/a", "a-{}-{}"):
        assert "must be the name of a step" in invoke("ls", here, "--names", wrong, code=2)


def test_damaged_step_is_said(here: Path, anywhere: Any) -> None:
    flip(here, 2)
    assert "does not match its CRC" in invoke("mirror", here, anywhere / "there", code=3)
    assert [info.step for info in scan(anywhere / "there")] == [1]


def test_mirror_that_another_one_writes_is_refused(here: Path, tmp_path: Path, anywhere: Any) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "other", mirror=anywhere / "there") as run:
        run.submit(7, {"x": torch.ones(3)}).mirrored.result(60)
        assert "is being written by" in invoke("mirror", here, anywhere / "there", code=3)


def test_directory_without_steps_is_refused(here: Path, tmp_path: Path) -> None:
    """A step is no run, nor is what has runs in it: to copy nothing is not "The mirror has everything"."""
    for path in (here / "step-00000001", tmp_path):
        assert "has no steps to copy: name a run" in invoke("mirror", path, tmp_path.parent / "there", code=3)
    assert not (tmp_path.parent / "there").exists()


def test_mirror_within_the_run_is_refused(here: Path) -> None:
    for there in (here / "mirror", here, here.parent):
        assert "one must not be in the other" in invoke("mirror", here, there, code=3)
    assert sorted(path.name for path in here.iterdir()) == ["step-00000001", "step-00000002"]


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in invoke("mirror", tmp_path / "none", tmp_path / "there", code=3)
    assert not (tmp_path / "there").exists()


def test_ls_has_a_column_for_the_mirror(here: Path, anywhere: Any) -> None:
    there = anywhere / "there"
    invoke("mirror", here, there)
    with aiockpt.SyncCheckpointManager(here) as run:
        run.save(2, {"x": torch.ones(3)}, overwrite=True)
        run.save(3, {"x": torch.ones(3)})
        run.checkpointer.delete(here / "step-00000001")
        (here / "notes").mkdir()
    found = json.loads(invoke("ls", here, "--mirror", there, "--json"))
    assert [each["mirror"] for each in found["checkpoints"]] == ["another save", "missing"]
    assert found["only_in_mirror"] == [1]
    text = invoke("ls", here, "--mirror", there)
    assert "another save" in text
    assert "Only the mirror has step 1." in text
    assert "mirror" not in invoke("ls", here)
