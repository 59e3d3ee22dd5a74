"""Virtual files: each transformed item appears in the index as a file of its own, so readers see decoded bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiockpt.core.strides import row_strides
from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.index import ChunkEntry, Entry, Index, ItemRange, ObjectEntry, TensorEntry, TensorItem
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.format.transforms.zstd import MOST_RATIO, ZSTD_DESCRIPTOR

if TYPE_CHECKING:
    import torch

    from aiockpt.format.transforms.item_transforms import ItemFacts

FRAMING_BYTES = 64 << 10
"""Upper bound of an item's framing, the bytes around a tensor's."""
OBJECT_BYTES = 64 << 20
"""Limit for all objects together, beyond `OBJECT_RATIO` times their stored bytes: against decompression bombs."""
OBJECT_RATIO = 100
"""Pickles of plain values rarely compress further; only very many zeros do."""


@dataclass(frozen=True, slots=True)
class VirtualFile:
    """A transformed item, as a file of its own."""

    name: str
    key: str  # one of the keys stored in it
    place: ItemRange  # of the stored bytes
    most: int  # its decoded size in bytes, or an upper bound
    is_exact: bool  # ``most`` is the size
    crc: int | None  # CRC-32 of the stored bytes, if it is known
    # Decoded bytes that an object may have before it draws on OBJECT_BYTES. None: no limit, because the shape of a
    # tensor sets its size, or because the caller trusts the checkpoint.
    free: int | None


def expose(
    path: str, index: Index, facts: Mapping[tuple[str, int], ItemFacts], *, trust: bool = False
) -> tuple[Index, list[VirtualFile]]:
    """Return the index with transformed items moved to virtual files, and these files.

    ``facts`` are the manifest's, by file and offset; ``trust``: do not limit the decoded size of objects.
    """
    exposer = _Exposer(path, facts, trust=trust)
    entries = {key: exposer.entry(key, entry) for key, entry in index.entries.items()}
    return replace(index, entries=entries, is_transformed=False), list(exposer.items.values())


class _Exposer:
    def __init__(self, path: str, facts: Mapping[tuple[str, int], ItemFacts], *, trust: bool) -> None:
        self._path = path
        self._facts = facts
        self._trust = trust
        self.items: dict[ItemRange, VirtualFile] = {}

    def entry(self, key: str, entry: Entry) -> Entry:
        if isinstance(entry, ObjectEntry) and entry.place.transforms:
            return ObjectEntry(self._place_object(key, entry.place))
        if isinstance(entry, TensorEntry) and any(chunk.place.transforms for chunk in entry.chunks):
            return entry._replace(chunks=tuple(self._chunk(key, entry.dtype, chunk) for chunk in entry.chunks))
        return entry

    def _chunk(self, key: str, dtype: torch.dtype, chunk: ChunkEntry) -> ChunkEntry:
        if not chunk.place.transforms:
            return chunk
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        place = self._place(key, chunk.place, nbytes, nbytes + FRAMING_BYTES, is_firm=True)
        facts = self._facts.get(chunk.place[:2])
        if facts is None:
            return chunk._replace(place=place)
        stride = row_strides(chunk.sizes) if facts.stride is None else facts.stride
        # The CRC in the manifest is that of the stored bytes, not of the decoded payload.
        item = TensorItem(dtype, chunk.sizes, stride, 0, facts.payload_offset, nbytes, None)
        return chunk._replace(place=place, item=item)

    def _place_object(self, key: str, stored: ItemRange) -> ItemRange:
        free = OBJECT_RATIO * stored.length
        # Above the budget, by which DecodedSource refuses an object while it decodes it, with the better message.
        most = max(free + 2 * OBJECT_BYTES, MOST_RATIO * stored.length if self._trust else 0)
        return self._place(key, stored, 0, most, is_firm=False, free=None if self._trust else free)

    def _place(
        self, key: str, stored: ItemRange, least: int, most: int, *, is_firm: bool, free: int | None = None
    ) -> ItemRange:
        """Return the virtual range of an item of ``least`` to ``most`` bytes.

        If ``most`` is not firm, the manifest may say that the item has more.
        """
        item = self.items.get(stored)
        if item is None:
            facts = self._facts.get(stored[:2])
            if facts is not None:
                self._check(key, stored, facts, least, most if is_firm else None)
                most = facts.raw_bytes
            if stored.transforms == (ZSTD_DESCRIPTOR,) and least > MOST_RATIO * stored.length:
                raise self._wrong(key, stored, f"{least} bytes, which its {stored.length} stored ones can't be")
            name = f"{stored.file}[{stored.offset}:{stored.offset + stored.length}]"
            crc = None if facts is None else facts.crc
            item = self.items[stored] = VirtualFile(name, key, stored, most, facts is not None, crc, free)
        return ItemRange(item.name, 0, item.most)

    def _check(self, key: str, stored: ItemRange, facts: ItemFacts, least: int, most: int | None) -> None:
        if facts.length != stored.length:
            raise self._wrong(key, stored, f"{stored.length} stored bytes, but {MANIFEST_NAME} says {facts.length}")
        if facts.raw_bytes < least or (most is not None and facts.raw_bytes > most):
            raise self._wrong(key, stored, f"at least {least} bytes, but {MANIFEST_NAME} says {facts.raw_bytes}")
        if stored.transforms == (ZSTD_DESCRIPTOR,) and facts.raw_bytes > MOST_RATIO * stored.length:
            raise self._wrong(key, stored, f"{facts.raw_bytes} bytes, which its {stored.length} stored ones can't be")

    def _wrong(self, key: str, place: ItemRange, contradiction: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}/{place.file}: the item of {key} at offset {place.offset} is said to have {contradiction}; "
            "the metadata is damaged"
        )
