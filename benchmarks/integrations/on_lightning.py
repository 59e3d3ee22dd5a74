"""Lightning: `Trainer.save_checkpoint` with its own two ways, and with ours, with the wait before the step."""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from aiockpt.integrations.lightning import AiockptCallback, AiockptCheckpointIO

WIDTH, LAYERS = 1024, 24  # 96 MiB of parameters, and twice as much of Adam's
BATCH, STEPS = 16, 4  # between two saves


class Timed(ModelCheckpoint):
    """Saves after every few steps, and keeps the seconds that each save has blocked training."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, monitor="step", mode="max", save_top_k=2, every_n_train_steps=STEPS)
        self.blocked: list[float] = []

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        begin = time.perf_counter()
        super()._save_checkpoint(trainer, filepath)
        self.blocked.append(time.perf_counter() - begin)


class TimedCallback(AiockptCallback):
    """Adds its waits to the save before."""

    def __init__(self, blocked: list[float]) -> None:
        super().__init__()
        self._blocked = blocked

    def _timed(self, name: str, *args: Any) -> None:
        begin = time.perf_counter()
        getattr(super(), name)(*args)
        if self._blocked:
            self._blocked[-1] += time.perf_counter() - begin

    def on_train_batch_start(self, *args: Any) -> None:
        self._timed("on_train_batch_start", *args)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._timed("on_before_optimizer_step", *args)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def rows(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each save blocked training, by contender; the first save is the first of each."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    contenders = {
        "stock torch.save": TorchCheckpointIO,
        "stock AsyncCheckpointIO": AsyncCheckpointIO,
        "aiockpt": AiockptCheckpointIO,
    }
    return {name: _blocked(directory / name, plugin(), rounds) for name, plugin in contenders.items()}


def _blocked(directory: Path, plugin: Any, rounds: int) -> list[float]:
    pl.seed_everything(1, verbose=False)
    saving = Timed(directory)
    beside = [TimedCallback(saving.blocked)] if isinstance(plugin, AiockptCheckpointIO) else []
    trainer = pl.Trainer(
        max_steps=STEPS * (rounds + 1),
        accelerator="cpu",
        plugins=[plugin],
        callbacks=[*beside, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.randn(BATCH * STEPS, WIDTH)
    trainer.fit(Model(), torch.utils.data.DataLoader(batches, batch_size=BATCH))
    shutil.rmtree(directory)
    return saving.blocked
