"""Facts about the stored keys of a checkpoint, and tables of them for terminals and notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from aiockpt.errors import printable_key
from aiockpt.format.index import Entry, ObjectEntry, TensorEntry
from aiockpt.telemetry.card import size_text

if TYPE_CHECKING:
    import torch


_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One stored piece of a tensor.

    Attributes:
        file: the file, relative to the checkpoint.
        offset: the offset of its item in the file, in bytes.
        nbytes: the length of the item, in bytes.
        offsets: the indices of its first element in the tensor.
        sizes: its shape.
    """

    file: str
    offset: int
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor.

    Attributes:
        key: its key.
        dtype: its dtype.
        shape: its shape.
        chunks: the stored pieces.
        stride: the strides of a tensor that may be a view of what is stored; None: each element is stored.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[ChunkInfo, ...]
    stride: tuple[int, ...] | None = None

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """Its shape, with 1 for each dimension along which an expanded tensor repeats its elements."""
        stride = self.shape if self.stride is None else self.stride
        return tuple(size if step else min(size, 1) for size, step in zip(self.shape, stride, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def file(self) -> str:
        """The file of the first piece; empty for a tensor without elements."""
        return self.chunks[0].file if self.chunks else ""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object.

    Attributes:
        key: its key.
        file: its file; empty if the value is part of the index.
        offset: the offset of its bytes in the file.
        nbytes: the number of its bytes.
    """

    key: str
    file: str
    offset: int
    nbytes: int


def describe(key: str, entry: Entry) -> TensorInfo | ObjectInfo:
    """Return the facts about an entry."""
    if isinstance(entry, TensorEntry):
        chunks = tuple(
            ChunkInfo(c.place.file, c.place.offset, c.place.length, c.offsets, c.sizes) for c in entry.chunks
        )
        item = entry.chunks[0].item if len(entry.chunks) == 1 else None
        return TensorInfo(key, entry.dtype, entry.shape, chunks, None if item is None else item.stride)
    if isinstance(entry, ObjectEntry):
        return ObjectInfo(key, entry.place.file, entry.place.offset, entry.place.length)
    return ObjectInfo(key, "", 0, 0)


def _rows(infos: Mapping[str, TensorInfo | ObjectInfo]) -> list[tuple[str, str, str, str, str]]:
    rows: list[tuple[str, str, str, str, str]] = []
    for info in islice(infos.values(), _SHOWN):
        key, file = printable_key(info.key), printable_key(info.file)
        if isinstance(info, TensorInfo):
            pieces = f" and {len(info.chunks) - 1} more" if len(info.chunks) > 1 else ""
            shape = "x".join(map(str, info.shape)) or "scalar"
            dtype = str(info.dtype).removeprefix("torch.")
            rows.append((key, dtype, shape, size_text(info.nbytes), file + pieces))
        else:
            rows.append((key, "object", "", size_text(info.nbytes) if file else "", file))
    return rows


def _headline(path: str, kind: str, infos: Mapping[str, TensorInfo | ObjectInfo]) -> str:
    tensors = [info for info in infos.values() if isinstance(info, TensorInfo)]
    nbytes = sum(info.nbytes for info in tensors)
    objects = len(infos) - len(tensors)
    return f"{printable_key(path)} ({kind}): {len(tensors)} tensors, {size_text(nbytes)}; {objects} objects"


def text_table(title: str, path: str, kind: str, infos: Mapping[str, TensorInfo | ObjectInfo]) -> str:
    """Return a table for terminals: a line with totals, then a line for each of the first entries."""
    rows = _rows(infos)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if i == 3 else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells))
    more = [f"  ... and {len(infos) - len(rows)} more"] if len(infos) > len(rows) else []
    return "\n".join([f"<{title} {_headline(path, kind, infos)}", *map(str.rstrip, lines), *more]) + ">"


def html_table(path: str, kind: str, infos: Mapping[str, TensorInfo | ObjectInfo]) -> str:
    """Return a table for notebooks; see `text_table`."""
    rows = _rows(infos)
    head = "".join(f"<th>{name}</th>" for name in ("key", "dtype", "shape", "size", "file"))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    more = f"<p>... and {len(infos) - len(rows)} more</p>" if len(infos) > len(rows) else ""
    return f"<p><b>{html.escape(_headline(path, kind, infos))}</b></p><table><tr>{head}</tr>{body}</table>{more}"
