"""What is to be read: objects, and parts of stored tensors, each with where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.planning.ranges import Selection, overlap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from enum import Enum

    from aiockpt.errors import LoadError
    from aiockpt.format.index import ChunkEntry, ItemRange, TensorEntry, TensorItem


@dataclass(eq=False, slots=True)
class ObjectRead:
    """An object to read.

    Attributes:
        name: its key.
        place: where its bytes are.
        value: what was read.
        member_of: the Enum class of the member whose place it takes.
    """

    name: str
    place: ItemRange
    value: Any = None
    member_of: type[Enum] | None = None


@dataclass(eq=False, slots=True)
class TensorRead:
    """A part of a tensor to read, from one stored chunk of it.

    Attributes:
        name: the key.
        dtype: the dtype that it is stored in.
        chunk: the stored chunk.
        selections: for each dimension, what is wanted of the chunk; None: all of it.
        target: what it goes to: a tensor of the shape of the selections, of any device, dtype and strides.
            None: memory of its own, which is made for it.
        fills: the target is the caller's, who is to be told what has come to it.
        item: what stands in the item, as soon as it is known.
        shared: without a target: several tensors are to see the same memory.
        memory: without a target: the payload, dtype uint8.
        made: without a target: the tensor itself, where it was small and nobody else sees its memory.
        pending: how many steps are left.
        begun: whether something has come to the target.
    """

    name: str
    dtype: torch.dtype
    chunk: ChunkEntry
    selections: tuple[Selection, ...] | None = None
    target: torch.Tensor | None = None
    fills: bool = False
    item: TensorItem | None = None
    shared: bool = False
    memory: torch.Tensor | None = None
    made: torch.Tensor | None = None
    pending: int = 1
    begun: bool = False


def view_of(memory: torch.Tensor, item: TensorItem, *, lazily: bool) -> torch.Tensor:
    """See a payload as the tensor that it stores.

    Args:
        memory: the payload, dtype uint8.
        item: what it stores.
        lazily: leave the memory as it is, for others see it as well, where values are stored conjugated or negated.
    """
    if not lazily:  # of the memory, for elements of the tensor may share theirs
        values = _values(memory, item)
        if item.conj:
            values.conj_physical_()
        if item.neg:
            values.neg_()
        return values.as_strided(item.shape, item.stride, item.storage_offset)
    tensor = seen_as(memory, item)
    tensor = tensor.conj() if item.conj else tensor
    return torch._neg_view(tensor) if item.neg else tensor


def seen_as(memory: torch.Tensor, item: TensorItem) -> torch.Tensor:
    """See a payload, dtype uint8, as the values that it stores, conjugated and negated as they may be."""
    return _values(memory, item).as_strided(item.shape, item.stride, item.storage_offset)


def _values(memory: torch.Tensor, item: TensorItem) -> torch.Tensor:
    rest = len(memory) % item.dtype.itemsize
    return (memory[:-rest] if rest else memory).view(item.dtype)


def reads_of(
    name: str,
    entry: TensorEntry,
    target: torch.Tensor,
    wanted: Sequence[Selection] | None = None,
    *,
    fills: bool = False,
) -> list[TensorRead]:
    """Plan how a tensor, or a part of it, comes into a target: one read for each stored chunk that has some of it.

    Args:
        name: the key.
        entry: the tensor as it is stored.
        target: where it goes, of the shape of what is wanted.
        wanted: for each dimension of the tensor, what is wanted; None: all.
        fills: see `TensorRead`.
    """
    if 0 in target.shape:
        return []
    if wanted is None and len(entry.chunks) == 1:
        return [TensorRead(name, entry.dtype, entry.chunks[0], None, target, fills)]
    chosen = [Selection(0, size) for size in entry.shape] if wanted is None else wanted
    found: list[TensorRead] = []
    for chunk in entry.chunks:
        common = overlap(chunk.offsets, chunk.sizes, chosen)
        if common is not None:
            whole = all(s == Selection(0, n) for s, n in zip(common.chunk, chunk.sizes, strict=True))
            region = target[common.target] if target.dim() else target
            found.append(TensorRead(name, entry.dtype, chunk, None if whole else common.chunk, region, fills))
    return found


def annotate_partial_load(error: LoadError, reads: Sequence[TensorRead]) -> None:
    """Add to an error which tensors of the caller's hold what by now."""
    begun: dict[str, bool] = {}
    for read in reads:
        if read.fills:
            begun[read.name] = begun.get(read.name, False) or read.begun
    unfinished = {read.name for read in reads if read.fills and read.pending}
    error.placed = tuple(name for name in begun if name not in unfinished)
    error.partly_placed = tuple(name for name in begun if name in unfinished and begun[name])
    told = [
        f"{len(names)} {how} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for names, how in ((error.placed, "had been filled"), (error.partly_placed, "hold a part of it"))
        if names
    ]
    said = "; ".join(told) if told else "no tensor was changed"
    error.args = (f"{error.args[0]} Of the {len(begun)} tensors to fill, {said}.", *error.args[1:])
