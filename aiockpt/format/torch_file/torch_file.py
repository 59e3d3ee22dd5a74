"""The structure of ``torch.save`` files, with the byte range of each tensor instead of its bytes.

The pickle in such a file is read by torch's own restricted unpickler, as ``torch.load(weights_only=True)`` does, but
every storage is a placeholder without memory. So the structure holds *meta* tensors, each of which leads back to the
record of the file that holds its bytes.

Source of the layout: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import pickletools
import re
from collections import UserDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.strides import view_fits
from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import InlineEntry, ItemRange, StoredChunk, TensorEntry, TensorItem
from aiockpt.format.item.harmless import UnknownMemberError, build_harmless
from aiockpt.format.item.objects import TensorSeeker, check_allowed, extended_allow_list, permitted, unpickling_error
from aiockpt.format.item.ziparchive import (
    LEGACY_MAGIC,
    LOCAL_HEADER,
    ZIP_MAGIC,
    FramingError,
    Record,
    data_offset,
    read_directory,
)
from aiockpt.format.pickle.guard import Opaque, stored_sizes, torch_globals
from aiockpt.format.pickle.machine import PickleError

# --- records and placeholders of storages ---------------------------------------------------------


_ALIGNMENT = 64
_WIDE = 0xFFFFFFFF
_PICKLES_BYTES = 1 << 20  # read first of a legacy file
_MOST_PICKLES_BYTES = 64 << 20
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
        at = self._usual_offset(record)  # a file may have 100,000 records, with a header to read for each
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
            return _open_legacy(name, length, fetch)
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
    if "data.pkl" not in records:
        raise LoadError(f"{name} is a zip file without data.pkl, so torch.save did not write it; name another file")
    if "byteorder" in records and (order := archive.read("byteorder")) != b"little":
        raise _foreign_order(name, order)
    alignment = archive.read(".storage_alignment") if ".storage_alignment" in records else b""
    if alignment.isdigit() and 0 < int(alignment[:9]) != _ALIGNMENT:
        archive = replace(archive, alignment=int(alignment[:9]))
    return archive


class _LegacyFile(TorchArchive):
    """A file of torch before 1.6: five pickles, and the storages, each behind its number of elements. It has no CRC."""

    __slots__ = ()

    def payload_offset(self, record: Record) -> int:
        return record.header_offset


def _open_legacy(name: str, length: int, fetch: Callable[[int, int], bytes]) -> TorchArchive:
    size = _PICKLES_BYTES
    while (found := _legacy_pickles(fetch(0, size))) is None:
        if size >= min(length, _MOST_PICKLES_BYTES):
            raise CorruptCheckpointError(f"{name} is damaged or cut short: its pickles have no end; {_RESTORE}")
        size *= 8
    (system, structure, _), keys, begin, at = found
    if re.search(rb"little_endian(?:q.|r.{4})?\x89", system, re.DOTALL):
        raise _foreign_order(name, b"big")
    try:
        sizes = stored_sizes(structure)
    except PickleError as exc:
        raise LoadError(
            f"{name} is in the format of torch before 1.6, and can't be read in parts ({exc}); if you trust it, read "
            "it with torch.load, and save it again"
        ) from exc
    records = {"data.pkl": Record("data.pkl", begin, len(structure), 0, 0)}
    for key in keys:
        nbytes, width = sizes.get(key, (0, 1))
        if fetch(at, 8) != (nbytes // width).to_bytes(8, "little") or at + 8 + nbytes > length:
            raise CorruptCheckpointError(
                f"the storage {key[:100]} of {name}, of {nbytes} bytes, is not whole at byte {at}; {_RESTORE}"
            )
        records[f"data/{key}"] = Record(f"data/{key}", at + 8, nbytes, 0, 0)
        at += 8 + nbytes
    return _LegacyFile(name, length, records, fetch, {})


def _legacy_pickles(data: bytes) -> tuple[list[bytes], list[str], int, int] | None:
    """Return the last three pickles, the texts in the last, the offset of the one before, and the end; None if cut."""
    file, ends, keys = io.BytesIO(data), [0], []
    try:
        for _ in range(5):
            keys = [str(arg) for code, arg, _ in pickletools.genops(file) if code.name.endswith(("UNICODE", "STRING"))]
            ends.append(file.tell())
    except ValueError:
        return None
    return [data[begin:end] for begin, end in pairwise(ends[2:])], keys, ends[3], ends[5]


def _foreign_order(name: str, order: bytes) -> LoadError:
    return LoadError(
        f"{name} was written with the byte order {order!r}, which is not read here; read it with torch.load and save "
        "it again on a little-endian machine"
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

    def load(self, pid: Any) -> Any:
        """Return the placeholder of a persistent id in the pickle."""
        pid = pid[:5] if type(pid) is tuple and pid[5:] in ((), (None,)) else ()  # the sixth is of legacy files
        kind, storage_type, key, _location, numel = pid if len(pid) == 5 else (None,) * 5
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


# --- tensors --------------------------------------------------------------------------------------


_PLAIN = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
_UNSUPPORTED = {  # functions whose tensors are not stored as one run of bytes
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_wrapper_subclass": "a tensor subclass without storage",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that stores it as a NumPy array",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that stores it by way of the CPU",
    "_rebuild_xla_tensor": "an XLA tensor",
}


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """The contents of a ``torch.save`` file."""

    name: str
    value: Any  # as saved, except that all tensors are meta tensors, which `entry` looks up
    _storages: Mapping[int, StoredStorage] = field(repr=False)
    refusal: LoadError | None = None  # why there are `Opaque` values in it

    def object(self, leaf: Any, key: str) -> InlineEntry:
        """Return an object of ``value`` that can be read without tensors, and with permission."""
        kind = _UNSUPPORTED.get(leaf.name.rpartition(".")[2]) if type(leaf) is Opaque else None
        if kind is not None:
            raise _unsupported(self.name, key, kind)
        if self.refusal is not None and TensorSeeker(Opaque).finds(leaf):
            raise type(self.refusal)(f"{key} can't be read, but keys= can leave it out: {self.refusal}")
        if holds_tensors(leaf):
            raise LoadError(f"{self.name}: {key} is an object with tensors inside; read it with torch.load")
        return InlineEntry(leaf)

    def entry(self, tensor: torch.Tensor, key: str = "a tensor") -> TensorEntry:
        """Return the byte range of a tensor of ``value``; tensors that share a storage have the same range."""
        kind = _kind_of(tensor)
        if kind is not None:
            raise _unsupported(self.name, key, kind)
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None:
            raise LoadError(
                f"{self.name}: {key} has no bytes of its own in the file, as a meta tensor has none; "
                "leave it out, or read the file with torch.load"
            )
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        if not view_fits(offset, shape, stride, tensor.dtype.itemsize, stored.nbytes):
            raise CorruptCheckpointError(
                f"{self.name}: {key} with sizes {list(shape)}, strides {list(stride)} and offset {offset} reaches out "
                f"of its storage of {stored.nbytes} bytes; the file is damaged"
            )
        item = TensorItem(
            dtype=tensor.dtype,
            shape=shape,
            stride=stride,
            storage_offset=offset,
            payload_offset=0,
            nbytes=stored.range.length,
            crc=stored.crc,
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )
        return TensorEntry(tensor.dtype, shape, (StoredChunk((0,) * len(shape), shape, stored.range, item),))


def _kind_of(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor that is not a plain one, else None."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_nested or tensor.is_quantized:
        return "a nested tensor" if tensor.is_nested else "a quantized tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return None


def _unsupported(name: str, key: str, kind: str) -> LoadError:
    return LoadError(
        f"{name}: {key} is {kind}, which is not stored as one run of bytes; read the file with torch.load, "
        "and save it again without, or as a plain tensor"
    )


def holds_tensors(value: Any) -> bool:
    """Return whether an object of ``TorchFile.value`` contains a tensor or a storage, which have no memory here.

    An object that can't be pickled counts as containing one.
    """
    return TensorSeeker(torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage).finds(value)


def read_torch_file(
    name: str,
    length: int,
    fetch: Callable[[int, int], bytes],
    *,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    lenient: bool = False,
) -> TorchFile:
    """Read the structure of a ``torch.save`` file of ``length`` bytes, and none of the bytes of its tensors.

    ``fetch`` returns the bytes at (offset, size) of the file; ``lenient`` allows `Opaque` values in place of those that
    can't be read; other arguments as in ``aiockpt.load``.
    """
    archive = open_archive(name, length, fetch)
    placeholders = Placeholders(archive)
    data, refusal = archive.read("data.pkl"), None
    try:
        value = _unpickled(data, placeholders, safe_globals, trust=trust)
    except LoadError:
        raise
    except Warning:  # the program turns warnings into errors
        raise
    except Exception as exc:  # a damaged pickle raises nearly anything, and so does a class that needs the values
        refusal = _refusal(archive, exc, data, safe_globals, trust=trust)
        if not lenient or isinstance(refusal, CorruptCheckpointError):
            raise refusal from exc
        try:
            value = _build(data, placeholders, safe_globals, lenient=True)
        except (PickleError, UnknownMemberError):
            raise refusal from exc
    finally:
        _forget_sparse_tensors()
    _check_size(name, value, len(data))
    # By the address of the placeholder, which every view of it has.
    storages = {stored.placeholder._cdata: stored for stored in placeholders.by_key.values()}
    return TorchFile(name, value, storages, refusal)


def _unpickled(data: bytes, placeholders: Placeholders, safe_globals: Sequence[Any], *, trust: bool) -> Any:
    for function, kind in _UNSUPPORTED.items():
        # Protocol 2, which torch.save uses, writes a global as "c" and two lines.
        if f"ctorch._utils\n{function}\n".encode() in data:
            raise _NoPlaceholderError(kind)
    if not trust:
        return _unpickle_restricted(data, placeholders, safe_globals)
    unpickler = _TrustingUnpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = placeholders.load  # type: ignore[method-assign]
    return unpickler.load()


def _check_size(name: str, value: Any, nbytes: int) -> None:
    """Raise LoadError for a value of a pickle of so many bytes that can't be taken apart."""
    try:
        too_much = _expands_too_much(value, nbytes)
    except RecursionError as exc:
        raise LoadError(
            f"{name} nests its containers too deep to be taken apart, or one holds itself; if you trust the file, read "
            "it with torch.load"
        ) from exc
    if too_much:
        raise LoadError(
            f"{name} holds one container many times, which holds another many times; it has more parts than can be "
            "taken apart. If you trust the file, read it with torch.load."
        )


def _refusal(
    archive: TorchArchive, exc: Exception, data: bytes, safe_globals: Sequence[Any], *, trust: bool
) -> LoadError:
    """Return the error for a failure to unpickle."""
    name = archive.name
    if isinstance(exc, _NoPlaceholderError):
        return _unsupported(name, "something in it", str(exc))
    error = unpickling_error(f"the pickle in {name}", exc, data, archive.storage_bytes(), safe_globals, trust=trust)
    is_checked = archive.records["data.pkl"].crc and not isinstance(exc, pickle.UnpicklingError)
    if isinstance(error, CorruptCheckpointError) and is_checked:
        return LoadError(
            f"{name} can't be read without the values of its tensors ({type(exc).__name__}: {exc}); read it with "
            "torch.load"
        )
    return error


class _NoPlaceholderError(Exception):
    """The pickle makes a tensor that no placeholder can replace; the argument is its kind."""


def _unpickle_restricted(data: bytes, placeholders: Placeholders, safe_globals: Sequence[Any]) -> Any:
    if b"numpy" in data:  # torch refuses NumPy's objects; here the rules of native checkpoints build them
        with contextlib.suppress(PickleError):
            return _build(data, placeholders, safe_globals)
    try:
        kind: Any = importlib.import_module("torch._weights_only_unpickler").Unpickler
    except (ImportError, AttributeError) as exc:
        raise LoadError(
            f"torch {torch.__version__} keeps its restricted unpickler in a place that is not known here; "
            "use a version of torch from 2.6 to 2.13, or pass trust=True if you trust the file"
        ) from exc
    unpickler = kind(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = placeholders.load
    with extended_allow_list(safe_globals):
        check_allowed(data, placeholders.archive.storage_bytes())
        return unpickler.load()


def _build(data: bytes, placeholders: Placeholders, safe_globals: Sequence[Any], *, lenient: bool = False) -> Any:
    plain = [f"torch._utils.{name}" for name in _PLAIN]
    return build_harmless(
        data,
        {**{name: torch_globals()[name] for name in plain}, **permitted(safe_globals)},
        named={name: kind for name, kind in torch_globals().items() if name.endswith("Storage")},
        storages=placeholders.archive.storage_bytes(),
        load=placeholders.load,
        lenient=lenient,
    )


class _TrustingUnpickler(pickle.Unpickler):
    """Unpickles anything, as ``torch.load(weights_only=False)`` does."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _UNSUPPORTED:
            raise _NoPlaceholderError(_UNSUPPORTED[name])
        if "Storage" in name:
            try:
                storage_type: Any = torch.serialization.StorageType
                return storage_type(name)
            except KeyError:
                pass
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)


def _forget_sparse_tensors() -> None:
    """Remove meta tensors from the list of sparse tensors that the next ``torch.load`` would validate."""
    get = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    pending = getattr(torch._utils, "_sparse_tensors_to_validate", []) if get is None else get()
    pending[:] = [tensor for tensor in pending if not tensor.is_meta]


# --- limits of expansion ------------------------------------------------------------------------------
# A pickle may hold one container many times, which holds another many times, and so on: a few hundred bytes stand for
# more leaves than can be counted. That costs nothing until the state dict is flattened: then every leaf gets a name.

_NODES_PER_BYTE = 64
_LEAST_NODES = 2_000_000
_LEAST_LETTERS = 64 << 20
_MANY = 1 << 62
_CONTAINERS = (dict, UserDict, list, tuple, set, frozenset, deque)


def _expands_too_much(value: Any, nbytes: int) -> bool:
    """Return whether a value is larger when flattened than an honest pickle of ``nbytes`` bytes."""
    nodes, letters = _expansion(value, {})
    return nodes > _NODES_PER_BYTE * nbytes + _LEAST_NODES or letters > _NODES_PER_BYTE * nbytes + _LEAST_LETTERS


def _expansion(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the nodes of a value, and the letters of their names below its own; takes time for distinct ones only."""
    if not isinstance(value, _CONTAINERS):
        return 1, 0
    if id(value) not in known:
        nodes, letters = 1, 0
        for key, child in value.items() if isinstance(value, dict | UserDict) else enumerate(value):
            count, below = _expansion(child, known)
            nodes += count
            letters += below + count * (len(key) if type(key) is str else 8)
        known[id(value)] = min(nodes, _MANY), min(letters, _MANY)
    return known[id(value)]
