"""Runs whose steps have other names, that are locked by something else, or that tell what was written."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt

STATE = {"w": torch.arange(5.0)}


def test_names(tmp_path: Path) -> None:
    for template, name in (
        ("checkpoint_{:06d}", "checkpoint_000012"),
        ("checkpoint-{}", "checkpoint-12"),
        ("{}", "12"),
    ):
        folder, other = tmp_path / f"of {name}", template.format(13)
        others = [f"0{other}", f"{other}0x", f"{other}.damaged", f"x{other}", "checkpoint-", "9" * 250]
        others += [f"checkpoint-{13:03}", f"checkpoint_{13:07}", f"checkpoint_{13:05}"]
        for path in (*others, *map(template.format, (0, 7, 12, 10**9))):
            (folder / path).mkdir(parents=True)
        run = aiockpt.SyncCheckpointManager(folder, names=template, read_only=True)
        assert run.path_of(12) == str(folder / name)
        assert [info.step for info in run.infos()] == [0, 7, 12, 10**9]


@pytest.mark.parametrize(
    "template", ["", "step", "{}-{}", "a/{}", ".{}", "{name}", "{:s}", "{:03d", "step-{:x}", "{!r:a}"]
)
def test_formats_that_do_not_name_one_step_are_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it must be the name of a step with one field"):
        aiockpt.CheckpointManager(tmp_path, names=template)


def test_a_run_has_the_steps_with_its_names_alone(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, names="checkpoint-{}", keep=aiockpt.KeepLatest(2)) as run:
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(STATE, tmp_path / "step-00000009")
        for step in (1, 2, 10):
            run.save(step, STATE)
        assert run.path_of(10) == str(tmp_path / "checkpoint-10")
    with aiockpt.SyncCheckpointManager(tmp_path, names="checkpoint-{}", read_only=True) as run:
        restored = run.restore({"w": torch.zeros(5)})
        assert restored is not None
        assert restored.step == 10
    assert sorted(name for name in os.listdir(tmp_path) if not name.startswith(".")) == [
        "checkpoint-10",
        "checkpoint-2",
        "step-00000009",
    ]
    assert aiockpt.SyncCheckpointManager(tmp_path, names="checkpoint-{}", read_only=True).steps() == [2, 10]
    assert aiockpt.SyncCheckpointManager(tmp_path, read_only=True).steps() == [9]


def test_two_managers_may_write_where_something_else_decides(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, lock=False) as one:
        one.save(1, STATE)
        with aiockpt.SyncCheckpointManager(tmp_path, lock=False) as other:
            other.save(2, STATE)
            assert one.steps() == other.steps() == [1, 2]
        assert ".aiockpt.lock" not in os.listdir(tmp_path)
        with aiockpt.SyncCheckpointManager(tmp_path) as owner:
            owner.save(3, STATE)


def test_without_a_lock_a_run_begins_where_no_directory_is(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "a" / "run", lock=False) as run:
        assert run.restore(STATE) is None
        run.save(1, STATE)
        assert run.steps() == [1]


def test_what_is_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def on_written(step: int, result: aiockpt.SaveResult) -> None:
        assert (tmp_path / f"step-{step:08d}").is_dir()
        told.append((step, result.path))
        if step == 2:
            raise ValueError("of the caller")

    with aiockpt.SyncCheckpointManager(tmp_path, on_written=on_written, keep=aiockpt.KeepLatest(1)) as run:
        for step in (1, 2, 3):
            run.save(step, STATE)
    assert told == [(step, str(tmp_path / f"step-{step:08d}")) for step in (1, 2, 3)]
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "on_written has failed for step 2"
    ]
    assert aiockpt.SyncCheckpointManager(tmp_path, read_only=True).steps() == [3]
