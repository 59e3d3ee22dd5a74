"""Write the golden checkpoints: ``python -m tests.golden.make FOLDER``; the kept ones are in ``data``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.local.temp_dir import RECORD, REPLACED, this_process
from aiockpt.testing import GatedStorage
from tests.format.transforms.encryption import ChaCha20
from tests.golden import stock
from tests.golden.states import PLAIN_DTYPES, plain_values, ranks, tensors, training
from tests.ranks.world import World, mesh_of, start_server

KEY = bytes(range(32))
METADATA = {"loss": 0.125, "run": "a", "diverged": float("nan"), "shape": [1, 2]}


def rank_state(rank: int, world_size: int) -> dict[str, Any]:
    """Return one rank's part of the state `ranks`."""
    mesh, whole = mesh_of(world_size), ranks(world_size)

    def sharded(key: str, dim: int) -> DTensor:
        return distribute_tensor(whole[key], mesh, [Shard(dim)])

    return {
        "rows": sharded("rows", 0),
        "columns": sharded("columns", 1),
        "uneven": sharded("uneven", 0),
        "same": distribute_tensor(whole["same"], mesh, [Replicate()]),
        "step": whole["step"],
        f"rng.{rank}": whole[f"rng.{rank}"],
    }


def save_ranks(rank: int, world_size: int, folder: Path) -> None:
    state = rank_state(rank, world_size)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, folder / "ranks-central", metadata=METADATA)
    dcp.save(state, checkpoint_id=folder / f"stock-ranks-{'.'.join(torch.__version__.split('.')[:2])}")


def save_alone(folder: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(training(large=True), folder / "training", metadata=METADATA)
        ckpt.save(plain_values(), folder / "plain-values")
        ckpt.save(tensors(large=True), folder / "hinted", separation_hint="layer")
        ckpt.save(tensors(PLAIN_DTYPES), folder / "file.safetensors", metadata={"loss": "0.125"})
        ckpt.save(tensors(PLAIN_DTYPES), folder / "safetensors", format="safetensors")
        ckpt.save(tensors(PLAIN_DTYPES), folder / "safetensors-shards", format="safetensors", shard_bytes=512)
        ckpt.save(training(large=True), folder / "compressed", metadata=METADATA, compress="zstd")
    with aiockpt.SyncCheckpointer(transforms=[ChaCha20(KEY)]) as ckpt:
        ckpt.save(training(large=True), folder / "encrypted", compress="zstd")


def save_delta(folder: Path) -> None:
    """Save what shares most files with a checkpoint that is not there any more."""
    state = tensors(large=True)
    name = next(iter(state))
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({**state, name: torch.zeros_like(state[name])}, folder / "base", base="auto")
        assert ckpt.save(state, folder / "delta", base="auto", metadata=METADATA).bytes_reused > 0
        ckpt.delete(folder / "base")


def save_and_die(folder: Path) -> None:
    """Kill this process when a save is written and not yet published."""
    with aiockpt.SyncCheckpointer() as ckpt:
        storage = GatedStorage(LocalStorage(), ["commit"])
        ckpt.submit(tensors(), folder / "step-1", storage=storage)
        storage.reached["commit"].result(60)
        os.kill(os.getpid(), signal.SIGKILL)


def replace_and_die(folder: Path) -> None:
    """Leave the files of a process that is killed between the two renames of an overwrite without RENAME_EXCHANGE."""
    with subprocess.Popen(["true"]) as process:
        here = this_process()
        assert here is not None
        hidden = folder / f".aiockpt-{replace(here, pid=process.pid, start=here.start + 1)}.{7:016x}"
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.zeros(9)}, f"{hidden}{REPLACED}")
        ckpt.save({"x": torch.ones(9)}, hidden)
    Path(f"{hidden}{RECORD}").write_text("step-1")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_alone(folder)
    save_delta(folder)
    stock.main(folder)
    start_server()
    with World(2) as world:
        world.results(save_ranks, folder)
    (folder / "unfinished").mkdir()
    (folder / "interrupted").mkdir()
    unfinished = repr(str(folder / "unfinished"))
    code = f"from pathlib import Path; from tests.golden import make; make.save_and_die(Path({unfinished}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    replace_and_die(folder / "interrupted")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
