"""The items of a save, between torch's planners and our files."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from aiockpt.errors import SaveError, WriteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem


def resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor | bytes:
    """Ask the planner for an item.

    Raises:
        SaveError: it gives something of another kind than it said.
    """
    value = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO and isinstance(value, io.BytesIO):
        return value.getvalue()
    if item.type != WriteItemType.BYTE_IO and isinstance(value, torch.Tensor):
        return value.detach()
    raise SaveError(f"{item.index.fqn}: the planner gave a {type(value).__name__} for an item of type {item.type.name}")


def results_of(items: Sequence[WriteItem], places: Iterable[tuple[str, int, int]]) -> list[WriteResult]:
    """Say where items are: file, offset and length of each."""
    return [
        WriteResult(index=item.index, size_in_bytes=place[2], storage_data=_StorageInfo(*place))
        for item, place in zip(items, places, strict=True)
    ]


def files_of(results: Sequence[Sequence[WriteResult]]) -> list[str]:
    """Give the files that ranks have written."""
    return list(dict.fromkeys(result.storage_data.relative_path for rank in results for result in rank))


def places_of(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], names: Mapping[str, str]
) -> dict[MetadataIndex, _StorageInfo]:
    """Give the place of every item, in files of the names that they get.

    Raises:
        WriteError: an item has no place.
    """
    places: dict[MetadataIndex, _StorageInfo] = {}
    for result in (result for rank in results for result in rank):
        info = result.storage_data
        places[result.index] = replace(info, relative_path=names[info.relative_path])
    for name, described in metadata.state_dict_metadata.items():
        wanted = [MetadataIndex(name)]
        if isinstance(described, TensorStorageMetadata):
            wanted = [MetadataIndex(name, chunk.offsets) for chunk in described.chunks]
        missing = [index for index in wanted if index not in places]
        if missing:
            raise WriteError(f"{name} was not written by any rank ({missing[0]}); nothing was published")
    return places
