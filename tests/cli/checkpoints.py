"""The same tensors in a checkpoint of each readable format, for the tests of commands."""

import subprocess
import tempfile
import warnings
from pathlib import Path

import anyio
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import aiockpt
from aiockpt.core.threads import Workers
from tests.places import ServerPath, storage_of

FORMATS = ("aiockpt", "dcp", "ranks", "torch", "safetensors", "sharded")


def tensors():
    """Return tensors of different dtypes, shapes and values."""
    return {
        "model.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) - 2,
        "model.0.bias": torch.tensor([1.5, float("nan"), -0.5], dtype=torch.bfloat16),
        "head": torch.arange(5, dtype=torch.int64) * 3,
    }


def make(form, path):
    """Write a checkpoint of `tensors`, in a directory or in a server; return its path."""
    if isinstance(path, ServerPath):  # other programs know files only
        with tempfile.TemporaryDirectory() as folder:
            made = make(form, Path(folder) / path.name)
            anyio.run(_copy, made, path := path.parent / made.name)
        return path
    state = tensors()
    with aiockpt.SyncCheckpointer() as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match form:
            case "aiockpt":
                ckpt.save(state, path, metadata={"loss": 0.25, "note": "größe"})
            case "dcp":
                dcp.save(state, checkpoint_id=path)
            case "ranks":  # ranks that saved alone: each wrote metadata of its own
                dcp.save(state, checkpoint_id=path)
                (path / ".metadata").rename(path / "__0.metadata")
            case "torch":
                path = path.with_suffix(".pt")
                torch.save(state, path)
            case "safetensors":
                path = path.with_suffix(".safetensors")
                save_file(state, path)
            case "sharded":
                ckpt.save(state, path, format="safetensors", shard_bytes=40)
    return path


_DIES = """
import os, sys, torch, aiockpt
from tests.places import storage_of

class Dying(aiockpt.storage.WrapperStorage):
    async def before(self, step, name):
        if step == "commit":
            os._exit(7)

aiockpt.save({"w": torch.ones(3)}, sys.argv[1], storage=Dying(storage_of(sys.argv[1])))
"""


def killed_save(python, path):
    """Run a process that dies while it publishes a checkpoint."""
    died = subprocess.run([*python, "-c", _DIES, str(path)], timeout=120, check=False)
    assert died.returncode == 7


async def _copy(source, target):
    """Copy the files of a checkpoint as they are."""
    files = {"": source} if source.is_file() else {file.name: file for file in source.iterdir()}
    workers = Workers(1, "aiockpt-copy")
    try:
        transaction = await storage_of(target).begin(str(target), overwrite=False, workers=workers)
        await transaction.write_files({name: file.read_bytes() for name, file in files.items()})
        await transaction.commit()
    finally:
        workers.close()
