"""Metadata files with a hole that makes them very large: refusing them costs neither time nor memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp import FileSystemReader
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MAX_BYTES = 64 << 20
SIZES = [1 << 30, 1 << 42]


def _metadata(folder: Path, size: int) -> Path:
    os.truncate(folder / "ours" / ".metadata", size)
    (folder / "ours" / ".aiockpt.json").unlink()
    return folder / "ours"


def _manifest(folder: Path, size: int) -> Path:
    os.truncate(folder / "ours" / ".aiockpt.json", size)
    return folder / "ours"


def _stock(folder: Path, size: int) -> Path:
    os.truncate(folder / "stock" / ".metadata", size)
    return folder / "stock"


def _hole_first(folder: Path, size: int) -> Path:
    """Put a hole before the end of the metadata."""
    file = folder / "stock" / ".metadata"
    end = file.read_bytes()[-1000:]
    os.truncate(file, 0)
    with file.open("r+b") as opened:
        opened.seek(size - len(end))
        opened.write(end)
    return folder / "stock"


def _header(folder: Path, size: int) -> Path:
    file = folder / "m.safetensors"
    with file.open("r+b") as opened:
        opened.write(min(size, 99_000_000).to_bytes(8, "little"))
    os.truncate(file, size)
    return file


def _shard_index(folder: Path, size: int) -> Path:
    file = folder / "set" / "model.safetensors.index.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"weight_map": {}}))
    os.truncate(file, size)
    (file.parent / "a.safetensors").write_bytes((folder / "m.safetensors").read_bytes())
    return file.parent


def _archive(folder: Path, size: int) -> Path:
    os.truncate(folder / "m.pt", size)
    return folder / "m.pt"


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", ["load", "open", "verify", "dcp"])
@pytest.mark.parametrize(
    "spoil",
    [_metadata, _manifest, _stock, _hole_first, _header, _shard_index, _archive],
    ids=lambda each: each.__name__,
)
def test_hole_is_refused(
    spoil: Callable[[Path, int], Path], operation: str, size: int, tmp_path: Path, ckpt: aiockpt.SyncCheckpointer
) -> None:
    state = {"w": torch.ones(100), "step": 3}
    ckpt.save(state, tmp_path / "ours")
    ckpt.save({"w": state["w"]}, tmp_path / "m.safetensors", format="safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "stock", **ALONE)
    torch.save(state, tmp_path / "m.pt")
    path = spoil(tmp_path, size)
    attempts: dict[str, Callable[[], Any]] = {
        "load": lambda: ckpt.load(path),
        "open": lambda: ckpt.open(path).__enter__(),
        "verify": lambda: ckpt.verify(path).raise_if_bad(),
        "dcp": lambda: FileSystemReader(path).read_metadata(),
    }
    tracemalloc.start()
    try:
        with pytest.raises(aiockpt.CorruptCheckpointError):
            attempts[operation]()
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
