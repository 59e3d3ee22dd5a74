"""Two processes of torchtitan, started by torchrun: ``torchtitan_driver.py DIRECTORY``; tells that all is well."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

import aiockpt
from aiockpt.integrations.torchtitan import AiockptCheckpointManager
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage
from tests.finders import names_in

WIDTH, LAYERS = 192, 3


class Adapter(StateDictAdapter):
    def __init__(self) -> None:
        super().__init__(None, None)
        self.fqn_to_index_mapping = {
            f"model.layers.{layer}.{name}": 1 + layer // 2 for layer in range(LAYERS) for name in ("weight", "bias")
        }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": each for name, each in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): each for name, each in hf_state_dict.items()}


class Counter:
    """The trainer's state, and with a rank the data loader's."""

    def __init__(self, rank: int | None = None) -> None:
        self.key, self.step = "step" if rank is None else f"dp_rank_{rank}", 0

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert list(state) == [self.key], state
        self.step = state[self.key]


class Run:
    """The objects of torchtitan's trainer: shards of one model, or with ``staged`` one part of it on each rank."""

    def __init__(self, folder: Path, kind: Any, *, staged: bool = False, **config: Any) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        mine = {str(at): layer for at, layer in enumerate(layers) if not staged or (at == 2) == (dist.get_rank() == 1)}
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(mine)})
        for layer in mine.values() if not staged else ():
            fully_shard(layer)
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=100
        )
        self.counter, self.loader = Counter(), Counter(dist.get_rank())
        config = {"enable": True, "folder": "run", "interval": 1, "initial_load_model_only": False, **config}
        self.checkpointer = kind.Config(**config).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            sd_adapter=Adapter(),
            base_folder=str(folder),
        )

    def train(self, steps: int, last: int = -1) -> None:
        for _ in range(steps):
            self.counter.step += 1
            self.loader.step += 1 + dist.get_rank()
            generator = torch.Generator().manual_seed(10 * self.counter.step + dist.get_rank())
            batch = torch.randn(4, WIDTH, generator=generator)
            for layer in self.model["layers"].values():
                batch = layer(batch)
            batch.square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.counter.step, last_step=self.counter.step == last)

    def state(self) -> list[Any]:
        states = [self.model.state_dict(), self.optimizers.state_dict()]
        found = [each for state in states for each in state.values()]
        return [local(each).clone() if isinstance(each, torch.Tensor) else each for each in found] + [self.loader.step]

    def close(self) -> None:
        self.checkpointer.maybe_wait_for_saving()  # torchtitan's own does not wait
        self.checkpointer.close()
        dist.barrier()


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_same(found: list[Any], expected: list[Any], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        is_same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert is_same, what


def check_runs(directory: Path, *, staged: bool) -> None:
    """Go on with one class from what the other has saved, and export."""
    whole = Run(directory / "whole", AiockptCheckpointManager, staged=staged, keep_latest_k=1)
    whole.train(5)
    whole.close()
    assert names_in(directory / "whole" / "run") == ["step-5"], names_in(directory / "whole" / "run")
    for writes, reads in (
        (AiockptCheckpointManager, AiockptCheckpointManager),
        (AiockptCheckpointManager, CheckpointManager),
        (CheckpointManager, AiockptCheckpointManager),
    ):
        where = directory / f"{writes.__name__} {reads.__name__}"
        run = Run(where, writes, staged=staged)
        run.train(3)
        run.close()
        run = Run(where, reads, staged=staged)
        assert run.checkpointer.load()
        run.train(2)
        check_same(run.state(), whole.state(), f"{reads.__name__} has read {writes.__name__} differently")
        run.close()


def check_export(directory: Path, *, staged: bool) -> None:
    """Compare the export with torchtitan's, and begin with it."""
    found = []
    for kind in (AiockptCheckpointManager, CheckpointManager):
        run = Run(directory / kind.__name__, kind, staged=staged, last_save_in_hf=True, last_save_model_only=True)
        run.train(2, last=2)
        run.close()
        export = directory / kind.__name__ / "run" / "step-2"
        index = json.loads((export / "model.safetensors.index.json").read_text())["weight_map"]
        found.append({name: load_file(export / file)[name] for name, file in sorted(index.items())})
    assert list(found[0]) == list(found[1])
    check_same(list(found[0].values()), list(found[1].values()), "exports differ")
    own = directory / "AiockptCheckpointManager" / "run" / "step-2"
    options = {"initial_load_path": str(own), "initial_load_in_hf": True, "initial_load_model_only": True}
    begun = Run(directory / "begun", AiockptCheckpointManager, staged=staged, **options)
    assert begun.checkpointer.load()
    parts = [list(each.model.state_dict().values()) for each in (begun, run)]
    check_same(*[[local(each) for each in part] for part in parts], "an export is read differently")
    begun.close()


def check_failure(directory: Path) -> None:
    """A save fails on rank 1: all ranks raise at the next one, and the old checkpoint stays."""
    fails = dist.get_rank() == 1
    broken = FaultyStorage(LocalStorage(), "write", OSError(errno.EIO, "broken"), nth=3, times=None if fails else 0)
    run = Run(directory, AiockptCheckpointManager, keep_latest_k=1, checkpointer={"storage": broken})
    try:
        run.train(8)
    except aiockpt.AiockptError as exc:
        assert "broken" in str(exc), exc
    else:
        raise AssertionError("no rank may go on")
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, run.counter.step)
    assert counts[0] == counts[1], counts
    run.close()
    assert all((directory / "run" / name / ".metadata").exists() for name in names_in(directory / "run"))


def main(directory: Path) -> None:
    """Check shards, then parts of a model on each rank, then a failure."""
    dist.init_process_group("gloo")
    for name, staged in (("shards", False), ("parts", True)):
        check_runs(directory / name, staged=staged)
        check_export(directory / f"{name} export", staged=staged)
    check_failure(directory / "failure")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]
    assert not left, left
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.write("all is well\n")
    sys.stdout.flush()
