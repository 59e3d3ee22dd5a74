"""Memory extent of tensors, and detection of those without memory: a storage may be freed under its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from aiockpt.core.strides import reach

# The address of a strided tensor's memory. Not `data_ptr`: it would copy memory that is shared until it is written.
address_of: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
Range = tuple[int, int]
"""The addresses of the first byte, and behind the last."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PACKED = {dtype: count for name, count in (("quint4x2", 2), ("quint2x4", 4)) if (dtype := getattr(torch, name, None))}
"""Elements per byte of packed dtypes."""


def freed_message(name: str, tensor: torch.Tensor) -> str:
    """Return the text of the error for a tensor without memory to copy."""
    if any(map(is_null, strided_parts(tensor))):
        return (
            f"{name} has no memory to copy: save a clone() of it if it is a zero tensor of torch's, or materialise it"
        )
    return (
        f"the memory of {name} was freed: its storage is smaller than the tensor. Save a state dict whose tensors "
        "are materialised"
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of any layout and class, or a part of it, reaches beyond its storage or has no memory."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.is_contiguous():
        nbytes = tensor.nbytes
        if not nbytes:
            return False
        if tensor.untyped_storage().nbytes() - nbytes >= tensor.storage_offset() * tensor.itemsize:
            return is_null(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # else each attribute below could call code of the tensor's class
        return any(map(_is_short, strided_parts(tensor)))


def plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, without applying lazy conjugation and negation."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def strided_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the strided tensors that hold the values of a tensor of any layout, or of a wrapper subclass."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names for part in strided_parts(getattr(tensor, name))]
    layout = tensor.layout
    if tensor.is_nested:
        parts = [tensor.values()] if layout is torch.strided else []
    elif layout is torch.strided:
        parts = [tensor]
    elif layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = []
    return [part for part in parts if part.numel()]


def reach_bytes(tensor: torch.Tensor) -> int:
    """Return the end of a strided tensor in its storage, in bytes."""
    numel = tensor.numel()
    if not numel:
        return 0
    end = tensor.storage_offset() + numel
    if not tensor.is_contiguous():
        end += reach(tensor.shape, tensor.stride()) - numel
    return -(-end // _PACKED[tensor.dtype]) if tensor.dtype in _PACKED else int(end) * tensor.itemsize


def _is_short(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor reaches beyond its storage, or has none of the memory it claims."""
    if not torch._C._has_storage(tensor):
        return False
    return tensor.untyped_storage().nbytes() < reach_bytes(tensor) or is_null(tensor)


def is_null(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of at least one element has a storage without memory, as `torch._efficientzerotensor`."""
    if type(tensor) in _PLAIN and tensor.is_cpu:  # wrappers have no address, and not each device has addresses
        return not address_of(tensor) and tensor.untyped_storage().nbytes() > 0
    return tensor._is_zerotensor()


def extent_of(tensor: torch.Tensor) -> Range:
    """Return the memory from the first to the last element of a plain tensor; nothing if it has none of its own."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return begin, tensor.untyped_storage().data_ptr() + reach_bytes(tensor)


def shared_among(extents: Sequence[Range], others: Sequence[Range] = ()) -> list[int]:
    """Return the numbers of the extents that have bytes in common with another one, or with one of the others."""
    ranges = np.fromiter(chain.from_iterable(chain(extents, others)), np.uint64).reshape(-1, 2)
    kept = np.flatnonzero(ranges[:, 1] > ranges[:, 0])
    order = kept[np.argsort(ranges[kept, 0], kind="stable")]
    begins, ends = ranges[order].T
    reached = np.maximum.accumulate(ends)  # how far those so far reach
    overlaps = np.zeros(len(order), bool)
    overlaps[1:] = begins[1:] < reached[:-1]
    overlaps[:-1] |= begins[1:] < ends[:-1]
    return [int(number) for number in order[overlaps & (order < len(extents))]]


def overlapping(extents: Sequence[Range], others: Sequence[Range]) -> list[bool]:
    """Return of each extent whether it has bytes in common with one of the others."""
    filled = [(begin, end) for begin, end in others if end > begin]
    one, other = (np.array(each, np.uint64).reshape(-1, 2) for each in (extents, sorted(filled)))
    before = np.searchsorted(other[:, 0], one[:, 1])  # how many of the others begin before the end of the extent
    ends = np.append(np.uint64(0), np.maximum.accumulate(other[:, 1]))[before]
    return [bool(each) for each in (ends > one[:, 0]) & (one[:, 1] > one[:, 0])]
