"""accelerate: its objects as a state of ours, and its `save_state` beside training."""

from __future__ import annotations

import contextlib
import os
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
