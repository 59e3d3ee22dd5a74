"""What a checkpoint holds, whatever format it is in: its tensors and objects, and where their bytes are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

ObjPath = tuple[str | int, ...]

Format = Literal["aiockpt", "dcp", "torch", "safetensors"]


class ItemRange(NamedTuple):
    """Where an item's bytes are.

    Attributes:
        file: a path relative to the checkpoint.
        offset: where in the file, in bytes.
        length: how many bytes.
        transforms: what was done to them before they were stored, as descriptors, the last first.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class TensorItem(NamedTuple):
    """Where a tensor's bytes stand in its item, and how to see them as the tensor.

    Attributes:
        dtype: the dtype of the tensor.
        shape: its sizes.
        stride: its strides, in elements.
        storage_offset: where the tensor starts in the payload, in elements.
        payload_offset: where the payload starts in the item, in bytes.
        nbytes: the length of the payload, in bytes.
        crc: the payload's CRC-32, or None where the writer left CRCs out.
        conj: the values are stored conjugated.
        neg: the values are stored negated.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    nbytes: int
    crc: int | None
    conj: bool = False
    neg: bool = False


class ChunkEntry(NamedTuple):
    """One stored piece of a tensor.

    Attributes:
        offsets: where it begins in the whole tensor.
        sizes: its sizes.
        place: its item.
        item: what stands in the item, where the index of the checkpoint says so; None: the item itself tells.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ItemRange
    item: TensorItem | None = None


class TensorEntry(NamedTuple):
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class ObjectEntry(NamedTuple):
    """A pickled object of the checkpoint, in an item of its own."""

    place: ItemRange


@dataclass(frozen=True, slots=True)
class InlineEntry:
    """An object that is part of the index itself."""

    value: Any


Entry = TensorEntry | ObjectEntry | InlineEntry


@dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        entries: by fully qualified name, in the order of the state dict.
        paths: for each name, where it belongs in the state dict.
        containers: records of the containers that paths can't express; see `aiockpt.planning.flatten`.
        metadata: the user's own facts.
        format: the format that the checkpoint is in.
        wrapped: the one key of the state dict that stands for the whole of what was saved, which was no dict.
        is_transformed: some items have `ItemRange.transforms`, and can't be read as they are stored.
    """

    entries: Mapping[str, Entry]
    paths: Mapping[str, ObjPath]
    containers: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    format: Format = "dcp"
    wrapped: str | None = None
    is_transformed: bool = False
