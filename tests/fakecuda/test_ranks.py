"""Two ranks with shards on fake devices, one device each, as those of FSDP2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import aiockpt
from tests.fakecuda import device as fake
from tests.ranks.world import World, start_server

CHUNK = 64 << 10


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    start_server()


def _whole() -> torch.Tensor:
    return torch.arange(450 * 300).reshape(450, 300)


def _parts(rank: int, world_size: int, *, empty: bool = False) -> dict[str, DTensor]:
    torch.cuda.set_device(rank)
    mesh = DeviceMesh("cuda", torch.arange(world_size))
    rows, columns = (_whole().chunk(world_size, dim)[rank].to(f"cuda:{rank}") for dim in (0, 1))
    whole = (_whole() + 1).to(f"cuda:{rank}")
    if empty:
        rows, columns, whole = (torch.zeros_like(tensor) for tensor in (rows, columns, whole))
    return {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "columns": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False),
        "all": DTensor.from_local(whole, mesh, [Replicate()], run_check=False),
    }


def _checkpointer() -> aiockpt.SyncCheckpointer:
    return aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=4 * CHUNK, fsync=False)


def _save(rank: int, world_size: int, path: Path, seed: int, kind: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        fake.pose_as(kind, patch)
        return _save_twice(rank, world_size, path, seed)


def _save_twice(rank: int, world_size: int, path: Path, seed: int) -> list[str]:
    state = _parts(rank, world_size)
    fake.set_seed(seed + rank)
    fake.delay(kernel=3000, to_host=3000)
    with _checkpointer() as ckpt:
        fenced = ckpt.submit({"model": state}, path / "fenced")
        fenced.fence()
        for tensor in state.values():
            tensor.to_local().add_(5)  # behind the copies
        torn = ckpt.submit({"model": state}, path / "torn")
        if rank:
            state["rows"].to_local().add_(5)  # before them
        ends = [type(save.written.exception(60)).__name__ for save in (fenced, torn)]
    fake.reset()
    return ends


def _load(rank: int, world_size: int, path: Path, kind: str, share: bool, near: bool) -> list[bool]:
    expected, target = _parts(rank, world_size), _parts(rank, world_size, empty=True)
    with pytest.MonkeyPatch.context() as patch, _checkpointer() as ckpt:
        fake.pose_as(kind, patch)
        if not near:  # by TCP, as between hosts
            patch.delattr(os, "memfd_create")
        ckpt.load(path, {"model": target}, share=share)
    return [torch.equal(target[name].to_local(), expected[name].to_local()) for name in expected]


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(fake.POSES)), ids=fake.POSES)
def test_two_ranks_save_and_load_their_parts(seed: int, kind: str, tmp_path: Path) -> None:
    """A change by one rank before its copies fails the save on all of them."""
    with World(2) as world:
        assert world.results(_save, tmp_path, seed, kind) == [["NoneType", "TornSnapshotError"]] * 2
        for share, near in ((False, True), (True, True), (True, False)):
            assert world.results(_load, tmp_path / "fenced", kind, share, near) == [[True] * 3] * 2
    assert not (tmp_path / "torn").exists()
    found = aiockpt.load(tmp_path / "fenced")["model"]
    assert torch.equal(found["rows"], _whole())
    assert torch.equal(found["columns"], _whole())
    assert torch.equal(found["all"], _whole() + 1)
