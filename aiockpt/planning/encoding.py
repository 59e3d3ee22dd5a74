"""Encoding plans: which items of a file image are compressed or transformed, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.index import ItemRange

if TYPE_CHECKING:
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.zstd import Zstd
    from aiockpt.planning.dcp_plan import DcpPlan


class ItemCoding(NamedTuple):
    """An item of an image, and how it is compressed."""

    name: str  # key, for messages
    offset: int  # in the image, in bytes
    length: int  # in bytes
    compression: Zstd | None  # None: not compressed


@dataclass(frozen=True, slots=True)
class ImageCoding:
    """The encoding of each item of an image."""

    items: Sequence[ItemCoding] = field(repr=False)  # by offset; the bytes between them are not stored
    transforms: Sequence[Transform] = ()  # applied to each item, in order, after its compression


def codings_of(
    plan: DcpPlan, compression: Sequence[Zstd | None] | None, transforms: Sequence[Transform]
) -> list[ImageCoding]:
    """Return the encoding of each image: each leaf's compression (None: none at all), then all ``transforms``."""
    names = plan.layout.structure.names

    def coding(leaf: int, offset: int, length: int) -> ItemCoding:
        return ItemCoding(names[leaf], offset, length, None if compression is None else compression[leaf])

    return [ImageCoding([coding(*item) for item in items], transforms) for items in _items(plan)]


def item_ranges(plan: DcpPlan, encoded: Sequence[Sequence[EncodedItem]] | None) -> dict[int, ItemRange]:
    """Return where each leaf is stored. ``encoded`` are the items of each image as stored; None: as they are."""
    ranges: dict[int, ItemRange] = {}
    for number, (image, items) in enumerate(zip(plan.layout.images, _items(plan), strict=True)):
        for row, (leaf, offset, length) in enumerate(items):
            if encoded is None:
                ranges[leaf] = ItemRange(image.name, offset, length)
            else:
                stored = encoded[number][row]
                ranges[leaf] = ItemRange(image.name, stored.offset, stored.length, stored.transforms)
    return ranges


def _items(plan: DcpPlan) -> list[list[tuple[int, int, int]]]:
    """Return the items of each image, by offset: the leaf, the offset, and the length."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in plan.layout.images]
    for (leaf, number), (_, place) in zip(plan.layout.objects.items(), plan.objects, strict=True):
        found[number].append((leaf, place.offset, place.length))
    for items, image in zip(found, plan.layout.images, strict=True):
        items += [(slot.leaf, slot.offset, slot.framing.length) for slot in image.slots]
    return found
