"""Writing `.metadata`, opcode by opcode.

Building the objects and pickling them would be simpler, but: objects that many tensors have in common are stored once,
the part that stays the same between saves is reused as bytes, and no C function holds the GIL for the whole of it.

Source of the layout: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (`_StorageInfo`);
``pickletools.py`` of CPython for the opcodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aiockpt.format.dcp.metadata_opcodes import (
    MetadataHead,
    Opcodes,
    int_opcodes,
    row_opcodes,
    text_opcodes,
)
from aiockpt.format.names import DCP_MODULE

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiockpt.format.index import ObjPath

    _Begins = tuple[tuple[int, ...], ...]
    Chunks = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets and sizes

_MOST_ROWS = 1 << 18
_REFERENCE = np.dtype("V5")  # the opcodes that push a value from the memo


class ShardedEntry(NamedTuple):
    """A tensor of one or more shards, whose byte ranges are in a `RangeTable`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Chunks  # the same object for tensors that are sharded alike
    ranks: tuple[int, ...]  # the writer of each shard
    leaves: tuple[int, ...]  # the number of each shard among the leaves of its writer


class RangeTable(NamedTuple):
    """The byte ranges of all leaves of all ranks, as columns."""

    files: list[str]
    begin_of: NDArray[np.int64]  # by rank: the row of its first leaf
    file_of: NDArray[np.int32]  # by row: the index in `files`
    offsets: NDArray[np.int64]  # by row, in bytes
    lengths: NDArray[np.int64]  # by row, in bytes


def encode_metadata(
    entries: Sequence[tuple[str, ShardedEntry | None]], paths: Mapping[str, ObjPath], table: RangeTable | None
) -> MetadataHead:
    """Encode everything that does not depend on the byte ranges of objects.

    ``entries`` are the tensors, and None for objects, in the order of the state dict. Without a ``table`` of the byte
    ranges of tensors these are left out too; see `MetadataDraft`.
    """
    ops = Opcodes()
    out = ops.out
    out.append(b"\x80\x04")  # without a frame, which pickle writes next: `is_pickled` tells the two apart by it
    ops.name(DCP_MODULE, "Metadata")
    out.append(b")\x81}(")
    ops.text("state_dict_metadata")
    out.append(b"}(")
    references = []
    for name, entry in entries:
        out.append(text_opcodes(name))
        references.append(ops.put(name))
        if entry is not None:
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
        for step in paths[name]:
            if isinstance(step, int):
                out.append(int_opcodes(step))
            else:
                ops.text(step)
        out.append(b"t")
    out.append(b"u")
    ops.text("storage_data")
    out.append(b"}")
    if table is not None:
        pairs = zip(references, (entry for _, entry in entries), strict=True)
        _sharded_storage(ops, [(reference, entry) for reference, entry in pairs if entry is not None], table)
    return MetadataHead(b"".join(out), ops.remembered)


def _tensor_metadata(ops: Opcodes, entry: ShardedEntry) -> None:
    """Push a TensorStorageMetadata."""
    dtype, shape, chunks = entry[:3]
    key = ("tensor", dtype, shape, id(chunks))
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
        ops.name(DCP_MODULE, "ChunkStorageMetadata")
        out.append(b")\x81}(")
        ops.text("offsets")
        ops.size(offsets)
        ops.text("sizes")
        ops.size(sizes)
        out.append(b"ub")
    out.append(b"eub")
    ops.put(key)


def _properties(ops: Opcodes, dtype: torch.dtype) -> None:
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


# --- rows of shards -----------------------------------------------------------------------------------
# Tensors whose shards begin at the same offsets have rows with the same opcodes, except for the tensor's name, the file
# and two numbers. So their rows are one array, whose columns are filled in at once.


def _sharded_storage(ops: Opcodes, items: Sequence[tuple[bytes, ShardedEntry]], table: RangeTable) -> None:
    """Add a row for every shard; each item is a reference to the name, and the tensor."""
    files = np.frombuffer(b"".join([ops.prepared(ops.text, file) for file in table.files]), _REFERENCE)
    begins_of: dict[int, _Begins] = {}
    alike: dict[_Begins, list[tuple[bytes, ShardedEntry]]] = {}
    for reference, entry in items:
        begins = begins_of.get(id(entry.chunks))
        if begins is None:
            begins = begins_of[id(entry.chunks)] = tuple(offsets for offsets, _ in entry.chunks)
        alike.setdefault(begins, []).append((reference, entry))
    for begins, group in alike.items():
        for rows in _shard_rows(ops, begins, group, files, table):
            ops.out.append(b"(" + rows + b"u")


def _shard_rows(
    ops: Opcodes,
    begins: _Begins,
    items: Sequence[tuple[bytes, ShardedEntry]],
    files: NDArray[np.void],
    table: RangeTable,
) -> Iterator[bytes]:
    """Yield the rows of tensors whose shards begin at the same offsets; ``files`` are references to the files."""
    head, index, info, before_offset, before_length = row_opcodes(ops)
    numbers = (index + b"J" + number.to_bytes(4, "little") + before_offset for number in range(len(begins)))
    tails = [number + ops.prepared(ops.size, begin) for number, begin in zip(numbers, begins, strict=True)]
    # One width for all numbers, so that all rows have one length. "J" is signed, so it ends at 2 GiB.
    far = max(int(column.max(initial=0)) for column in (table.offsets, table.lengths)) >= 1 << 31
    number, value = (b"\x8a\x08", "<i8") if far else (b"J", "<i4")
    blank = bytes(_REFERENCE.itemsize)
    zero = bytes(np.dtype(value).itemsize)
    between = (number + zero).join((before_offset, before_length, b"ub"))
    opcodes = [head + blank + tail + info + blank + between for tail in tails]
    file = len(head) + len(blank) + len(tails[0]) + len(info)
    offset = file + len(blank) + len(before_offset) + len(number)
    length = offset + len(zero) + len(before_length) + len(number)
    row = np.dtype(
        {
            "names": ["name", "file", "offset", "length"],
            "formats": [_REFERENCE, _REFERENCE, value, value],
            "offsets": [len(head), file, offset, length],
            "itemsize": len(opcodes[0]),
        }
    )
    one = np.frombuffer(b"".join(opcodes), row)
    step = max(1, _MOST_ROWS // len(one))  # so that no C function runs for long with the GIL
    for at in range(0, len(items), step):
        names, tensors = zip(*items[at : at + step], strict=True)
        where = table.begin_of[[tensor.ranks for tensor in tensors]] + np.array([tensor.leaves for tensor in tensors])
        rows = np.empty((len(names), len(one)), row)
        rows.view(f"V{row.itemsize}")[:] = one.view(f"V{row.itemsize}")
        rows["name"] = np.frombuffer(b"".join(names), _REFERENCE)[:, None]
        rows["file"] = files[table.file_of[where]]
        rows["offset"] = table.offsets[where]
        rows["length"] = table.lengths[where]
        yield rows.tobytes()
