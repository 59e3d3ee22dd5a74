"""Two processes of Lightning, started by it: ``lightning_driver.py KIND DIRECTORY``; tells that all is well at the end.

FSDP runs on the CPU here, as the model wraps itself.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import aiockpt
from aiockpt.integrations.lightning import (
    AiockptCallback,
    AiockptCheckpointIO,
    AiockptFSDPStrategy,
    AiockptModelParallelStrategy,
)
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage
from tests.finders import names_in

WIDTH = 192


class Model(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_wrapped = kind, False
        self.net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def configure_model(self) -> None:
        if self.is_wrapped:
            return
        self.is_wrapped = True
        if self.kind == "model parallel":
            for layer in self.net:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        elif self.kind == "fsdp":
            options = {"device_id": torch.device("cpu"), "use_orig_params": True}
            layers = [FullyShardedDataParallel(layer, **options) for layer in self.net]
            self.net = FullyShardedDataParallel(torch.nn.Sequential(*layers), **options)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        batch = torch.randn(
            1, WIDTH, generator=torch.Generator().manual_seed(1)
        )  # all alike: a run goes on within an epoch
        return torch.utils.data.DataLoader(batch.repeat(64, 1), batch_size=4)


class StockFSDP(FSDPStrategy):
    """Lightning refuses its own class without a GPU."""


def strategy_of(kind: str, ours: bool, **options: Any) -> Any:
    more = {"checkpointer": options} if ours else {}
    if kind == "model parallel":
        make = AiockptModelParallelStrategy if ours else ModelParallelStrategy
        return make(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", **more)
    if kind == "fsdp":
        make = AiockptFSDPStrategy if ours else StockFSDP
        return make(state_dict_type="sharded", process_group_backend="gloo", **more)
    return DDPStrategy(process_group_backend="gloo")


def fit(
    kind: str, run: Path, steps: int, path: Path | None = None, *, ours: bool = True, more: Any = (), **options: Any
) -> Any:
    """Train, and return the trainer with this rank's part of the weights. ``more``: a plugin, and a callback."""
    pl.seed_everything(1, verbose=False)
    plugins = [*([AiockptCheckpointIO(**options)] if ours and kind == "ddp" else []), *more[:1]]
    saving = ModelCheckpoint(run, save_last=True, save_top_k=1, monitor="step", mode="max", every_n_train_steps=2)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(kind, ours, **options),
        plugins=plugins,
        callbacks=[*([AiockptCallback()] if ours else []), saving, *more[1:]],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run,
    )
    model = Model(kind)
    trainer.fit(model, ckpt_path=path)
    parameters = [each.detach() for each in model.parameters()]
    return trainer, [(each.to_local() if hasattr(each, "to_local") else each).clone() for each in parameters]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Interrupts(pl.Callback):
    """Sends this process the signal by which SLURM announces the end of a job, after a step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def check_requeue(kind: str, run: Path, rank: int, whole: list[torch.Tensor]) -> None:
    """Requeue the job in the middle: its checkpoint is durable by then, and the next job goes on from it."""
    if rank == 0:
        command = run / "bin" / "scontrol"
        command.parent.mkdir(parents=True)
        command.write_text(f"#!/bin/sh\ncp -r {run}/hpc_ckpt_1.ckpt {run}/at-requeue && echo $@ > {run}/asked\n")
        command.chmod(0o755)
    os.environ["PATH"] = f"{run}/bin{os.pathsep}{os.environ['PATH']}"
    facts = {
        "JOB_ID": 7,
        "NTASKS": 2,
        "NTASKS_PER_NODE": 2,
        "LOCALID": rank,
        "NODEID": 0,
        "PROCID": rank,
        "JOB_NAME": "train",
    }
    os.environ.update({f"SLURM_{name}": str(value) for name, value in facts.items()})
    slurm = SLURMEnvironment(requeue_signal=signal.SIGUSR1)
    trainer, _ = fit(kind, run, 4, more=(slurm, Interrupts()))
    trainer.strategy.barrier()
    assert (run / "asked").read_text() == "requeue 7\n"
    assert torch.load(run / "at-requeue" / "meta.pt", weights_only=False)["global_step"] == 3
    assert aiockpt.verify(run / "at-requeue").ok
    _, found = fit(kind, run, 8, more=(slurm,))  # takes hpc_ckpt_1.ckpt by itself
    assert same(found, whole), "weights differ after a requeue"
    for name in facts:
        del os.environ[f"SLURM_{name}"]


def main(kind: str, directory: Path) -> None:
    """Compare runs with and without ours; then let a save fail on one rank."""
    _, whole = fit(kind, directory / "stock", 8, ours=False)
    fit(kind, directory / "ours", 4)
    assert not threads(), threads()
    trainer, resumed = fit(kind, directory / "ours", 8, directory / "ours" / "last.ckpt")
    assert same(resumed, whole), "weights differ after resuming"
    trainer.strategy.barrier()
    assert names_in(directory / "ours") == ["epoch=0-step=8.ckpt", "last.ckpt"], names_in(directory / "ours")
    for ours, by in ((False, "ours"), (True, "stock")):
        _, found = fit(kind, directory / f"by {by}", 8, directory / by / "epoch=0-step=8.ckpt", ours=ours)
        assert same(found, whole), f"{by} is read differently"

    at_end = directory / "end"
    trainer.save_checkpoint(at_end)
    assert at_end.exists()
    assert not threads(), threads()

    if kind == "model parallel":
        check_requeue(kind, directory / "requeue", trainer.global_rank, whole)

    fails = trainer.global_rank == (0 if kind == "ddp" else 1)
    broken = FaultyStorage(LocalStorage(), "write", OSError(errno.EIO, "broken"), nth=3, times=None if fails else 0)
    if kind == "ddp":  # only rank 0 knows, and raises; the other process would wait for it
        return
    try:
        fit(kind, directory / "fails", 8, storage=broken)
    except aiockpt.AiockptError as exc:
        assert "broken" in str(exc), exc
    else:
        raise AssertionError("no rank may go on")
    assert not threads(), threads()
    trainer.strategy.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.write("all is well\n")
    sys.stdout.flush()
