"""Distributed tensors: which part of which whole a rank has.

The local part of a DTensor is found as DCP finds it, with `compute_local_shape_and_global_offset` of
``torch/distributed/tensor/_utils.py``; that of a ShardedTensor is in its own metadata.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.planning.source import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class LocalPart(NamedTuple):
    """A part of a distributed tensor that this rank has.

    Attributes:
        tensor: its values; a view, not a copy.
        shard: where it belongs.
    """

    tensor: torch.Tensor
    shard: Shard


class ShardingError(ValueError):
    """A distributed tensor can't be saved, or loaded into; the message names the key."""


def is_distributed(value: object) -> bool:
    """Tell whether a value is one rank's part of a tensor."""
    kind = type(value)
    return kind.__module__.startswith("torch.distributed") and kind.__name__ in ("DTensor", "ShardedTensor")


def whole_shape(value: Any) -> tuple[int, ...]:
    """Give the sizes of the whole of a distributed tensor."""
    return tuple(value.shape if type(value).__name__ == "DTensor" else value.metadata().size)


def local_parts(name: str, value: Any) -> list[LocalPart]:
    """Give the parts of a distributed tensor that this rank has. Does not block.

    Args:
        name: its key, for messages.
        value: a DTensor or a ShardedTensor.

    Returns:
        The parts; none if this rank is not in the tensor's mesh, or its part is empty.

    Raises:
        ShardingError: it holds partial sums, or is sharded in a way that no hyper-rectangle describes.
    """
    if type(value).__name__ == "ShardedTensor":
        shape = tuple(value.metadata().size)
        parts = [(each.tensor.detach(), tuple(each.metadata.shard_offsets)) for each in value.local_shards()]
        return [
            LocalPart(tensor, Shard(shape, offsets)) for tensor, offsets in parts if tensor.numel() or not all(shape)
        ]
    return _dtensor_parts(name, value)


def _dtensor_parts(name: str, value: Any) -> list[LocalPart]:
    partial = [str(placement) for placement in value.placements if placement.is_partial()]
    if partial:
        raise ShardingError(
            f"{name} is a DTensor of partial values ({', '.join(partial)}), which are no tensor until they are "
            "reduced; call redistribute() with Shard or Replicate placements first"
        )
    shape = tuple(value.shape)
    place = _place(shape, value.device_mesh, tuple(value.placements))
    if place is None:
        return []
    sizes, offsets = place
    local = value.detach().to_local()
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(local, functional.AsyncCollectiveTensor):
        local = local.wait()
    if tuple(local.shape) != sizes:
        raise ShardingError(
            f"{name} is a DTensor of {shape} whose local part is {tuple(local.shape)}, not {sizes} as its placements "
            f"{value.placements} say; it can't be told which part of the tensor that is"
        )
    if not local.numel() and 0 not in shape:
        return []
    return [LocalPart(local, Shard(shape, offsets))]


@lru_cache(maxsize=65_536)
def _place(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Give sizes and offsets of this rank's part; None if it is not in the mesh."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(map(int, sizes)), tuple(map(int, offsets))
