"""Small tensors of an index in columns: read without an object for each.

Where there are many, a `TensorRead`, its item and its place cost more than the bytes. So rows of the index become
`SmallRows`, which are read in jobs of neighbours. A job checks the CRCs of all its items, and then makes the new
tensors of one form by one operator, each with a storage of its own, or copies to the targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from isal.isal_zlib import crc32
from numpy.lib.stride_tricks import sliding_window_view

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.extent import address_of, extent_of
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.strides import row_strides
from aiockpt.format.checks import wrong_crc
from aiockpt.format.index import TensorEntry
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.planning.flatten import TENSOR_TYPES
from aiockpt.planning.specs import is_plain_on_host
from aiockpt.reading.targets import Region, check_memory, loaded_dtype
from aiockpt.staging.pool import Chunk, MappedMemory, copy_small

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aiockpt.format.index import Entry
    from aiockpt.format.manifest.columnar_index import ItemForm
    from aiockpt.options import DType
    from aiockpt.staging.scatter import Placement
    from aiockpt.storage.base import Source

MOST_BYTES = 64 << 10
"""Payloads below this size are read so: of larger ones, an object each costs little."""
LEAST_ROWS = 256
_JOB_BYTES = 2 << 20  # so that the CRCs and the copies of a job find its bytes in the processor's cache
_MOST_STRETCHES = 64  # of one job


def small_rows(entries: Mapping[str, Entry], dtype: DType) -> NDArray[np.int64] | None:
    """Return the positions of the names that may be read so: whole tensors in rows, loaded as stored, and not tied.

    None if there are few of them, or the index has no columns.
    """
    if not isinstance(entries, IndexedEntries) or len(entries) < LEAST_ROWS:
        return None
    fitting = np.array([*(_is_small(form, dtype) for form in entries.forms), False])  # objects have the form -1
    chosen = fitting[entries.form_of[entries.first_rows]]
    if entries.parts is not None:
        chosen &= entries.parts.division_of < 0
    chosen[[entries.numbers[name] for name in entries.sharing()]] = False
    numbers = np.flatnonzero(chosen)
    return numbers if len(numbers) >= LEAST_ROWS else None


def _is_small(form: ItemForm, dtype: DType) -> bool:
    entry = TensorEntry(form.dtype, form.shape, ())
    is_small = 0 < form.nbytes < MOST_BYTES and form.stride == row_strides(form.shape)
    return is_small and loaded_dtype(entry, dtype, form.dtype) is form.dtype


class SmallRows:
    """Rows of an index in the order of their bytes, with the new tensors made of them, or the targets they fill."""

    def __init__(self, entries: IndexedEntries, numbers: NDArray[np.int64], fills: SmallFills | None = None) -> None:
        rows = entries.first_rows[numbers]
        order = np.lexsort((entries.offset_of[rows], entries.file_of[rows]))
        self.entries, self.fills = entries, fills is not None
        self.rows = rows[order]
        self.names = [entries.names[number] for number in numbers[order].tolist()]
        self.tensors: list[Any] = [None] * len(order)
        self.places: list[int] = []  # the addresses of the targets
        if fills is not None:
            self.tensors = [fills.tensors[number] for number in order.tolist()]
            self.places = [fills.places[number] for number in order.tolist()]
        self.begun = np.zeros(len(order), bool)  # some bytes may have reached the target
        self.done = np.zeros(len(order), bool)

    def __len__(self) -> int:
        return len(self.names)

    def jobs(self, source: Source, path: str, *, verify: bool) -> list[BulkRead]:
        """Return the jobs that read all rows: neighbours in a file become one stretch, and a few stretches one job."""
        entries, rows = self.entries, self.rows
        file, begin = entries.file_of[rows], entries.offset_of[rows]
        end = begin + entries.length_of[rows]
        breaks = np.flatnonzero((file[1:] != file[:-1]) | (begin[1:] > end[:-1] + source.gap_bytes)) + 1
        found: list[BulkRead] = []
        stretches: list[tuple[int, int]] = []
        used = 0
        for low, high in pairwise([0, *breaks.tolist(), len(rows)]):
            while low < high:
                limit = begin[low] + _JOB_BYTES - used - BLOCK_BYTES
                stop = low + int(np.searchsorted(end[low:high], limit, "right"))
                if stretches and (stop == low or len(stretches) == _MOST_STRETCHES):
                    found.append(BulkRead(self, stretches, source, path, verify))
                    stretches, used = [], 0
                    continue
                stretches.append((low, stop))
                used += int(end[stop - 1] - begin[low]) + BLOCK_BYTES
                low = stop
        return [*found, BulkRead(self, stretches, source, path, verify)]

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors by name."""
        return zip(self.names, self.tensors, strict=True)

    def contested(self, others: Sequence[Region]) -> list[Region]:
        """Return the targets as regions, with an entry each, if one shares memory with another or with these."""
        known = [extent_of(each.tensor) for each in others if each.tensor.is_cpu]
        sizes = np.array([form.nbytes for form in self.entries.forms])[self.entries.form_of[self.rows]]
        begins = np.array([*self.places, *(begin for begin, _ in known)], np.int64)
        ends = np.append(np.array(self.places, np.int64) + sizes, np.array([end for _, end in known], np.int64))
        order = np.argsort(begins)
        if (begins[order][1:] >= np.maximum.accumulate(ends[order])[:-1]).all():
            return []
        return [Region(name, self._entry(name), tensor.detach()) for name, tensor in self.values()]

    def _entry(self, name: str) -> TensorEntry:
        entry = self.entries[name]
        assert isinstance(entry, TensorEntry)
        return entry


class SmallFills:
    """Collects the targets that are plain host memory, of the form that a small row has."""

    def __init__(self, entries: Mapping[str, Entry], dtype: DType) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.places: list[int] = []
        self._entries, self._forms = entries, {}
        numbers = small_rows(entries, dtype)
        if numbers is not None and isinstance(entries, IndexedEntries):
            forms = entries.form_of[entries.first_rows[numbers]].tolist()
            names = map(entries.names.__getitem__, numbers.tolist())
            self._forms = dict(zip(names, map(entries.forms.__getitem__, forms), strict=True))

    @property
    def is_possible(self) -> bool:
        """Whether any row can be taken."""
        return bool(self._forms)

    def take(self, name: str, leaf: Any) -> bool:
        """Take a leaf of the target, if it fits."""
        form = self._forms.get(name)
        if (
            form is None
            or type(leaf) not in TENSOR_TYPES
            or not is_plain_on_host(leaf)
            or leaf.dtype is not form.dtype
            or leaf.shape != form.shape
            or not leaf.is_contiguous()
        ):
            return False
        rest = leaf.untyped_storage().nbytes() - form.nbytes
        place = address_of(leaf)
        if not place or rest < 0 or rest < leaf.storage_offset() * form.dtype.itemsize:  # its memory was freed
            return False
        self.names.append(name)
        self.tensors.append(leaf)
        self.places.append(place)
        return True

    def rows(self) -> SmallRows | None:
        """Return the rows of what was taken."""
        if not self.names or not isinstance(self._entries, IndexedEntries):
            return None
        return SmallRows(self._entries, np.array([self._entries.numbers[name] for name in self.names]), self)


@dataclass(eq=False, slots=True)
class BulkRead:
    """Rows that lie close together, with the range of rows of each stretch; a job as those of `jobs`."""

    device: ClassVar = torch.device("cpu")

    of: SmallRows
    stretches: Sequence[tuple[int, int]]
    source: Source
    path: str
    verify: bool

    @property
    def nbytes(self) -> int:
        rows, entries = self.of.rows, self.of.entries
        first, last = (rows[[each[end] - end for each in self.stretches]] for end in (0, 1))
        return int((entries.offset_of[last] + entries.length_of[last] - entries.offset_of[first]).sum())

    @property
    def file(self) -> str:
        return self._file_of(self.stretches[0][0])

    @property
    def span(self) -> slice:
        """The rows."""
        return slice(self.stretches[0][0], self.stretches[-1][1])

    @gc_pause()
    def read(self, buffer: Chunk | MappedMemory) -> list[Placement]:
        """Read all items, check their CRCs, and make or fill the tensors. Blocks."""
        entries, rows = self.of.entries, self.of.rows[self.span]
        forms = entries.form_of[rows]
        sizes, skips = (np.array([form[n] for form in entries.forms])[forms] for n in (5, 4))
        starts = entries.offset_of[rows] + skips  # in the file, then in the buffer
        at, origin = 0, self.span.start
        for low, high in self.stretches:
            first, last = self.of.rows[[low, high - 1]].tolist()
            begin, end = int(entries.offset_of[first]), int(entries.offset_of[last] + entries.length_of[last])
            at += (begin - at) % BLOCK_BYTES  # same offset in the page as in the file, as O_DIRECT requires
            self.source.read(self._file_of(low), begin, buffer.view[at : at + end - begin])
            starts[low - origin : high - origin] += at - begin
            at += end - begin
        if self.verify:
            self._check(buffer.view, starts, sizes)
        if self.of.fills:
            self._fill(buffer.address, starts, sizes)
        else:
            self._make(buffer.tensor, starts, forms)
        return []

    def finish(self) -> None:
        self.of.done[self.span] = True

    def _file_of(self, row: int) -> str:
        return self.of.entries.files[int(self.of.entries.file_of[self.of.rows[row]])]

    def _check(self, view: memoryview, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        ends = (starts + sizes).tolist()
        crcs = [crc32(view[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]
        wrong = np.flatnonzero(np.array(crcs, np.int64) != self.of.entries.crc_of[self.of.rows[self.span]])
        if len(wrong):
            name = self.of.names[self.span.start + int(wrong[0])]
            chunk = self.of._entry(name).chunks[0]
            assert chunk.item is not None
            raise wrong_crc(self.path, name, chunk.place, chunk.item)

    def _fill(self, address: int, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Copy the payloads to the targets; if the memory of one was freed since the plan, change none."""
        of, span = self.of, self.span
        places = [tensor.data_ptr() for tensor in of.tensors[span]]
        for name, tensor, place, planned in zip(of.names[span], of.tensors[span], places, of.places[span], strict=True):
            if place != planned:  # its storage was resized
                check_memory(name, tensor)
        of.begun[span] = True
        for place, start, nbytes in zip(places, (starts + address).tolist(), sizes.tolist(), strict=True):
            copy_small(place, start, nbytes)

    def _make(self, memory: torch.Tensor, starts: NDArray[np.int64], forms: NDArray[np.int64]) -> None:
        """Make the new tensors, those of a form by one operator, each with a storage of its own."""
        entries, tensors, origin = self.of.entries, self.of.tensors, self.span.start
        for number in set(forms.tolist()):
            form, chosen = entries.forms[number], np.flatnonzero(forms == number)
            made: Any = torch.unbind_copy(_stacked(memory, starts[chosen], form))  # type: ignore[func-returns-value]
            if form.dtype is torch.bool:
                made = [each.view(torch.bool) for each in made]
            for position, tensor in zip((chosen + origin).tolist(), made, strict=True):
                tensors[position] = tensor


def _stacked(memory: torch.Tensor, starts: NDArray[np.int64], form: ItemForm) -> torch.Tensor:
    """Return payloads of one form as one tensor: a view if they lie at equal distances, else a copy."""
    # bool as bytes: its operators may change bytes other than 0 and 1.
    dtype = torch.uint8 if form.dtype is torch.bool else form.dtype
    count, first, size = len(starts), int(starts[0]), dtype.itemsize
    step = int(starts[1]) - first if count > 1 else form.nbytes
    if first % size or step % size or not (np.diff(starts) == step).all():
        windows = sliding_window_view(memory.numpy(), form.nbytes)
        return torch.from_numpy(windows[starts]).view(dtype).view(count, *form.shape)
    values = memory[first : first + step * (count - 1) + form.nbytes].view(dtype)
    return values.as_strided((count, *form.shape), (step // size, *form.stride))
