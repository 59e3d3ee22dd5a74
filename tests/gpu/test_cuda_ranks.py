"""Two ranks with shards on CUDA devices; they share a device if there is only one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import aiockpt
from tests.ranks.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def _whole() -> torch.Tensor:
    return torch.randn(2050, 700, generator=torch.Generator().manual_seed(3))


def _parts(rank: int, world_size: int, *, empty: bool = False) -> dict[str, DTensor]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = DeviceMesh("cuda", torch.arange(world_size))
    rows, columns = (_whole().chunk(world_size, dim)[rank].cuda() for dim in (0, 1))
    whole = _whole().bfloat16().cuda()
    if empty:
        rows, columns, whole = (torch.zeros_like(tensor) for tensor in (rows, columns, whole))
    return {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "columns": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False),
        "all": DTensor.from_local(whole, mesh, [Replicate()], run_check=False),
    }


def _save(rank: int, world_size: int, path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        state = _parts(rank, world_size)
        save = ckpt.submit({"model": state}, path)
        save.fence()
        for tensor in state.values():
            tensor.to_local().zero_()  # ordered after the copies
        save.written.result(120)


def _load(rank: int, world_size: int, path: Path) -> list[bool]:
    expected, target = _parts(rank, world_size), _parts(rank, world_size, empty=True)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"model": target})
    torch.cuda.synchronize()
    return [torch.equal(target[name].to_local(), expected[name].to_local()) for name in expected]


def test_two_ranks_save_and_load_their_parts(tmp_path: Path) -> None:
    with World(2) as world:
        world.results(_save, tmp_path / "c")
        assert world.results(_load, tmp_path / "c") == [[True] * 3] * 2
    with aiockpt.SyncCheckpointer() as ckpt:
        state = ckpt.load(tmp_path / "c")["model"]
    assert torch.equal(state["rows"], _whole())
    assert torch.equal(state["columns"], _whole())
    assert torch.equal(state["all"], _whole().bfloat16())


def _load_with_little_memory(rank: int, world_size: int, path: Path) -> int:
    target = _parts(rank, world_size, empty=True)
    with aiockpt.SyncCheckpointer(chunk_bytes=1 << 20) as ckpt:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ckpt.load(path, {"model": target})
        peak = torch.cuda.max_memory_allocated() - before
    assert all(target[name].device.type == "cuda" for name in target)
    assert torch.equal(target["rows"].to_local(), _parts(rank, world_size)["rows"].to_local())
    return peak


def test_parts_go_straight_to_their_device(tmp_path: Path) -> None:
    """One rank loads what two ranks saved; no whole tensor is assembled on the device."""
    with World(2) as world:
        world.results(_save, tmp_path / "c")
    with World(1) as world:
        (peak,) = world.results(_load_with_little_memory, tmp_path / "c")
    assert peak <= 4 << 20
