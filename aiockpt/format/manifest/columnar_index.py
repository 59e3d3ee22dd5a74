"""Entries as columns: the index of many tensors, which makes an object for a tensor only on access."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from aiockpt.core.dataclasses import dataclass, replace
from aiockpt.core.strides import reach
from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.checks import misplaced
from aiockpt.format.index import Division, Entry, ItemRange, ObjectEntry, ObjPath, StoredChunk, TensorEntry, TensorItem

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


T = TypeVar("T")


class ItemForm(NamedTuple):
    """The form of a tensor item; items of one form differ only in their payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # as stored, in elements
    item_bytes: int  # length of the item
    payload_offset: int  # in the item, in bytes
    nbytes: int  # length of the payload

    def fits(self) -> bool:
        """Return whether the tensor lies within its payload, and the payload within the item."""
        if len(self.shape) != len(self.stride) or self.payload_offset + self.nbytes > self.item_bytes:
            return False
        size = self.dtype.itemsize
        return self.nbytes == math.prod(self.shape) * size and reach(self.shape, self.stride) * size <= self.nbytes


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class _Rows(Mapping[str, T]):
    """Values by name, made on access from columns."""

    names: Sequence[str]  # in the order of the state dict
    numbers: Mapping[str, int]  # position of each name in ``names``

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.names)} leaves>"

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.numbers


class PartColumns(NamedTuple):
    """The rows of each name, where tensors are stored in parts."""

    divisions: Sequence[Division]
    division_of: NDArray[np.int64]  # by name: positions in ``divisions``; -1 if it has one row
    begin_of: NDArray[np.int64]  # by name: its first row


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class IndexedEntries(_Rows[Entry]):
    """The entries of an index: a row for each name, or for each stored part of it."""

    files: Sequence[str]
    forms: Sequence[ItemForm]  # the distinct ones
    form_of: NDArray[np.int64]  # positions in ``forms``; -1 for objects
    file_of: NDArray[np.int64]  # positions in ``files``
    offset_of: NDArray[np.int64]  # of the item in the file, in bytes
    length_of: NDArray[np.int64]  # of the item, in bytes
    crc_of: NDArray[np.int64]  # CRC-32 of the payload; undefined for objects
    parts: PartColumns | None = None  # None: every tensor is stored whole
    hash_of: Sequence[str | None] | None = None  # of the payload; None: there is no such column

    def __getitem__(self, name: str) -> Entry:
        number = self.numbers[name]
        row, division = number, -1
        if self.parts is not None:
            row, division = int(self.parts.begin_of[number]), int(self.parts.division_of[number])
        count = len(self.parts.divisions[division].offsets) if self.parts is not None and division >= 0 else 1
        columns = (self.form_of, self.file_of, self.offset_of, self.length_of, self.crc_of)
        return self._entry(division, [column[row : row + count].tolist() for column in columns])

    def items(self) -> ItemsView[str, Entry]:
        """Return all entries with their names, several times as fast as one by one."""
        columns = [c.tolist() for c in (self.form_of, self.file_of, self.offset_of, self.length_of, self.crc_of)]
        if self.parts is None:
            return dict(zip(self.names, map(self._whole, *columns), strict=True)).items()
        found: dict[str, Entry] = {}
        ends = [*self.parts.begin_of.tolist(), len(self.form_of)][1:]
        bounds = zip(self.names, self.parts.division_of.tolist(), self.parts.begin_of.tolist(), ends, strict=True)
        for name, division, begin, end in bounds:
            found[name] = self._entry(division, [column[begin:end] for column in columns])
        return found.items()

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """The first row of each name."""
        return np.arange(len(self.names)) if self.parts is None else self.parts.begin_of

    def at(self, numbers: NDArray[np.int64]) -> IndexedEntries:
        """Return the entries at some positions, in ascending order."""
        names = [self.names[number] for number in numbers.tolist()]
        rows, parts = numbers, None
        if self.parts is not None:
            begin = self.parts.begin_of[numbers]
            counts = np.append(self.parts.begin_of, len(self.form_of))[numbers + 1] - begin
            begin_of = np.cumsum(counts) - counts
            rows = np.repeat(begin - begin_of, counts) + np.arange(counts.sum())
            parts = PartColumns(self.parts.divisions, self.parts.division_of[numbers], begin_of)
        return replace(
            self,
            names=names,
            numbers=dict(zip(names, range(len(names)), strict=True)),
            form_of=self.form_of[rows],
            file_of=self.file_of[rows],
            offset_of=self.offset_of[rows],
            length_of=self.length_of[rows],
            crc_of=self.crc_of[rows],
            parts=parts,
        )

    def objects(self) -> list[str]:
        """Return the names of those that are no tensors."""
        return [self.names[number] for number in np.flatnonzero(self.form_of[self.first_rows] < 0).tolist()]

    def sharing(self) -> list[str]:
        """Return the names whose first item is also that of another name, in order; fast."""
        rows = self.first_rows
        file, offset = self.file_of[rows], self.offset_of[rows]
        order = np.lexsort((offset, file))
        file, offset = file[order], offset[order]
        same = np.flatnonzero((file[1:] == file[:-1]) & (offset[1:] == offset[:-1]))
        return [self.names[number] for number in sorted({*order[same].tolist(), *order[same + 1].tolist()})]

    def _entry(self, division: int, columns: Sequence[Sequence[int]]) -> Entry:
        """Return an entry by its division and its rows."""
        if division < 0 or self.parts is None:
            return self._whole(*(column[0] for column in columns))
        shape, offsets = self.parts.divisions[division]
        chunks = tuple(map(self._chunk, offsets, *columns))
        return TensorEntry(self.forms[columns[0][0]].dtype, shape, chunks)

    def _whole(self, form: int, file: int, offset: int, length: int, crc: int) -> Entry:
        if form < 0:
            return ObjectEntry(ItemRange(self.files[file], offset, length))
        dtype, shape = self.forms[form][:2]
        return TensorEntry(dtype, shape, (self._chunk((0,) * len(shape), form, file, offset, length, crc),))

    def _chunk(self, at: tuple[int, ...], form: int, file: int, offset: int, length: int, crc: int) -> StoredChunk:
        dtype, shape, stride, _, payload_offset, nbytes = self.forms[form]
        item = TensorItem(dtype, shape, stride, 0, payload_offset, nbytes, crc)
        return StoredChunk(at, shape, ItemRange(self.files[file], offset, length), item)

    def _name_of(self, row: int) -> str:
        begins = None if self.parts is None else self.parts.begin_of
        return self.names[row if begins is None else int(np.searchsorted(begins, row, "right")) - 1]

    def check(self, files: Mapping[str, int], path: str) -> None:
        """Check that every item lies within its file, and overlaps no other; tied tensors have one item."""
        sizes = np.array([files.get(file, -1) for file in self.files], dtype=np.int64)[self.file_of]
        beyond = np.flatnonzero(self.offset_of + self.length_of > sizes)
        if len(beyond):
            row = beyond[0]
            file = self.files[self.file_of[row]]
            place = ItemRange(file, int(self.offset_of[row]), int(self.length_of[row]))
            raise misplaced(path, self._name_of(row), place, files.get(file))
        rows = np.arange(len(self.form_of))
        begins = rows if self.parts is None else self.parts.begin_of
        owners = np.searchsorted(begins, rows, "right")  # the parts of one tensor are never the same item
        columns = [owners, self.crc_of, self.form_of, self.length_of, self.offset_of, self.file_of]
        order = np.lexsort(columns)
        columns = [column[order] for column in columns]
        owner, *facts = columns
        length, offset, file = facts[2:]
        differ = np.any([column[1:] != column[:-1] for column in facts], axis=0) | (owner[1:] == owner[:-1])
        on_another = np.flatnonzero(differ & (file[1:] == file[:-1]) & (offset[1:] < (offset + length)[:-1]))
        if len(on_another):
            first, second = order[on_another[0] : on_another[0] + 2].tolist()
            file, one, two = self.files[self.file_of[first]], self._name_of(first), self._name_of(second)
            raise CorruptCheckpointError(
                f"{path}/{file}: the item of {two} at offset {self.offset_of[second]} lies partly on that of {one}, "
                f"{self.length_of[first]} bytes at offset {self.offset_of[first]}: the index is damaged. Use an older "
                "checkpoint."
            )


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class IndexedPaths(_Rows[ObjPath]):
    """The path of each name in the state dict."""

    parents: Sequence[ObjPath]  # the distinct paths of the containers that hold leaves
    heads: Sequence[str]  # the common beginning of the names of each parent's leaves
    parent_of: Sequence[int]  # positions in ``parents``
    sequences: frozenset[int]  # the parents whose leaves are elements of a list

    def nest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return some or all values as nested dicts; no path leads through a list."""
        root: dict[str, Any] = {}
        within: dict[int, tuple[dict[str, Any], int]] = {}  # by parent: its dict, and the length of the names' heads
        for name, parent in zip(self.names, self.parent_of, strict=True):
            if name in values:
                if parent not in within:
                    container = root
                    for part in self.parents[parent]:
                        container = container.setdefault(part, {})  # type: ignore[arg-type]
                    within[parent] = container, len(self.heads[parent])
                container, head = within[parent]
                container[name[head:]] = values[name]
        return root

    @property
    def has_positions(self) -> bool:
        """Whether a path leads through a list."""
        return bool(self.sequences) or any(type(part) is int for parent in self.parents for part in parent)

    def __getitem__(self, name: str) -> ObjPath:
        parent = self.parent_of[self.numbers[name]]
        last = name[len(self.heads[parent]) :]
        return (*self.parents[parent], int(last) if parent in self.sequences else last)
