"""Copies of one value by ranks that saved alone: they differ where the ranks' files are of different saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from aiockpt.errors import LoadError
from aiockpt.format.index import Entry, Index, ItemRange, ObjectEntry, TensorEntry, TensorItem
from aiockpt.format.item.objects import decode_object
from aiockpt.format.item.tensor_item import parse_tensor_item
from aiockpt.format.item.ziparchive import FramingError
from aiockpt.reading.jobs import ItemWindow

if TYPE_CHECKING:
    from aiockpt.storage.base import Source

_PIECE_BYTES = 1 << 20
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})

Verdict = Literal["same", "different", "unknown"]


def differing_copies(source: Source, parts: Mapping[int, Index]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield key and file of each copy unlike the lowest rank's, a message, and whether it is an error. Blocks.

    Tensors and plain values must be equal. Other objects may differ from rank to rank, as states of generators do.
    """
    seen: dict[tuple[str, str], tuple[int, ItemRange]] = {}
    for rank, part in sorted(parts.items()):
        for name, box, place in [(name, *each) for name, entry in part.entries.items() for each in _places(entry)]:
            first_rank, first = seen.setdefault((name, box), (rank, place))
            if first_rank == rank:
                continue
            verdict = (_compare_tensors if box else _compare_objects)(source, first, place)
            which = f"ranks {first_rank} and {rank}, which saved alone, have different values of {name}"
            if verdict == "different":
                message = (
                    f"{which}: their files may be of different saves, of which the last was interrupted. Use an older "
                    "checkpoint, and give each save a directory of its own; data that differs between ranks needs "
                    "names that differ"
                )
                yield name, place.file, message, True
            elif verdict == "unknown":
                message = f"{which}, or store them in different ways; that of rank {first_rank} is used"
                yield name, place.file, message, False


def _places(entry: Entry) -> list[tuple[str, ItemRange]]:
    """Return where an entry is stored, chunk by chunk; an object has no box."""
    if isinstance(entry, TensorEntry):
        return [(f"{chunk.offsets} {chunk.sizes}", chunk.place) for chunk in entry.chunks]
    return [("", entry.place)] if isinstance(entry, ObjectEntry) else []


def _compare_tensors(source: Source, one: ItemRange, other: ItemRange) -> Verdict:
    """Compare by the CRCs in the framing, or byte by byte if there are none."""
    if one.transforms or other.transforms:
        return "same" if _is_same(source, one, other) else "unknown"
    try:
        items = _parsed(source, one), _parsed(source, other)
    except FramingError:  # of another serialization format
        return "same" if _is_same(source, one, other) else "different"
    if items[0].crc is None or items[1].crc is None:
        places = [
            place._replace(offset=place.offset + item.payload_offset, length=item.nbytes)
            for place, item in zip((one, other), items, strict=True)
        ]
        is_same = _is_same(source, *places)
    else:
        is_same = (items[0].nbytes, items[0].crc) == (items[1].nbytes, items[1].crc)
    if _layout(items[0]) != _layout(items[1]):
        return "unknown"
    return "same" if is_same else "different"


def _layout(item: TensorItem) -> tuple[object, ...]:
    return item.dtype, item.shape, item.stride, item.storage_offset, item.conj, item.neg


def _parsed(source: Source, place: ItemRange) -> TensorItem:
    return parse_tensor_item(place.length, ItemWindow(source, place).fetch)


def _compare_objects(source: Source, one: ItemRange, other: ItemRange) -> Verdict:
    if _is_same(source, one, other):
        return "same"
    if one.transforms or other.transforms or max(one.length, other.length) > _PIECE_BYTES:
        return "unknown"
    try:
        values = [decode_object("", source.read_bytes(*place[:3])) for place in (one, other)]
    except LoadError:  # a load of it says why
        return "unknown"
    if not all(type(value) in _PLAIN for value in values):
        return "unknown"
    return "same" if repr(values[0]) == repr(values[1]) else "different"  # by repr: NaN is NaN, 1 is not True


def _is_same(source: Source, one: ItemRange, other: ItemRange) -> bool:
    """Compare byte by byte."""
    steps = range(0, one.length, _PIECE_BYTES)
    return one.length == other.length and all(
        source.read_bytes(one.file, one.offset + at, min(_PIECE_BYTES, one.length - at))
        == source.read_bytes(other.file, other.offset + at, min(_PIECE_BYTES, one.length - at))
        for at in steps
    )
