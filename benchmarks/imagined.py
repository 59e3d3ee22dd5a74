"""Worlds that are only imagined: what each rank would bring to rank 0 and get from it, without the ranks."""

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
"""How many files each rank writes."""
OBJECTS = 4
"""How many objects every rank has besides, such as the step."""
_PARTS = 8


@dataclass(frozen=True)
class Imagined:
    """A state of many parts of tensors, each on one rank.

    Attributes:
        ranks: how many ranks there are.
        items: how many parts, in all or on each rank.
        each: they are counted on each rank: every tensor has a part there. Else in all: tensors are cut in eight.
    """

    ranks: int
    items: int
    each: bool

    @property
    def cut(self) -> int:
        """In how many parts each tensor is cut."""
        return self.ranks if self.each else min(_PARTS, self.ranks)

    @cached_property
    def tensors(self) -> int:
        """How many tensors there are."""
        return self.items if self.each else max(1, self.items // self.cut)

    def of_rank(self, rank: int) -> Iterator[tuple[str, tuple[str | int, ...], int]]:
        """Give name, path and rows of the parts that a rank has."""
        groups = self.ranks // self.cut
        for number in range(rank // self.cut, self.tensors, groups):
            layer, which = divmod(number, len(_NAMES))
            kind = _NAMES[which]
            path = ("model", "layers", layer, *kind.split("."), "weight")
            yield f"model.layers.{layer}.{kind}.weight", path, _ROWS * _WEIGHTS[which]

    def objects(self) -> list[tuple[str, tuple[str | int, ...]]]:
        """Give name and path of the objects that every rank has."""
        return [(f"optim.groups.{number}.lr", ("optim", "groups", number, "lr")) for number in range(OBJECTS)]

    def part(self, rank: int, rows: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Give the sizes of a tensor, and offsets and sizes of a rank's part."""
        return (rows * self.cut, _COLUMNS), (rows * (rank % self.cut), 0), (rows, _COLUMNS)


def item_bytes(rows: int) -> int:
    """Give how many bytes a part takes in a file."""
    return rows * _COLUMNS * DTYPE.itemsize + _FRAMING_BYTES


DTYPE = torch.bfloat16


def file_name(rank: int, number: int) -> str:
    """Name a file of a rank."""
    return f"__{rank}_{number}.distcp"
