"""Which tensors lie in the memory of others."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CONTESTED = "\0"


class AliasIndex:
    """The memory that keys of a state dict reach into.

    The extents of a storage that are kept are apart from each other: those of one key are one, and so are those of
    several keys that overlap, which then are nobody's.
    """

    def __init__(self) -> None:
        self._kept: defaultdict[tuple[torch.device, int], list[tuple[int, int, str]]] = defaultdict(list)

    def claim(self, name: str, tensor: torch.Tensor) -> bool:
        """Keep the memory of a tensor for a key; False if some of it may be another's too."""
        if not tensor.numel():
            return True
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        low = tensor.data_ptr()
        high = low + (last + 1) * tensor.itemsize
        kept = self._kept[tensor.device, tensor.untyped_storage().data_ptr()]
        at = bisect_left(kept, (low, 0, ""))
        begin = at - 1 if at and kept[at - 1][1] > low else at
        end = begin
        while end < len(kept) and kept[end][0] < high:
            end += 1
        touched = kept[begin:end]
        is_mine = all(owner == name for _, _, owner in touched)
        low, high = min([low, *(each[0] for each in touched)]), max([high, *(each[1] for each in touched)])
        kept[begin:end] = [(low, high, name if is_mine else _CONTESTED)]
        return is_mine
