"""What a checkpoint holds, as ``torch.distributed.checkpoint`` describes it, and as we do."""

from __future__ import annotations

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
from aiockpt.format.index import ChunkEntry, InlineEntry, ItemRange, TensorEntry
from aiockpt.format.names import DCP_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.format.index import Entry, Index
    from aiockpt.reading.virtual_files import VirtualFile


@dataclass(frozen=True, slots=True, eq=False)
class StoredItem:
    """What stands in one item of a checkpoint.

    Attributes:
        info: where torch's metadata says that it is.
        presented: what a transformed item is seen as.
        dtype: the dtype of a tensor's item; None for an object.
        chunk: the piece of a tensor that it holds; None for an object.
        inline: the object itself, where it is a part of the index.
    """

    info: _StorageInfo
    dtype: torch.dtype | None = None
    chunk: ChunkEntry | None = None
    inline: InlineEntry | None = None
    presented: VirtualFile | None = None

    @property
    def place(self) -> ItemRange:
        """Where the item is, for who reads it."""
        if self.presented is not None:
            return ItemRange(self.presented.name, 0, self.presented.most)
        return ItemRange(self.info.relative_path, self.info.offset, self.info.length)


class DescribedCheckpoint:
    """A checkpoint's metadata as torch has it, beside what we know of each item.

    Attributes:
        metadata: for torch's planners.

    Args:
        index: what it holds.
        transformed: the items that are stored otherwise than as they are, by the files that they are seen as.
    """

    def __init__(self, index: Index, transformed: Mapping[str, VirtualFile] | None = None) -> None:
        self._items: dict[int, StoredItem] = {}
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in index.entries.items():
            described[name] = _describe(entry)
            for key, item in _items(name, entry, transformed or {}):
                places[key] = item.info
                self._items[id(item.info)] = item
        self.metadata = Metadata(described, planner_data=dict(index.paths.items()), storage_data=places)
        if hasattr(self.metadata, "version"):  # since torch 2.8
            self.metadata.version = DCP_VERSION

    def find(self, info: _StorageInfo) -> StoredItem | None:
        """Look up an item of this metadata."""
        item = self._items.get(id(info))
        return item if item is not None and item.info is info and _is_unchanged(item) else None


def _is_unchanged(item: StoredItem) -> bool:
    if item.presented is not None:
        info = item.info
        return item.presented.place[:3] == (info.relative_path, info.offset, info.length)
    return item.chunk is None or item.chunk.place == item.place


def _describe(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(entry, TensorEntry):
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)


def _items(name: str, entry: Entry, transformed: Mapping[str, VirtualFile]) -> list[tuple[MetadataIndex, StoredItem]]:
    if isinstance(entry, TensorEntry):
        return [
            (
                MetadataIndex(name, torch.Size(chunk.offsets), number),
                _item_at(chunk.place, transformed, entry.dtype, chunk),
            )
            for number, chunk in enumerate(entry.chunks)
        ]
    if isinstance(entry, InlineEntry):
        return [(MetadataIndex(name), StoredItem(_StorageInfo("", 0, 0), inline=entry))]
    return [(MetadataIndex(name), _item_at(entry.place, transformed))]


def _item_at(
    place: ItemRange,
    transformed: Mapping[str, VirtualFile],
    dtype: torch.dtype | None = None,
    chunk: ChunkEntry | None = None,
) -> StoredItem:
    presented = transformed.get(place.file)
    if presented is None:
        return StoredItem(_StorageInfo(*place[:3]), dtype, chunk)
    stored = presented.place
    info = _StorageInfo(*stored[:3], transform_descriptors=list(stored.transforms))
    return StoredItem(info, dtype, chunk, presented=presented)


def stored_item(
    metadata: Metadata, described: DescribedCheckpoint | None, path: str, index: MetadataIndex
) -> StoredItem:
    """Look up what a read item asks for.

    Args:
        metadata: what the plan was made from, by whatever reader.
        described: what was read of the checkpoint here.
        path: the checkpoint, for messages.
        index: which item.

    Raises:
        MissingKeysError: there is no such item.
        CorruptCheckpointError: it is stored in a way that is not known here.
    """
    info = (metadata.storage_data or {}).get(index)
    if info is None:
        raise MissingKeysError(f"{path} has no item {index}: the plan was made for another checkpoint", (index.fqn,))
    known = described.find(info) if described is not None else None
    return known if known is not None else _item_of_another(metadata, path, index, info)


def _item_of_another(metadata: Metadata, path: str, index: MetadataIndex, info: _StorageInfo) -> StoredItem:
    """Look up an item in metadata that was not made here."""
    if getattr(info, "transform_descriptors", None):
        raise CorruptCheckpointError(
            f"{path}: {index.fqn} is stored with the transforms {info.transform_descriptors}, which are not known here"
        )
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return StoredItem(info)
    place = ItemRange(info.relative_path, info.offset, info.length)
    for chunk in entry.chunks:
        if chunk.offsets == index.offset:
            return StoredItem(info, entry.properties.dtype, ChunkEntry(tuple(chunk.offsets), tuple(chunk.sizes), place))
    raise CorruptCheckpointError(f"{path}: the metadata describes no chunk of {index.fqn} at {index.offset}")
