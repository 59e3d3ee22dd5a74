"""The interface of transforms of stored items, which users may implement, and how a manifest records them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.manifest.index_writer import encode_column

if TYPE_CHECKING:
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem, MetadataDraft

_DESCRIPTOR = re.compile(r"[^/\s\0]{1,200}/[^/\s\0]{1,50}")


class Encoder(Protocol):
    """Encodes the bytes of one item into those that are stored."""

    def update(self, data: memoryview) -> bytes | memoryview:
        """Consume the next bytes of the item; return the output that is available by now.

        Args:
            data: valid only during the call; copy what must be kept.
        """

    def finish(self) -> bytes | memoryview:
        """Return the rest of the output."""


class Decoder(Protocol):
    """Decodes the stored bytes of one item into the bytes of the item.

    May raise any exception if the stored bytes were not made by its transform, or were made with another key.
    """

    def update(self, data: memoryview, most: int) -> bytes | memoryview:
        """Consume the next stored bytes; return the output that is available by now.

        Args:
            data: pieces of any length, valid only during the call.
            most: the most bytes that may be returned. More are an error, best raised before they are produced.
        """

    def finish(self, most: int) -> bytes | memoryview:
        """Return the rest of the output, at most ``most`` bytes; raise if the stored bytes end too early."""


@runtime_checkable
class Transform(Protocol):
    """Encodes items before they are stored: compression, encryption, or anything else.

    Passed as ``transforms=`` to a checkpointer, it is applied to every tensor and object, each by itself. Several
    threads use it at once, each with encoders and decoders of its own. It should be picklable. The description of the
    checkpoint is not transformed: names, shapes, dtypes, sizes, and the user's ``metadata`` stay readable.

    Attributes:
        descriptor: name and version, "name/version"; stored in the checkpoint, it identifies the transform on load.
    """

    @property
    def descriptor(self) -> str:
        """Name and version, "name/version"."""

    def encoder(self) -> Encoder:
        """Return a new encoder for one item."""

    def decoder(self) -> Decoder:
        """Return a new decoder for one item."""


def check_transforms(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Return a caller's transforms as a tuple; raise TypeError or ValueError if they can't be used."""
    checked = tuple(transforms)
    seen: set[str] = set()
    for each in checked:
        if isinstance(each, type) or not isinstance(each, Transform):
            raise TypeError(f"transforms must have a descriptor, encoder() and decoder(), which {each!r} has not")
        descriptor = each.descriptor
        if not isinstance(descriptor, str) or not _DESCRIPTOR.fullmatch(descriptor):
            raise ValueError(f"the descriptor of a transform is {descriptor!r}; it must be 'name/version'")
        if descriptor in seen:
            raise ValueError(f"two transforms are called {descriptor}; give each a name or version of its own")
        seen.add(descriptor)
    return checked


# --- the transforms of a file's items -----------------------------------------------------------------
# The section "transformed" of the manifest has a row for each such item: its offset and length as stored, the CRC-32 of
# the stored bytes, the length of the item itself, the offset of a tensor's payload in it (zero for objects), and its
# strides, unless the tensor is stored row by row. `.metadata` records which transforms were applied.


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
