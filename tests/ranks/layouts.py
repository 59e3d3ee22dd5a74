"""Distributed states for tests: the same random tensors, laid out over ranks in many ways.

torch itself shards the tensors (`distribute_tensor`, `fully_shard`), so a load into a layout has to produce exactly the
local tensors that a rank holds here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.ranks.world import mesh_of

LAYOUTS = ["shard0", "shard1", "replicate", "hsdp", "grid", "fsdp_tp"]

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (16, 24),
    "uneven": (5, 7),
    "row": (3,),
    "scalar": (),
    "empty": (0, 4),
    "cube": (6, 9, 10),
    "nine": (9, 4),  # FSDP2 over tensor parallelism shards it differently from what its placements say
    "large": (300, 1024),
}
_DTYPES = {"uneven": torch.bfloat16, "row": torch.int64, "cube": torch.complex64}


def full_tensors(seed: int = 7) -> dict[str, torch.Tensor]:
    """Return the whole tensors: random, but the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        dtype = _DTYPES.get(name, torch.float32)
        if dtype.is_floating_point or dtype.is_complex:
            made[name] = torch.randn(shape, generator=generator).to(dtype)
        else:
            made[name] = torch.randint(-(1 << 60), 1 << 60, shape, generator=generator, dtype=dtype)
    return made


def distributed(layout: str, world_size: int, seed: int = 7) -> dict[str, torch.Tensor]:
    """Shard the tensors over all ranks; every rank must call this."""
    tensors = full_tensors(seed)
    if layout == "fsdp_tp":
        return _fsdp_over_tp(tensors, world_size)
    mesh = _mesh(layout, world_size)
    return {name: distribute_tensor(tensor, mesh, _placements(layout, tensor)) for name, tensor in tensors.items()}


def _mesh(layout: str, world_size: int) -> DeviceMesh:
    if layout in ("shard0", "shard1", "replicate"):
        return mesh_of(world_size)
    outer = 2 if world_size > 1 else 1
    return mesh_of(outer, world_size // outer)


def _placements(layout: str, tensor: torch.Tensor) -> list[Placement]:
    if not tensor.dim():
        return [Replicate()] * (1 if layout in ("shard0", "shard1", "replicate") else 2)
    second = Shard(1) if tensor.dim() > 1 else Replicate()
    return {
        "shard0": [Shard(0)],
        "shard1": [second],
        "replicate": [Replicate()],
        "hsdp": [Replicate(), Shard(0)],
        "grid": [Shard(0), second],
    }[layout]


def _fsdp_over_tp(tensors: dict[str, torch.Tensor], world_size: int) -> dict[str, Any]:
    """Shard parameters by tensor parallelism and then, along the same dimension, by FSDP2, where both are possible."""
    tp = 2 if world_size > 1 else 1
    mesh = mesh_of(world_size // tp, tp, names=("dp", "tp"))
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.dim():
            local = distribute_tensor(tensor, mesh["tp"], [Shard(0)])
            setattr(module, name, torch.nn.Parameter(local, requires_grad=tensor.is_floating_point()))
    fully_shard(module, mesh=mesh["dp"])
    state = module.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    return dict(state)
