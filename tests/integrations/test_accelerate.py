"""accelerate: its objects as a state of ours, and its `save_state` beside training."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import aiockpt
from aiockpt.integrations.accelerate import install, state_of
from tests.states import assert_same

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


def _prepared(**options: Any) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _train(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.randn(4, 200)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_state_goes_on_where_it_was(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    _train(accelerator, model, optimizer, 3)
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(3, state_of(accelerator))
        _train(accelerator, model, optimizer, 2)
        expected = _copy(model)
        restored = run.restore(state_of(accelerator))
        assert restored is not None
        assert restored.step == 3
        _train(accelerator, model, optimizer, 2)
    assert_same(expected, _copy(model))


@pytest.mark.parametrize("limit", [1, 2])
def test_save_state_writes_beside_training_and_keeps_what_is_durable(limit: int, tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator, model, optimizer = _prepared(project_config=project)
    with contextlib.closing(install(accelerator)) as installed:
        seen, had = [], False
        for number in range(4):
            _train(accelerator, model, optimizer, 1)
            seen.append(_copy(model))
            path = accelerator.save_state()
            assert Path(path).name == f"checkpoint_{number}"
            there = [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("checkpoint_")]
            assert there or not had, "total_limit has left nothing"
            had = bool(there)
        installed.wait_for_checkpoints()
        kept = sorted(name for name in os.listdir(tmp_path / "checkpoints") if not name.startswith("."))
        assert kept[-1] == "checkpoint_3"
        assert aiockpt.verify(tmp_path / "checkpoints" / "checkpoint_3").ok
        _train(accelerator, model, optimizer, 1)
        accelerator.load_state()
        assert_same(seen[3], _copy(model))
    there = sorted(name for name in os.listdir(tmp_path / "checkpoints") if not name.startswith("."))
    assert there == [f"checkpoint_{number}" for number in range(4 - limit, 4)]


def test_the_stock_code_loads_it(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    _train(accelerator, model, optimizer, 2)
    expected = _copy(model)
    with contextlib.closing(install(accelerator)):
        accelerator.save_state(str(tmp_path / "c"))
    _train(accelerator, model, optimizer, 2)
    other, fresh, _ = _prepared()
    other.load_state(str(tmp_path / "c"))
    assert_same(expected, _copy(fresh))


KILLED_WITHIN_A_SAVE = """
import os, signal, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from aiockpt.integrations.accelerate import install

project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(200, 200)
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
installed = install(accelerator)
for _ in range(int(sys.argv[2])):
    accelerator.save_state()
installed.wait_for_checkpoints()
accelerator.register_save_state_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
accelerator.save_state()
"""


def _killed(folder: Path, whole: int) -> None:
    """Save so many checkpoints, and be killed within the next save."""
    done = subprocess.run([sys.executable, "-c", KILLED_WITHIN_A_SAVE, str(folder), str(whole)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert any(path.is_dir() for path in folder.glob(".aiockpt-*")), "something unfinished is left"


@pytest.mark.parametrize("whole", [1, 2])
def test_the_stock_code_finds_the_newest_whole_one_after_a_kill(whole: int, tmp_path: Path) -> None:
    """It takes the entry with the largest number in its name, and fails if one has no number."""
    _killed(tmp_path, whole)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"checkpoint_{number}" for number in range(whole)]
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2, iteration=whole)
    accelerator, model, _ = _prepared(project_config=project)
    before = _copy(model)
    accelerator.load_state()
    assert not torch.equal(before["weight"], _copy(model)["weight"])
    accelerator.save_state()
    accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"checkpoint_{whole}", f"checkpoint_{whole + 1}"]
    with contextlib.closing(install(accelerator)):
        accelerator.save_state()
    assert list(tmp_path.glob(".aiockpt-*")) == [], "the next save removes what is left"


def test_load_state_says_that_there_is_no_whole_one(tmp_path: Path) -> None:
    _killed(tmp_path, 0)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, model, _ = _prepared(project_config=project)
    before = _copy(model)
    with contextlib.closing(install(accelerator)):
        with pytest.raises(FileNotFoundError, match=r"checkpoints has no whole checkpoint, such as checkpoint_0"):
            accelerator.load_state()
        assert_same(before, _copy(model))
        accelerator.save_state()
        accelerator.load_state()
