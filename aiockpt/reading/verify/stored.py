"""Files and the items in them, as they are to be checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from isal.isal_zlib import crc32_combine

from aiockpt.planning.coverage import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from aiockpt.format.index import TensorItem

_LARGE_BYTES = 1 << 20  # items of this size and more are streamed


class KeyRef(NamedTuple):
    """A key that is read from an item, and what the item should hold.

    Attributes:
        key: the key; None where it is not known.
        dtype: of the tensor; None for objects.
        sizes: of the chunk.
        given: what the manifest says of the item, if it does.
    """

    key: str | None
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    given: TensorItem | None = None


@dataclass(eq=False, slots=True)
class CheckedRange:
    """Bytes of an item that are checked piece by piece.

    Attributes:
        item: the item.
        name: which record of it; empty if that goes without saying.
        start: where they begin in the item.
        stop: where they end.
        crc: the CRC-32 that they should have, if one is known.
        parts: offset, length and CRC-32 of each piece that was read.
    """

    item: StoredItem
    name: str
    start: int
    stop: int
    crc: int | None
    parts: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class StoredItem:
    """An item of a file.

    Attributes:
        file: the file.
        start: where it begins, in bytes.
        length: its bytes.
        kind: a tensor or an object in framing of its own, or the raw bytes of a tensor.
        crc: the CRC-32 of raw bytes, if one is known.
        covered: a CRC of the whole file covers it.
        owners: the keys that are read from it.
        inner: for an archive of many tensors, the keys that are read from a record, by where it begins.
        streams: the parts of it that are checked piece by piece.
    """

    file: str
    start: int
    length: int
    kind: Literal["tensor", "object", "raw"]
    crc: int | None = None
    covered: bool = False
    owners: list[KeyRef] = field(default_factory=list)
    inner: dict[int, list[KeyRef]] = field(default_factory=dict)
    streams: list[CheckedRange] = field(default_factory=list)

    @property
    def is_large(self) -> bool:
        """Whether it is streamed, rather than held in memory."""
        return self.length >= _LARGE_BYTES

    def extents(self) -> list[Extent[StoredItem | CheckedRange]]:
        """Give what of it is to be read."""
        if not self.is_large:
            return [Extent(self.start, self.start + self.length, self, streamed=False)]
        return [
            Extent(self.start + stream.start, self.start + stream.stop, stream, streamed=True)
            for stream in self.streams
            if stream.start < stream.stop
        ]


@dataclass(eq=False, slots=True)
class StoredFile:
    """A file to check.

    Attributes:
        name: its name.
        nbytes: its size.
        crc: the CRC-32 of all of it; None where it is not known, and then only the items are read.
        items: what it holds.
        parts: CRC-32 and length of each part that was read, by number.
        unread: some of it could not be read.
    """

    name: str
    nbytes: int
    crc: int | None
    items: list[StoredItem] = field(default_factory=list)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    unread: bool = False


def combined(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Combine the CRC-32s and lengths of parts that follow each other."""
    crc = length = 0
    for part, count in parts:
        crc, length = crc32_combine(crc, part, count), length + count
    return crc, length
