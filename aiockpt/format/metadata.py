"""The `.metadata` file of a DCP checkpoint: written opcode by opcode, read without trusting it.

The file is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``. It is written here as pickle
opcodes rather than by building the objects, for three reasons: objects that many tensors have in common are
stored once, the part that stays the same between saves is reused as bytes, and no C function holds the
interpreter for the whole of it. It is read by an unpickler that knows the handful of names such a file may
contain, each replaced by a plain record of this module.

Source of the layout: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (`_StorageInfo`);
``pickletools.py`` of CPython for the opcodes.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

METADATA_NAME = ".metadata"
DCP_VERSION = "1.0.0"

ObjPath = tuple[str | int, ...]

_DCP = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item's bytes are: ``length`` bytes at ``offset`` of ``file``, a path relative to the checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One stored piece of a tensor: its place in the whole tensor, and its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ItemPlace


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A pickled object of the checkpoint."""

    place: ItemPlace


Entry = TensorEntry | ObjectEntry


@dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint holds: its entries by fully qualified name, and where each belongs in the state dict."""

    entries: Mapping[str, Entry]
    paths: Mapping[str, ObjPath]


# --- writing -----------------------------------------------------------------------------------------


class _Opcodes:
    """Emits pickle opcodes; a value that was remembered is written once and referred to afterwards."""

    def __init__(self, remembered: int = 0) -> None:
        self.out: list[bytes] = []
        self.remembered = remembered
        self._memo: dict[Any, bytes] = {}

    def put(self, key: Any) -> bytes:
        """Remember the value on top of the stack under ``key``; give the opcodes that push it again."""
        number = self.remembered.to_bytes(4, "little")
        self.remembered += 1
        self.out.append(b"r" + number)
        self._memo[key] = reference = b"j" + number
        return reference

    def get(self, key: Any) -> bool:
        """Push the remembered value, if there is one."""
        reference = self._memo.get(key)
        if reference is None:
            return False
        self.out.append(reference)
        return True

    def text(self, value: str) -> None:
        if not self.get(value):
            self.out.append(text_opcodes(value))
            self.put(value)

    def name(self, module: str, name: str) -> None:
        if not self.get((module, name)):
            self.text(module)
            self.text(name)
            self.out.append(b"\x93")
            self.put((module, name))

    def size(self, sizes: tuple[int, ...]) -> None:
        """Push ``torch.Size(sizes)``."""
        key = ("size", sizes)
        if not self.get(key):
            self.name("torch", "Size")
            self.out.append(b"(" + b"".join(map(int_opcodes, sizes)) + b"t\x85R")
            self.put(key)

    def prepared(self, push: Callable[..., None], *args: Any) -> bytes:
        """Remember a value without using it yet; give the opcodes that push it."""
        begin = len(self.out)
        push(*args)
        if not self.out[-1].startswith(b"r"):  # it was remembered before: take back the push
            reference = self.out.pop()
            del self.out[begin:]
            return reference
        self.out.append(b"0")
        return b"j" + self.out[-2][1:]


def text_opcodes(value: str) -> bytes:
    """Give the opcodes that push a string."""
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return b"\x8c%c" % len(data) + data
    return b"X" + struct.pack("<I", len(data)) + data


def int_opcodes(value: int) -> bytes:
    """Give the opcodes that push a non-negative integer."""
    if value < 256:
        return b"K%c" % value
    if value < 65_536:
        return b"M" + value.to_bytes(2, "little")
    if value < 2**31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a%c" % len(data) + data


@dataclass(frozen=True, slots=True)
class MetadataHead:
    """The part of `.metadata` that does not depend on where objects are; see `finish_metadata`."""

    data: bytes
    remembered: int


def encode_metadata(entries: Sequence[tuple[str, Entry]], paths: Mapping[str, ObjPath]) -> MetadataHead:
    """Encode everything that does not depend on where objects are.

    Args:
        entries: name and entry of each item, in the order of the state dict; each tensor with one chunk.
        paths: the path in the state dict of each name.
    """
    ops = _Opcodes()
    out = ops.out
    out.append(b"\x80\x04")
    ops.name(_DCP, "Metadata")
    out.append(b")\x81}(")
    ops.text("state_dict_metadata")
    out.append(b"}(")
    references = []
    for name, entry in entries:
        out.append(text_opcodes(name))
        references.append(ops.put(name))
        if isinstance(entry, TensorEntry):
            _tensor_metadata(ops, entry)
        elif not ops.get("an object"):
            ops.name(_DCP, "BytesStorageMetadata")
            out.append(b")\x81")
            ops.put("an object")
    out.append(b"u")
    ops.text("planner_data")
    out.append(b"}(")
    for (name, _), reference in zip(entries, references, strict=True):
        out.append(reference + b"(")
        for part in paths[name]:
            if isinstance(part, int):
                out.append(int_opcodes(part))
            else:
                ops.text(part)
        out.append(b"t")
    out.append(b"u")
    ops.text("storage_data")
    out.append(b"}")
    _storage_data(
        ops,
        [
            (reference, entry.chunks[0].offsets, entry.chunks[0].place)
            for (_, entry), reference in zip(entries, references, strict=True)
            if isinstance(entry, TensorEntry)
        ],
    )
    return MetadataHead(b"".join(out), ops.remembered)


def finish_metadata(head: MetadataHead, objects: Sequence[tuple[str, ItemPlace]]) -> bytes:
    """Complete `.metadata` with the places of the objects."""
    ops = _Opcodes(head.remembered)
    _storage_data(ops, [(text_opcodes(name), None, place) for name, place in objects])
    ops.text("storage_meta")
    ops.out.append(b"N")
    ops.text("version")
    ops.text(DCP_VERSION)
    ops.out.append(b"ub.")
    return head.data + b"".join(ops.out)


def _tensor_metadata(ops: _Opcodes, entry: TensorEntry) -> None:
    key = ("tensor", entry.dtype, entry.shape)
    if ops.get(key):
        return
    out = ops.out
    ops.name(_DCP, "TensorStorageMetadata")
    out.append(b")\x81}(")
    ops.text("properties")
    _properties(ops, entry.dtype)
    ops.text("size")
    ops.size(entry.shape)
    ops.text("chunks")
    out.append(b"]")
    ops.name(_DCP, "ChunkStorageMetadata")
    out.append(b")\x81}(")
    ops.text("offsets")
    ops.size(entry.chunks[0].offsets)
    ops.text("sizes")
    ops.size(entry.chunks[0].sizes)
    out.append(b"ubaub")
    ops.put(key)


def _properties(ops: _Opcodes, dtype: torch.dtype) -> None:
    """Push a TensorProperties with the five fields that every version of torch reads."""
    key = ("properties", dtype)
    if ops.get(key):
        return
    out = ops.out
    ops.name(_DCP, "TensorProperties")
    out.append(b")\x81(")
    ops.name("torch", str(dtype).removeprefix("torch."))
    if not ops.get("strided"):
        ops.name("torch.serialization", "_get_layout")
        ops.text("torch.strided")
        out.append(b"\x85R")
        ops.put("strided")
    out.append(b"\x89")
    if not ops.get("contiguous"):
        ops.name(_DCP, "_MEM_FORMAT_ENCODING")
        out.append(b"K\0\x85R")
        ops.put("contiguous")
    out.append(b"\x89tb")
    ops.put(key)


def _storage_data(ops: _Opcodes, items: Sequence[tuple[bytes, tuple[int, ...] | None, ItemPlace]]) -> None:
    """Add entries to the dict on top of the stack: the opcodes of the name, the offsets, the place."""
    out = ops.out
    index_head = ops.prepared(ops.name, _DCP, "MetadataIndex") + b")\x81}(" + ops.prepared(ops.text, "fqn")
    info = ops.prepared(ops.name, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    info_head = b"ub" + info + b")\x81}(" + ops.prepared(ops.text, "relative_path")
    index, offset, length = (ops.prepared(ops.text, key) for key in ("index", "offset", "length"))
    index_tails = {
        offsets: index + b"N" if offsets is None else index + b"K\0" + offset + ops.prepared(ops.size, offsets)
        for offsets in {item[1] for item in items}
    }
    info_heads = {file: info_head + ops.prepared(ops.text, file) + offset for file in {item[2].file for item in items}}
    out.append(b"(")
    out.extend(
        b"".join(
            (
                index_head,
                name,
                index_tails[offsets],
                info_heads[place.file],
                int_opcodes(place.offset),
                length,
                int_opcodes(place.length),
                b"ub",
            )
        )
        for name, offsets, place in items
    )
    out.append(b"u")


# --- reading -----------------------------------------------------------------------------------------


class _Record:
    """Stands for any of the metadata classes: takes the fields and does nothing with them."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["fields"] = tuple(state)


class _Metadata(_Record):
    state_dict_metadata: Any = None
    planner_data: Any = None
    storage_data: Any = None


class _TensorStorageMetadata(_Record):
    properties: Any = None
    size: Any = None
    chunks: Any = None


class _TensorProperties(_Record):
    # Five fields up to torch 2.14, six since; older files carry a dict.
    fields: tuple[Any, ...] = ()


class _ChunkStorageMetadata(_Record):
    offsets: Any = None
    sizes: Any = None


class _BytesStorageMetadata(_Record):
    pass


class _MetadataIndex(_Record):
    fqn: Any = None
    offset: Any = None


class _StorageInfo(_Record):
    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


class _StorageMeta(_Record):
    pass


def _size(values: Any = ()) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{sizes} is no tensor size")
    return sizes


def _path(*parts: Any) -> str:
    return str(pathlib.PurePosixPath(*map(str, parts)))


def _ignored(*_args: Any) -> None:
    return None


_NAMES: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): _Metadata,
    (_DCP, "TensorStorageMetadata"): _TensorStorageMetadata,
    (_DCP, "TensorProperties"): _TensorProperties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _TensorProperties,
    (_DCP, "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _ignored,
    (_DCP, "ChunkStorageMetadata"): _ChunkStorageMetadata,
    (_DCP, "BytesStorageMetadata"): _BytesStorageMetadata,
    (_DCP, "MetadataIndex"): _MetadataIndex,
    (_DCP, "StorageMeta"): _StorageMeta,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _ignored,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("pathlib._local", "WindowsPath"): _path,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _NAMES.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnsafeCheckpointError(
            f"{METADATA_NAME} names {module}.{name}, which no checkpoint's metadata needs; it was not loaded. "
            "Do not open this checkpoint with tools that unpickle it."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeCheckpointError(f"{METADATA_NAME} refers to something outside itself: {pid!r}")


@dataclass(slots=True)
class _Decoder:
    """Turns what was unpickled into an `Index`, believing nothing."""

    entries: dict[str, Entry] = field(default_factory=dict)
    places: dict[tuple[str, tuple[int, ...] | None], ItemPlace] = field(default_factory=dict)

    def place(self, index: Any, info: Any) -> None:
        if not isinstance(index, _MetadataIndex) or not isinstance(info, _StorageInfo):
            raise TypeError("storage_data holds something else than places")
        name, offset = _text(index.fqn), None if index.offset is None else _size(index.offset)
        if info.transform_descriptors:
            raise CorruptCheckpointError(
                f"{name} is stored with the transforms {list(info.transform_descriptors)}, which this version "
                "does not read; load it with the program that wrote it"
            )
        where = ItemPlace(_text(info.relative_path), _count(info.offset), _count(info.length))
        self.places[name, offset] = where

    def entry(self, name: str, described: Any) -> Entry:
        if isinstance(described, _BytesStorageMetadata):
            return ObjectEntry(self.places[name, None])
        if not isinstance(described, _TensorStorageMetadata):
            raise TypeError(f"{name} is neither a tensor nor an object")
        dtype = _dtype_of(described.properties)
        shape = _size(described.size)
        chunks = tuple(
            ChunkEntry(_size(c.offsets), _size(c.sizes), self.places[name, _size(c.offsets)]) for c in described.chunks
        )
        for chunk in chunks:
            if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
                raise ValueError(f"a chunk of {name} has another number of dimensions than {shape}")
            ends = (o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            if any(end > total for end, total in zip(ends, shape, strict=True)):
                raise ValueError(f"a chunk of {name} lies outside its shape {shape}")
        return TensorEntry(dtype, shape, chunks)


def _dtype_of(properties: Any) -> torch.dtype:
    fields: Any = getattr(properties, "fields", ())
    if not fields and isinstance(properties, _TensorProperties):
        state = properties.__dict__
        fields = (state.get("dtype"),)
    if not isinstance(fields[0], torch.dtype):
        raise TypeError("a tensor without a dtype")
    return fields[0]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} stands where a name belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} stands where an offset or a length belongs")
    return value


def _obj_path(value: Any) -> ObjPath:
    path = tuple(value)
    if not path or not all(type(part) in (str, int) for part in path):
        raise TypeError(f"{value!r} is no path in a state dict")
    return path


def decode_metadata(data: bytes) -> Index:
    """Read a `.metadata` file, ours or DCP's, without running anything that it names.

    Raises:
        UnsafeCheckpointError: it names a function or class that metadata does not need.
        CorruptCheckpointError: it is damaged, or does not describe a checkpoint.
    """
    try:
        loaded = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(loaded, _Metadata):
            raise TypeError("it holds something other than checkpoint metadata")
        decoder = _Decoder()
        for index, info in (loaded.storage_data or {}).items():
            decoder.place(index, info)
        entries = {_text(k): decoder.entry(k, v) for k, v in loaded.state_dict_metadata.items()}
        paths: dict[str, ObjPath] = {name: (name,) for name in entries}
        if loaded.planner_data:
            paths = {_text(k): _obj_path(v) for k, v in loaded.planner_data.items() if k in entries}
            paths |= {name: (name,) for name in entries if name not in paths}
    except (UnsafeCheckpointError, CorruptCheckpointError):
        raise
    except Exception as exc:  # unpickling damaged bytes raises nearly anything
        raise CorruptCheckpointError(
            f"{METADATA_NAME} is damaged ({type(exc).__name__}: {exc}); the checkpoint can't be read, use an older one"
        ) from exc
    return Index(entries, paths)
