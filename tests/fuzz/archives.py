"""Mutations of zip archives, record by record with valid CRCs, and field by field."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from random import Random

from tests.fuzz import pickled

_SIGNATURES = re.compile(rb"PK(?:\x01\x02|\x03\x04|\x05\x06|\x06\x06|\x06\x07|\x07\x08)")
_FIELDS = {
    b"PK\1\2": ((4, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (38, 4), (42, 4)),
    b"PK\3\4": ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\6\6": ((0, 4), (4, 8), (16, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\6\7": ((4, 4), (8, 8), (16, 4)),
    b"PK\7\10": ((4, 4), (8, 8), (16, 8)),
}
_NAMES = (
    "data.pkl",
    "DATA.PKL",
    "data/0",
    "Data/0",
    "byteorder",
    "version",
    "constants.pkl",
    "code/x",
    "../x",
    "\0",
    "",
)


def changed(data: bytes, rng: Random, other: bytes) -> bytes:
    """Return a mutation of an archive."""
    roll = rng.random()
    if roll < 0.45:
        return _field_changed(data, rng)
    if roll < 0.85:
        return _rebuilt(data, rng, other)
    return bytes_changed(data, rng)


def bytes_changed(data: bytes, rng: Random, _other: bytes = b"") -> bytes:
    """Return a mutation of some bytes at a random place."""
    if not data:
        return b"\0"
    at, roll = rng.randrange(len(data)), rng.random()
    if roll < 0.4:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if roll < 0.6:
        return data[:at] + rng.randbytes(rng.choice((1, 2, 4, 8))) + data[at + rng.choice((0, 1, 4, 8)) :]
    if roll < 0.75:
        return data[:at]
    if roll < 0.9:
        end = at + rng.choice((1, 4, 30, 200))
        return data[:end] + data[at:]
    return data[:at] + data[at + rng.choice((1, 2, 16, 100)) :]


def _field_changed(data: bytes, rng: Random) -> bytes:
    found = [match.start() for match in _SIGNATURES.finditer(data)]
    if not found:
        return bytes_changed(data, rng)
    image = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.choice(found)
        offset, width = rng.choice(_FIELDS[data[at : at + 4]])
        begin = at + offset
        if begin + width > len(image):
            continue
        old = int.from_bytes(image[begin : begin + width], "little")
        value = rng.choice((old + 1, old - 1, old ^ 1 << rng.randrange(8 * width), *pickled.NUMBERS, rng.choice(found)))
        image[begin : begin + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(image)


def _rebuilt(data: bytes, rng: Random, other: bytes) -> bytes:
    """Return a new archive with changed records and valid CRCs."""
    try:
        records = records_of(data)
    except Exception:  # zipfile raises errors of many types for damaged archives
        return bytes_changed(data, rng)
    records = records or [("archive/data.pkl", b"N.")]
    at, roll = rng.randrange(len(records)), rng.random()
    name, content = records[at]
    if roll < 0.4:
        records = [(n, pickled.changed(c, rng, other)) if n.endswith("data.pkl") else (n, c) for n, c in records]
    elif roll < 0.55:
        records.insert(rng.randrange(len(records) + 1), (_name(name, rng), rng.choice(records)[1]))
    elif roll < 0.65:
        records[at] = (_name(name, rng), content)
    elif roll < 0.75:
        del records[at]
    elif roll < 0.85:
        rng.shuffle(records)
    else:
        records[at] = (name, bytes_changed(content, rng))
    return written(records, compressed=at if rng.random() < 0.1 else -1)


def records_of(data: bytes) -> list[tuple[str, bytes]]:
    """Return the name and content of each record below 1 MiB."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist() if info.file_size < 1 << 20]


def _name(name: str, rng: Random) -> str:
    folder = rng.choice((name.partition("/")[0], name.partition("/")[0], "b", "", "archive/x"))
    return f"{folder}/{rng.choice(_NAMES)}" if rng.random() < 0.8 else name.upper()


def written(records: list[tuple[str, bytes]], compressed: int = -1) -> bytes:
    """Return an archive of these records, which may have equal names; ``compressed`` is the index of one to deflate."""
    body, directory = b"", b""
    for number, (name, content) in enumerate(records):
        encoded = name.encode("utf-8", "replace")
        stored = zlib.compress(content, wbits=-15) if number == compressed else content
        method, crc = (8 if number == compressed else 0), zlib.crc32(content)
        common = struct.pack("<5H3I2H", 20, 0, method, 0, 0, crc, len(stored), len(content), len(encoded), 0)
        directory += b"PK\1\2\x14\0" + common + struct.pack("<3H2I", 0, 0, 0, 0, len(body)) + encoded
        body += b"PK\3\4" + common + encoded + stored
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(records), len(records), len(directory), len(body), 0)
    return body + directory + end
