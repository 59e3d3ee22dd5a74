"""Where to look at a tensor, to know whether it is still the same."""

from __future__ import annotations

from typing import NamedTuple

import torch

from aiockpt.core.extent import freed_message, is_freed, reach_bytes, strided_parts
from aiockpt.errors import SaveError
from aiockpt.staging.base import RAW_DTYPES

LINE_BYTES = 64
"""What is seen at one place: memory comes in such lines, so that fewer bytes would take as long."""
DISTANCE_BYTES = 64 << 10
"""How far the places of a tensor are apart at most ..."""
LEAST_PLACES = 8
"""... and how many it has at least, if it is so large."""

# What torch can put together as it is. Others are seen as whole numbers.
_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})


class SamplePoint(NamedTuple):
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


def seen_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors in which a tensor of any layout is looked at: all of the memory of a quantized one."""
    if tensor.is_quantized:
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return [raw.set_(tensor.untyped_storage())]
    # Itself, not a view, which would not show that it has other memory by then.
    return [part if part is tensor else part.detach() for part in strided_parts(tensor)]


def place_of(name: str, leaf: int, tensor: torch.Tensor, part: torch.Tensor, chance: float) -> SamplePoint:
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
    if is_freed(part):
        raise SaveError(freed_message(name))
    numel, size = part.numel(), part.itemsize
    length = min(numel, max(1, LINE_BYTES // size))
    number = min(numel // length, max(LEAST_PLACES, -(-numel * size // DISTANCE_BYTES)))
    # Seldom a power of two, so that the columns of a matrix are all met.
    step = (numel - length) // number
    begin = int(chance * (numel - length - (number - 1) * step + 1))
    plain = _plain(part)
    dense = plain if plain.is_contiguous() else _in_memory_order(plain)
    if dense.is_contiguous():
        picks = None
        dense = dense.as_strided((number, length), (step, 1), part.storage_offset() + begin)
    else:
        row = torch.arange(begin, begin + length, device=part.device)
        picks = torch.arange(number, device=part.device)[:, None] * step + row
    seen = dense if dense.dtype in _COMMON else dense.view(RAW_DTYPES[size])
    return SamplePoint(
        leaf, tensor, part, seen, picks, number, length, seen.data_ptr() - part.data_ptr(), reach_bytes(part)
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """See the memory of a tensor that is conjugated or negated lazily."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """See a tensor with its dimensions in the order in which they lie; contiguous, if there are no holes."""
    stride = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda d: (-stride[d], d)))
