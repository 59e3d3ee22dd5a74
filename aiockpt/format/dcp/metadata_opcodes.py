"""The opcodes of `.metadata`, and its tail: the byte ranges of the items. Free of torch, for the writer process.

For the source of the layout see `aiockpt.format.dcp.metadata_writer`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.index import ItemRange
from aiockpt.format.names import DCP_MODULE, DCP_VERSION

if TYPE_CHECKING:
    ChunkKey = tuple[int, tuple[int, ...]] | None  # number and offsets of a tensor's chunk; None for an object
    ItemKey = tuple[str, ChunkKey]
    Row = tuple[bytes, ChunkKey, ItemRange]


class Opcodes:
    """Emits pickle opcodes. A value that was put into the memo is written once and referred to afterwards."""

    def __init__(self, remembered: int = 0) -> None:
        self.out: list[bytes] = []
        self.remembered = remembered  # length of the memo
        self._memo: dict[Any, bytes] = {}

    def put(self, key: Any) -> bytes:
        """Add the value on top of the stack to the memo under ``key``; return the opcodes that push it again."""
        # Always the form with 4 bytes: references of one length make rows of one length, see `metadata_writer`.
        number = self.remembered.to_bytes(4, "little")
        self.remembered += 1
        self.out.append(b"r" + number)
        self._memo[key] = reference = b"j" + number
        return reference

    def get(self, key: Any) -> bool:
        """Push the value of a key from the memo and return True; return False if there is none."""
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
        key = ("size", sizes)
        if not self.get(key):
            self.name("torch", "Size")
            self.out.append(b"(" + b"".join(map(int_opcodes, sizes)) + b"t\x85R")
            self.put(key)

    def prepared(self, push: Callable[..., None], *args: Any) -> bytes:
        """Add a value to the memo without using it yet; return the opcodes that push it."""
        begin = len(self.out)
        push(*args)
        if not self.out[-1].startswith(b"r"):  # it was in the memo: undo the push
            reference = self.out.pop()
            del self.out[begin:]
            return reference
        self.out.append(b"0")
        return b"j" + self.out[-2][1:]


def text_opcodes(value: str) -> bytes:
    """Return the opcodes that push a string."""
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return b"\x8c%c" % len(data) + data
    return b"X" + struct.pack("<I", len(data)) + data


def int_opcodes(value: int) -> bytes:
    """Return the opcodes that push a non-negative integer."""
    if value < 256:
        return b"K%c" % value
    if value < 65_536:
        return b"M" + value.to_bytes(2, "little")
    if value < 2**31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")  # with room for the sign bit, which must be 0
    return b"\x8a%c" % len(data) + data


@dataclass(frozen=True, slots=True)
class MetadataHead:
    """The part of `.metadata` that does not depend on the byte ranges of objects; see `metadata_tail`."""

    data: bytes
    remembered: int  # length of the memo


class EncodedItem(NamedTuple):
    """An item as it was stored."""

    offset: int  # in the file, in bytes
    length: int  # in bytes
    crc: int  # CRC-32 of the stored bytes
    raw_bytes: int  # length of the item before transforms
    transforms: tuple[str, ...] = ()  # descriptors, the last applied first; empty: stored as it is


@dataclass(frozen=True, slots=True)
class MetadataDraft:
    """A `.metadata` of items whose byte ranges are known only when they are written."""

    head: MetadataHead
    files: Sequence[str]
    keys: Sequence[Sequence[Sequence[ItemKey]]] = field(repr=False)  # by file and item: the names that are read from it

    def finish(self, encoded: Sequence[Sequence[EncodedItem]]) -> bytes:
        """Complete it with the items of each file as they were stored."""
        rows: list[Row] = []
        for file, keys_of, items in zip(self.files, self.keys, encoded, strict=True):
            for keys, item in zip(keys_of, items, strict=True):
                where = ItemRange(file, item.offset, item.length, item.transforms)
                rows += [(text_opcodes(name), chunk, where) for name, chunk in keys]
        return self.head.data + _tail(self.head.remembered, rows)


def metadata_tail(remembered: int, objects: Sequence[tuple[str, ItemRange]]) -> bytes:
    """Encode what follows a head with a memo of this length: the byte ranges of the objects, and the end."""
    return _tail(remembered, [(text_opcodes(name), None, where) for name, where in objects])


def _tail(remembered: int, rows: Sequence[Row]) -> bytes:
    ops = Opcodes(remembered)
    storage_data(ops, rows)
    ops.text("storage_meta")
    ops.out.append(b"N")
    ops.text("version")
    ops.text(DCP_VERSION)
    ops.out.append(b"ub.")
    return b"".join(ops.out)


def storage_data(ops: Opcodes, items: Sequence[Row]) -> None:
    """Add entries to the dict on top of the stack: opcodes of the name; number and offsets of the chunk; byte range."""
    out = ops.out
    index_head, index, info_head, offset, length = row_opcodes(ops)
    index_tails = {
        chunk: index + (b"N" if chunk is None else int_opcodes(chunk[0]) + offset + ops.prepared(ops.size, chunk[1]))
        for chunk in {item[1] for item in items}
    }
    info_heads = {file: info_head + ops.prepared(ops.text, file) + offset for file in {item[2].file for item in items}}
    info_tails = {transforms: _transforms(ops, transforms) for transforms in {item[2].transforms for item in items}}
    out.append(b"(")
    out.extend(
        b"".join(
            (
                index_head,
                name,
                index_tails[chunk],
                info_heads[where.file],
                int_opcodes(where.offset),
                length,
                int_opcodes(where.length),
                info_tails[where.transforms],
                b"ub",
            )
        )
        for name, chunk, where in items
    )
    out.append(b"u")


def row_opcodes(ops: Opcodes) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Return the opcodes that precede, in an entry, the tensor's name, chunk number, file, offset and length."""
    index_head = ops.prepared(ops.name, DCP_MODULE, "MetadataIndex") + b")\x81}(" + ops.prepared(ops.text, "fqn")
    info = ops.prepared(ops.name, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    info_head = b"ub" + info + b")\x81}(" + ops.prepared(ops.text, "relative_path")
    index, offset, length = (ops.prepared(ops.text, key) for key in ("index", "offset", "length"))
    return index_head, index, info_head, offset, length


def _transforms(ops: Opcodes, descriptors: tuple[str, ...]) -> bytes:
    """Return the opcodes of the field of transforms; empty if there are none."""
    if not descriptors:
        return b""
    name = ops.prepared(ops.text, "transform_descriptors")
    return name + b"](" + b"".join(ops.prepared(ops.text, each) for each in descriptors) + b"e"
