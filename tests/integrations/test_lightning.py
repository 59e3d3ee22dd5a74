"""Lightning's Trainer with checkpoints that are written beside training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import aiockpt
from aiockpt.integrations.lightning import AiockptCallback, AiockptCheckpointIO, AiockptModelParallelStrategy
from tests.states import assert_same

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

PROGRAM = """
import os, signal, sys
from tests.integrations.test_lightning import fit
fit(sys.argv[1], kill=sys.argv[2] == "kill", resume=sys.argv[3] if sys.argv[2] == "resume" else None)
"""


class Model(BoringModel):
    """A model whose loss is logged, and falls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", float(100 - self.global_step))
        return loss


def fit(folder: str, *, kill: bool = False, resume: str | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    io = AiockptCheckpointIO()
    saver = ModelCheckpoint(folder, monitor="step_loss", save_top_k=2, every_n_train_steps=2, filename="{step}")
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=8,
        plugins=[io],
        callbacks=[AiockptCallback(), saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
    if kill:
        own = io.save_checkpoint

        def save(checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            own(checkpoint, path, storage_options)
            if "step=6" in os.fspath(path):
                os.kill(os.getpid(), signal.SIGKILL)

        io.save_checkpoint = save
    trainer.fit(Model(), ckpt_path=resume)
    return trainer


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


def _files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".ckpt"))


def test_the_best_are_kept_and_load_as_stock_files(tmp_path: Path) -> None:
    trainer = fit(str(tmp_path))
    assert _files(tmp_path) == ["step=6.ckpt", "step=8.ckpt"]
    assert not _threads()
    for name in _files(tmp_path):
        loaded = torch.load(tmp_path / name, weights_only=False)
        assert loaded["global_step"] == int(name[5])
    model = Model.load_from_checkpoint(tmp_path / "step=8.ckpt")
    assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".aiockpt")]


def test_a_run_that_was_killed_within_a_save_goes_on(tmp_path: Path) -> None:
    def run(folder: Path, how: str, *more: str) -> int:
        done = [sys.executable, "-c", PROGRAM, folder, how, *more]
        return subprocess.run(done, timeout=150, capture_output=True, check=False).returncode

    assert run(tmp_path / "whole", "whole") == 0
    assert run(tmp_path / "broken", "kill") == -signal.SIGKILL
    found = _files(tmp_path / "broken")
    assert found, "what was durable is gone"
    for name in found:
        torch.load(tmp_path / "broken" / name, weights_only=False)
    assert run(tmp_path / "broken", "resume", str(tmp_path / "broken" / found[-1])) == 0
    one, other = (torch.load(tmp_path / each / "step=8.ckpt", weights_only=False) for each in ("whole", "broken"))
    assert one["global_step"] == other["global_step"] == 8


def test_a_failed_save_is_raised(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises((aiockpt.AiockptError, OSError)):
        fit(str(tmp_path / "taken" / "below"))
    assert not _threads()


def test_outside_of_fit_a_save_is_durable_on_return(tmp_path: Path) -> None:
    trainer = fit(str(tmp_path))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert not _threads()
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 8


def test_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[AiockptCheckpointIO()])
    model = torch.nn.Linear(30, 30)
    fabric.save(tmp_path / "c.ckpt", {"model": model, "step": 3})
    target = {"model": torch.nn.Linear(30, 30), "step": 0}
    fabric.load(tmp_path / "c.ckpt", target)
    assert_same(dict(model.state_dict()), dict(target["model"].state_dict()))
    assert target["step"] == 3
    assert not _threads()


class Sharded(LightningModule):
    """A model that FSDP2 shards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(64.0 * 64).reshape(64, 64) / 4096, batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


SHARDED = """
import sys
from tests.integrations.test_lightning import fit_sharded
fit_sharded(sys.argv[1])
"""  # a file: Lightning runs it once more for the other rank


def fit_sharded(folder: str) -> None:
    torch.manual_seed(0)
    saver = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2, filename="{step}")
    Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=2,
        strategy=AiockptModelParallelStrategy(
            process_group_backend="gloo", data_parallel_size=2, tensor_parallel_size=1
        ),
        max_steps=4,
        callbacks=[AiockptCallback(), saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Sharded())


def test_shards_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SHARDED)
    given = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    paths = os.pathsep.join([str(Path(aiockpt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        given, timeout=150, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert _files(tmp_path) == ["step=2.ckpt", "step=4.ckpt"]
    for name in _files(tmp_path):
        assert aiockpt.verify(tmp_path / name).ok
        loaded = aiockpt.load(tmp_path / name, trust=True)
        assert loaded["state_dict"]["net.weight"].shape == (64, 64)
