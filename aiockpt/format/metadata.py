"""The `.metadata` file of a DCP checkpoint: what it says, and how to read it without trusting it.

The file is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``. It is read by an unpickler that
knows the handful of names such a file may contain, each replaced by a plain record of this module.

Source of the layout: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (`_StorageInfo`).
"""

from __future__ import annotations

import io
import pathlib
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError
from aiockpt.format.index import ChunkEntry, Entry, Index, ItemPlace, ObjectEntry, ObjPath, TensorEntry

METADATA_NAME = ".metadata"
DCP_VERSION = "1.0.0"

DCP_MODULE = "torch.distributed.checkpoint.metadata"


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
    (DCP_MODULE, "Metadata"): _Metadata,
    (DCP_MODULE, "TensorStorageMetadata"): _TensorStorageMetadata,
    (DCP_MODULE, "TensorProperties"): _TensorProperties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _TensorProperties,
    (DCP_MODULE, "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _ignored,
    (DCP_MODULE, "ChunkStorageMetadata"): _ChunkStorageMetadata,
    (DCP_MODULE, "BytesStorageMetadata"): _BytesStorageMetadata,
    (DCP_MODULE, "MetadataIndex"): _MetadataIndex,
    (DCP_MODULE, "StorageMeta"): _StorageMeta,
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
    if not path or not all(type(part) is str or (type(part) is int and part >= 0) for part in path):
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
