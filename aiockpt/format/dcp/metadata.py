"""Reading the `.metadata` file of a DCP checkpoint without trusting it.

The file is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``. It is read by `read_pickle`, which maps the
few globals that such a file may name to plain records of this module.

Source of the layout: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (`_StorageInfo`).
"""

from __future__ import annotations

import pathlib
import reprlib
from typing import Any

import torch

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError
from aiockpt.format.checks import MAX_DIMS, check_paths
from aiockpt.format.dtypes import DTYPES, QUANTIZED_DTYPES
from aiockpt.format.index import Entry, Index, ItemRange, ObjectEntry, ObjPath, StoredChunk, TensorEntry
from aiockpt.format.names import DCP_MODULE, METADATA_NAME
from aiockpt.format.pickle.machine import Function, Record, read_pickle

_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # up to torch 2.2
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"

_MAX_SIZE = 2**63 - 1
_MANY_BYTES = 1 << 20
_MOST_TRANSFORMS = 16

Sizes = tuple[int, ...]
_FoundChunk = tuple[Sizes, Sizes, str]


def _kind(name: str, *, repeats: bool = False) -> type[Record]:
    return type(name, (Record,), {"__slots__": (), "repeats": repeats})


_Metadata = _kind("Metadata")
_TensorStorageMetadata = _kind("TensorStorageMetadata", repeats=True)
_TensorProperties = _kind("TensorProperties")  # a tuple of five fields up to torch 2.14, six since; older: a dict
_ChunkStorageMetadata = _kind("ChunkStorageMetadata")
_BytesStorageMetadata = _kind("BytesStorageMetadata")
_MetadataIndex = _kind("MetadataIndex")
_StorageInfo = _kind("_StorageInfo")
_StorageMeta = _kind("StorageMeta")
_Plan = _kind("Plan")  # a piece of the plans that Megatron-Core leaves for its next save; it is not used

_INDEX_NAMES = ("fqn", "index", "offset")
_INFO_NAMES = ("relative_path", "offset", "length")


@dataclass(frozen=True, slots=True)
class _Path:
    parts: tuple[str, ...]


def _path(*parts: Any) -> _Path:
    if not all(type(part) is str for part in parts):
        raise TypeError("a path of something other than texts")
    return _Path(parts)


def _ignored(*_args: Any) -> None:
    return None


_ENUM = Function(_ignored)


def _unsafe(module: str, name: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"{METADATA_NAME} names {module[:200]}.{name[:200]}, which no checkpoint's metadata needs; it was not "
        "loaded. Do not open this checkpoint with tools that unpickle it."
    )


def _member(kind: Any, name: Any) -> None:
    """Stand for a member of an Enum, as Python 3.11.0 to 3.11.3 pickle it: by its name."""
    if kind is not _ENUM or type(name) is not str:
        raise _unsafe("builtins", "getattr")


_NAMES: dict[tuple[str, str], Any] = {
    (DCP_MODULE, "Metadata"): _Metadata,
    (DCP_MODULE, "TensorStorageMetadata"): _TensorStorageMetadata,
    (DCP_MODULE, "TensorProperties"): _TensorProperties,
    (_SHARDED_MODULE, "TensorProperties"): _TensorProperties,
    (DCP_MODULE, "_MEM_FORMAT_ENCODING"): _ENUM,
    (_SHARDED_MODULE, "MEM_FORMAT_ENCODING"): _ENUM,
    (DCP_MODULE, "ChunkStorageMetadata"): _ChunkStorageMetadata,
    (DCP_MODULE, "BytesStorageMetadata"): _BytesStorageMetadata,
    (DCP_MODULE, "MetadataIndex"): _MetadataIndex,
    (DCP_MODULE, "StorageMeta"): _StorageMeta,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Plan,
    **{(_PLANNER_MODULE, name): _Plan for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")},
    (_PLANNER_MODULE, "WriteItemType"): _ENUM,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Plan,
    **{(module, "getattr"): Function(_member) for module in ("builtins", "__builtin__")},
    ("torch.serialization", "_get_layout"): Function(_ignored),
    **{
        (module, name): Function(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath")
    },
}


class _MetadataDecoder:
    """Turns an untrusted `.metadata` file into an `Index`.

    Values of the pickle may be shared: whatever costs more than a fixed time is checked once for each value, or counted
    against the length of the file.
    """

    def __init__(self, data: bytes, *, as_stored: bool) -> None:
        self._data = data
        self._as_stored = as_stored
        self._chunks_left = len(data)
        self._transforms_left = len(data)
        self._is_transformed = False
        # By name and offsets as text: hashes of texts are salted, so a file can't make them collide.
        self._ranges: dict[tuple[str, str | None], ItemRange] = {}
        # Checked values by id. They stay referenced, so no other value gets their id.
        self._sizes: dict[int, tuple[Sizes, str]] = {}
        self._tensors: dict[int, tuple[Record, torch.dtype, Sizes, list[_FoundChunk]]] = {}

    def decode(self) -> Index:
        loaded = read_pickle(self._data, self._find_global)
        if not isinstance(loaded, _Metadata):
            raise TypeError("it holds something other than checkpoint metadata")
        fields = loaded.fields()
        for index, info in _dict_of(fields, "storage_data").items():
            self._add_range(index, info)
        described = _dict_of(fields, "state_dict_metadata")
        entries = {_text(name): self._entry(name, value) for name, value in described.items()}
        paths = self._paths(_dict_of(fields, "planner_data"), entries)
        check_paths(paths)
        meta = _storage_meta(fields.get("storage_meta"))
        return Index(entries, paths, is_transformed=self._is_transformed, storage_meta=meta)

    def _find_global(self, module: str, name: str) -> Any:
        known = _NAMES.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return Function(self._size)
        raise _unsafe(module, name)

    def _size(self, values: Any = ()) -> Sizes:
        if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
            raise ValueError(f"a {type(values).__name__}, or too many numbers, stand where a tensor size belongs")
        sizes = tuple(values)
        if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in sizes):
            raise ValueError(f"{reprlib.repr(sizes)} is no tensor size")
        self._sizes[id(sizes)] = sizes, str(sizes)
        return sizes

    def _checked(self, sizes: Any) -> tuple[Sizes, str]:
        """Return a size that `_size` has checked, or checks now, and its text."""
        return self._sizes.get(id(sizes)) or self._sizes[id(self._size(sizes))]

    def _add_range(self, index: Any, info: Any) -> None:
        if type(index) is not _MetadataIndex or type(info) is not _StorageInfo:
            raise TypeError("storage_data holds something other than byte ranges")
        if index.names == _INDEX_NAMES:
            name, _, offset = index.values
        else:
            fields = index.fields()
            name, offset = fields.get("fqn"), fields.get("offset")
        transforms: tuple[str, ...] = ()
        if info.names == _INFO_NAMES:
            file, begin, length = info.values
        else:
            fields = info.fields()
            file, begin, length = (fields.get(each) for each in _INFO_NAMES)
            transforms = self._transforms(name, fields.get("transform_descriptors"))
        where = ItemRange(_text(file), _count(begin), _count(length), transforms)
        self._ranges[_text(name), None if offset is None else self._checked(offset)[1]] = where

    def _transforms(self, name: Any, descriptors: Any) -> tuple[str, ...]:
        if not descriptors:
            return ()
        if type(descriptors) not in (list, tuple) or len(descriptors) > min(_MOST_TRANSFORMS, self._transforms_left):
            raise ValueError(f"the transforms of {_text(name)[:200]} are no list of names, or an impossible one")
        self._transforms_left -= len(descriptors)
        self._is_transformed = True
        return tuple(map(_text, descriptors))

    def _range_of(self, name: str, offsets: str | None) -> ItemRange:
        where = self._ranges.pop((name, offsets), None)
        if where is None:
            raise ValueError(f"it does not say where {name[:200]} is stored")
        return where

    def _entry(self, name: str, described: Any) -> Entry:
        if type(described) is _BytesStorageMetadata:
            return ObjectEntry(self._range_of(name, None))
        known = self._tensors.get(id(described))
        if known is None:
            known = self._tensors[id(described)] = (described, *self._tensor(name, described))
        _, dtype, shape, chunks = known
        if dtype in QUANTIZED_DTYPES and not self._as_stored and len(chunks) == 1 and chunks[0][1] == shape:
            # Unpickled as a whole: its item has scales and zero points beside the values.
            return ObjectEntry(self._range_of(name, chunks[0][2]))
        return TensorEntry(dtype, shape, tuple([StoredChunk(o, n, self._range_of(name, t)) for o, n, t in chunks]))

    def _tensor(self, name: str, described: Any) -> tuple[torch.dtype, Sizes, list[_FoundChunk]]:
        if type(described) is not _TensorStorageMetadata:
            raise TypeError(f"{name[:200]} is neither a tensor nor an object")
        fields = described.fields()
        shape, _ = self._checked(fields.get("size"))
        listed = fields.get("chunks")
        if type(listed) is not list or len(listed) > self._chunks_left:
            raise ValueError(f"{name[:200]} has no list of chunks, or an impossible one")
        self._chunks_left -= len(listed)
        chunks: dict[str, _FoundChunk] = {}
        # Several ranks that hold nothing of the tensor may describe the same empty chunk. Empty ones come last, so that
        # none takes the place of a chunk with values at the same offsets.
        for chunk in sorted([self._chunk(name, each, shape) for each in listed], key=_is_empty):
            if chunk[2] not in chunks:
                chunks[chunk[2]] = chunk
            elif not _is_empty(chunk):
                raise ValueError(f"{name[:200]} has two chunks at {chunk[2]}")
        return _dtype_of(fields.get("properties")), shape, list(chunks.values())

    def _chunk(self, name: str, chunk: Any, shape: Sizes) -> _FoundChunk:
        if type(chunk) is not _ChunkStorageMetadata:
            raise TypeError(f"{name[:200]} has a chunk that is a {type(chunk).__name__}")
        fields = chunk.fields()
        offsets, text = self._checked(fields.get("offsets"))
        sizes, _ = self._checked(fields.get("sizes"))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a chunk of {name[:200]} has another number of dimensions than {shape}")
        if any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {name[:200]} lies outside its shape {shape}")
        return offsets, sizes, text

    def _paths(self, planned: dict[Any, Any], entries: dict[str, Entry]) -> dict[str, ObjPath]:
        paths: dict[str, ObjPath] = {}
        left = len(self._data)
        for name, path in planned.items():
            if name not in entries:
                continue
            if type(path) is not tuple or not 0 < len(path) <= left or not _are_steps(path):
                raise TypeError(f"the path of {name[:200]} in the state dict is no path")
            left -= len(path)
            paths[name] = path
        return paths | {name: (name,) for name in entries if name not in paths}


def _is_empty(chunk: _FoundChunk) -> bool:
    return 0 in chunk[1]


def _are_steps(path: tuple[Any, ...]) -> bool:
    kinds = set(map(type, path))
    return kinds == {str} or (kinds <= {str, int} and all(type(n) is str or 0 <= n <= _MAX_SIZE for n in path))


def _dict_of(fields: dict[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if value is None and name == "planner_data":
        return {}
    if type(value) is not dict:
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def _storage_meta(record: Any) -> dict[str, Any]:
    """Return the fields of a StorageMeta that have the expected types; nothing depends on them."""
    fields = record.fields() if type(record) is _StorageMeta else {}
    found = {name: fields[name] for name in ("checkpoint_id", "save_id", "load_id") if type(fields.get(name)) is str}
    modules = fields.get("modules")
    if type(modules) is list and set(map(type, modules)) <= {str}:
        found["modules"] = list(modules)
    if type(place := fields.get("checkpoint_id")) is _Path:
        found["checkpoint_id"] = pathlib.Path(*place.parts)
    return found


def _dtype_of(properties: Any) -> torch.dtype:
    values = properties.values if type(properties) is _TensorProperties else None
    dtype = values[0] if values and properties.names is None else properties.fields().get("dtype") if values else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a dtype")
    return dtype


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} stands where a name belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise ValueError(f"{reprlib.repr(value)} stands where an offset or a length belongs")
    return value


def decode_metadata(data: bytes, *, as_stored: bool = False) -> Index:
    """Read a `.metadata` file, ours or DCP's, without running anything, in time and memory linear in its length.

    Quantized tensors become objects, as aiockpt itself saves them; unless ``as_stored``.
    """
    try:
        if len(data) < _MANY_BYTES:
            return _MetadataDecoder(data, as_stored=as_stored).decode()
        with gc_pause():
            return _MetadataDecoder(data, as_stored=as_stored).decode()
    except (TypeError, ValueError) as exc:  # PickleError among them
        raise CorruptCheckpointError(
            f"{METADATA_NAME} is damaged ({type(exc).__name__}: {exc}); the checkpoint can't be read, use an older one"
        ) from exc
