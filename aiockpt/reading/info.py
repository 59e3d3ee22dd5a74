"""Facts about the stored keys of a checkpoint, and tables of them for terminals and notebooks."""

from __future__ import annotations

import html
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from aiockpt.core.wording import plural
from aiockpt.errors import printable_key
from aiockpt.format.index import Entry, ObjectEntry, TensorEntry
from aiockpt.telemetry.card import size_text

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
        tied_to: the key before it under which the same tensor is stored; None: it is stored under this one.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[ChunkInfo, ...]
    stride: tuple[int, ...] | None = None
    tied_to: str | None = None

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


def describe(key: str, entry: Entry, tied_to: str | None = None) -> TensorInfo | ObjectInfo:
    """Return the facts about an entry, which is ``tied_to`` an earlier one."""
    if isinstance(entry, TensorEntry):
        chunks = tuple(
            ChunkInfo(c.place.file, c.place.offset, c.place.length, c.offsets, c.sizes) for c in entry.chunks
        )
        item = entry.chunks[0].item if len(entry.chunks) == 1 else None
        return TensorInfo(key, entry.dtype, entry.shape, chunks, None if item is None else item.stride, tied_to)
    if isinstance(entry, ObjectEntry):
        return ObjectInfo(key, entry.place.file, entry.place.offset, entry.place.length)
    return ObjectInfo(key, "", 0, 0)


# --- values and totals ----------------------------------------------------------------------------------


_VALUE_BYTES = 4096
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 40
_short.maxdict = _short.maxlist = _short.maxtuple = 4


def has_value(info: TensorInfo | ObjectInfo) -> bool:
    """Return whether a stored value is small enough to be shown: a tensor of one element, or a small object."""
    return info.nbytes <= _VALUE_BYTES if isinstance(info, ObjectInfo) else not info.shape


def value_text(value: object) -> str:
    """Return a value in short."""
    is_scalar = isinstance(value, torch.Tensor) and not value.is_nested and not value.shape
    item = value.item() if is_scalar else value  # type: ignore[attr-defined] # a tensor
    return f"{item:.6g}" if item is not value and isinstance(item, float) else _short.repr(item)


def stored_bytes(infos: Iterable[TensorInfo | ObjectInfo]) -> int:
    """Return the bytes of the tensors, each tied one counted once."""
    once = {info.tied_to or info.key: info.nbytes for info in infos if isinstance(info, TensorInfo)}
    return sum(once.values())


# --- tables ---------------------------------------------------------------------------------------------


def _rows(
    infos: Mapping[str, TensorInfo | ObjectInfo], values: Mapping[str, object]
) -> list[tuple[str, str, str, str, str]]:
    rows: list[tuple[str, str, str, str, str]] = []
    for info in shown_infos(infos):
        key, file = printable_key(info.key), printable_key(info.file)
        value = printable_key(value_text(values[info.key])) if info.key in values else ""
        if isinstance(info, TensorInfo):
            pieces = f" and {len(info.chunks) - 1} more" if len(info.chunks) > 1 else ""
            shape = "x".join(map(str, info.shape)) or f"scalar {value}".rstrip()
            dtype = str(info.dtype).removeprefix("torch.")
            rows.append((key, dtype, shape, "tied" if info.tied_to else size_text(info.nbytes), file + pieces))
        else:
            kind = type(values[info.key]).__name__ if value else "object"
            rows.append((key, kind, value, size_text(info.nbytes) if file else "", file))
    return rows


def shown_infos(infos: Mapping[str, TensorInfo | ObjectInfo]) -> list[TensorInfo | ObjectInfo]:
    """Return the entries that a table shows."""
    return list(islice(infos.values(), _SHOWN))


def _headline(path: str, kind: str, infos: Mapping[str, TensorInfo | ObjectInfo]) -> str:
    tensors = [info for info in infos.values() if isinstance(info, TensorInfo)]
    nbytes = stored_bytes(tensors)
    objects = len(infos) - len(tensors)
    counted = f"{plural(len(tensors), 'tensor')}, {size_text(nbytes)}; {plural(objects, 'object')}"
    return f"{printable_key(path)} ({kind}): {counted}"


def text_table(
    title: str, path: str, kind: str, infos: Mapping[str, TensorInfo | ObjectInfo], values: Mapping[str, object]
) -> str:
    """Return a table for terminals: a line with totals, then a line for each of the first entries, some with values."""
    rows = _rows(infos, values)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if i == 3 else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells))
    more = [f"  ... and {len(infos) - len(rows)} more"] if len(infos) > len(rows) else []
    return "\n".join([f"<{title} {_headline(path, kind, infos)}", *map(str.rstrip, lines), *more]) + ">"


def html_table(path: str, kind: str, infos: Mapping[str, TensorInfo | ObjectInfo], values: Mapping[str, object]) -> str:
    """Return a table for notebooks; see `text_table`."""
    rows = _rows(infos, values)
    head = "".join(f"<th>{name}</th>" for name in ("key", "dtype", "shape", "size", "file"))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    more = f"<p>... and {len(infos) - len(rows)} more</p>" if len(infos) > len(rows) else ""
    return f"<p><b>{html.escape(_headline(path, kind, infos))}</b></p><table><tr>{head}</tr>{body}</table>{more}"
