"""Distributed tensors: the parts of a whole tensor that a rank has.

DTensor placements are applied from the first mesh dimension to the last: ``Shard`` cuts a dimension as
`torch.chunk` does; ``_StridedShard``, which FSDP2 uses over tensor parallelism, cuts each of ``split_factor`` pieces
so and takes one part of every piece. The parts of a ShardedTensor are in its own metadata. A tensor that implements
DCP's protocol (``torch/distributed/_checkpointable.py``) is asked for them; one that has the attributes of a
``CheckpointableTensor`` (``torch/distributed/checkpoint/protocol.py``, since torch 2.14) says it there.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from aiockpt.planning.snapshot import Shard

_PROTOCOL = "__create_write_items__"
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_FLAT = "_is_flat_param"  # mark of an FSDP1 parameter: several flattened into one, of which each rank has a piece
_MARKS = ("global_shape", "global_offsets", _FLAT)  # each of them shows that a tensor is a part of a whole
_KINDS: dict[type, str | None] = {}
_Run = tuple[int, int]  # adjacent positions along a dimension: the first, and how many


class LocalPart(NamedTuple):
    """A part of a distributed tensor that this rank has."""

    tensor: torch.Tensor  # a view, not a copy
    shard: Shard


class ShardingError(ValueError):
    """A distributed tensor can't be saved, or loaded into; the message names the key."""


def any_distributed(values: Sequence[object]) -> bool:
    """Return whether one of very many values is one rank's part of a tensor; fast."""
    kinds = set(map(type, values))
    if any(_kind(kind) is not None for kind in kinds):
        return True
    if not all(issubclass(kind, torch.Tensor) for kind in kinds):
        values = [value for value in values if isinstance(value, torch.Tensor)]
    return any([True for value in values if hasattr(value, mark)] for mark in _MARKS)


def is_distributed(value: object) -> bool:
    """Return whether a value is one rank's part of a tensor."""
    return _kind_of(value) is not None


def whole_shape(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of the whole of a distributed tensor; None if this rank has no part that records it."""
    kind = _kind_of(value)
    if kind == "CheckpointableTensor":
        return tuple(value.global_shape)
    if kind == "_Checkpointable":
        return next((tuple(item.tensor_data.size) for item in _write_items("", value)), None)
    return tuple(value.metadata().size if kind == "ShardedTensor" else value.shape)


def whole_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a distributed tensor, also on a rank that has no part of it."""
    sharded = _kind(type(value)) == "ShardedTensor"  # which warns when it is asked for it like other tensors
    dtype: torch.dtype = value.metadata().tensor_properties.dtype if sharded else value.dtype
    return dtype


def counted(value: Any, parts: Iterable[LocalPart]) -> list[torch.Tensor]:
    """Return the tensors whose version counters record changes of these parts: a DTensor has one of its own."""
    own = [value] if _kind(type(value)) == "DTensor" else []
    return own + [part.tensor for part in parts]


def local_parts(name: str, value: Any) -> list[LocalPart]:
    """Return the parts of a distributed tensor that this rank has. Waits only for a pending collective.

    There are none if this rank is not in the tensor's mesh or its part is empty, and several if its pieces are not
    adjacent.
    """
    kind = _kind_of(value)
    if kind == "DTensor":
        return _dtensor_parts(name, value)
    if kind == "ShardedTensor":
        shape = tuple(value.metadata().size)
        parts = [(each.tensor.detach(), tuple(each.metadata.shard_offsets)) for each in value.local_shards()]
    elif kind == "CheckpointableTensor":
        shape, parts = _described_parts(name, value)
    elif kind == "_Checkpointable" and isinstance(value, torch.Tensor):
        shape, parts = _asked_parts(name, value)
    else:
        raise ShardingError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which stands for a part of a tensor "
            "in an unknown way; put a DTensor, or the whole tensor, in its place"
        )
    return [LocalPart(tensor, Shard(shape, offsets)) for tensor, offsets in parts if tensor.numel() or not all(shape)]


def _kind(kind: type) -> str | None:
    """Return which distributed tensor a class is, or derives from; None for any other class."""
    if kind not in _KINDS:
        # By name, because importing the classes takes long, and a program without distributed tensors has not done so.
        names = [each.__name__ for each in kind.__mro__ if each.__module__.startswith("torch.distributed")]
        found = next((name for name in names if name in ("DTensor", "ShardedTensor")), None)
        if found is None and hasattr(kind, _PROTOCOL):
            found = "_Checkpointable"
        elif found is None and ((names and issubclass(kind, torch.Tensor)) or _has_fields(kind)):
            found = "unknown"
        _KINDS[kind] = found
    return _KINDS[kind]


def _has_fields(kind: type) -> bool:
    """Return whether a class of other values has fields that identify a part of a tensor, as Megatron's does."""
    return not issubclass(kind, torch.Tensor) and "global_shape" in getattr(kind, "__dataclass_fields__", ())


def _kind_of(value: Any) -> str | None:
    kind = _kind(type(value))
    if kind is None and isinstance(value, torch.Tensor) and any(hasattr(value, mark) for mark in _MARKS):
        return "unknown" if hasattr(value, _FLAT) else "CheckpointableTensor"
    if kind == "DTensor" and hasattr(value._local_tensor, _PROTOCOL):
        return "_Checkpointable"
    return kind


# --- tensors that describe their parts --------------------------------------------------------------

# Shape of the whole; for each part its values and offsets.
_Parts = tuple[tuple[int, ...], list[tuple[torch.Tensor, tuple[int, ...]]]]


def _described_parts(name: str, value: Any) -> _Parts:
    """Return the parts that a CheckpointableTensor's attributes describe, as views."""
    try:
        # Such a subclass may wrap another tensor: then its own memory has no values.
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError("its class does not store its values directly")
        shape = _sizes(value.global_shape)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            local = value.detach().as_subclass(torch.Tensor)
        parts = [
            (_region(local, _sizes(inner), _sizes(sizes)), _within(shape, _sizes(begin), _sizes(sizes)))
            for begin, inner, sizes in zip(value.global_offsets, value.local_offsets, value.local_sizes, strict=True)
        ]
    except (AttributeError, TypeError, ValueError) as exc:
        raise ShardingError(
            f"{name} is a tensor of {tuple(value.shape)} with some of the attributes {', '.join(_ATTRIBUTES)}, which "
            f"do not say which part of a tensor it is: {exc}. Correct them, or remove them if it is a whole one"
        ) from None
    return shape, parts


def _sizes(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _within(shape: Sequence[int], offsets: tuple[int, ...], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the offsets of a region; raise ValueError if it is not within a shape."""
    if not all(at >= 0 and n >= 0 and at + n <= total for at, n, total in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"{tuple(sizes)} at {offsets} reaches out of {tuple(shape)}")
    return offsets


def _region(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: Sequence[int]) -> torch.Tensor:
    _within(tensor.shape, offsets, sizes)
    return tensor[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]


def _asked_parts(name: str, value: Any) -> _Parts:
    """Return the parts that a tensor lists through DCP's protocol."""
    shape: tuple[int, ...] = ()
    parts = []
    for item in _write_items(name, value):
        with torch.no_grad():
            tensor = value.__get_tensor_shard__(item.index)
        shape, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != tuple(chunk.sizes):
            raise ShardingError(
                f"{name} is a {type(value).__name__} whose part at {tuple(chunk.offsets)} should have the sizes "
                f"{tuple(chunk.sizes)}, but is a {type(tensor).__name__} of {tuple(getattr(tensor, 'shape', ()))}"
            )
        parts.append((tensor.detach(), tuple(chunk.offsets)))
    return shape, parts


def _write_items(name: str, value: Any) -> list[Any]:
    try:
        items = list(value.__create_write_items__(name, value))
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:  # whatever its class does
        raise ShardingError(f"{name} is a {type(value).__name__} that can't list its parts: {exc}") from exc
    if any(item.tensor_data is None for item in items):
        raise ShardingError(f"{name} is a {type(value).__name__} that stores bytes, not a tensor; put the bytes there")
    return items


# --- DTensors -------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """A cut of a tensor, made by one dimension of the device mesh."""

    dim: int  # of the tensor
    split: int  # how many pieces of it each rank has a part of; 1 for a plain ``Shard``
    pieces: int  # how many parts they are cut into
    number: int  # of this rank's part


class _LocalBox(NamedTuple):
    """A hyper-rectangle of a tensor that this rank has."""

    region: tuple[slice, ...] | None  # in the local tensor; None: all of it
    offsets: tuple[int, ...]  # in the whole


def _dtensor_parts(name: str, value: Any) -> list[LocalPart]:
    cuts = _cuts(name, value)
    if cuts is None:
        return []
    with torch.no_grad():
        local = value.to_local()
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(local, functional.AsyncCollectiveTensor):
        local = local.wait()
    local = local.detach()
    shape = tuple(value.shape)
    if not local.numel() and 0 not in shape:
        return []
    pieces = _local_boxes(shape, cuts, tuple(local.shape))
    if pieces is None:
        raise ShardingError(
            f"{name} is a DTensor of {shape} whose local part is {tuple(local.shape)}, which does not match its "
            f"placements {value.placements} on a mesh of {tuple(value.device_mesh.shape)}; so its position in the "
            "tensor is unknown"
        )
    return [LocalPart(local if region is None else local[region], Shard(shape, offsets)) for region, offsets in pieces]


def _cuts(name: str, value: Any) -> tuple[_Cut, ...] | None:
    """Return the cuts that a DTensor's placements make; None if this rank is not in its mesh."""
    mesh = value.device_mesh
    place = mesh.get_coordinate()
    sizes = mesh.shape
    cuts: list[_Cut] = []
    for mesh_dim, placement in enumerate(value.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if placement.is_partial():
            raise ShardingError(
                f"{name} is a DTensor of partial values ({placement}), which are no tensor until they are reduced; "
                "call redistribute() with Shard or Replicate placements first"
            )
        if kind not in ("Shard", "_StridedShard"):
            raise ShardingError(
                f"{name} is a DTensor with the placement {placement}, which is unknown; call redistribute() "
                "with Shard or Replicate placements first"
            )
        if place is not None:
            split = placement.split_factor if kind == "_StridedShard" else 1
            cuts.append(_Cut(placement.dim % value.ndim, split, sizes[mesh_dim], place[mesh_dim]))
    return None if place is None else tuple(cuts)


@lru_cache(maxsize=65_536)
def _local_boxes(
    shape: tuple[int, ...], cuts: tuple[_Cut, ...], local: tuple[int, ...]
) -> tuple[_LocalBox, ...] | None:
    """Return the pieces of a tensor that make up a local tensor; None if it can't be of this shape."""
    along = _runs(shape, cuts)
    if _run_sizes(along) != local:
        # FSDP2 cuts the result of tensor parallelism, which for uneven sizes differs from the placements.
        along = _runs(shape, [cut._replace(split=1) for cut in reversed(cuts)])
        if _run_sizes(along) != local or all(cut.split == 1 for cut in cuts):
            return None
    if all(len(runs) == 1 for runs in along):
        return (_LocalBox(None, tuple(runs[0][0] for runs in along)),)
    placed = [zip(_local_slices(runs), runs, strict=True) for runs in along]
    return tuple(
        _LocalBox(tuple(part for part, _ in chosen), tuple(run[0] for _, run in chosen))
        for chosen in itertools.product(*placed)
    )


def _runs(shape: Sequence[int], cuts: Iterable[_Cut]) -> list[list[_Run]]:
    """Return for each dimension the positions left after cutting, in stored order."""
    along: list[list[_Run]] = [[(0, size)] for size in shape]
    for dim, split, pieces, number in cuts:
        parts = [_cut(_cut(along[dim], split, i), pieces, number) for i in range(split)]
        along[dim] = _joined(run for part in parts for run in part)
    return along


def _cut(runs: Sequence[_Run], pieces: int, number: int) -> list[_Run]:
    """Return one of the pieces that `torch.chunk` cuts."""
    total = sum(count for _, count in runs)
    most = -(-total // pieces)
    begin, end = number * most, (number + 1) * most
    found: list[_Run] = []
    at = 0
    for start, count in runs:
        first, last = max(begin - at, 0), min(end - at, count)
        if first < last:
            found.append((start + first, last - first))
        at += count
    return found


def _joined(runs: Iterable[_Run]) -> list[_Run]:
    """Merge adjacent runs; return at least one, which may be empty."""
    found: list[_Run] = []
    for start, count in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((start, count))
    return found or [(0, 0)]


def _run_sizes(along: Sequence[Sequence[_Run]]) -> tuple[int, ...]:
    return tuple(sum(count for _, count in runs) for runs in along)


def _local_slices(runs: Sequence[_Run]) -> list[slice]:
    """Return where the positions of each run are in the local tensor."""
    ends = itertools.accumulate(count for _, count in runs)
    return [slice(end - count, end) for (_, count), end in zip(runs, ends, strict=True)]
