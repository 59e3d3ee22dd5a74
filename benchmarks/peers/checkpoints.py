"""Checkpoints of every format: written for the load benchmarks, and read back by the save benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks.harness.states import State, empty_like, same_bits, size_of, split
from benchmarks.limits import raw

Format = Literal["aiockpt", "dcp", "torch", "safetensors", "torch_checkpointing", "torchsnapshot", "orbax"]

_MANY = 5_000  # from this number of tensors on, dcp.load takes minutes

TORCH_CHECKPOINTING_FILES = 4
"""torch_checkpointing writes one file for each top-level item."""


def save_by_aiockpt(state: State, path: Path) -> None:
    """Save with aiockpt."""
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        checkpointer.save(state, path)


def save_by_safetensors(state: State, path: Path) -> None:
    """Save as one safetensors file."""
    from safetensors.torch import save_file

    save_file(state, path)


def torch_checkpointing_manager(*, direct: bool) -> Any:
    """Return torch_checkpointing's manager, configured to save in this process."""
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
    """Load with torch_checkpointing, one file after the other."""
    manager = torch_checkpointing_manager(direct=direct)
    try:
        names = sorted(file.name.removesuffix("_0.pt") for file in path.glob("*.pt"))
        items = dict.fromkeys(names) if target is None else torch_checkpointing_items(target)
        loaded = manager.load(path, items, strict=True)
    finally:
        manager.close()
    return {name: tensor for part in loaded.values() for name, tensor in part.items()}


def torch_checkpointing_items(state: State) -> dict[str, State]:
    """Split a state into top-level items: torch_checkpointing writes one file for each."""
    return {f"part{number}": part for number, part in enumerate(split(state, TORCH_CHECKPOINTING_FILES))}


def save_by_torch_checkpointing(state: State, path: Path) -> None:
    """Save with torch_checkpointing."""
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
"""For each file or directory name, the function that writes it."""


def make(state: State, path: Path) -> None:
    """Save a state in the format that the path's name stands for, unless the path exists."""
    if not path.exists():
        WRITERS[path.name](state, path)


def load_back(format: Format, path: Path, state: State) -> State:
    """Load a saved state: aiockpt's checkpoints with DCP unless they have too many tensors, DCP's with aiockpt."""
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
    if format == "torchsnapshot":
        import torchsnapshot

        target = torchsnapshot.StateDict(**empty_like(state))
        with ThreadPoolExecutor(1) as thread:  # it runs an event loop of its own
            thread.submit(torchsnapshot.Snapshot(str(path)).restore, {"state": target}).result()
        return dict(target)
    import orbax.checkpoint

    loaded = orbax.checkpoint.PyTreeCheckpointer().restore(path.resolve())
    return {name: torch.from_numpy(array) for name, array in loaded.items()}


def check(format: Format, path: Path, state: State) -> None:
    """Raise ValueError if the checkpoint at a path differs from the saved state in any bit."""
    if not same_bits(load_back(format, path, state), state):
        raise ValueError("what was loaded differs from what was saved")
