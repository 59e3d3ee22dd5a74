"""Tensors that are backed by the files themselves: nothing is read before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.item.tensor_item import parse_tensor_item
from aiockpt.format.item.ziparchive import FramingError
from aiockpt.reading.read_plan import view_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from aiockpt.format.index import ChunkEntry, TensorEntry, TensorItem
    from aiockpt.storage.base import Source


class MapReader:
    """Maps the files of a checkpoint, privately: who writes to a tensor writes to a copy of the page.

    Args:
        source: the files.
        path: where they are, for messages.
    """

    def __init__(self, source: Source, path: str) -> None:
        self._source = source
        self._path = path
        self._maps: dict[str, mmap.mmap] = {}

    def tensors(self, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Give tensors by name. Those that can't be mapped are copies: in several chunks, or at an odd address."""
        return {name: self._tensor(name, entry) for name, entry in entries.items()}

    def _tensor(self, name: str, entry: TensorEntry) -> torch.Tensor:
        if len(entry.chunks) == 1:
            return self._chunk(name, entry.chunks[0], entry.dtype)
        whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for chunk in entry.chunks:
            region = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
            region.copy_(self._chunk(name, chunk, entry.dtype))
        return whole

    def _chunk(self, name: str, chunk: ChunkEntry, dtype: torch.dtype) -> torch.Tensor:
        place = chunk.place
        item = chunk.item or self._parsed(name, chunk, dtype)
        if not item.nbytes:
            return torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="cpu")
        at = place.offset + item.payload_offset
        memory = torch.frombuffer(self._map(place.file), dtype=torch.uint8, count=item.nbytes, offset=at)
        if memory.data_ptr() % item.dtype.itemsize:
            memory = memory.clone()
        return view_of(memory, item, lazily=True)

    def _parsed(self, name: str, chunk: ChunkEntry, dtype: torch.dtype) -> TensorItem:
        mapped, place = self._map(chunk.place.file), chunk.place

        def fetch(offset: int, size: int) -> bytes:
            return mapped[place.offset + offset : place.offset + min(offset + size, place.length)]

        try:
            item = parse_tensor_item(place.length, fetch)
        except FramingError as exc:
            raise CorruptCheckpointError(f"{self._path}/{place.file}: the item of {name} is damaged: {exc}") from exc
        if item.shape != chunk.sizes or item.dtype != dtype:
            raise CorruptCheckpointError(
                f"{self._path}/{place.file}: {name} is {item.dtype} {item.shape} in its item but {dtype} {chunk.sizes} "
                "in the metadata"
            )
        return item

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = self._source.map(file)
        return self._maps[file]
