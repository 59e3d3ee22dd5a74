"""Targets whose elements share memory, so that filling one would undo another."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from aiockpt.errors import ShapeMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.format.index import TensorEntry
    from aiockpt.planning.ranges import Selection

_MOST_PLACES = 1 << 20


class Region(NamedTuple):
    """Memory that a load fills, and what with.

    Attributes:
        name: the key.
        tensor: the memory.
        wanted: what of the stored tensor goes there, for each of its dimensions; None: all.
        entry: what is stored.
    """

    name: str
    tensor: torch.Tensor
    wanted: tuple[Selection, ...] | None
    entry: TensorEntry


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, as those of an expanded tensor do; true where it takes long to tell."""
    if 0 in tensor.shape:
        return False
    dims = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for step, size in dims:
        if step <= reach:
            break
        reach += (size - 1) * step
    else:
        return False
    if tensor.numel() > _MOST_PLACES or dims[0][0] == 0:
        return True
    places = np.zeros(1, np.int64)
    for step, size in dims:
        places = np.add.outer(places, np.arange(size) * step).reshape(-1)
    return len(np.unique(places)) < len(places)


def find_twins(regions: Sequence[Region]) -> list[tuple[Region, Region]]:
    """Find what is filled twice from different bytes of the checkpoint, which must be the same values then.

    Raises:
        ShapeMismatchError: two targets share a part of their memory.
    """
    distinct: dict[object, Region] = {}
    for each in regions:
        tensor = each.tensor
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel():
            # Tied tensors that are stored once count once.
            distinct.setdefault((_form(tensor), each.wanted, tuple(c.place for c in each.entry.chunks)), each)
    found: list[tuple[Region, Region]] = []
    near: list[tuple[int, Region]] = []
    for region in sorted(distinct.values(), key=lambda each: (str(each.tensor.device), each.tensor.data_ptr())):
        begin, device = region.tensor.data_ptr(), region.tensor.device
        near = [(end, other) for end, other in near if other.tensor.device == device and end > begin]
        for _, other in near:
            # The pieces that a key has here don't overlap.
            if other.name == region.name or not _share_memory(other.tensor, region.tensor):
                continue
            if (_form(other.tensor), other.wanted) != (_form(region.tensor), region.wanted):
                raise ShapeMismatchError(
                    f"{other.name} and {region.name} share memory in the target, but are not the same there: clone one"
                )
            found.append((other, region))
        near.append((begin + _extent_bytes(region.tensor), region))
    return found


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.itemsize


class _Memory:
    """Where a tensor's memory is, for NumPy, which does not touch it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
            "version": 3,
        }


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share an element; true also where it takes long to tell."""
    try:
        return np.shares_memory(np.asarray(_Memory(one)), np.asarray(_Memory(other)), _MOST_PLACES)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
