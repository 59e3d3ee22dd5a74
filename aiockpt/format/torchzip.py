"""The framing of a tensor item: a whole ``torch.save`` file around one tensor's bytes.

A ``torch.save`` file is an uncompressed zip archive. For one tensor it holds a few small records, then the
record ``data/0`` with the tensor's bytes (the *payload*), then more small records and the central directory.
Everything but the payload and its CRC depends on dtype, shape and stride alone, so it is produced once by
``torch.save`` itself under ``torch.serialization.skip_data`` and kept as a prefix and a suffix.

Source of the layout: PKWARE's APPNOTE.TXT for zip, ``torch/serialization.py`` for the records.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from isal.isal_zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CRC = struct.Struct("<I")

# Python names it since 3.13.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

HEAD_BYTES = 2048
"""How much of an item's beginning holds the framing before the payload, with room to spare."""
TAIL_BYTES = 2048
"""How much of an item's end holds the framing after the payload, with room to spare."""


class FramingError(ValueError):
    """The bytes are not the zip framing of one plain strided tensor."""


@dataclass(frozen=True, slots=True)
class Framing:
    """What stands around a payload of ``nbytes`` bytes in an item.

    Attributes:
        prefix: the bytes before the payload.
        suffix: the bytes after it, with zero in place of the payload's CRC.
        crc_at: the offsets in ``suffix`` where that CRC-32 belongs, as little-endian uint32; none for no bytes.
        nbytes: the length of the payload in bytes.
    """

    prefix: bytes
    suffix: bytes
    crc_at: tuple[int, ...]
    nbytes: int

    @property
    def length(self) -> int:
        """The length of the whole item in bytes."""
        return len(self.prefix) + self.nbytes + len(self.suffix)

    def sealed_suffix(self, crc: int) -> bytes:
        """Give the suffix with the payload's CRC-32 filled in."""
        suffix = bytearray(self.suffix)
        for at in self.crc_at:
            _CRC.pack_into(suffix, at, crc)
        return bytes(suffix)


@dataclass(frozen=True, slots=True)
class _Record:
    """One entry of a central directory; offsets count from the beginning of the item."""

    name: str
    header_offset: int
    size: int
    crc: int
    crc_at: int


class _Sink(io.BytesIO):
    """Takes what ``torch.save`` writes and keeps the place of the bytes that it skips."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.skipped: tuple[int, int] | None = None
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        self.position += len(self.parts[-1])
        return len(self.parts[-1])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or self.skipped is not None:
            raise FramingError(f"torch.save moved in the file in a way that is not known: {offset}, {whence}")
        self.skipped = (self.position, offset)
        self.position += offset
        return self.position


def _unbacked_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Make a tensor whose storage has the right size but no memory behind it until touched."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu").as_strided(shape, stride)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    storage = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
    return storage.view(dtype).as_strided(shape, stride)


@lru_cache(maxsize=16_384)
def tensor_framing(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Framing:
    """Give the framing of a dense CPU tensor, without its bytes.

    Args:
        dtype: any dtype that ``torch.save`` accepts.
        shape: the sizes.
        stride: the strides in elements; the tensor fills its storage without gaps.
    """
    sink = _Sink()
    tensor = _unbacked_tensor(dtype, shape, stride)
    with torch.serialization.skip_data():
        torch.save(tensor, sink)
    nbytes = tensor.untyped_storage().nbytes()
    data = b"".join(sink.parts)
    start = sink.skipped[0] if sink.skipped is not None else len(data)
    return _framing_around(data[:start], data[start:], nbytes)


def _framing_around(prefix: bytes, rest: bytes, nbytes: int) -> Framing:
    """Split what ``torch.save`` wrote, and fill in the CRCs of the small records."""

    def fetch(offset: int, size: int) -> bytes:
        if offset < len(prefix):
            return prefix[offset : offset + size]
        return rest[offset - len(prefix) - gap :][:size]

    gap = nbytes if rest else 0
    length = len(prefix) + gap + len(rest)
    records = _directory(length, fetch)
    payload = next(r for r in records if r.name.endswith("/data/0"))
    payload_offset = _data_offset(payload, fetch)
    if not gap:  # nothing was skipped: an empty storage has no bytes to skip
        whole = prefix + rest
        prefix, rest = whole[:payload_offset], whole[payload_offset + nbytes :]
        gap = nbytes
    if payload_offset != len(prefix) or payload.size != nbytes:
        raise FramingError("torch.save placed the tensor's bytes in a way that is not known")
    # The small records carry CRCs only if torch is set to compute them: fill them in either way.
    image = bytearray(prefix + rest)
    for record in records:
        if record is not payload:
            begin = _data_offset(record, fetch)
            crc = crc32(fetch(begin, record.size))
            for at in (begin + record.size + 4, record.crc_at):
                _CRC.pack_into(image, at if at < len(prefix) else at - nbytes, crc)
    end = payload_offset + nbytes
    return Framing(
        prefix=bytes(image[: len(prefix)]),
        suffix=bytes(image[len(prefix) :]),
        # A record without bytes has no data descriptor, and zero for a CRC.
        crc_at=(4, payload.crc_at - end) if nbytes else (),
        nbytes=nbytes,
    )


def _directory(length: int, fetch: Callable[[int, int], bytes]) -> list[_Record]:
    """Read the central directory of a zip of ``length`` bytes."""
    try:
        tail_at = max(0, length - _END.size - _LOCATOR64.size)
        tail = fetch(tail_at, length - tail_at)
        end = _END.unpack(tail[-_END.size :])
        if end[0] != b"PK\5\6":
            raise FramingError("no end-of-directory record where the item ends")
        count, size, offset = end[4], end[5], end[6]
        if tail[: -_END.size][-_LOCATOR64.size :][:4] == b"PK\6\7":
            locator = _LOCATOR64.unpack(tail[-_END.size - _LOCATOR64.size : -_END.size])
            end64 = _END64.unpack(fetch(locator[2], _END64.size))
            count, size, offset = end64[7], end64[8], end64[9]
        if not 0 <= offset <= offset + size <= length:
            raise FramingError("the zip directory lies outside the item")
        return _entries(fetch(offset, size), offset, count)
    except (struct.error, UnicodeDecodeError, IndexError) as exc:
        raise FramingError(f"the zip directory is damaged: {exc}") from exc


def _entries(directory: bytes, offset: int, count: int) -> list[_Record]:
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
        name = directory[name_at:extra_at].decode()
        records.append(_Record(name, header, size, crc, offset + at + 16))
        at = extra_at + entry[11] + entry[12]
    return records


def _zip64_sizes(extra: bytes, size: int, compressed: int, header: int) -> tuple[int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, width = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{width // 8}Q", extra, at + 4))
            size = next(values) if size == 0xFFFFFFFF else size
            if compressed == 0xFFFFFFFF:
                next(values)
            header = next(values) if header == 0xFFFFFFFF else header
        at += 4 + width
    return size, header


def _data_offset(record: _Record, fetch: Callable[[int, int], bytes]) -> int:
    header = fetch(record.header_offset, _LOCAL.size)
    if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
        raise FramingError(f"the header of record {record.name} is damaged")
    fields = _LOCAL.unpack(header)
    return record.header_offset + _LOCAL.size + int(fields[9]) + int(fields[10])


# --- reading an item ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorItem:
    """Where a tensor's bytes stand in its item, and how to see them as the tensor.

    Attributes:
        dtype: the dtype of the tensor.
        shape: its sizes.
        stride: its strides, in elements.
        storage_offset: where the tensor starts in the payload, in elements.
        payload_offset: where the payload starts in the item, in bytes.
        nbytes: the length of the payload, in bytes.
        crc: the payload's CRC-32, or None where the writer left CRCs out.
        conj: the values are stored conjugated.
        neg: the values are stored negated.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    nbytes: int
    crc: int | None
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class _View:
    """What data.pkl says: a strided view of one storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    flags: frozenset[str]


def _rebuild_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
) -> _View:
    return _rebuild_v3(storage, offset, shape, stride, _grad, _hooks, storage.dtype, metadata)


def _rebuild_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> _View:
    flags = frozenset(key for key, value in (metadata or {}).items() if value)
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise FramingError("data.pkl does not describe a tensor")
    return _View(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)), dtype, flags)


def _rebuild_parameter(data: Any, _grad: Any, _hooks: Any, _state: Any = None) -> _View:
    if not isinstance(data, _View):
        raise FramingError("data.pkl does not describe a tensor")
    return data


_REBUILD: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("collections", "OrderedDict"): OrderedDict,
}


_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


class _TensorUnpickler(pickle.Unpickler):
    """Reads data.pkl without making any object but sizes and names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILD:
            return _REBUILD[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        raise FramingError(f"data.pkl names {module}.{name}, which no plain tensor needs")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise FramingError("data.pkl refers to something other than a storage")
        return _Storage(str(key), dtype, int(numel) * dtype.itemsize)


@lru_cache(maxsize=16_384)
def _read_view(data_pkl: bytes) -> _View:
    try:
        view = _TensorUnpickler(io.BytesIO(data_pkl)).load()
    except FramingError:
        raise
    except Exception as exc:  # unpickling damaged bytes raises nearly anything
        raise FramingError(f"data.pkl is damaged: {exc}") from exc
    if not isinstance(view, _View):
        raise FramingError("data.pkl does not describe one plain tensor")
    return view


def parse_tensor_item(length: int, fetch: Callable[[int, int], bytes]) -> TensorItem:
    """Find the payload of a tensor item and how to see it.

    Args:
        length: the length of the item in bytes.
        fetch: gives the bytes at (offset in the item, size); never called for the payload.

    Raises:
        FramingError: the item is not the ``torch.save`` file of one plain strided tensor.
    """
    records = {r.name.partition("/")[2]: r for r in _directory(length, fetch)}
    if "data.pkl" not in records:
        raise FramingError("the item has no data.pkl")
    pkl = records["data.pkl"]
    data_pkl = bytes(fetch(_data_offset(pkl, fetch), pkl.size))
    checked = bool(pkl.crc)
    if checked and crc32(data_pkl) != pkl.crc:
        raise FramingError("data.pkl does not match its CRC")
    if "byteorder" in records and fetch(_data_offset(records["byteorder"], fetch), 6) != b"little":
        raise FramingError("big-endian tensors can't be read here")
    view = _read_view(data_pkl)
    payload = records.get(f"data/{view.storage.key}")
    if payload is None or payload.size < view.storage.nbytes:
        raise FramingError("the record of the tensor's bytes is missing or too short")
    at = _data_offset(payload, fetch)
    last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    if min((*view.shape, *view.stride, view.offset), default=0) < 0 or at + payload.size > length:
        raise FramingError("the tensor lies outside its item")
    if 0 not in view.shape and (last + 1) * view.dtype.itemsize > payload.size:
        raise FramingError("the tensor is larger than its bytes")
    return TensorItem(
        dtype=view.dtype,
        shape=view.shape,
        stride=view.stride,
        storage_offset=view.offset,
        payload_offset=at,
        nbytes=payload.size,
        crc=payload.crc if checked else None,
        conj="conj" in view.flags,
        neg="neg" in view.flags,
    )


class ItemParser:
    """Parses many items, most of which have the framing of one seen before.

    Two items of the same length with the same bytes before the payload differ only in payload and CRC.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], tuple[TensorItem, int]] = {}
        self._prefix_bytes = 704

    def parse(self, item: memoryview) -> TensorItem:
        """Parse an item whose bytes are all in memory.

        Raises:
            FramingError: see `parse_tensor_item`.
        """
        key = (bytes(item[: self._prefix_bytes]), len(item))
        known = self._known.get(key)
        if known is not None:
            template, crc_at = known
            if template.crc is None:
                return template
            return replace(template, crc=_CRC.unpack_from(item, crc_at)[0])

        def fetch(offset: int, size: int) -> bytes:
            return bytes(item[offset : offset + size])

        parsed = parse_tensor_item(len(item), fetch)
        if parsed.payload_offset == self._prefix_bytes:
            name = b"/data/0"
            entry = next((r for r in _directory(len(item), fetch) if r.name.encode().endswith(name)), None)
            if entry is not None:
                self._known[key] = (parsed, entry.crc_at)
        return parsed


def verify_archive(blob: bytes) -> str | None:
    """Check the CRC of every record of a whole ``torch.save`` file.

    Returns:
        None when all is well, or when the file carries no CRCs; else what is wrong.
    """

    def fetch(offset: int, size: int) -> bytes:
        return blob[offset : offset + size]

    if blob[:4] != b"PK\3\4":
        return None  # the format of torch < 1.6, which has no CRCs
    try:
        records = _directory(len(blob), fetch)
        if all(record.crc == 0 for record in records):
            return None
        for record in records:
            at = _data_offset(record, fetch)
            if crc32(fetch(at, record.size)) != record.crc:
                return f"record {record.name} does not match its CRC"
    except FramingError as exc:
        return str(exc)
    return None
