"""Reading a tensor item: where its payload is, and how to see it as the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from isal.isal_zlib import crc32

from aiockpt.core.strides import view_fits
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.index import TensorItem
from aiockpt.format.item.framing import CRC
from aiockpt.format.item.ziparchive import FramingError, Record, data_offset, read_directory
from aiockpt.format.pickle.fast_pickle import read_pickle
from aiockpt.format.pickle.machine import Function, PickleError

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES = 2048
"""How much of an item's beginning holds the framing before the payload, with room to spare."""
TAIL_BYTES = 2048
"""How much of an item's end holds the framing after the payload, with room to spare."""
_SHORT_BYTES = 2048
_MOST_PICKLE_BYTES = 1 << 16


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
) -> _View:
    return _rebuild_v3(storage, offset, shape, stride, _grad, _hooks, getattr(storage, "dtype", None), metadata)


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
    if type(storage) is not _Storage or not isinstance(dtype, torch.dtype):
        raise FramingError("data.pkl does not describe a tensor")
    if metadata is not None and (type(metadata) is not dict or len(metadata) > len(_FLAGS)):
        raise FramingError("data.pkl describes a tensor with more than its values")
    flags = frozenset(name for name in _FLAGS if metadata and metadata.get(name))
    if ("conj" in flags and not dtype.is_complex) or ("neg" in flags and dtype not in _NEGATED):
        raise FramingError(f"data.pkl describes a {dtype} with flags that it can't have")
    return _View(storage, _number(offset), _sizes(shape), _sizes(stride), dtype, flags)


def _rebuild_parameter(data: Any, _grad: Any, _hooks: Any, _state: Any = None) -> _View:
    if type(data) is not _View:
        raise FramingError("data.pkl does not describe a tensor")
    return data


def _no_hooks() -> dict[str, Any]:
    return {}


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
    ("collections", "OrderedDict"): Function(_no_hooks),
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


def _find_global(module: str, name: str) -> Any:
    known = _FUNCTIONS.get((module, name))
    if known is not None:
        return known
    if module == "torch" and (name in DTYPES or name in _STORAGE_DTYPES):
        return DTYPES.get(name) or _STORAGE_DTYPES[name]
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return torch.uint8
    raise FramingError(f"data.pkl names {module[:200]}.{name[:200]}, which no plain tensor needs")


def _persistent_load(pid: Any) -> _Storage:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise FramingError("data.pkl refers to something other than a storage")
    _, dtype, key, _, numel = pid
    if not isinstance(dtype, torch.dtype) or type(key) is not str:
        raise FramingError("data.pkl refers to a storage without a dtype or a name")
    return _Storage(key, dtype, _number(numel) * dtype.itemsize)


def _read_view(data_pkl: bytes) -> _View:
    try:
        view = read_pickle(data_pkl, _find_global, _persistent_load)
    except PickleError as exc:
        raise FramingError(f"data.pkl is damaged: {exc}") from exc
    if not isinstance(view, _View):
        raise FramingError("data.pkl does not describe one plain tensor")
    return view


_read_short_view = lru_cache(maxsize=16_384)(_read_view)


def _described(records: dict[str, Record], length: int, fetch: Callable[[int, int], bytes]) -> tuple[_View, bool]:
    """Read what data.pkl says, and tell whether the item carries CRCs."""
    if "data.pkl" not in records:
        raise FramingError("the item has no data.pkl")
    pkl = records["data.pkl"]
    if pkl.size > min(length, _MOST_PICKLE_BYTES):
        raise FramingError(f"data.pkl has {pkl.size} bytes, too many for one tensor")
    data_pkl = bytes(fetch(data_offset(pkl, fetch), pkl.size))
    checked = bool(pkl.crc)
    if checked and crc32(data_pkl) != pkl.crc:
        raise FramingError("data.pkl does not match its CRC")
    if "byteorder" in records and fetch(data_offset(records["byteorder"], fetch), 6) != b"little":
        raise FramingError("big-endian tensors can't be read here")
    return (_read_short_view if len(data_pkl) <= _SHORT_BYTES else _read_view)(data_pkl), checked


def parse_tensor_item(length: int, fetch: Callable[[int, int], bytes]) -> TensorItem:
    """Find the payload of a tensor item and how to see it.

    Args:
        length: the length of the item in bytes.
        fetch: gives the bytes at (offset in the item, size); never called for the payload.

    Raises:
        FramingError: the item is not the ``torch.save`` file of one plain strided tensor.
    """
    records = {r.name.partition("/")[2]: r for r in read_directory(length, fetch)}
    view, checked = _described(records, length, fetch)
    payload = records.get(f"data/{view.storage.key}")
    if payload is None or payload.size < view.storage.nbytes:
        raise FramingError("the record of the tensor's bytes is missing or too short")
    at = data_offset(payload, fetch)
    if at + payload.size > length:
        raise FramingError("the tensor lies outside its item")
    if not view_fits(view.offset, view.shape, view.stride, view.dtype.itemsize, payload.size):
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
            return template._replace(crc=CRC.unpack_from(item, crc_at)[0])

        def fetch(offset: int, size: int) -> bytes:
            return bytes(item[offset : offset + size])

        parsed = parse_tensor_item(len(item), fetch)
        if parsed.payload_offset == self._prefix_bytes:
            name = b"/data/0"
            entry = next((r for r in read_directory(len(item), fetch) if r.name.encode().endswith(name)), None)
            if entry is not None:
                self._known[key] = (parsed, entry.crc_at)
        return parsed
