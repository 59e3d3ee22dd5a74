"""Reading a tensor item: where its payload is, and how to see it as the tensor."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from isal.isal_zlib import crc32

from aiockpt.format.index import TensorItem
from aiockpt.format.torchzip import CRC
from aiockpt.format.ziparchive import FramingError, data_offset, read_directory

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES = 2048
"""How much of an item's beginning holds the framing before the payload, with room to spare."""
TAIL_BYTES = 2048
"""How much of an item's end holds the framing after the payload, with room to spare."""


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
    records = {r.name.partition("/")[2]: r for r in read_directory(length, fetch)}
    if "data.pkl" not in records:
        raise FramingError("the item has no data.pkl")
    pkl = records["data.pkl"]
    data_pkl = bytes(fetch(data_offset(pkl, fetch), pkl.size))
    checked = bool(pkl.crc)
    if checked and crc32(data_pkl) != pkl.crc:
        raise FramingError("data.pkl does not match its CRC")
    if "byteorder" in records and fetch(data_offset(records["byteorder"], fetch), 6) != b"little":
        raise FramingError("big-endian tensors can't be read here")
    view = _read_view(data_pkl)
    payload = records.get(f"data/{view.storage.key}")
    if payload is None or payload.size < view.storage.nbytes:
        raise FramingError("the record of the tensor's bytes is missing or too short")
    if len(view.shape) != len(view.stride):
        raise FramingError("sizes and strides differ in number")
    at = data_offset(payload, fetch)
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
            return replace(template, crc=CRC.unpack_from(item, crc_at)[0])

        def fetch(offset: int, size: int) -> bytes:
            return bytes(item[offset : offset + size])

        parsed = parse_tensor_item(len(item), fetch)
        if parsed.payload_offset == self._prefix_bytes:
            name = b"/data/0"
            entry = next((r for r in read_directory(len(item), fetch) if r.name.encode().endswith(name)), None)
            if entry is not None:
                self._known[key] = (parsed, entry.crc_at)
        return parsed
