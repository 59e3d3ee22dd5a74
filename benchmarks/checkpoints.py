"""What there is to load: a state as everybody saves it, in a directory or file whose name says by whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks import raw
from benchmarks.states import State, size_of, split

TORCH_CHECKPOINTING_FILES = 4
"""It writes one file for each top-level item."""


def save_by_aiockpt(state: State, path: Path) -> None:
    """Save as this package does."""
    with aiockpt.SyncCheckpointer() as checkpointer:
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
