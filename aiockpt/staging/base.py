"""Stagers copy the bytes of tensors into chunks, at the offsets that a layout assigns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from aiockpt.core.extent import freed_message, is_freed
from aiockpt.errors import StageError
from aiockpt.planning.ranges import boxes

if TYPE_CHECKING:
    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.planning.specs import TensorSpec
    from aiockpt.staging.pool import Chunk


class LayoutMismatchError(Exception):
    """A tensor differs from a reused layout: the save must be planned again. Never raised to a caller."""


class Fill(NamedTuple):
    """A chunk, and the pieces of tensors to copy into it."""

    chunk: Chunk
    pieces: Sequence[Piece]


class Pending(Protocol):
    """Copies that were issued and may not be complete."""

    async def wait(self) -> None:
        """Wait until the bytes are in the chunk; if cancelled, wait for that first."""


class Done:
    """Copies that are complete."""

    async def wait(self) -> None:
        """Return at once."""


class Stager(ABC):
    """Copies pieces of tensors on one kind of device into chunks."""

    is_async: bool = True  # `issue` may return before its copies are complete

    @abstractmethod
    async def issue(self, fills: Sequence[Fill], snapshot: Snapshot, layout: Layout) -> Sequence[Pending]:
        """Start to fill chunks. Pieces of other devices, and their bytes, are not touched.

        Once this returns, `fence` orders the caller's stream behind the copies; once the `wait` of a chunk's result
        returns, the bytes are in that chunk. Raises `LayoutMismatchError` if a tensor differs from the layout.
        """

    def fence(self) -> None:
        """Make this thread's current stream of the device wait for all copies issued so far. Does not block.

        Thread-safe.
        """

    def settle(self, chunk: Chunk) -> None:
        """Ask for memory near the device for a chunk's arena, before its pages are faulted in."""

    async def pin(self, chunk: Chunk) -> None:
        """Lock a chunk's memory ahead of its first use, if that makes copies faster."""

    def close(self) -> None:
        """Unlock the chunks, and release the device. Blocks."""


def matching(leaf: int, snapshot: Snapshot, layout: Layout) -> tuple[torch.Tensor, TensorSpec]:
    """Return a leaf's tensor and spec; raise LayoutMismatchError if they no longer agree."""
    tensor, spec = snapshot.tensors[leaf], layout.specs[leaf]
    if tensor is None or spec is None or not spec.describes(tensor):
        raise LayoutMismatchError(snapshot.structure.names[leaf])
    return tensor, spec


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise StageError if a tensor's storage does not cover it: the storage may have been freed since the call."""
    if is_freed(tensor):
        raise StageError(freed_message(name, tensor))


def restore(raw: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose raw bytes were copied at the call, with its lazy conjugation and negation."""
    copy = raw.clone().view(tensor.dtype).view(tensor.shape)  # a copy: its offset in the arena may not be aligned
    return with_lazy_bits(copy, tensor)


def with_lazy_bits(plain: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return plain memory with the lazy conjugation and negation of a tensor."""
    plain = torch.conj(plain) if tensor.is_conj() else plain
    return torch._neg_view(plain) if tensor.is_neg() else plain


RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By size in bytes, dtypes whose copies keep every bit."""


def copy_strided(piece: Piece, tensor: torch.Tensor, spec: TensorSpec, target: torch.Tensor) -> None:
    """Copy a piece of a tensor of any strides to ``target``, dtype uint8, in the order in which it is stored."""
    # With its dimensions permuted to stored order, the tensor is row-major.
    order = sorted(range(tensor.dim()), key=lambda d: (-spec.saved_stride[d], d))
    source = tensor.detach().permute(order)
    if not (tensor.is_conj() or tensor.is_neg()):
        source = source.view(RAW_DTYPES[tensor.dtype.itemsize])
    flat = target.view(source.dtype)
    size = tensor.dtype.itemsize
    at = 0
    for box in boxes(tuple(source.shape), piece.start // size, piece.stop // size):
        part = source[box.index]
        flat[at : at + box.count].view(part.shape).copy_(part, non_blocking=True)
        at += box.count
