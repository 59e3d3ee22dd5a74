"""Translates an index to the metadata of ``torch.distributed.checkpoint``, and its items back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt.errors import CorruptCheckpointError, MissingKeysError
from aiockpt.format.index import Entry, Index, InlineEntry, ItemRange, StoredChunk, TensorEntry
from aiockpt.format.names import DCP_VERSION
from aiockpt.planning.dtensor import is_distributed, local_parts

if TYPE_CHECKING:
    from aiockpt.format.checks import Box
    from aiockpt.reading.decoded import VirtualFile


@dataclass(frozen=True, slots=True, eq=False)
class DescribedItem:
    """An item of a checkpoint."""

    range: ItemRange  # the bytes to read: of a transformed item, its virtual file
    dtype: torch.dtype | None = None  # None: an object
    chunk: StoredChunk | None = None  # the chunk of a tensor that it holds; None: an object
    inline: InlineEntry | None = None  # the object itself, if it is stored in the index


class DescribedCheckpoint:
    """A checkpoint's metadata in torch's form (``metadata``), with the `DescribedItem` of each location in it."""

    def __init__(self, index: Index, transformed: Mapping[str, VirtualFile] | None = None) -> None:
        self._items: dict[int, tuple[_StorageInfo, ItemRange, DescribedItem]] = {}
        self._incomplete: dict[str, TensorEntry] = {}
        described: dict[str, Any] = {}
        locations: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in index.entries.items():
            described[name] = _describe(entry)
            if isinstance(entry, TensorEntry) and not entry.is_whole:
                self._incomplete[name] = entry
            for key, item in _items(name, entry):
                virtual = (transformed or {}).get(item.range.file)
                stored = item.range if virtual is None else virtual.place
                locations[key] = info = storage_info(stored)
                self._items[id(info)] = info, stored, item
        self.metadata = Metadata(described, planner_data=dict(index.paths.items()), storage_data=locations)
        if hasattr(self.metadata, "version"):  # since torch 2.8
            self.metadata.version = DCP_VERSION

    def find(self, info: _StorageInfo) -> DescribedItem | None:
        """Return the item of a location that is an object of this metadata, unchanged; None for any other."""
        known, stored, item = self._items.get(id(info), (None, None, None))
        if known is not info or stored is None:
            return None
        return item if stored[:3] == (info.relative_path, info.offset, info.length) else None

    def check_held(self, path: str, state_dict: Mapping[str, Any]) -> None:
        """Raise CorruptCheckpointError if this is one rank's metadata, and not all that a state wants is in it."""
        for name, entry in self._incomplete.items():
            leaf = state_dict.get(name)
            if not isinstance(leaf, torch.Tensor):
                continue
            parts = local_parts(name, leaf) if is_distributed(leaf) else None
            whole: Box = ((0,) * len(entry.shape), entry.shape)
            boxes = [whole] if parts is None else [(p.shard.offsets, tuple(p.tensor.shape)) for p in parts]
            wanted = sum(math.prod(sizes) for _, sizes in boxes)
            held = sum(_common(chunk, box) for chunk in entry.chunks for box in boxes)
            if held < wanted:
                raise CorruptCheckpointError(
                    f"{path} holds {held} of the {wanted} elements of {name} that are to be loaded: it is the "
                    "checkpoint of one rank that saved alone, and fills only what that rank had; or it is damaged. "
                    "If all ranks saved to one directory, aiockpt's own load joins their parts"
                )


def _common(chunk: StoredChunk, box: Box) -> int:
    """Return the number of elements that a chunk and a box share."""
    bounds = zip(chunk.offsets, chunk.sizes, *box, strict=True)
    return math.prod([max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in bounds])


def _describe(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(entry, TensorEntry):
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)


def _items(name: str, entry: Entry) -> list[tuple[MetadataIndex, DescribedItem]]:
    if isinstance(entry, TensorEntry):
        return [
            (MetadataIndex(name, torch.Size(each.offsets), number), DescribedItem(each.place, entry.dtype, each))
            for number, each in enumerate(entry.chunks)
        ]
    if isinstance(entry, InlineEntry):
        return [(MetadataIndex(name), DescribedItem(ItemRange("", 0, 0), inline=entry))]
    return [(MetadataIndex(name), DescribedItem(entry.place))]


def storage_info(place: ItemRange) -> _StorageInfo:
    """Return torch's form of a location."""
    if not place.transforms:
        return _StorageInfo(*place[:3])
    return _StorageInfo(*place[:3], transform_descriptors=list(place.transforms))


def described_item(
    metadata: Metadata, described: DescribedCheckpoint | None, path: str, index: MetadataIndex
) -> DescribedItem:
    """Return the item that a plan asks for; ``described`` is what this process read of the checkpoint."""
    info = (metadata.storage_data or {}).get(index)
    if info is None:
        raise MissingKeysError(f"{path} has no item {index}: the plan was made for another checkpoint", (index.fqn,))
    known = described.find(info) if described is not None else None
    return known if known is not None else _item_in_foreign_metadata(metadata, path, index, info)


def _item_in_foreign_metadata(metadata: Metadata, path: str, index: MetadataIndex, info: _StorageInfo) -> DescribedItem:
    """Return an item of metadata that another reader has read."""
    if getattr(info, "transform_descriptors", None):
        raise CorruptCheckpointError(
            f"{path}: {index.fqn} is stored with the transforms {info.transform_descriptors}, which are not known here"
        )
    entry = metadata.state_dict_metadata.get(index.fqn)
    place = ItemRange(info.relative_path, info.offset, info.length)
    if not isinstance(entry, TensorStorageMetadata):
        return DescribedItem(place)
    for chunk in entry.chunks:
        if chunk.offsets == index.offset:
            stored = StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), place)
            return DescribedItem(place, entry.properties.dtype, stored)
    raise CorruptCheckpointError(f"{path}: the metadata describes no chunk of {index.fqn} at {index.offset}")
