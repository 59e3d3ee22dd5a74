"""Writing `.metadata`, opcode by opcode.

Not by building the objects and pickling them, for three reasons: objects that many tensors have in common are
stored once, the part that stays the same between saves is reused as bytes, and no C function holds the
interpreter for the whole of it.

Source of the layout: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (`_StorageInfo`);
``pickletools.py`` of CPython for the opcodes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiockpt.format.index import Entry, ItemPlace, ObjPath, TensorEntry
from aiockpt.format.metadata import DCP_MODULE, DCP_VERSION
from aiockpt.format.metadata_rows import CutEntry, PlaceTable, RowParts, cut_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch

    Cut = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


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


def encode_metadata(
    entries: Sequence[tuple[str, Entry | CutEntry]], paths: Mapping[str, ObjPath], table: PlaceTable | None = None
) -> MetadataHead:
    """Encode everything that does not depend on where objects are.

    Args:
        entries: name and entry of each item, in the order of the state dict.
        paths: the path in the state dict of each name.
        table: where the parts of tensors are that were cut.
    """
    ops = _Opcodes()
    out = ops.out
    out.append(b"\x80\x04")
    ops.name(DCP_MODULE, "Metadata")
    out.append(b")\x81}(")
    ops.text("state_dict_metadata")
    out.append(b"}(")
    references = []
    for name, entry in entries:
        out.append(text_opcodes(name))
        references.append(ops.put(name))
        if isinstance(entry, CutEntry):
            _tensor_metadata(ops, entry.dtype, entry.shape, entry.cut, id(entry.cut))
        elif isinstance(entry, TensorEntry):
            chunks = tuple((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
            _tensor_metadata(ops, entry.dtype, entry.shape, chunks, chunks)
        elif not ops.get("an object"):
            ops.name(DCP_MODULE, "BytesStorageMetadata")
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
            (reference, (number, chunk.offsets), chunk.place)
            for (_, entry), reference in zip(entries, references, strict=True)
            if isinstance(entry, TensorEntry)
            for number, chunk in enumerate(entry.chunks)
        ],
    )
    if table is not None:
        cut = [(reference, entry) for (_, entry), reference in zip(entries, references, strict=True)]
        _cut_storage(ops, [(reference, entry) for reference, entry in cut if isinstance(entry, CutEntry)], table)
    return MetadataHead(b"".join(out), ops.remembered)


def finish_metadata(head: MetadataHead, objects: Sequence[tuple[str, ItemPlace]]) -> bytes:
    """Complete `.metadata` with the places of the objects."""
    return head.data + metadata_tail(head.remembered, objects)


def metadata_tail(remembered: int, objects: Sequence[tuple[str, ItemPlace]]) -> bytes:
    """Encode what follows a head that remembers so many values: the places of the objects, and the end."""
    ops = _Opcodes(remembered)
    _storage_data(ops, [(text_opcodes(name), None, place) for name, place in objects])
    ops.text("storage_meta")
    ops.out.append(b"N")
    ops.text("version")
    ops.text(DCP_VERSION)
    ops.out.append(b"ub.")
    return b"".join(ops.out)


def _tensor_metadata(
    ops: _Opcodes, dtype: torch.dtype, shape: tuple[int, ...], chunks: Cut, chunks_key: Hashable
) -> None:
    """Push a TensorStorageMetadata; ``chunks_key`` is equal for equal chunks."""
    key = ("tensor", dtype, shape, chunks_key)
    if ops.get(key):
        return
    out = ops.out
    ops.name(DCP_MODULE, "TensorStorageMetadata")
    out.append(b")\x81}(")
    ops.text("properties")
    _properties(ops, dtype)
    ops.text("size")
    ops.size(shape)
    ops.text("chunks")
    out.append(b"](")
    for offsets, sizes in chunks:
        _chunk_metadata(ops, offsets, sizes)
    out.append(b"eub")
    ops.put(key)


def _chunk_metadata(ops: _Opcodes, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    ops.name(DCP_MODULE, "ChunkStorageMetadata")
    ops.out.append(b")\x81}(")
    ops.text("offsets")
    ops.size(offsets)
    ops.text("sizes")
    ops.size(sizes)
    ops.out.append(b"ub")


def _properties(ops: _Opcodes, dtype: torch.dtype) -> None:
    """Push a TensorProperties with the five fields that every version of torch reads."""
    key = ("properties", dtype)
    if ops.get(key):
        return
    out = ops.out
    ops.name(DCP_MODULE, "TensorProperties")
    out.append(b")\x81(")
    ops.name("torch", str(dtype).removeprefix("torch."))
    if not ops.get("strided"):
        ops.name("torch.serialization", "_get_layout")
        ops.text("torch.strided")
        out.append(b"\x85R")
        ops.put("strided")
    out.append(b"\x89")
    if not ops.get("contiguous"):
        ops.name(DCP_MODULE, "_MEM_FORMAT_ENCODING")
        out.append(b"K\0\x85R")
        ops.put("contiguous")
    out.append(b"\x89tb")
    ops.put(key)


def _storage_data(ops: _Opcodes, items: Sequence[tuple[bytes, tuple[int, tuple[int, ...]] | None, ItemPlace]]) -> None:
    """Add entries to the dict on top of the stack: opcodes of the name; number and offsets of the chunk; the place."""
    out = ops.out
    index_head = ops.prepared(ops.name, DCP_MODULE, "MetadataIndex") + b")\x81}(" + ops.prepared(ops.text, "fqn")
    info = ops.prepared(ops.name, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    info_head = b"ub" + info + b")\x81}(" + ops.prepared(ops.text, "relative_path")
    index, offset, length = (ops.prepared(ops.text, key) for key in ("index", "offset", "length"))
    index_tails = {
        chunk: index + (b"N" if chunk is None else int_opcodes(chunk[0]) + offset + ops.prepared(ops.size, chunk[1]))
        for chunk in {item[1] for item in items}
    }
    info_heads = {file: info_head + ops.prepared(ops.text, file) + offset for file in {item[2].file for item in items}}
    out.append(b"(")
    out.extend(
        b"".join(
            (
                index_head,
                name,
                index_tails[chunk],
                info_heads[place.file],
                int_opcodes(place.offset),
                length,
                int_opcodes(place.length),
                b"ub",
            )
        )
        for name, chunk, place in items
    )
    out.append(b"u")


def _cut_storage(ops: _Opcodes, items: Sequence[tuple[bytes, CutEntry]], table: PlaceTable) -> None:
    """Add entries for every part of tensors that were cut: references to the name, and the tensor."""
    out = ops.out
    head = ops.prepared(ops.name, DCP_MODULE, "MetadataIndex") + b")\x81}(" + ops.prepared(ops.text, "fqn")
    info = ops.prepared(ops.name, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    info_head = b"ub" + info + b")\x81}(" + ops.prepared(ops.text, "relative_path")
    index, offset, length = (ops.prepared(ops.text, key) for key in ("index", "offset", "length"))
    files = [ops.prepared(ops.text, file) for file in table.files]
    begins_of: dict[int, tuple[tuple[int, ...], ...]] = {}
    alike: dict[tuple[tuple[int, ...], ...], list[tuple[bytes, CutEntry]]] = {}
    for reference, entry in items:
        begins = begins_of.get(id(entry.cut))
        if begins is None:
            begins = begins_of[id(entry.cut)] = tuple(offsets for offsets, _ in entry.cut)
        alike.setdefault(begins, []).append((reference, entry))
    for begins, some in alike.items():
        numbers = (index + b"J" + number.to_bytes(4, "little") + offset for number in range(len(begins)))
        tails = [number + ops.prepared(ops.size, begin) for number, begin in zip(numbers, begins, strict=True)]
        parts = RowParts(head, tails, info_head, offset, length, files)
        names, tensors = zip(*some, strict=True)
        for rows in cut_rows(names, tensors, table, parts):
            out.append(b"(" + rows + b"u")
