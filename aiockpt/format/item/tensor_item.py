"""Parsing a tensor item: finds its payload, and how to view it as the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from isal.isal_zlib import crc32

from aiockpt.core.strides import view_fits
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.dtypes import DTYPES, STORAGE_DTYPES
from aiockpt.format.index import TensorItem
from aiockpt.format.item.ziparchive import CRC, FramingError, Record, data_offset, read_directory
from aiockpt.format.pickle.machine import Function, PickleError, read_pickle

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _find_global(module: str, name: str) -> Any:
    known = _FUNCTIONS.get((module, name))
    if known is not None:
        return known
    if module == "torch" and (name in DTYPES or name in STORAGE_DTYPES):
        return DTYPES.get(name) or STORAGE_DTYPES[name]
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return torch.uint8
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

    def __len__(self) -> int:
        return len(self._templates)

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
