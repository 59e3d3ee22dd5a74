"""What every stager does: put the bytes of tensors into their places of a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch

from aiockpt.core.extent import freed_message, is_freed
from aiockpt.errors import StageError
from aiockpt.planning.ranges import boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.planning.specs import TensorSpec
    from aiockpt.staging.pool import Chunk


class LayoutMismatchError(Exception):
    """A tensor is not what a kept layout assumed: the save has to be planned anew. Never leaves the engine."""


class Pending(Protocol):
    """Copies that were issued and may be still under way."""

    async def wait(self) -> None:
        """Return when the bytes are in the chunk. Cancellation waits for that too."""


class Done:
    """Copies that are complete."""

    async def wait(self) -> None:
        """Return at once."""


class Stager(ABC):
    """Copies pieces of tensors on one kind of device into chunks.

    Attributes:
        lags: whether copies may be still under way when they are issued.
    """

    lags: bool = True

    @abstractmethod
    async def issue(self, pieces: Sequence[Piece], chunk: Chunk, capture: Snapshot, layout: Layout) -> Pending:
        """Start to copy ``pieces`` into ``chunk``; those of other devices are left alone, and so is their place.

        When this returns, the copies are ordered before whatever the fence makes the caller's stream do
        next; when the result's `wait` returns, the bytes are there.

        Raises:
            LayoutMismatchError: a tensor is not what the layout assumed.
        """

    def fence(self) -> None:
        """Let this thread's current stream of the device wait for all copies issued so far. Does not block.

        May be called from any thread.
        """

    async def pin(self, chunk: Chunk) -> None:
        """Prepare a chunk for fast copies ahead of its first use, where that helps."""

    def close(self) -> None:
        """Undo what `pin` did, and let go of the device. Blocks."""


def check(leaf: int, capture: Snapshot, layout: Layout) -> tuple[torch.Tensor, TensorSpec]:
    """Give a leaf's tensor and spec, if they still agree.

    Raises:
        LayoutMismatchError: they don't.
    """
    tensor, spec = capture.tensors[leaf], layout.specs[leaf]
    if tensor is None or spec is None or not spec.describes(tensor):
        raise LayoutMismatchError(capture.structure.names[leaf])
    return tensor, spec


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's storage covers it, whatever its strides: it may have been freed since the call.

    Raises:
        StageError: it does not.
    """
    if is_freed(tensor):
        raise StageError(freed_message(name))


def restore(raw: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """See the bytes that were taken from a contiguous tensor as that tensor, lazily conjugated or negated as it is."""
    copy = raw.clone().view(tensor.dtype).view(tensor.shape)  # a copy, for the place in the arena may be odd
    copy = torch.conj(copy) if tensor.is_conj() else copy
    return torch._neg_view(copy) if tensor.is_neg() else copy


RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By size in bytes, dtypes that are copied bit by bit."""


def copy_strided(piece: Piece, tensor: torch.Tensor, spec: TensorSpec, target: torch.Tensor) -> None:
    """Copy a piece of a tensor whose memory is not laid out as it is stored.

    Args:
        piece: which bytes of the stored tensor.
        tensor: the tensor, of any strides.
        spec: its description.
        target: the piece's place in the chunk, dtype uint8.
    """
    # Seen with its dimensions in stored order, the tensor is row-major.
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
