"""Parsing a tensor item: finds its payload, and how to view it as the tensor; and the verification of any item."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.strides import view_fits
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.dtypes import DTYPES, STORAGE_DTYPES
from aiockpt.format.index import TensorItem
from aiockpt.format.item.ziparchive import (
    CRC,
    END_RECORD,
    LOCAL_HEADER,
    FramingError,
    Record,
    SubclassItemError,
    data_offset,
    read_directory,
)
from aiockpt.format.pickle.machine import Function, PickleError, read_pickle

HEAD_BYTES = 2048
"""The beginning of an item holds the framing before the payload, with room to spare."""
TAIL_BYTES = 2048
"""The end of an item holds the framing after the payload, with room to spare."""
_SHORT_BYTES = 2048
_MOST_PICKLE_BYTES = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StorageRef:
    key: str
    dtype: torch.dtype
    nbytes: int


class _StridedView(NamedTuple):
    """The contents of data.pkl: a strided view of one storage."""

    key: str  # of the storage
    item: TensorItem  # without payload offset and CRC; ``nbytes`` of the storage


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_DIMS:
        raise FramingError("data.pkl has sizes or strides that are none")
    return tuple(map(_number, value))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise FramingError("data.pkl has a number that is out of range, or none at all")
    return value


def _rebuild_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
) -> _StridedView:
    return _rebuild_v3(storage, offset, shape, stride, _grad, _hooks, getattr(storage, "dtype", None), metadata)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> _StridedView:
    if type(storage) is not _StorageRef or not isinstance(dtype, torch.dtype):
        raise FramingError("data.pkl does not describe a tensor")
    if metadata is not None and (type(metadata) is not dict or len(metadata) > len(_FLAGS)):
        raise FramingError("data.pkl describes a tensor with more than its values")
    conj, neg = (bool(metadata and metadata.get(name)) for name in _FLAGS)
    if (conj and not dtype.is_complex) or (neg and dtype not in _NEGATED):
        raise FramingError(f"data.pkl describes a {dtype} with flags that it can't have")
    sizes, strides, begin = _sizes(shape), _sizes(stride), _number(offset)
    return _StridedView(storage.key, TensorItem(dtype, sizes, strides, begin, 0, storage.nbytes, None, conj, neg))


def _rebuild_parameter(data: Any, _grad: Any, _hooks: Any, _state: Any = None) -> _StridedView:
    if type(data) is not _StridedView:
        raise FramingError("data.pkl does not describe a tensor")
    return data


_FLAGS = ("conj", "neg")
_NEGATED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}
)
_MOST = 2**63 - 1
_FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor_v2"): Function(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): Function(_rebuild_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Function(_rebuild_parameter),
    ("collections", "OrderedDict"): Function(dict),  # no hooks
}


_SUBCLASSES = {
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._tensor", "_rebuild_from_type"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
}


def _find_global(module: str, name: str) -> Any:
    known = _FUNCTIONS.get((module, name))
    if known is not None:
        return known
    if module == "torch" and (name in DTYPES or name in STORAGE_DTYPES):
        return DTYPES.get(name) or STORAGE_DTYPES[name]
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return torch.uint8
    if (module, name) in _SUBCLASSES:
        raise SubclassItemError("torch has pickled it as an object, as a tensor of a subclass")
    raise FramingError(f"data.pkl names {module[:200]}.{name[:200]}, which no plain tensor needs")


def _persistent_load(pid: Any) -> _StorageRef:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise FramingError("data.pkl refers to something other than a storage")
    _, dtype, key, _, numel = pid
    if not isinstance(dtype, torch.dtype) or type(key) is not str:
        raise FramingError("data.pkl refers to a storage without a dtype or a name")
    return _StorageRef(key, dtype, _number(numel) * dtype.itemsize)


def _read_view(data_pkl: bytes) -> _StridedView:
    try:
        view = read_pickle(data_pkl, _find_global, _persistent_load)
    except PickleError as exc:
        raise FramingError(f"data.pkl is damaged: {exc}") from exc
    if not isinstance(view, _StridedView):
        raise FramingError("data.pkl does not describe one plain tensor")
    return view


_read_short_view = lru_cache(maxsize=16_384)(_read_view)


def parse_tensor_item(length: int, fetch: Callable[[int, int], bytes]) -> TensorItem:
    """Parse an item of ``length`` bytes; ``fetch`` returns the bytes at (offset, size), and never reads the payload."""
    return _parse(length, fetch)[0]


def _parse(length: int, fetch: Callable[[int, int], bytes]) -> tuple[TensorItem, Record, Record]:
    """Return the item, and the records of its pickle and of its payload."""
    records = {r.name.partition("/")[2]: r for r in read_directory(length, fetch)}
    if "data.pkl" not in records:
        raise FramingError("the item has no data.pkl")
    pkl = records["data.pkl"]
    if pkl.size > min(length, _MOST_PICKLE_BYTES):
        raise FramingError(f"data.pkl has {pkl.size} bytes, too many for one tensor")
    data_pkl = bytes(fetch(data_offset(pkl, fetch), pkl.size))
    has_crcs = bool(pkl.crc)
    if has_crcs and crc32(data_pkl) != pkl.crc:
        raise FramingError("data.pkl does not match its CRC")
    if "byteorder" in records and fetch(data_offset(records["byteorder"], fetch), 6) != b"little":
        raise FramingError("big-endian tensors can't be read here")
    key, item = (_read_short_view if len(data_pkl) <= _SHORT_BYTES else _read_view)(data_pkl)
    payload = records.get(f"data/{key}")
    if payload is None or payload.size < item.nbytes:
        raise FramingError("the record of the tensor's bytes is missing or too short")
    at = data_offset(payload, fetch)
    if at + payload.size > length:
        raise FramingError("the tensor lies outside its item")
    if not view_fits(item.storage_offset, item.shape, item.stride, item.dtype.itemsize, payload.size):
        raise FramingError("the tensor is larger than its bytes")
    item = item._replace(payload_offset=at, nbytes=payload.size, crc=payload.crc if has_crcs else None)
    return item, pkl, payload


def with_crc(template: TensorItem, item: memoryview, crc_at: int) -> TensorItem:
    """Return a template with the CRC at an offset of an item."""
    crc = CRC.unpack_from(item, crc_at)[0]
    return TensorItem(*template[:6], crc, template.conj, template.neg)  # _replace() takes twice as long


class TemplateCache(Generic[T]):
    """Framings of items seen before, for items with the same length and the same bytes before the payload.

    A checkpoint holds thousands of such items, and parsing one takes far longer than comparing its beginning.
    """

    def __init__(self) -> None:
        self._prefix_bytes: dict[int, int] = {}  # by length of the item, as of the last that was added
        self._templates: dict[tuple[bytes, int], T] = {}

    def find(self, item: memoryview) -> T | None:
        length = len(item)
        return self._templates.get((bytes(item[: self._prefix_bytes.get(length, 0)]), length))

    def add(self, item: memoryview, payload_offset: int, template: T) -> None:
        self._prefix_bytes[len(item)] = payload_offset
        self._templates[bytes(item[:payload_offset]), len(item)] = template


class ItemParser:
    """Parses many tensor items; the framing of most of them was seen before."""

    def __init__(self) -> None:
        self._templates = TemplateCache[tuple[TensorItem, int]]()

    def parse(self, item: memoryview) -> TensorItem:
        """Parse an item whose bytes are all in memory; errors as of `parse_tensor_item`."""
        known = self._templates.find(item)
        if known is not None:
            template, crc_at = known
            return template if template.crc is None else with_crc(template, item, crc_at)

        def fetch(offset: int, size: int) -> bytes:
            return bytes(item[offset : offset + size])

        parsed, pkl, payload = _parse(len(item), fetch)
        # The bytes before the payload identify a template, so they must include the description of the tensor.
        if pkl.header_offset < payload.header_offset:
            self._templates.add(item, parsed.payload_offset, (parsed, payload.crc_at))
        return parsed


# --- verification: every record against its CRC, and local headers against the zip directory -------------
# Loading a tensor reads little of its item; verification compares everything that has a CRC or is stored twice.


_END64 = struct.Struct("<4sQ2H2I4Q4sIQI")  # with the locator behind it
_LENGTHS = struct.Struct("<3H")  # of the name, extra fields and comment of an entry
_DESCRIPTOR_FLAG = 8
_DIRECTORY_FLAG = 16
_DESCRIPTOR = b"PK\7\10"
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
        tensor = _parse_plain(length, fetch) if is_tensor else None
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


def _parse_plain(length: int, fetch: Callable[[int, int], bytes]) -> TensorItem | None:
    """Parse an item; None for a tensor of a subclass, of whose records only the CRCs can be checked."""
    try:
        return parse_tensor_item(length, fetch)
    except SubclassItemError:
        return None


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

    tensor: TensorItem
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
        self._templates = TemplateCache[_Template]()

    def check(self, item: memoryview, *, is_tensor: bool) -> tuple[Framed, list[CheckedRecord]]:
        """Check a whole item; return its framing, and the records that do not match their CRC."""
        template = self._templates.find(item) if is_tensor else None
        if template is not None and template.matches(item):
            tensor = with_crc(template.tensor, item, template.payload.crc_at[0])
            return Framed(tensor, (template.payload,)), []

        def fetch(offset: int, size: int) -> bytes:
            return bytes(item[offset : offset + size])

        framed = read_framing(len(item), fetch, is_tensor=is_tensor)
        wrong = [each for each in framed.checked if crc32(item[each.start : each.stop]) != each.crc]
        if framed.tensor is not None and not wrong:
            self._learn(item, framed.tensor, framed.checked)
        return framed, wrong

    def _learn(self, item: memoryview, tensor: TensorItem, checked: Sequence[CheckedRecord]) -> None:
        """Make an intact item a template, if its payload is one record."""
        start = tensor.payload_offset
        payload = next((each for each in checked if each.start == start and each.stop > start), None)
        if payload is None or payload.stop != start + tensor.nbytes:
            return
        # The id differs between items, because torch makes it from the CRCs of the other records.
        varying = tuple(
            s for s in checked if s.start >= start and (s is payload or s.name.endswith("/.data/serialization_id"))
        )
        holes = sorted({(s.start, s.stop) for s in varying} | {(at, at + CRC.size) for s in varying for at in s.crc_at})
        fixed = []
        end = start
        for low, high in [*holes, (len(item), len(item))]:
            if low > end:
                fixed.append((end, bytes(item[end:low])))
            end = max(end, high)
        self._templates.add(item, start, _Template(tensor, payload, varying, tuple(fixed)))
