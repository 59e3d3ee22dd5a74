"""What a rank has, as rank 0 is told."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ObjPath

RankLeaf = tuple[int, int]
"""A rank, and the number of a leaf there."""

_PROTOCOL = 5


class ShardForm(NamedTuple):
    """What parts of tensors that differ in their place alone have in common.

    Attributes:
        dtype: the dtype of the tensor.
        shape: the sizes of the whole tensor.
        sizes: the sizes of the part.
        nbytes: the bytes that it takes in a file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        """The bytes of the part itself."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RankInventory:
    """What one rank has, leaf by leaf; small enough to travel.

    Attributes:
        names: the name of each leaf.
        paths: the path of each leaf in the state dict.
        forms: the distinct forms of the parts.
        form_of: for each leaf its position in ``forms``; -1 for objects.
        offsets: for each leaf where the part begins in the whole tensor; nothing for objects.
        tied: the leaves that are the same memory as an earlier one, with that one.
        containers: records of the containers that paths can't express.
    """

    names: list[str]
    paths: list[ObjPath]
    forms: list[ShardForm]
    form_of: list[int]
    offsets: list[tuple[int, ...]]
    tied: dict[int, int] = field(default_factory=dict)
    containers: list[dict[str, Any]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        kinds: dict[tuple[int, tuple[int, ...]], int] = {}
        kind_of = [kinds.setdefault(kind, len(kinds)) for kind in zip(self.form_of, self.offsets, strict=True)]
        named = pickle.dumps((self.names, self.paths), _PROTOCOL)
        return _unpacked, (named, self.forms, list(kinds), kind_of, self.tied, self.containers)


def _unpacked(
    named: bytes,
    forms: list[ShardForm],
    kinds: list[tuple[int, tuple[int, ...]]],
    kind_of: list[int],
    tied: dict[int, int],
    containers: list[dict[str, Any]],
) -> RankInventory:
    names, paths = _named(named)
    form_of = [kinds[kind][0] for kind in kind_of]
    return RankInventory(names, paths, forms, form_of, [kinds[kind][1] for kind in kind_of], tied, containers)


@functools.lru_cache(maxsize=8)
def _named(data: bytes) -> tuple[list[str], list[ObjPath]]:
    """Read names and paths. Ranks that have the same share one list of them, which nobody changes."""
    names, paths = pickle.loads(data)
    return names, paths
