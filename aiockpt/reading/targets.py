"""Validate the tensors that a load fills: shape, dtype, layout and memory; return the regions to fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from aiockpt.core.extent import extent_of, is_freed, is_null, reach_bytes, strided_parts
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.wording import a
from aiockpt.errors import ShapeMismatchError
from aiockpt.format.index import Entry, TensorEntry
from aiockpt.format.item.arrays import ARRAY_TYPES, torch_dtype, view_array
from aiockpt.planning.dtensor import ShardingError, counted, is_distributed, local_parts, whole_dtype, whole_shape
from aiockpt.planning.flatten import TENSOR_TYPES
from aiockpt.planning.ranges import Selection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.options import DType


_MAX_ENUMERATED = 1 << 20
"""The effort limit of exact overlap checks; beyond it a possible overlap counts as one."""


class Region(NamedTuple):
    """Memory of this process to fill, and the entry that fills it; without chunks, a live object fills it by itself."""

    name: str
    entry: TensorEntry
    tensor: torch.Tensor  # detached
    wanted: tuple[Selection, ...] | None = None  # the part of the stored tensor, per dimension; None: all


class Target(NamedTuple):
    """A tensor of the caller to fill."""

    regions: list[Region]  # this rank's part of it; empty where other ranks have all
    counted: list[torch.Tensor]  # the tensors whose version counters change


def target_of(path: str, name: str, entry: Entry, leaf: Any, dtype: DType) -> Target | None:
    """Return the regions of a leaf to fill with an entry; None if the leaf is replaced instead."""
    if is_distributed(leaf):
        return _distributed_target(path, name, entry, leaf, dtype)
    if type(leaf) in ARRAY_TYPES and isinstance(entry, TensorEntry):
        return _array_target(path, name, entry, leaf, dtype)
    check_target(path, name, entry, leaf, dtype)
    if not (isinstance(entry, TensorEntry) and isinstance(leaf, torch.Tensor)):
        return None
    # `detach` releases the GIL, and beside a busy thread may have to wait for it.
    is_plain = type(leaf) is torch.Tensor and not leaf.requires_grad
    return Target([Region(name, entry, leaf if is_plain else leaf.detach())], [leaf])


def _array_target(path: str, name: str, entry: TensorEntry, array: NDArray[Any], dtype: DType) -> Target | None:
    """Check a NumPy array; return None if no tensor can have its strides."""
    mine = torch_dtype(array.dtype)
    if mine is None:
        raise ShapeMismatchError(f"{name} is an array of {array.dtype!r} in the target but {entry.dtype} in {path}")
    if not array.flags.writeable:
        raise ShapeMismatchError(f"{name} is a read-only array in the target, which can't be filled")
    tensor = view_array(array)
    if tensor is None:
        _check_shape(path, name, entry.shape, array.shape)
        _check_dtype(path, name, entry, mine, dtype)
        return None
    check_target(path, name, entry, tensor, dtype)
    return Target([Region(name, entry, tensor)], [])


def _distributed_target(path: str, name: str, entry: Entry, leaf: Any, dtype: DType) -> Target:
    """Check a distributed tensor; only this rank's part of it is filled."""
    if not isinstance(entry, TensorEntry):
        raise ShapeMismatchError(f"{name} is a {type(leaf).__name__} in the target but an object in {path}")
    try:
        parts, shape = local_parts(name, leaf), whole_shape(leaf)
    except ShardingError as exc:
        raise ShapeMismatchError(str(exc)) from exc
    if shape is not None:
        _check_shape(path, name, entry.shape, shape)
    _check_dtype(path, name, entry, whole_dtype(leaf), dtype)
    regions = []
    for part in parts:
        sizes = tuple(part.tensor.shape)
        # An entry of the shape of the part, so that its memory is checked like any tensor's.
        form = TensorEntry(entry.dtype, sizes, entry.chunks)
        check_target(path, f"this rank's part of {name}", form, part.tensor, dtype)
        wanted = None if sizes == part.shard.shape else tuple(map(Selection, part.shard.offsets, sizes))
        regions.append(Region(name, entry, part.tensor, wanted))
    return Target(regions, counted(leaf, parts))


def relocated(tensor: torch.Tensor, move: Callable[[torch.UntypedStorage, str], Any]) -> torch.Tensor:
    """Move a tensor with a map_location function, as ``torch.load`` does."""
    storage = move(tensor.untyped_storage(), "cpu")
    if storage is None:
        return tensor
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(f"map_location gave a {type(storage).__name__}; it must give a torch.UntypedStorage or None")
    fresh = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def check_target(path: str, name: str, entry: Entry, leaf: Any, dtype: DType) -> None:
    """Raise ShapeMismatchError if an entry, cast to ``dtype``, does not fit a leaf of the target."""
    if _fits_plainly(entry, leaf, dtype) or not isinstance(leaf, torch.Tensor):
        return
    if not isinstance(entry, TensorEntry):
        if type(leaf) in TENSOR_TYPES and leaf.layout is torch.strided and not leaf.is_quantized:
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
    if is_encoding(leaf):
        raise ShapeMismatchError(
            f"{name} is {a(type(leaf).__name__)} in the target, which encodes its values in its own way: put "
            "the module or optimizer into the target, instead of its state dict"
        )
    _check_shape(path, name, entry.shape, tuple(leaf.shape))
    check_memory(name, leaf)
    _check_dtype(path, name, entry, leaf.dtype, dtype)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeMismatchError if the storage of a tensor was freed, as FSDP does between steps."""
    if is_freed(tensor):
        if any(map(is_null, strided_parts(tensor))):
            raise ShapeMismatchError(f"{name} in the target has no memory: clone() it, or materialise it first")
        raise ShapeMismatchError(f"the memory of {name} in the target was freed; materialise it first")


def _fits_plainly(entry: Entry, leaf: Any, dtype: DType) -> bool:
    """Return True for most tensors that fit; a fast path for 100,000 of them."""
    return (
        isinstance(entry, TensorEntry)
        and type(leaf) in TENSOR_TYPES
        and not leaf.is_nested
        and leaf.dtype is loaded_dtype(entry, dtype, leaf.dtype)
        and leaf.shape == entry.shape
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not leaf.is_meta
        and not is_freed(leaf)
    )


def is_encoding(leaf: Any) -> bool:
    """Return whether a leaf is a tensor of a class that stores its values in its own way, such as a quantized one."""
    kind = type(leaf)
    return (
        isinstance(leaf, torch.Tensor)
        and kind not in TENSOR_TYPES
        and not torch.nn.parameter.is_lazy(leaf)
        and (
            kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            or kind.dequantize is not torch.Tensor.dequantize
        )
    )


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; of a wrapper, by the protocol of torch.compile, because few of them can be cloned."""
    if type(tensor) in TENSOR_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    inner = {name: _with_own_memory(getattr(tensor, name)) for name in names}
    kind: Any = type(tensor)
    return cast("torch.Tensor", kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride()))


def encoded_copy(path: str, name: str, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with an encoding of its own, with other values; raise if it does not take them."""
    try:
        with torch.no_grad():
            return _with_own_memory(leaf.detach()).copy_(values)
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:
        raise ShapeMismatchError(
            f"{name} is {a(type(leaf).__name__)} in the target, which does not take the values that {path} has: "
            f"{type(exc).__name__}: {exc}. Nothing was changed. Load into the model before it is converted, and "
            "convert it then"
        ) from exc


def loaded_dtype(entry: TensorEntry, dtype: DType, wanted: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype that a tensor is loaded as; ``wanted`` is that of the tensor to fill, if there is one.

    Only floating-point tensors are cast, as in ``nn.Module.to``. A tensor without dimensions counts or steers, such as
    a number of steps, a learning rate or a decay, unless a parameter of the target has the dtype to cast to.
    """
    stored = entry.dtype
    if dtype is None or not stored.is_floating_point:
        return stored
    if dtype == "target":
        return wanted if wanted is not None and wanted.is_floating_point else stored
    return dtype if entry.shape or wanted is dtype else stored


def _check_shape(path: str, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if wanted != stored:
        raise ShapeMismatchError(
            f"{name} has the shape {wanted} in the target but {stored} in {path}. Make the target as it was saved, or "
            "load the rest by keys="
        )


def _check_dtype(path: str, name: str, entry: TensorEntry, wanted: torch.dtype, dtype: DType) -> None:
    loaded = loaded_dtype(entry, dtype, wanted)
    if wanted == loaded:
        return
    became = "" if loaded is entry.dtype else f", loaded as {loaded}"
    can_cast = entry.dtype.is_floating_point and wanted.is_floating_point
    advice = '; pass dtype="target" to cast each tensor to the dtype that it has in the target' if can_cast else ""
    raise ShapeMismatchError(f"{name} is {wanted} in the target but {entry.dtype} in {path}{became}{advice}")


# --- targets that share memory --------------------------------------------------------------------------


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, as in an expanded tensor; True if that would take long to decide."""
    if tensor.is_contiguous():
        return False
    dims = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for step, size in dims:
        if step <= reach:
            break
        reach += (size - 1) * step
    else:
        return False
    if tensor.numel() > _MAX_ENUMERATED or dims[0][0] == 0:
        return True
    offsets = np.zeros(1, np.int64)
    for step, size in dims:
        offsets = np.add.outer(offsets, np.arange(size) * step).reshape(-1)
    offsets.sort()
    return bool((offsets[1:] == offsets[:-1]).any())


def place_in_memory(leaf: Any) -> tuple[object, ...] | None:
    """Return a key that is equal for tied tensors, also for empty and distributed ones; None for other values."""
    whole: tuple[object, ...] = ()
    if is_distributed(leaf) and hasattr(leaf, "placements"):
        whole, leaf = (leaf.device_mesh, leaf.placements, leaf.shape), leaf._local_tensor
    if type(leaf) not in TENSOR_TYPES or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    # Not its address, which is 0 for the part of a rank without rows.
    storage = leaf.untyped_storage()._cdata
    return storage, leaf.storage_offset(), leaf.dtype, leaf.shape, leaf.stride(), whole


@gc_pause()
def find_twins(regions: Sequence[Region]) -> list[tuple[Region, Region]]:
    """Return pairs of targets that share memory, and are filled with different items."""
    if not contested((each.name, each.tensor) for each in regions):
        return []
    distinct: dict[object, Region] = {}
    for each in regions:
        tensor = each.tensor
        if type(tensor) in TENSOR_TYPES and tensor.numel():
            # Tied tensors that are stored once count once.
            places = tuple(chunk.place for chunk in each.entry.chunks) or each.name
            distinct.setdefault((_view_key(tensor), each.wanted, places), each)
    found: list[tuple[Region, Region]] = []
    near: list[tuple[int, Region]] = []
    for region in sorted(distinct.values(), key=lambda each: (str(each.tensor.device), each.tensor.data_ptr())):
        begin, device = region.tensor.data_ptr(), region.tensor.device
        near = [(end, other) for end, other in near if other.tensor.device == device and end > begin]
        others = [other for _, other in near if other.name != region.name]  # parts of one tensor don't overlap
        found += [(other, region) for other in others if _share_memory(other.tensor, region.tensor)]
        near.append((region.tensor.untyped_storage().data_ptr() + reach_bytes(region.tensor), region))
    return found


def check_same(one: Region, other: Region) -> None:
    """Raise ShapeMismatchError if two targets that share memory are not the same there."""
    if (_view_key(one.tensor), one.wanted) != (_view_key(other.tensor), other.wanted):
        raise ShapeMismatchError(
            f"{one.name} and {other.name} share memory in the target, but are not the same there: clone one"
        )


def contested(tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Return the names whose tensors may have bytes in common with a tensor of another name."""
    found, end, owner = set[str](), 0, ""  # of those so far, the one that ends last
    for (low, high), name in sorted((extent_of(tensor), name) for name, tensor in tensors):
        if low < min(end, high) and name != owner:
            found |= {name, owner}
        if high > end:
            end, owner = high, name
    return found


def _view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Memory:
    """A tensor's address and strides as NumPy's array interface; NumPy never touches the memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
            "version": 3,
        }


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share an element; True if that would take long to decide."""
    try:
        return np.shares_memory(np.asarray(_Memory(one)), np.asarray(_Memory(other)), _MAX_ENUMERATED)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
