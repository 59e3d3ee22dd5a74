"""Writing `.metadata`, opcode by opcode.

Not by building the objects and pickling them, for three reasons: objects that many tensors have in common are
stored once, the part that stays the same between saves is reused as bytes, and no C function holds the
interpreter for the whole of it.

Source of the layout: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (`_StorageInfo`);
``pickletools.py`` of CPython for the opcodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.format.dcp.metadata_opcodes import MetadataHead, Opcodes, int_opcodes, storage_data, text_opcodes
from aiockpt.format.dcp.metadata_rows import CutEntry, PlaceTable, RowParts, cut_rows
from aiockpt.format.index import Entry, ObjPath, TensorEntry
from aiockpt.format.names import DCP_MODULE

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

    Cut = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def encode_metadata(
    entries: Sequence[tuple[str, Entry | CutEntry]],
    paths: Mapping[str, ObjPath],
    table: PlaceTable | None = None,
    *,
    placed: bool = True,
) -> MetadataHead:
    """Encode everything that does not depend on where objects are.

    Args:
        entries: name and entry of each item, in the order of the state dict.
        paths: the path in the state dict of each name.
        table: where the parts of tensors are that were cut.
        placed: it is known where tensors are; if not, leave that out, see `MetadataDraft`.
    """
    ops = Opcodes()
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
    storage_data(
        ops,
        [
            (reference, (number, chunk.offsets), chunk.place)
            for (_, entry), reference in zip(entries, references, strict=True)
            if isinstance(entry, TensorEntry) and placed
            for number, chunk in enumerate(entry.chunks)
        ],
    )
    if table is not None:
        cut = [(reference, entry) for (_, entry), reference in zip(entries, references, strict=True)]
        _cut_storage(ops, [(reference, entry) for reference, entry in cut if isinstance(entry, CutEntry)], table)
    return MetadataHead(b"".join(out), ops.remembered)


def _tensor_metadata(
    ops: Opcodes, dtype: torch.dtype, shape: tuple[int, ...], chunks: Cut, chunks_key: Hashable
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


def _chunk_metadata(ops: Opcodes, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    ops.name(DCP_MODULE, "ChunkStorageMetadata")
    ops.out.append(b")\x81}(")
    ops.text("offsets")
    ops.size(offsets)
    ops.text("sizes")
    ops.size(sizes)
    ops.out.append(b"ub")


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


def _cut_storage(ops: Opcodes, items: Sequence[tuple[bytes, CutEntry]], table: PlaceTable) -> None:
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
