"""The framing of a tensor item: a whole ``torch.save`` file around one tensor's bytes.

A ``torch.save`` file is an uncompressed zip archive. For one tensor it holds a few small records, then the record
``data/0`` with the tensor's bytes (the *payload*), then more small records and the central directory. Everything except
the payload and its CRC depends on dtype, shape and stride alone. So ``torch.save`` itself produces it once, under
``torch.serialization.skip_data``, and it is kept as a prefix and a suffix.

Source of the layout: ``torch/serialization.py``.
"""

from __future__ import annotations

import io
import math
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from isal.isal_zlib import crc32

from aiockpt.format.item.ziparchive import CRC, Framing, FramingError, Record, data_offset, read_directory

CRC_IN_DESCRIPTOR = 4  # the offset of the CRC-32 behind a record's bytes
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # in the module mmap since Python 3.13


class SparseFile(io.BytesIO):
    """A file in memory for ``torch.save``, in which the bytes that it skips take no room."""

    def __init__(self) -> None:
        super().__init__()
        self._starts = [0]
        self._blocks = [bytearray()]

    @property
    def length(self) -> int:
        """Bytes written and skipped."""
        return self._starts[-1] + len(self._blocks[-1])

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._blocks[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            raise FramingError(f"torch.save moved in the file in a way that is not known: {offset}, {whence}")
        self._starts.append(self.length + offset)
        self._blocks.append(bytearray())
        return self._starts[-1]

    def fetch(self, offset: int, size: int) -> bytes:
        """Return bytes that were written in one go."""
        block, at = self._find(offset)
        return bytes(block[at : at + size])

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Replace bytes that were written, or fill skipped ones, of a gap in order."""
        block, at = self._find(offset)
        block[at : at + len(data)] = data

    def _find(self, offset: int) -> tuple[bytearray, int]:
        number = bisect_right(self._starts, offset) - 1
        return self._blocks[number], offset - self._starts[number]

    def blocks(self) -> list[tuple[int, bytearray]]:
        """Return each run of bytes between gaps, with its offset."""
        found: list[tuple[int, bytearray]] = []
        for start, block in zip(self._starts, self._blocks, strict=True):
            if found and found[-1][0] + len(found[-1][1]) == start:
                found[-1] = (found[-1][0], found[-1][1] + block)
            else:
                found.append((start, block))
        return found


def unbacked_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose storage has the right size but no memory behind it until touched."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu").as_strided(shape, stride)
    # NORESERVE: the kernel must not refuse a mapping as large as the tensor, none of which is ever touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    storage = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
    return storage.view(dtype).as_strided(shape, stride)


@lru_cache(maxsize=16_384)
def tensor_framing(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Framing:
    """Return the framing of a dense CPU tensor of any dtype that ``torch.save`` accepts; strides are in elements."""
    file = SparseFile()
    tensor = unbacked_tensor(dtype, shape, stride)
    with torch.serialization.skip_data():
        torch.save(tensor, file)
    return _framing_around(file, tensor.untyped_storage().nbytes(), "/data/0")


def pickle_framing(blob: bytes, nbytes: int) -> Framing:
    """Return the framing of a pickle of ``nbytes`` bytes in a ``torch.save`` file of an object without storages."""
    file = SparseFile()
    file.write(blob)
    return _framing_around(file, nbytes, "/data.pkl")


def fill_crcs(file: SparseFile, records: Iterable[Record]) -> None:
    """Fill in the CRCs of records: torch writes them only if it is set to, and knows the bytes."""
    for record in records:
        if record.size:
            begin = data_offset(record, file.fetch)
            crc = CRC.pack(crc32(file.fetch(begin, record.size)))
            file.store(begin + record.size + CRC_IN_DESCRIPTOR, crc)
            file.store(record.crc_at, crc)


def _framing_around(file: SparseFile, nbytes: int, name: str) -> Framing:
    """Split a file around the record with a name, and fill in the CRCs of the other records."""
    records = read_directory(file.length, file.fetch)
    payload = next(r for r in records if r.name.endswith(name))
    start = data_offset(payload, file.fetch)
    fill_crcs(file, [record for record in records if record is not payload])
    (_, head), *_ = blocks = file.blocks()
    image = b"".join(block for _, block in blocks)
    skipped = file.length - len(image)  # nothing for a pickle, and for an empty storage
    if payload.size != nbytes or skipped not in (0, nbytes) or (skipped and len(head) != start):
        raise FramingError("torch.save placed the tensor's bytes in a way that is not known")
    end = start + nbytes
    # An empty record has no data descriptor, and zero for a CRC.
    crc_at = (CRC_IN_DESCRIPTOR, payload.crc_at - end) if nbytes else ()
    return Framing(prefix=image[:start], suffix=image[end - skipped :], crc_at=crc_at, nbytes=nbytes)
