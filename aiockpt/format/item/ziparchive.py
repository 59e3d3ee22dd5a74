"""Zip archives as ``torch.save`` writes them: uncompressed records, 64-bit sizes where needed. Free of torch.

Source of the layout: PKWARE's APPNOTE.TXT.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass

LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
END_RECORD = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_DIRECTORY = 0x10  # among the external attributes
CRC = struct.Struct("<I")
ZIP_MAGIC = b"PK\3\4"
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number near the beginning of files of torch < 1.6, which are no archives."""


class FramingError(ValueError):
    """The bytes are not the zip framing of one plain strided tensor."""


class SubclassItemError(FramingError):
    """The item is whole, but of a tensor of a subclass, which torch has pickled as an object."""


@dataclass(frozen=True, slots=True)
class Framing:
    """The bytes around a payload of ``nbytes`` bytes in an item."""

    prefix: bytes
    suffix: bytes  # with zero in place of the payload's CRC-32
    crc_at: tuple[int, ...]  # offsets of that CRC in the suffix, as little-endian uint32; none for an empty payload
    nbytes: int

    @property
    def length(self) -> int:
        return len(self.prefix) + self.nbytes + len(self.suffix)

    def sealed_suffix(self, crc: int) -> bytes:
        """Return the suffix with the payload's CRC-32 filled in."""
        suffix = bytearray(self.suffix)
        for at in self.crc_at:
            CRC.pack_into(suffix, at, crc)
        return bytes(suffix)


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a central directory; offsets count from the beginning of the item."""

    name: str
    header_offset: int
    size: int
    crc: int
    crc_at: int  # the offset of `crc` in the directory


def read_directory(length: int, fetch: Callable[[int, int], bytes]) -> list[Record]:
    """Read the central directory of a zip of ``length`` bytes; ``fetch`` returns the bytes at (offset, size)."""
    try:
        tail_at = max(0, length - END_RECORD.size - _LOCATOR64.size)
        tail = fetch(tail_at, length - tail_at)
        end = END_RECORD.unpack(tail[-END_RECORD.size :])
        if end[0] != b"PK\5\6" or end[7]:  # a comment would follow the record, so it would not be the last
            raise FramingError("no end-of-directory record where the item ends")
        count, size, offset = end[4], end[5], end[6]
        if tail[: -END_RECORD.size][-_LOCATOR64.size :][:4] == b"PK\6\7":
            locator = _LOCATOR64.unpack(tail[-END_RECORD.size - _LOCATOR64.size : -END_RECORD.size])
            end64 = _END64.unpack(fetch(locator[2], _END64.size))
            if end64[0] != b"PK\6\6":  # other readers would use the record above then
                raise FramingError("no 64-bit end-of-directory record where the item says that it is")
            count, size, offset = end64[7], end64[8], end64[9]
        if not 0 <= offset <= offset + size <= length:
            raise FramingError("the zip directory lies outside the item")
        records = _entries(fetch(offset, size), offset, count)
    except (struct.error, UnicodeDecodeError, IndexError, StopIteration) as exc:
        raise FramingError(f"the zip directory is damaged: {exc}") from exc
    # torch ignores case when it looks up a record: it must not find others than those that are checked here.
    if len({record.name.lower() for record in records}) != len(records):
        raise FramingError("two records of the zip directory have the same name")
    return records


def _entries(directory: bytes, offset: int, count: int) -> list[Record]:
    records = []
    at = 0
    for _ in range(count):
        entry = _CENTRAL.unpack_from(directory, at)
        if entry[0] != b"PK\1\2":
            raise FramingError("an entry of the zip directory is damaged")
        method, crc, size, header = entry[4], entry[7], entry[9], entry[16]
        name_at, extra_at = at + _CENTRAL.size, at + _CENTRAL.size + entry[10]
        extra = directory[extra_at : extra_at + entry[11]]
        size, header = _zip64_sizes(extra, size, entry[8], header)
        if method != 0:
            raise FramingError("a compressed record, which torch.save never writes")
        if entry[15] & _DIRECTORY:  # torch.load would leave its memory uninitialised
            raise FramingError("a record that is marked as a directory")
        name = directory[name_at:extra_at].decode()
        records.append(Record(name, header, size, crc, offset + at + 16))
        at = extra_at + entry[11] + entry[12]
    return records


def _zip64_sizes(extra: bytes, size: int, compressed: int, header: int) -> tuple[int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, width = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            # Present only for the fields that are all ones, in this order: size, compressed size, offset of the header.
            values = iter(struct.unpack_from(f"<{width // 8}Q", extra, at + 4))
            size = next(values) if size == 0xFFFFFFFF else size
            if compressed == 0xFFFFFFFF:
                next(values)
            header = next(values) if header == 0xFFFFFFFF else header
        at += 4 + width
    return size, header


def data_offset(record: Record, fetch: Callable[[int, int], bytes]) -> int:
    """Return the offset of a record's bytes, which follow its local header."""
    header = fetch(record.header_offset, LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or header[:4] != ZIP_MAGIC:
        raise FramingError(f"the header of record {record.name} is damaged")
    fields = LOCAL_HEADER.unpack(header)
    # torch pads the extra field of the local header to align the bytes; the directory's entry has no padding.
    return record.header_offset + LOCAL_HEADER.size + int(fields[9]) + int(fields[10])


def read_archive(blob: bytes) -> dict[str, memoryview]:
    """Return the bytes of each record of a ``torch.save`` file, by name."""
    view = memoryview(blob)

    def fetch(offset: int, size: int) -> bytes:
        return bytes(view[offset : offset + size])

    if blob[:4] != ZIP_MAGIC:
        raise FramingError("it is not a zip file, as torch.save writes them since version 1.6")
    records = sorted(read_directory(len(blob), fetch), key=lambda record: record.header_offset)
    checked = any(record.crc for record in records)
    found, end = {}, 0
    for record in records:
        at = data_offset(record, fetch)
        if record.header_offset < end or at + record.size > len(blob):
            raise FramingError(f"record {record.name} lies outside the file, or over another record")
        end = at + record.size
        found[record.name] = view[at:end]
        if checked and crc32(found[record.name]) != record.crc:
            raise FramingError(f"record {record.name} does not match its CRC")
    return found
