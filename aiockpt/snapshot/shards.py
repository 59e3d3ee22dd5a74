"""Replaces distributed tensors by this rank's shards, and encoded tensors by plain ones."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.errors import SaveError
from aiockpt.format.boxes import overlapping
from aiockpt.planning.dtensor import (
    LocalPart,
    ShardingError,
    counted,
    is_distributed,
    local_parts,
    replica_of,
    whole_shape,
)
from aiockpt.planning.snapshot import Shard

if TYPE_CHECKING:
    from aiockpt.planning.flatten import FlatState

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that hold their values directly; subclasses may not."""


def take_local_parts(
    flat: FlatState, shards: dict[int, Shard], *, together: bool, once: bool
) -> dict[int, torch.Tensor]:
    """Replace distributed tensors in ``flat`` by this rank's parts, and encoded tensors by dense ones.

    ``shards`` gets the position of each part that is not the whole of its tensor. ``together``: other ranks save their
    parts as well. ``once``: see `aiockpt.snapshot.capture.capture_state`. Return the DTensor of each leaf that is a
    part of one, which has a version counter of its own.
    """
    names, paths, leaves = flat.names, flat.paths, flat.leaves
    flat.names, flat.paths, flat.leaves = [], [], []
    wholes: dict[int, torch.Tensor] = {}
    moved: list[int] = []
    for name, path, value in zip(names, paths, leaves, strict=True):
        moved.append(len(flat.leaves))
        taken = [dense_form(name, value)]
        if is_distributed(value):
            parts = [] if once and not _counts(name, value) else _parts_of(name, value, together=together)
            own = counted(value, ())
            wholes |= {len(flat.leaves) + number: own[0] for number in range(len(parts)) if own}
            taken = [_taken(part, len(flat.leaves) + number, shards) for number, part in enumerate(parts)]
        flat.names += [name] * len(taken)
        flat.paths += [path] * len(taken)
        flat.leaves += taken
    for record in flat.containers:
        at = record["at"]
        if isinstance(at, int):
            record["at"] = moved[at] if at < len(moved) else len(flat.leaves)
    return wholes


def _counts(name: str, value: Any) -> bool:
    """Return whether this rank saves its copy of a part; names are hashed to spread the work over the copies."""
    index, count = replica_of(value)
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % count == index


def _taken(part: LocalPart, leaf: int, shards: dict[int, Shard]) -> torch.Tensor:
    """Record where a part belongs, unless it is the whole."""
    if 0 in part.shard.shape:
        return part.tensor.new_empty(part.shard.shape)  # an empty tensor has no shards
    if tuple(part.tensor.shape) != part.shard.shape:
        shards[leaf] = part.shard
    return part.tensor


def _parts_of(name: str, value: Any, *, together: bool) -> list[LocalPart]:
    try:
        parts, shape = local_parts(name, value), whole_shape(value)
    except ShardingError as exc:
        raise SaveError(str(exc)) from None
    parts = [part._replace(tensor=dense_form(name, part.tensor)) for part in parts]
    for part in parts:
        if type(part.tensor) not in PLAIN_TYPES:
            raise SaveError(
                f"{name} is a {type(value).__name__} whose part here is a {type(part.tensor).__name__}, which can't be "
                "saved as a part of a tensor; put a plain tensor in its place"
            )
    if together or [tuple(part.tensor.shape) for part in parts] == [shape]:
        return parts
    boxes = [(part.shard.offsets, tuple(part.tensor.shape)) for part in parts]
    if shape is None or sum(part.tensor.numel() for part in parts) != math.prod(shape) or overlapping(boxes):
        raise SaveError(
            f"{name} is a {type(value).__name__}, of which this process has a part only, and it saves alone: make the "
            "checkpointer with the process group of all ranks that have the others, or gather it with full_tensor()"
        )
    whole = parts[0].tensor.new_empty(shape)
    for part, (offsets, sizes) in zip(parts, boxes, strict=True):
        whole[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))] = part.tensor
    return [LocalPart(whole, Shard(shape, (0,) * len(shape)))]


def is_encoded(value: Any) -> bool:
    """Return whether a tensor stores its values in an encoding of its own, and can dequantize them."""
    kind = type(value)
    return (
        isinstance(value, torch.Tensor)
        and kind not in PLAIN_TYPES
        and kind.dequantize is not torch.Tensor.dequantize
        and not is_distributed(value)
    )


def dense_form(name: str, value: Any) -> Any:
    """Return a plain tensor of the values of an encoded one."""
    if not is_encoded(value):
        return value
    with torch.no_grad():
        dense = value.dequantize()
    if type(dense) not in PLAIN_TYPES:
        raise SaveError(f"{name} is a {type(value).__name__} whose dequantize() gave a {type(dense).__name__}")
    return dense.detach()
