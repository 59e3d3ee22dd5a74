"""What tensors are loaded into: does it fit, and what of it is to be filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.core.extent import is_freed
from aiockpt.errors import ShapeMismatchError
from aiockpt.format.index import TensorEntry
from aiockpt.format.item.arrays import ARRAY_TYPES, torch_dtype, view_array
from aiockpt.planning.dtensor import (
    LocalPart,
    ShardingError,
    counted,
    is_distributed,
    local_parts,
    whole_dtype,
    whole_shape,
)
from aiockpt.planning.ranges import Selection
from aiockpt.reading.overlaps import overlaps_itself

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiockpt.format.index import Entry


class TargetRegion(NamedTuple):
    """Memory to fill.

    Attributes:
        tensor: a tensor of this process, detached.
        wanted: what of the stored tensor goes there, for each of its dimensions; None: all.
    """

    tensor: torch.Tensor
    wanted: tuple[Selection, ...] | None = None


class Target(NamedTuple):
    """A tensor of the caller that is loaded into.

    Attributes:
        fillings: what of it this process has; none for a distributed tensor that others have.
        counted: the tensors whose version counters tell of the change.
    """

    fillings: list[TargetRegion]
    counted: list[torch.Tensor]


def target_of(path: str, name: str, entry: Entry, leaf: Any, dtype: torch.dtype | None) -> Target | None:
    """Check that an entry can be loaded into a leaf of a state dict; give what is to be filled.

    Args:
        path: the checkpoint, for messages.
        name: the key.
        entry: what is stored.
        leaf: what the target has there.
        dtype: what floating-point values are cast to.

    Returns:
        None if the leaf can't be filled but is to be replaced.

    Raises:
        ShapeMismatchError: it does not fit.
    """
    if is_distributed(leaf):
        return _distributed_target(path, name, entry, leaf, dtype)
    if type(leaf) in ARRAY_TYPES and isinstance(entry, TensorEntry):
        return _array_target(path, name, entry, leaf, dtype)
    check_target(path, name, entry, leaf, dtype)
    if not (isinstance(entry, TensorEntry) and isinstance(leaf, torch.Tensor)):
        return None
    return Target([TargetRegion(leaf.detach())], [leaf])


def _array_target(
    path: str, name: str, entry: TensorEntry, array: NDArray[Any], dtype: torch.dtype | None
) -> Target | None:
    """Check a NumPy array; None for one whose elements lie so that no tensor can share them."""
    mine = torch_dtype(array.dtype)
    if mine is None:
        raise ShapeMismatchError(f"{name} is an array of {array.dtype!r} in the target but {entry.dtype} in {path}")
    if not array.flags.writeable:
        raise ShapeMismatchError(f"{name} is a read-only array in the target, which can't be filled")
    tensor = view_array(array)
    if tensor is None:
        _check_shape(path, name, entry.shape, array.shape)
        _check_dtype(path, name, entry.dtype, mine, dtype)
        return None
    check_target(path, name, entry, tensor, dtype)
    return Target([TargetRegion(tensor)], [])


def _distributed_target(path: str, name: str, entry: Entry, leaf: Any, dtype: torch.dtype | None) -> Target:
    """Check a distributed tensor, of which only this rank's part is filled."""
    if not isinstance(entry, TensorEntry):
        raise ShapeMismatchError(f"{name} is a {type(leaf).__name__} in the target but an object in {path}")
    try:
        parts, shape = local_parts(name, leaf), whole_shape(leaf)
    except ShardingError as exc:
        raise ShapeMismatchError(str(exc)) from exc
    if shape is not None:
        _check_shape(path, name, entry.shape, shape)
    _check_dtype(path, name, entry.dtype, whole_dtype(leaf), dtype)
    for part in parts:
        # The sizes are those of the part: a rank's memory is checked as any tensor's is.
        form = TensorEntry(entry.dtype, tuple(part.tensor.shape), entry.chunks)
        check_target(path, f"this rank's part of {name}", form, part.tensor, dtype)
    return Target([TargetRegion(part.tensor, _wanted(part)) for part in parts], counted(leaf, parts))


def _wanted(part: LocalPart) -> tuple[Selection, ...] | None:
    sizes = part.tensor.shape
    if sizes == part.shard.shape:
        return None
    return tuple(map(Selection, part.shard.offsets, sizes))


def relocated(tensor: torch.Tensor, move: Callable[[torch.UntypedStorage, str], Any]) -> torch.Tensor:
    """Move a tensor as ``torch.load`` does with a function for its map_location."""
    storage = move(tensor.untyped_storage(), "cpu")
    if storage is None:
        return tensor
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(f"map_location gave a {type(storage).__name__}; it must give a torch.UntypedStorage or None")
    fresh = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def check_target(path: str, name: str, entry: Entry, leaf: Any, dtype: torch.dtype | None) -> None:
    """Check that an entry can be loaded into a leaf of the target.

    Args:
        path: the checkpoint, for messages.
        name: the key.
        entry: what is stored.
        leaf: what the target has there.
        dtype: what floating-point values are cast to.

    Raises:
        ShapeMismatchError: it does not fit.
    """
    if _fits_plainly(entry, leaf, dtype) or not isinstance(leaf, torch.Tensor):
        return
    if not isinstance(entry, TensorEntry):
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and not leaf.is_quantized:
            raise ShapeMismatchError(f"{name} is a tensor in the target but an object in {path}")
        return
    if torch.nn.parameter.is_lazy(leaf):
        raise ShapeMismatchError(f"{name} is not initialised in the target: run a batch through the lazy module first")
    if leaf.is_nested or type(leaf).__module__.startswith("torch._subclasses"):
        kind = "nested tensor" if leaf.is_nested else type(leaf).__name__
        raise ShapeMismatchError(f"{name} is a {kind} in the target, which can't be filled")
    if type(leaf).__module__.startswith("torch.distributed"):
        raise ShapeMismatchError(
            f"{name} is a {type(leaf).__name__} in the target, which can't be filled: wait for the tensor it stands for"
        )
    if leaf.layout is not torch.strided:
        raise ShapeMismatchError(f"{name} has the layout {leaf.layout} in the target but is strided in {path}")
    if leaf.is_meta:
        raise ShapeMismatchError(f"{name} is on the meta device in the target; give it memory first (to_empty)")
    if overlaps_itself(leaf):
        raise ShapeMismatchError(f"{name} overlaps itself in the target: its elements share memory; clone it")
    _check_shape(path, name, entry.shape, tuple(leaf.shape))
    check_memory(name, leaf)
    _check_dtype(path, name, entry.dtype, leaf.dtype, dtype)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that there is memory to fill.

    Raises:
        ShapeMismatchError: the tensor reaches out of its storage.
    """
    if is_freed(tensor):
        raise ShapeMismatchError(f"the memory of {name} in the target was freed; materialise it first")


def _fits_plainly(entry: Entry, leaf: Any, dtype: torch.dtype | None) -> bool:
    """Tell, in a short time, of most tensors that they fit."""
    return (
        isinstance(entry, TensorEntry)
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and not leaf.is_nested
        and leaf.dtype is cast(entry.dtype, dtype)
        and leaf.shape == entry.shape
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not leaf.is_meta
        and not is_freed(leaf)
    )


def cast(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Give the dtype that a stored dtype is loaded as: floating-point ones are cast, as ``nn.Module.to`` does."""
    return dtype if dtype is not None and stored.is_floating_point else stored


def _check_shape(path: str, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if wanted != stored:
        raise ShapeMismatchError(f"{name} has the shape {wanted} in the target but {stored} in {path}")


def _check_dtype(path: str, name: str, stored: torch.dtype, wanted: torch.dtype, dtype: torch.dtype | None) -> None:
    loaded = cast(stored, dtype)
    if wanted == loaded:
        return
    became = "" if loaded is stored else f", loaded as {loaded}"
    advice = f"; pass dtype={wanted} to cast" if stored.is_floating_point and wanted.is_floating_point else ""
    raise ShapeMismatchError(f"{name} is {wanted} in the target but {stored} in {path}{became}{advice}")
