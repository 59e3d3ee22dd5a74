"""Work items of a verification: files, the items in them, and the keys that refer to these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from isal.isal_zlib import crc32_combine

from aiockpt.planning.segments import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from aiockpt.format.index import TensorItem

_LARGE_BYTES = 1 << 20  # items of this size and more are streamed


class KeyRef(NamedTuple):
    """A key that is stored in an item, and what the item should hold."""

    key: str | None  # None where it is unknown
    dtype: torch.dtype | None = None  # None for objects
    sizes: tuple[int, ...] = ()  # of the chunk
    given: TensorItem | None = None  # the manifest's facts about the item


@dataclass(eq=False, slots=True)
class CheckedRange:
    """Bytes of an item that are read in pieces and checked against one CRC."""

    item: StoredItem
    name: str  # of the zip record; empty where the item has only one
    start: int  # in the item
    stop: int
    crc: int | None  # expected; None where it is unknown
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset, length and CRC-32 of each piece read


@dataclass(eq=False, slots=True)
class StoredItem:
    """An item of a file."""

    file: str
    start: int
    length: int
    kind: Literal["tensor", "object", "raw"]  # in a zip archive of its own, or the bare bytes of a tensor
    crc: int | None = None  # of raw bytes, if it is known
    covered: bool = False  # by a CRC of the whole file
    owners: list[KeyRef] = field(default_factory=list)
    inner: dict[int, list[KeyRef]] = field(default_factory=dict)  # torch.save file: the keys of each record's offset
    streams: list[CheckedRange] = field(default_factory=list)  # of a large item

    @property
    def is_large(self) -> bool:
        """Whether it is streamed instead of read into memory whole."""
        return self.length >= _LARGE_BYTES

    def extents(self) -> list[Extent[StoredItem | CheckedRange]]:
        """Return the byte ranges to read."""
        if not self.is_large:
            return [Extent(self.start, self.start + self.length, self, streamed=False)]
        return [
            Extent(self.start + stream.start, self.start + stream.stop, stream, streamed=True)
            for stream in self.streams
            if stream.start < stream.stop
        ]


@dataclass(eq=False, slots=True)
class StoredFile:
    """A file to check."""

    name: str
    nbytes: int
    crc: int | None  # of the whole file; None: unknown, so only its items are read
    items: list[StoredItem] = field(default_factory=list)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # CRC-32 and length of each range, by its number
    unread: bool = False  # some of it could not be read


def combined(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Combine the CRC-32s and lengths of parts that follow each other."""
    crc = length = 0
    for part, count in parts:
        crc, length = crc32_combine(crc, part, count), length + count
    return crc, length
