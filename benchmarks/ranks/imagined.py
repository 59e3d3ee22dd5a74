"""Simulated worlds: what each rank would send to rank 0, without the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

_ROWS, _COLUMNS = 64, 1024
_FRAMING_BYTES = 1500
_NAMES = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
_WEIGHTS = (1, 1, 1, 1, 3, 3, 3)
FILES = 2
"""The number of files that each rank writes."""
OBJECTS = 4
"""The number of objects on every rank, such as the learning rate."""
_PARTS = 8


@dataclass(frozen=True)
class Imagined:
    """A simulated state: tensors cut into parts, each part on one rank.

    Attributes:
        ranks: the number of ranks.
        items: the number of parts, on each rank or in all.
        each: if true, ``items`` counts the parts of each rank, and every tensor has a part on every rank; else it
            counts the parts of all ranks, and tensors are cut in eight.
    """

    ranks: int
    items: int
    each: bool

    @property
    def cut(self) -> int:
        """The number of parts of each tensor."""
        return self.ranks if self.each else min(_PARTS, self.ranks)

    @cached_property
    def tensors(self) -> int:
        """The number of tensors."""
        return self.items if self.each else max(1, self.items // self.cut)

    def of_rank(self, rank: int) -> Iterator[tuple[str, tuple[str | int, ...], int]]:
        """Yield name, path and rows of each part on a rank."""
        groups = self.ranks // self.cut
        for number in range(rank // self.cut, self.tensors, groups):
            layer, which = divmod(number, len(_NAMES))
            kind = _NAMES[which]
            path = ("model", "layers", layer, *kind.split("."), "weight")
            yield f"model.layers.{layer}.{kind}.weight", path, _ROWS * _WEIGHTS[which]

    def objects(self) -> list[tuple[str, tuple[str | int, ...]]]:
        """Return name and path of each object on every rank."""
        return [(f"optim.groups.{number}.lr", ("optim", "groups", number, "lr")) for number in range(OBJECTS)]

    def part(self, rank: int, rows: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Return the shape of a tensor, and the offsets and sizes of a rank's part."""
        return (rows * self.cut, _COLUMNS), (rows * (rank % self.cut), 0), (rows, _COLUMNS)


def item_bytes(rows: int) -> int:
    """Return the bytes of a part in a file."""
    return rows * _COLUMNS * DTYPE.itemsize + _FRAMING_BYTES


DTYPE = torch.bfloat16


def file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_{number}.distcp"
