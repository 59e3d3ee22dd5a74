"""Where to look at a tensor, to know whether it is still the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from aiockpt.errors import SaveError
from aiockpt.planning.source import freed_message
from aiockpt.staging.base import RAW_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

LINE_BYTES = 64
"""What is seen at one place: memory comes in such lines, so that fewer bytes would take as long."""
DISTANCE_BYTES = 64 << 10
"""How far the places of a tensor are apart at most ..."""
LEAST_PLACES = 8
"""... and how many it has at least, if it is so large."""

# What torch can put together as it is. Others are seen as whole numbers.
_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})


class Place(NamedTuple):
    """Where a tensor is looked at: at rows of elements that lie next to each other.

    Attributes:
        leaf: which tensor of the state.
        tensor: the tensor.
        part: it, or what holds some of its values.
        seen: a view of its memory: the rows, or what ``picks`` is into.
        picks: which elements of ``seen`` the rows are, where a view of them can't be had.
        number: how many rows there are.
        length: the elements of a row.
        distance: from the tensor's memory to what is seen, in bytes.
        end_bytes: how much memory its storage must have.
    """

    leaf: int
    tensor: torch.Tensor
    part: torch.Tensor
    seen: torch.Tensor
    picks: torch.Tensor | None
    number: int
    length: int
    distance: int
    end_bytes: int

    def has_moved(self) -> bool:
        """Tell whether the tensor has other memory than it had, or none."""
        if self.seen.untyped_storage().nbytes() < self.end_bytes:
            return True
        return self.seen.data_ptr() - self.part.data_ptr() != self.distance

    def rows(self) -> torch.Tensor:
        """Give what is there now: a view of shape (number, length), or a copy."""
        return self.seen if self.picks is None else torch.take(self.seen, self.picks)


def strided_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Give the strided tensors that hold the values of one of any layout; none of what is held otherwise."""
    layout = tensor.layout
    if layout is torch.strided:
        if not tensor.is_quantized:
            return (tensor,) if tensor.numel() else ()
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        parts = [raw.set_(tensor.untyped_storage())]
    elif layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = []
    return [part.detach() for part in parts if part.numel()]


def place_of(name: str, leaf: int, tensor: torch.Tensor, part: torch.Tensor, chance: float) -> Place:
    """Choose where to look at a tensor.

    Args:
        name: of the tensor, for errors.
        leaf: its position in the state.
        tensor: it.
        part: one of its `strided_parts`.
        chance: where to begin, from 0 to 1.

    Raises:
        SaveError: its memory was freed.
    """
    numel, size = part.numel(), part.itemsize
    length = min(numel, max(1, LINE_BYTES // size))
    number = min(numel // length, max(LEAST_PLACES, -(-numel * size // DISTANCE_BYTES)))
    # Seldom a power of two, so that the columns of a matrix are all met.
    step = (numel - length) // number
    begin = int(chance * (numel - length - (number - 1) * step + 1))
    plain = _plain(part)
    dense = plain if plain.is_contiguous() else _in_memory_order(plain)
    offset = part.storage_offset()
    if dense.is_contiguous():
        end, picks = offset + numel, None
    else:
        end = offset + 1 + sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
        row = torch.arange(begin, begin + length, device=part.device)
        picks = torch.arange(number, device=part.device)[:, None] * step + row
    if part.untyped_storage().nbytes() < end * size:
        raise SaveError(freed_message(name))
    if picks is None:
        dense = dense.as_strided((number, length), (step, 1), offset + begin)
    seen = dense if dense.dtype in _COMMON else dense.view(RAW_DTYPES[size])
    return Place(leaf, tensor, part, seen, picks, number, length, seen.data_ptr() - part.data_ptr(), int(end) * size)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """See the memory of a tensor that is conjugated or negated lazily."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """See a tensor with its dimensions in the order in which they lie; contiguous, if there are no holes."""
    stride = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda d: (-stride[d], d)))
