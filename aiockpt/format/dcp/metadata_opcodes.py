"""The opcodes of `.metadata`, and its end: where the items are. Free of torch, for a process that only writes.

For the source of the layout see `aiockpt.format.dcp.metadata_writer`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.format.index import ItemRange
from aiockpt.format.names import DCP_MODULE, DCP_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Row = tuple[bytes, tuple[int, tuple[int, ...]] | None, ItemRange]


class Opcodes:
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
        """Push a string."""
        if not self.get(value):
            self.out.append(text_opcodes(value))
            self.put(value)

    def name(self, module: str, name: str) -> None:
        """Push what a module has under a name."""
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


class EncodedItem(NamedTuple):
    """An item as it was stored.

    Attributes:
        offset: where in the file, in bytes.
        length: in how many bytes.
        crc: the CRC-32 of these.
        raw_bytes: the bytes of the item itself.
        transforms: descriptors of what was done to it, the last first; none: it is stored as it is.
    """

    offset: int
    length: int
    crc: int
    raw_bytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetadataDraft:
    """A `.metadata` of items whose places are known only when they are written.

    Attributes:
        head: what does not depend on places.
        files: the names of the files with items.
        keys: for each file and each of its items what is read from it: names, each with the offsets of the chunk, or
            None for an object.
    """

    head: MetadataHead
    files: Sequence[str]
    keys: Sequence[Sequence[Sequence[tuple[str, tuple[int, ...] | None]]]] = field(repr=False)

    def finish(self, encoded: Sequence[Sequence[EncodedItem]]) -> bytes:
        """Complete it with what the items of each file have come to."""
        rows: list[Row] = []
        for file, keys_of, items in zip(self.files, self.keys, encoded, strict=True):
            for keys, item in zip(keys_of, items, strict=True):
                place = ItemRange(file, item.offset, item.length, item.transforms)
                rows += [(text_opcodes(name), None if at is None else (0, at), place) for name, at in keys]
        return self.head.data + _tail(self.head.remembered, rows)


def finish_metadata(head: MetadataHead, objects: Sequence[tuple[str, ItemRange]]) -> bytes:
    """Complete `.metadata` with the places of the objects."""
    return head.data + metadata_tail(head.remembered, objects)


def metadata_tail(remembered: int, objects: Sequence[tuple[str, ItemRange]]) -> bytes:
    """Encode what follows a head that remembers so many values: the places of the objects, and the end."""
    return _tail(remembered, [(text_opcodes(name), None, place) for name, place in objects])


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
    info_tails = {transforms: _transforms(ops, transforms) for transforms in {item[2].transforms for item in items}}
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
                info_tails[place.transforms],
                b"ub",
            )
        )
        for name, chunk, place in items
    )
    out.append(b"u")


def _transforms(ops: Opcodes, descriptors: tuple[str, ...]) -> bytes:
    """Give the opcodes of the field that says what was done to an item; none for nothing."""
    if not descriptors:
        return b""
    name = ops.prepared(ops.text, "transform_descriptors")
    return name + b"](" + b"".join(ops.prepared(ops.text, each) for each in descriptors) + b"e"
