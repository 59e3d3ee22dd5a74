"""Verification of items: every record against its CRC, and local headers against the zip directory.

Loading a tensor reads little of its item; verification compares everything that has a CRC or is stored twice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.format.item.tensor_item import TemplateCache, parse_tensor_item, with_crc
from aiockpt.format.item.ziparchive import (
    CRC,
    END_RECORD,
    LOCAL_HEADER,
    FramingError,
    Record,
    data_offset,
    read_directory,
)

if TYPE_CHECKING:
    from aiockpt.format.index import TensorItem

_END64 = struct.Struct("<4sQ2H2I4Q4sIQI")  # with the locator behind it
_LENGTHS = struct.Struct("<3H")  # of the name, extra fields and comment of an entry
_DESCRIPTOR_FLAG = 8
_DIRECTORY_FLAG = 16
_DESCRIPTOR = b"PK\7\10"
_SMALL_BYTES = 4096  # objects up to this size become templates
_MOST_TEMPLATES = 4096
_LEGACY = b"\x80\x02\x8a"  # the beginning of files of torch < 1.6


@dataclass(frozen=True, slots=True)
class CheckedRecord:
    """The bytes of one record; offsets count from the beginning of the item."""

    name: str
    start: int
    stop: int
    crc: int  # the CRC-32 that it should have
    crc_at: tuple[int, ...]  # offsets of that CRC


@dataclass(frozen=True, slots=True)
class Framed:
    """An item whose framing is sound."""

    tensor: TensorItem | None  # None for objects
    checked: tuple[CheckedRecord, ...]  # its records; none if the writer left CRCs out


def read_framing(length: int, fetch: Callable[[int, int], bytes], *, is_tensor: bool) -> Framed:
    """Read the framing of an item of ``length`` bytes and check that it is consistent.

    ``fetch`` returns the bytes at (offset, size), fewer at the end. With ``is_tensor``, it must be one plain tensor.
    """
    try:
        tensor = parse_tensor_item(length, fetch) if is_tensor else None
        if not is_tensor and fetch(0, len(_LEGACY)) == _LEGACY:
            return Framed(None, ())
        records = read_directory(length, fetch)
        _check_end(records, length, fetch)
        checked = tuple(_checked_record(record, length, fetch) for record in records)
    except FramingError:
        raise
    except (StopIteration, IndexError, ValueError, OverflowError, struct.error) as exc:
        raise FramingError(f"the zip framing is damaged ({type(exc).__name__}: {exc})") from exc
    if all(each.crc == 0 for each in checked):  # torch can be set to leave CRCs out, and then stores zeros
        checked = ()
    return Framed(tensor, checked)


def _check_end(records: Sequence[Record], length: int, fetch: Callable[[int, int], bytes]) -> None:
    """Check that the end-of-directory records agree with each other and follow the directory directly."""
    at = length - _END64.size - END_RECORD.size
    tail = fetch(at, length - at) if at >= 0 else b""
    if tail[:4] == b"PK\6\6" or tail[56:60] == b"PK\6\7":
        large, small = _END64.unpack_from(tail), END_RECORD.unpack_from(tail, _END64.size)
        disk, first_disk, here, count, size, offset = large[4:10]
        narrow = (*(min(n, 0xFFFF) for n in (here, count)), *(min(n, 0xFFFF_FFFF) for n in (size, offset)))
        agree = small[1:] == (disk, first_disk, *narrow, 0) and here == count and offset + size == at
        if not agree or large[:2] != (b"PK\6\6", 44) or large[10:] != (b"PK\6\7", 0, at, 1):
            raise FramingError("the records that end the zip directory do not agree with each other")
    else:
        at = length - END_RECORD.size
    entry = records[-1].crc_at - 16 if records else at
    lengths = _LENGTHS.unpack(fetch(entry + 28, _LENGTHS.size)) if records else ()
    if records and entry + 46 + sum(lengths) != at:
        raise FramingError("the zip directory does not end where its last entry does")


def _checked_record(record: Record, length: int, fetch: Callable[[int, int], bytes]) -> CheckedRecord:
    """Check a record's header and descriptor against the directory."""
    start = data_offset(record, fetch)
    stop = start + record.size
    if stop > length:
        raise FramingError(f"record {record.name} ends outside of the item")
    header = fetch(record.header_offset, LOCAL_HEADER.size)
    flags, width = LOCAL_HEADER.unpack(header)[2:10:7]
    entry = fetch(record.crc_at - 10, 36)
    # Versions, flags, method and times stand before the CRC in both places; behind it sizes, disk and attributes.
    sound = entry[:10] == header[4:14] and entry[14:18] == entry[18:22] and entry[28:30] == b"\0\0"
    if (
        not sound
        or entry[32] & _DIRECTORY_FLAG
        or fetch(record.header_offset + LOCAL_HEADER.size, width) != record.name.encode()
    ):
        raise FramingError(f"the header of record {record.name} does not agree with the directory")
    if not flags & _DESCRIPTOR_FLAG:
        return CheckedRecord(record.name, start, stop, record.crc, (record.crc_at,))
    head = _DESCRIPTOR + CRC.pack(record.crc)
    found = fetch(stop, len(head) + 16)
    forms = ("<2Q", "<2I") if record.size < 1 << 32 else ("<2Q",)
    if not any(found.startswith(head + struct.pack(form, record.size, record.size)) for form in forms):
        raise FramingError(f"the data descriptor of record {record.name} does not agree with the directory")
    return CheckedRecord(record.name, start, stop, record.crc, (stop + len(_DESCRIPTOR), record.crc_at))


@dataclass(frozen=True, slots=True)
class _Template:
    """An item without its payload and serialization id: the only records that differ between items framed alike."""

    tensor: TensorItem | None
    payload: CheckedRecord
    varying: tuple[CheckedRecord, ...]  # the records that differ, payload included
    fixed: tuple[tuple[int, bytes], ...]  # offsets and bytes of the rest, from the payload on

    def matches(self, item: memoryview) -> bool:
        for start, data in self.fixed:
            if bytes(item[start : start + len(data)]) != data:  # a memoryview compares byte by byte
                return False
        for each in self.varying:
            crc = crc32(item[each.start : each.stop])
            for at in each.crc_at:
                if CRC.unpack_from(item, at)[0] != crc:
                    return False
        return True


class ItemChecker:
    """Checks many items whose bytes are in memory; the framing of most of them was seen before."""

    def __init__(self) -> None:
        self._tensors = TemplateCache[_Template]()
        self._objects = TemplateCache[_Template]()

    def check(self, item: memoryview, *, is_tensor: bool) -> tuple[Framed, list[CheckedRecord]]:
        """Check a whole item; return its framing, and the records that do not match their CRC."""
        template = self._tensors.find(item) if is_tensor else None
        if template is not None and template.matches(item):
            tensor = template.tensor and with_crc(template.tensor, item, template.payload.crc_at[0])
            return Framed(tensor, (template.payload,)), []

        def fetch(offset: int, size: int) -> bytes:
            return bytes(item[offset : offset + size])

        framed = read_framing(len(item), fetch, is_tensor=is_tensor)
        wrong = [each for each in framed.checked if crc32(item[each.start : each.stop]) != each.crc]
        if framed.checked and not wrong and (is_tensor or len(item) <= _SMALL_BYTES):
            self._learn(item, framed)
        return framed, wrong

    def object_pickle(self, item: memoryview) -> bytes | None:
        """Return the pickle of an intact small object; None if the item needs a full parse."""
        if len(item) > _SMALL_BYTES:
            return None
        template = self._objects.find(item)
        if template is None or not template.matches(item):
            _, wrong = self.check(item, is_tensor=False)
            template = None if wrong else self._objects.find(item)
            if template is None or not template.matches(item):
                return None
        return bytes(item[template.payload.start : template.payload.stop])

    def _learn(self, item: memoryview, framed: Framed) -> None:
        """Make an intact item a template, if its payload is one record."""
        tensor = framed.tensor
        if tensor is not None:
            start = tensor.payload_offset
            payload = next((each for each in framed.checked if each.start == start and each.stop > start), None)
            if payload is None or payload.stop != start + tensor.nbytes:
                return
        else:
            payload = next((each for each in framed.checked if each.name.endswith("/data.pkl")), None)
            if payload is None or len(self._objects) >= _MOST_TEMPLATES:
                return
            start = payload.start
        # The id differs between items, because torch makes it from the CRCs of the other records.
        varying = tuple(
            s
            for s in framed.checked
            if s.start >= start and (s is payload or s.name.endswith("/.data/serialization_id"))
        )
        holes = sorted({(s.start, s.stop) for s in varying} | {(at, at + CRC.size) for s in varying for at in s.crc_at})
        fixed = []
        end = start
        for low, high in [*holes, (len(item), len(item))]:
            if low > end:
                fixed.append((end, bytes(item[end:low])))
            end = max(end, high)
        templates = self._objects if tensor is None else self._tensors
        templates.add(item, start, _Template(tensor, payload, varying, tuple(fixed)))
