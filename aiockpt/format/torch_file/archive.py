"""The records of a ``torch.save`` file, and placeholders for the storages that its pickle refers to.

Source of the layout: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import ItemRange
from aiockpt.format.item.ziparchive import (
    LEGACY_MAGIC,
    LOCAL_HEADER,
    ZIP_MAGIC,
    FramingError,
    Record,
    data_offset,
    read_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ALIGNMENT = 64
_WIDE = 0xFFFFFFFF
_RESTORE = "restore it, or use an older checkpoint"


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """The records of a ``torch.save`` file."""

    name: str
    length: int
    records: Mapping[str, Record]  # by name, without the archive's name in front
    fetch: Callable[[int, int], bytes]  # returns the bytes at (offset, size)
    following: Mapping[int, int]  # from the offset of a record's header to that of the next record
    alignment: int = _ALIGNMENT  # of the payloads' offsets

    def storage_bytes(self) -> dict[str, int]:
        """Return the size of each storage, by its key in the pickle."""
        return {name[5:]: record.size for name, record in self.records.items() if name.startswith("data/")}

    def read(self, record_name: str) -> bytes:
        """Read a small record and check its CRC, if it has one."""
        record = self.records[record_name]
        data = self.fetch(self.payload_offset(record), record.size)
        if len(data) != record.size or (record.crc and crc32(data) != record.crc):
            raise CorruptCheckpointError(f"the record {record_name} of {self.name} does not match its CRC; {_RESTORE}")
        return data

    def payload_offset(self, record: Record) -> int:
        """Return the offset of a record's bytes, if possible without reading the header before them."""
        at = self._usual_offset(record)
        if at is None:
            try:
                at = data_offset(record, self.fetch)
            except FramingError as exc:
                raise _damaged(self.name, exc) from exc
        if at + record.size > self.length:
            raise CorruptCheckpointError(
                f"{self.name} ends at byte {self.length}, but its record {record.name} goes up to byte "
                f"{at + record.size}: it was truncated or changed; {_RESTORE}"
            )
        return at

    def _usual_offset(self, record: Record) -> int | None:
        """Compute the offset as torch's writer does; return it if the position of the next record confirms it."""
        wide_at, wide_size = record.header_offset >= _WIDE, record.size >= _WIDE
        extra = 4 + (4 if wide_at or wide_size else 0) + (8 if wide_at else 0) + (16 if wide_size else 0)
        start = record.header_offset + LOCAL_HEADER.size + len(record.name.encode()) + extra
        at = start + -start % self.alignment
        descriptor = (24 if wide_at or wide_size else 16) if record.size else 0
        return at if self.following.get(record.header_offset) == at + record.size + descriptor else None


def _damaged(name: str, exc: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name} is damaged or cut short, or no torch.save file: {exc}; {_RESTORE}")


def open_archive(name: str, length: int, fetch: Callable[[int, int], bytes]) -> TorchArchive:
    """Read the directory of a ``torch.save`` file."""
    head = fetch(0, min(length, 64))
    if not head.startswith(ZIP_MAGIC):
        if LEGACY_MAGIC in head:
            raise LoadError(
                f"{name} is in the format of torch before 1.6, which is not read in parts; read it with torch.load "
                "and save it again"
            )
        raise CorruptCheckpointError(f"{name} does not begin as a torch.save file does, but with {head[:8]!r}")
    try:
        listed = read_directory(length, fetch)
    except FramingError as exc:
        raise _damaged(name, exc) from exc
    records = {record.name.partition("/")[2]: record for record in listed}
    if len(records) != len(listed):
        raise CorruptCheckpointError(f"{name} has two records of one name; {_RESTORE}")
    headers = sorted(record.header_offset for record in listed)
    archive = TorchArchive(name, length, records, fetch, dict(pairwise(headers)))
    _check_kind(archive)
    alignment = archive.read(".storage_alignment") if ".storage_alignment" in records else b""
    if alignment.isdigit() and 0 < int(alignment[:9]) != _ALIGNMENT:
        archive = replace(archive, alignment=int(alignment[:9]))
    return archive


def _check_kind(archive: TorchArchive) -> None:
    name, records = archive.name, archive.records
    if "constants.pkl" in records or any(inner.startswith("code/") for inner in records):
        raise LoadError(
            f"{name} is a TorchScript program, not a torch.save file; open it with torch.jit.load, and save its "
            "state_dict()"
        )
    if "data.pkl" not in records:
        raise LoadError(f"{name} is a zip file without data.pkl, so torch.save did not write it; name another file")
    if "byteorder" in records and (order := archive.read("byteorder")) != b"little":
        raise LoadError(
            f"{name} was written with the byte order {order!r}, which is not read here; read it with torch.load and "
            "save it again on a little-endian machine"
        )


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A storage of a file."""

    placeholder: torch.UntypedStorage  # has no memory
    nbytes: int  # according to the pickle
    range: ItemRange  # of its record's bytes
    crc: int | None  # of these bytes; None if the writer left it out


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Makes the placeholders of storages, one for each record."""

    archive: TorchArchive
    by_key: dict[str, StoredStorage] = field(default_factory=dict)  # by key in the pickle

    def by_address(self) -> dict[int, StoredStorage]:
        """Return the storages by the address of their placeholder, which every view of it has."""
        return {stored.placeholder._cdata: stored for stored in self.by_key.values()}

    def load(self, pid: Any) -> Any:
        """Return the placeholder of a persistent id in the pickle."""
        kind, storage_type, key, _location, numel = pid if type(pid) is tuple and len(pid) == 5 else (None,) * 5
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else getattr(storage_type, "dtype", None)
        if (
            kind not in ("storage", b"storage")
            or not isinstance(dtype, torch.dtype)
            or type(key) is not str
            or type(numel) is not int
            or numel < 0
        ):
            raise CorruptCheckpointError(
                f"the pickle in {self.archive.name} refers to something outside itself that is no storage; {_RESTORE}"
            )
        nbytes = numel * dtype.itemsize
        stored = self.by_key.get(key)
        if stored is None:
            stored = self.by_key[key] = self._make(key, nbytes)
        elif stored.nbytes != nbytes:
            raise CorruptCheckpointError(
                f"the pickle in {self.archive.name} gives the storage {key} both {stored.nbytes} and {nbytes} bytes; "
                f"{_RESTORE}"
            )
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=stored.placeholder, dtype=dtype, _internal=True)

    def _make(self, key: str, nbytes: int) -> StoredStorage:
        record = self.archive.records.get(f"data/{key}")
        if record is None or record.size < nbytes:
            found = "is missing" if record is None else f"has {record.size} bytes"
            raise CorruptCheckpointError(
                f"the record data/{key} of {self.archive.name} {found}, where a storage of {nbytes} bytes should be; "
                f"{_RESTORE}"
            )
        stored_at = ItemRange(self.archive.name, self.archive.payload_offset(record), record.size)
        untyped: Any = torch.UntypedStorage
        # Zero: the CRC was not computed.
        return StoredStorage(untyped(nbytes, device="meta"), nbytes, stored_at, record.crc or None)
