"""Section "transformed" of the manifest: the items whose stored bytes were compressed or transformed.

Each file has a row for each such item: its offset and length as stored, the CRC-32 of the stored bytes, the length of
the item itself, the offset of a tensor's payload in it (zero for objects), and, unless the tensor is stored row by
row, its strides. `.metadata` records which transforms were applied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.manifest.index_writer import encode_column

if TYPE_CHECKING:
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem, MetadataDraft

_MAX_BYTES = 1 << 60
_MAX_DIMS = 64


class ItemFacts(NamedTuple):
    """A row of the section; see the module."""

    offset: int
    length: int
    crc: int
    raw_bytes: int
    payload_offset: int = 0
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TransformedDraft:
    """The description of transformed items, without their stored sizes and CRCs."""

    metadata: MetadataDraft
    # for each item of each file its payload offset and strides; see `ItemFacts`
    forms: Sequence[Sequence[tuple[int, tuple[int, ...] | None]]] = field(repr=False)

    def section(self, encoded: Sequence[Sequence[EncodedItem]]) -> str:
        """Return the section, with the stored size and CRC of each file's items."""
        files = []
        for name, forms, items in zip(self.metadata.files, self.forms, encoded, strict=True):
            rows = [
                (*item[:4], payload_offset, *(() if stride is None else (stride,)))
                for (payload_offset, stride), item in zip(forms, items, strict=True)
                if item.transforms
            ]
            files.append(f"\n    {json.dumps(name)}: {encode_column(rows)}")
        return "{" + ",".join(files) + "\n  }"


def decode_transformed(section: Any) -> dict[tuple[str, int], ItemFacts]:
    """Return the items by file and offset; `decode_manifest` translates the errors of a damaged section."""
    if type(section) is not dict:
        raise TypeError("the section of transformed items is no mapping")
    return {(name, item.offset): item for name, rows in section.items() for item in map(_facts, rows)}


def _facts(row: Any) -> ItemFacts:
    if type(row) is not list or len(row) not in (5, 6):
        raise ValueError("a transformed item has another number of facts than there are")
    numbers, stride = row[:5], row[5] if len(row) == 6 else None
    if stride is not None and (type(stride) is not list or len(stride) > _MAX_DIMS):
        raise TypeError("the strides of a transformed item are none")
    if not all(type(number) is int and 0 <= number <= _MAX_BYTES for number in (*numbers, *(stride or ()))):
        raise ValueError("a transformed item has numbers that are none, or out of range")
    offset, length, crc, raw_bytes, payload_offset = numbers
    return ItemFacts(offset, length, crc, raw_bytes, payload_offset, None if stride is None else tuple(stride))
