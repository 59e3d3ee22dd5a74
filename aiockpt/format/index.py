"""The contents of a checkpoint in any format: its tensors and objects, and where their bytes are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiockpt.core.dataclasses import dataclass, field, replace

if TYPE_CHECKING:
    import torch

    from aiockpt.errors import LoadError

ObjPath = tuple[str | int, ...]

Format = Literal["aiockpt", "dcp", "torch", "safetensors"]


class Division(NamedTuple):
    """The division of a tensor into stored parts."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: Sequence[tuple[int, ...]]  # where each part begins in it


def lacking_of(shape: Sequence[int], sizes: Iterable[Sequence[int]]) -> int:
    """Return how many elements of a shape parts of these sizes lack; less than 0 if they overlap."""
    return math.prod(shape) - sum(map(math.prod, sizes))


class ItemRange(NamedTuple):
    """The bytes of an item."""

    file: str  # a path relative to the checkpoint
    offset: int  # in the file, in bytes
    length: int  # in bytes
    transforms: tuple[str, ...] = ()  # descriptors of the applied transforms, the last first


class TensorItem(NamedTuple):
    """The bytes of a tensor in its item, and how to view them as the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    storage_offset: int  # of the tensor in the payload, in elements
    payload_offset: int  # in the item, in bytes
    nbytes: int  # of the payload
    crc: int | None  # CRC-32 of the payload; None if the writer left CRCs out
    conj: bool = False  # the values are stored conjugated
    neg: bool = False  # the values are stored negated


class StoredChunk(NamedTuple):
    """One stored piece of a tensor."""

    offsets: tuple[int, ...]  # where it begins in the whole tensor
    sizes: tuple[int, ...]
    place: ItemRange
    item: TensorItem | None = None  # None: not in the index, the item must be parsed


class TensorEntry(NamedTuple):
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the chunks, if they do not overlap, hold every element."""
        return lacking_of(self.shape, (chunk.sizes for chunk in self.chunks)) <= 0


class ObjectEntry(NamedTuple):
    """A pickled object of the checkpoint, in an item of its own."""

    place: ItemRange


@dataclass(frozen=True, slots=True)
class InlineEntry:
    """An object that is stored in the index itself."""

    value: Any
    error: LoadError | None = None  # why there is no value, where keys can choose what is read


Entry = TensorEntry | ObjectEntry | InlineEntry


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint."""

    entries: Mapping[str, Entry]  # in the order of the state dict
    paths: Mapping[str, ObjPath]  # of each name in the state dict
    # records of the containers that paths can't express; see `aiockpt.planning.flatten`
    containers: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the user's own
    format: Format = "dcp"
    wrapped: str | None = None  # the only key, if what was saved was no dict
    storage_meta: Mapping[str, Any] = field(default_factory=dict)  # what DCP's metadata says of its save
    is_transformed: bool = False  # some items have `ItemRange.transforms`, and can't be read as they are stored
    # By the name of a module's state dict, what ``_metadata`` says of it, where containers can't be recorded.
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    beside: Sequence[str] = ()  # files with other parts of the state, which do not belong to the checkpoint

    @property
    def is_part(self) -> bool:
        """Whether it lacks chunks of a tensor, as that of one of several ranks does."""
        return any(isinstance(entry, TensorEntry) and not entry.is_whole for entry in self.entries.values())

    @property
    def files(self) -> set[str]:
        """The files that its items are in."""
        places = [entry.place for entry in self.entries.values() if isinstance(entry, ObjectEntry)]
        tensors = (entry for entry in self.entries.values() if isinstance(entry, TensorEntry))
        return {place.file for place in (*places, *(chunk.place for each in tensors for chunk in each.chunks))}

    def with_names(self, names: Mapping[str, str]) -> Index:
        """Return an index with further names, each with the name of the tensor that it shares; they come last."""
        entries = dict(self.entries.items())
        entries |= {name: entries[kept] for name, kept in names.items()}
        return replace(self, entries=entries, paths={**self.paths, **{name: (name,) for name in names}})
