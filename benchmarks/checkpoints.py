"""Checkpoints of every format: made where there is something to load, and loaded back where something was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks import raw
from benchmarks.states import State, empty_like, same_bits, size_of, split

Format = Literal["aiockpt", "dcp", "torch", "safetensors", "torch_checkpointing", "torchsnapshot", "orbax"]

_MANY = 5_000  # of as many tensors, dcp.load takes minutes

TORCH_CHECKPOINTING_FILES = 4
"""It writes one file for each top-level item."""


def save_by_aiockpt(state: State, path: Path) -> None:
    """Save as this package does."""
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        checkpointer.save(state, path)


def save_by_safetensors(state: State, path: Path) -> None:
    """Save as one file of safetensors."""
    from safetensors.torch import save_file

    save_file(state, path)


def torch_checkpointing_manager(*, direct: bool) -> Any:
    """Make torch_checkpointing's manager, one that saves in this process."""
    from torch_checkpointing import CheckpointManager, CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    return CheckpointManager(
        CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(writer_config=writer),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=direct),
        )
    )


def torch_checkpointing_load(path: Path, target: State | None, *, direct: bool) -> State:
    """Load as torch_checkpointing does, a file after the other."""
    manager = torch_checkpointing_manager(direct=direct)
    try:
        names = sorted(file.name.removesuffix("_0.pt") for file in path.glob("*.pt"))
        items = dict.fromkeys(names) if target is None else torch_checkpointing_items(target)
        loaded = manager.load(path, items, strict=True)
    finally:
        manager.close()
    return {name: tensor for part in loaded.values() for name, tensor in part.items()}


def torch_checkpointing_items(state: State) -> dict[str, State]:
    """Deal a state out to the items that torch_checkpointing keeps in files of their own."""
    return {f"part{number}": part for number, part in enumerate(split(state, TORCH_CHECKPOINTING_FILES))}


def save_by_torch_checkpointing(state: State, path: Path) -> None:
    """Save as torch_checkpointing does."""
    manager = torch_checkpointing_manager(direct=False)
    try:
        manager.save(str(path), torch_checkpointing_items(state))
    finally:
        manager.close()


WRITERS: dict[str, Callable[[State, Path], object]] = {
    "raw": lambda state, path: raw.write_direct(path, raw.Arena(64 << 20), size_of(state), threads=1),
    "aiockpt": save_by_aiockpt,
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    "state.pt": torch.save,
    "state.safetensors": save_by_safetensors,
    "torch_checkpointing": save_by_torch_checkpointing,
}
"""How the file or directory of each name is made."""


def make(state: State, path: Path) -> None:
    """Save a state as the name of the path says, unless that was done before."""
    if not path.exists():
        WRITERS[path.name](state, path)


def load_back(format: Format, path: Path, state: State) -> State:
    """Load what was saved: our checkpoints by DCP, unless they are of too many tensors, and DCP's by us."""
    if format == "aiockpt" and len(state) < _MANY:
        target = empty_like(state)
        dcp.load(target, checkpoint_id=path, no_dist=True)
        return target
    if format in ("aiockpt", "dcp"):
        with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
            return checkpointer.load(path)
    if format == "torch":
        return torch.load(path, mmap=True)
    if format == "safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if format == "torch_checkpointing":
        return torch_checkpointing_load(path, None, direct=False)
    from benchmarks import peers

    return peers.load_back(format, path, state)


def check(format: Format, path: Path, state: State) -> None:
    """Raise ValueError if what is at a path differs from what was saved, in any bit."""
    if not same_bits(load_back(format, path, state), state):
        raise ValueError("what was loaded differs from what was saved")
