"""Conversions between DCP checkpoints and safetensors: the files equal a save of the loaded tensors."""

from __future__ import annotations

import asyncio
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import aiockpt
from aiockpt.dcp import convert
from aiockpt.dcp import format_utils as ours
from tests.dcp.test_format_utils import _save_sharded, sharded_whole
from tests.memory import peak_growth
from tests.ranks.world import World
from tests.states import assert_same, random_tensor, storable_dtypes
from tests.stock import ALONE

OTHER: dict[str, Any] = {"dcp": "safetensors", "safetensors": "dcp"}


def to_safetensors(source: Path, target: Path, *, overwrite: bool = True, **options: Any) -> None:
    ours.convert_checkpoint(source, target, to="safetensors", overwrite=overwrite, **options)


def to_dcp(source: Path, target: Path, **options: Any) -> None:
    ours.convert_checkpoint(source, target, to="dcp", **options)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".aiockpt.json"}


def assert_as_saved(path: Path, state: dict[str, torch.Tensor], expected: Path, **given: Any) -> None:
    """Check that a directory equals a save of ``state``, CRCs included."""
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state, expected, format="safetensors", **given)
        assert ckpt.verify(path).ok
    assert contents(path) == contents(expected)
    files = [json.loads((each / ".aiockpt.json").read_text())["files"] for each in (path, expected)]
    assert files[0] == files[1]


def stock_load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process
        dcp.load(target, checkpoint_id=path, **ALONE)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [4096, 16 << 20])
def test_a_checkpoint_of_several_ranks(
    world4: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Convert shards by rows, columns and blocks, and replicas, with many chunks per tensor and the reverse."""
    monkeypatch.setattr(convert, "_CHUNK_BYTES", chunk_bytes)
    world4.results(_save_sharded, tmp_path / "c", timeout_s=100)
    to_safetensors(tmp_path / "c", tmp_path / "st", keys=["model", "plain"], shard_bytes=300_000, metadata={"step": 3})
    flat = {name if name == "plain" else f"model.{name}": tensor for name, tensor in sharded_whole().items()}
    stored = [*json.loads((tmp_path / "st" / "model.safetensors.index.json").read_text())["weight_map"]]
    assert sorted(stored) == sorted(flat)
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt, ckpt.open(tmp_path / "c") as reader:
        flat = {name: flat[name] for name in reader if name in flat}  # in the order of the checkpoint
    assert_as_saved(tmp_path / "st", flat, tmp_path / "expected", shard_bytes=300_000, metadata={"step": 3})

    to_dcp(tmp_path / "st", tmp_path / "back")
    assert_same(flat, stock_load(tmp_path / "back", flat))
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        assert ckpt.verify(tmp_path / "back").ok
        found = ckpt.load(tmp_path / "back")
    assert_same(flat, {name: found.pop(name) for name in flat})
    assert not found


@pytest.mark.parametrize("chunk_bytes", [4096, 16 << 20])
@pytest.mark.parametrize("writer", ["stock", "ours"])
def test_dtypes_views_and_tied_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, chunk_bytes: int
) -> None:
    monkeypatch.setattr(convert, "_CHUNK_BYTES", chunk_bytes)
    base = random_tensor(torch.float32, (130, 70), 1)
    state = {str(dtype): random_tensor(dtype, (41, 67), n) for n, dtype in enumerate(storable_dtypes())}
    state = {name: tensor for name, tensor in state.items() if tensor.dtype in _SAFETENSORS}
    state |= {"turned": base.t(), "steps": base[::3, 1::2], "0-d": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    if writer == "ours":
        state |= {"tied": base, "again": base}
        with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
            ckpt.save(state, tmp_path / "c")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "c", **ALONE)
    to_safetensors(tmp_path / "c", tmp_path / "m.safetensors")
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state, tmp_path / "expected.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    to_dcp(tmp_path / "m.safetensors", tmp_path / "back")
    expected = {name: tensor.contiguous() for name, tensor in state.items() if name != "again"}
    found = stock_load(tmp_path / "back", expected)
    assert all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items() if t.dim())


_SAFETENSORS = {
    getattr(torch, name)
    for name in ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
}


@pytest.mark.parametrize("chunk_bytes", [4096, 16 << 20])
def test_keys_and_dtype_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(convert, "_CHUNK_BYTES", chunk_bytes)
    weight, ids = random_tensor(torch.float32, (90, 81), 1), torch.arange(5000)
    state = {"model": {"a.w": weight, "b": {"w": weight[:7] * 3}, "ids": ids}, "optim": {"m": weight + 1}, "step": 5}
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state, tmp_path / "c")
    to_safetensors(tmp_path / "c", tmp_path / "st", keys=["model.*w", "model.ids"], dtype=torch.bfloat16)
    chosen = {"model.a.w": weight.bfloat16(), "model.b.w": (weight[:7] * 3).bfloat16(), "model.ids": ids}
    assert_as_saved(tmp_path / "st", chosen, tmp_path / "expected")

    to_dcp(tmp_path / "st", tmp_path / "back", keys="model.b", dtype=torch.float64)
    expected = {"model.b.w": (weight[:7] * 3).bfloat16().double()}
    assert_same(expected, stock_load(tmp_path / "back", expected))

    with pytest.raises(aiockpt.SaveError, match=r"step of .* is not a plain tensor.*keys="):
        to_safetensors(tmp_path / "c", tmp_path / "no")
    with pytest.raises(aiockpt.MissingKeysError, match="nothing"):
        to_safetensors(tmp_path / "c", tmp_path / "no", keys=["model", "nothing"])
    with pytest.raises(ValueError, match="shard_bytes"):
        to_safetensors(tmp_path / "c", tmp_path / "no.safetensors", keys="model", shard_bytes=5)
    mapping = {"model.a.w": 2, "model.b.w": 1, "model.ids": 2}
    to_safetensors(tmp_path / "c", tmp_path / "two", keys="model", fqn_to_index_mapping=mapping)
    assert sorted(load_file(tmp_path / "two" / "model-00002-of-00002.safetensors")) == ["model.a.w", "model.ids"]
    left = {"c", "st", "expected", "back", "two"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"z": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "c")
    with pytest.raises(aiockpt.SaveError, match=r"z is a tensor of 1 dimensions and of torch\.complex128"):
        to_safetensors(tmp_path / "c", tmp_path / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("chunk_bytes", [4096, 16 << 20])
def test_damage_leaves_the_old_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(convert, "_CHUNK_BYTES", chunk_bytes)
    state = {"w": random_tensor(torch.float32, (300, 211), 1)}
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state, tmp_path / "c")
        ckpt.save({"old": torch.ones(3)}, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(aiockpt.CorruptCheckpointError, match="w"):
        to_safetensors(tmp_path / "c", tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == before
    with pytest.raises(aiockpt.CheckpointExistsError):
        to_safetensors(tmp_path / "c", tmp_path / "m.safetensors", overwrite=False, verify=False)
    to_safetensors(tmp_path / "c", tmp_path / "m.safetensors", verify=False)
    assert load_file(tmp_path / "m.safetensors").keys() == {"w"}
    assert {path.name for path in tmp_path.iterdir()} == {"c", "m.safetensors"}


@pytest.mark.asyncio
async def test_both_ways_without_blocking_the_loop(tmp_path: Path) -> None:
    state = {"a": random_tensor(torch.float32, (55, 7), 1), "b": torch.arange(9)}
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state, tmp_path / "m.safetensors")
    await ours.convert_checkpoint_async(tmp_path / "m.safetensors", tmp_path / "c", to="dcp")
    await ours.convert_checkpoint_async(tmp_path / "c", tmp_path / "n.safetensors", to="safetensors")
    assert (tmp_path / "n.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()
    with pytest.raises(aiockpt.CheckpointExistsError):
        await ours.convert_checkpoint_async(
            tmp_path / "c", tmp_path / "n.safetensors", overwrite=False, to="safetensors"
        )


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["dcp", "safetensors"])
async def test_cancelling_leaves_nothing(tmp_path: Path, way: str) -> None:
    state = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(48)}
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state, tmp_path / "in", format=way)
    task = asyncio.ensure_future(ours.convert_checkpoint_async(tmp_path / "in", tmp_path / "out", to=OTHER[way]))
    while not list(tmp_path.glob(".aiockpt-*")):  # until something is written
        await asyncio.wait([task], timeout=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _peak_of(rank: int, world_size: int, folder: Path, way: str) -> int:
    """Convert; return the peak growth of this process's memory in bytes."""
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"warm": torch.rand(9)}, folder / "warm.safetensors")
    to_dcp(folder / "warm.safetensors", folder / "warm")
    to_safetensors(folder / "warm", folder / "warmer")
    return peak_growth(
        lambda: ours.convert_checkpoint(folder / "in", folder / "out", to=OTHER[way], dtype=torch.bfloat16)
    )


@pytest.mark.slow
@pytest.mark.parametrize("large", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("way", ["dcp", "safetensors"])
def test_memory_is_bounded(tmp_path: Path, way: str, large: bool) -> None:
    count, side = (1, 13000) if large else (40, 2048)
    state = {f"w{n}": torch.full((side, side), float(n + 1)) for n in range(count)}
    for n, tensor in enumerate(state.values()):
        tensor.view(-1)[n :: side + 1] = torch.rand(len(tensor.view(-1)[n :: side + 1]))
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "in", format=way)
    with World(1, store="file") as world:  # a new process, without an earlier peak that would hide the growth
        (peak_bytes,) = world.results(_peak_of, tmp_path, way)
    assert 8 << 20 < peak_bytes < 256 << 20  # the state has 640 MiB or more
    with aiockpt.SyncCheckpointer() as ckpt:
        out = ckpt.load(tmp_path / "out", mmap=True)
    assert all(torch.equal(out[name], tensor.bfloat16()) for name, tensor in state.items())
