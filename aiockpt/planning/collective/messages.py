"""Messages between the ranks of one save."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ItemRange, ObjPath
    from aiockpt.format.manifest.manifest import FileFacts


# --- inventories ------------------------------------------------------------------------------------


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


# --- requests, assignments and results --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a rank brings to the first round.

    Attributes:
        overwrite: as the caller said.
        decentralized: whether it decides alone what it writes.
        form: the name of the form to save in.
        token: the plan of all ranks that the rank's kept layout belongs to, if that may serve.
        holdings: what the rank has, where it does not, and rank 0 is to decide.
    """

    overwrite: bool
    decentralized: bool
    form: str
    token: int | None
    holdings: RankInventory | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """What rank 0 replies.

    Attributes:
        ticket: for taking part in the transaction; None: come again, with all that you have.
        token: the plan of all ranks.
        leaves: what to write; None: the same as last time, or what the rank decides.
        tell_places: say where the items are.
        secret: what the writer processes of the ranks know each other by.
    """

    ticket: str | None
    token: int
    leaves: list[int] | None = field(repr=False)
    tell_places: bool
    secret: bytes = field(repr=False, default=b"")


class ItemPlaces(NamedTuple):
    """Where the items of one rank's share are, one row for each.

    Attributes:
        files: the names of the rank's files.
        leaves: the leaf of each item.
        file_of: the position of its file in ``files``.
        offsets: where it starts there, in bytes.
        lengths: its length in bytes.
    """

    files: list[str]
    leaves: list[int]
    file_of: list[int]
    offsets: list[int]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written of its share.

    Attributes:
        files: its files.
        items: how many tensor items are in them.
        objects: for each leaf that is an object of the share, where it is.
        places: where the tensor items are; None where rank 0 knows it from an earlier save.
        holdings: what the rank has, where it has decided alone to write all of that.
        token: the plan of all ranks that it was written by.
    """

    files: dict[str, FileFacts]
    items: int
    objects: dict[int, ItemRange]
    places: ItemPlaces | None = field(repr=False)
    holdings: RankInventory | None = field(repr=False, default=None)
    token: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What rank 0 tells all ranks of the checkpoint.

    Attributes:
        files: the size in bytes of each file; None for other ranks than 0, of which there may be thousands.
        file_bytes: the bytes of all files with items.
        tensor_bytes: the bytes of the tensors in them.
        tensors: how many tensors there are.
        objects: how many objects there are.
    """

    files: dict[str, int] | None
    file_bytes: int
    tensor_bytes: int
    tensors: int
    objects: int
