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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


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
        entries: name and entry of each item, in the order of the state dict.
        paths: the path in the state dict of each name.
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
        if isinstance(entry, TensorEntry):
            _tensor_metadata(ops, entry)
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
    key = ("tensor", entry.dtype, entry.shape, tuple(chunk[:2] for chunk in entry.chunks))
    if ops.get(key):
        return
    out = ops.out
    ops.name(DCP_MODULE, "TensorStorageMetadata")
    out.append(b")\x81}(")
    ops.text("properties")
    _properties(ops, entry.dtype)
    ops.text("size")
    ops.size(entry.shape)
    ops.text("chunks")
    out.append(b"](")
    for chunk in entry.chunks:
        _chunk_metadata(ops, chunk.offsets, chunk.sizes)
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
