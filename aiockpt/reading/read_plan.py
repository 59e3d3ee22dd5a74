"""The read plan, pure: which byte ranges of the checkpoint go into which new or existing tensors.

`plan_reads` turns requests into a `ReadPlan`. The executor carries it out, and `load.build_values` makes the
values of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import LoadError
from aiockpt.format.index import Entry, InlineEntry, ItemRange, ObjectEntry, StoredChunk, TensorEntry, TensorItem
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.options import DType, LoadOptions, target_device
from aiockpt.planning.ranges import Selection, overlap
from aiockpt.reading.bulk import SmallRows, small_rows
from aiockpt.reading.targets import loaded_dtype, target_of
from aiockpt.staging.runtime import is_host

if TYPE_CHECKING:
    from enum import Enum


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A key, a part of a tensor, or a tensor to fill."""

    name: str
    entry: Entry
    selections: tuple[Selection, ...] | None = None  # the part of a tensor, per dimension; None: all
    shape: tuple[int, ...] = ()  # of the result
    taken: tuple[int, ...] = ()  # dimensions that an integer index removes from the result
    out: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the value is read whole, into new memory."""
        return self.selections is None and self.out is None

    def nbytes(self, dtype: DType = None) -> int:
        """Return the memory of the value, with floating-point values cast to ``dtype``."""
        if isinstance(self.entry, ObjectEntry):
            return self.entry.place.length
        if isinstance(self.entry, InlineEntry):
            return 0
        item = self.entry.chunks[0].item if len(self.entry.chunks) == 1 and self.selections is None else None
        # A view keeps the whole storage that it was saved with.
        return max(math.prod(self.shape) * loaded_dtype(self.entry, dtype).itemsize, item.nbytes if item else 0)

    @property
    def position(self) -> tuple[str, int]:
        """The file and offset of its first byte."""
        if isinstance(self.entry, TensorEntry) and self.entry.chunks:
            return self.entry.chunks[0].place[:2]
        return self.entry.place[:2] if isinstance(self.entry, ObjectEntry) else ("", 0)


@dataclass(eq=False, slots=True)
class ObjectRead:
    """An object to read."""

    name: str
    place: ItemRange
    value: Any = None  # set when it was read
    member_of: type[Enum] | None = None  # the Enum class of the target's leaf, whose members may be unpickled


@dataclass(eq=False, slots=True)
class TensorRead:
    """A read of one stored chunk, or of a part of it."""

    name: str
    dtype: torch.dtype  # as stored
    chunk: StoredChunk
    selections: tuple[Selection, ...] | None = None  # the part of the chunk, per dimension; None: all
    # A tensor of the selections' shape, on any device, of any dtype and strides. None: new memory of the stored form.
    target: torch.Tensor | None = None
    fills: bool = False  # the target is the caller's, so errors report whether it was changed
    item: TensorItem | None = None  # set when the framing was parsed
    only_checked: bool = False  # without target: the bytes are dropped once their CRC was checked
    shared: bool = False  # without target: several tensors are views of the memory
    memory: torch.Tensor | None = None  # without target: the payload, dtype uint8
    made: torch.Tensor | None = None  # without target: the tensor, if it is small and not shared
    pending: int = 1  # jobs left
    begun: bool = False  # some bytes have reached the target


@dataclass(eq=False, slots=True)
class NewTensor:
    """New memory to read into. Keys that store the same bytes share it, so that tied tensors are tied again."""

    keys: dict[str, TensorEntry]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    move: Callable[[torch.UntypedStorage, str], Any] | None = None  # a map_location function
    selections: tuple[Selection, ...] | None = None  # see ReadRequest
    taken: tuple[int, ...] = ()
    reads: list[TensorRead] = field(default_factory=list)
    tensor: torch.Tensor | None = None  # allocated before reading; None: the memory is made as it was stored

    def read_into(self, tensor: torch.Tensor) -> None:
        """Set the allocated tensor, and plan its reads."""
        self.tensor = tensor
        if not tensor.is_meta:
            name, entry = next(iter(self.keys.items()))
            self.reads = reads_of(name, entry, _with_taken(tensor, self.taken), self.selections)


@dataclass(eq=False, slots=True)
class ReadPlan:
    """The reads of a load, or of one phase of it."""

    values: dict[str, Any] = field(default_factory=dict)  # at first those that need no read
    arrays: Sequence[str] = ()  # the values that become NumPy arrays
    objects: list[ObjectRead] = field(default_factory=list)
    mapped: dict[str, TensorEntry] = field(default_factory=dict)
    new: list[NewTensor] = field(default_factory=list)
    small: SmallRows | None = None  # new tensors that are read in bulk
    fills: list[TensorRead] = field(default_factory=list)
    filled: list[torch.Tensor] = field(default_factory=list)  # the caller's, whose version counters change

    @property
    def reads(self) -> list[TensorRead]:
        """The reads of all tensors; those of new ones when they are allocated."""
        return [*(read for each in self.new for read in each.reads), *self.fills]


@gc_pause()
def plan_reads(
    path: str,
    whole: Mapping[str, Entry],
    parts: Sequence[ReadRequest],
    options: LoadOptions,
    enums: Mapping[str, type[Enum]],
    *,
    in_bulk: bool = False,
    arrays: Collection[str] = (),
) -> ReadPlan:
    """Plan the reads of whole entries into new memory, and of parts of tensors into new memory or `ReadRequest.out`.

    ``arrays``: the entries that become NumPy arrays, so that they are read to host memory whatever the options say.
    """
    plan = ReadPlan(arrays=[name for name in arrays if name in whole])
    where, device, dtype = options.map_location, target_device(options.map_location), options.dtype
    move = where if callable(where) and not isinstance(where, torch.device) else None  # a device is callable too
    if in_bulk and isinstance(whole, IndexedEntries) and device.type == "cpu" and not (options.mmap or move):
        numbers = small_rows(whole, dtype)
        if numbers is not None:
            plan.small = SmallRows(whole, numbers)
            is_left = np.ones(len(whole), bool)
            is_left[numbers] = False
            whole = whole.at(np.flatnonzero(is_left))
    tensors: dict[str, TensorEntry] = {}
    for name, entry in whole.items():
        if isinstance(entry, TensorEntry):
            tensors[name] = entry
        elif isinstance(entry, ObjectEntry):
            plan.objects.append(ObjectRead(name, entry.place, member_of=enums.get(name)))
        elif entry.error is not None:
            raise entry.error
        else:
            plan.values[name] = entry.value
    if options.mmap:
        plan.mapped = tensors
    else:
        hosted = [] if where is None else [name for name in plan.arrays if name in tensors]
        plan.new = _new_tensors({name: tensors.pop(name) for name in hosted}, torch.device("cpu"), dtype, None)
        plan.new += _new_tensors(tensors, device, dtype, move)
    for part in parts:
        if not isinstance(part.entry, TensorEntry):
            continue
        if part.out is not None:
            _plan_out(plan, path, part, part.entry, part.out, dtype)
            continue
        if device.type != "meta":
            _check_expanded(part.name, part.entry, math.prod(part.shape) * part.entry.dtype.itemsize)
        form = part.shape, loaded_dtype(part.entry, dtype), device, move
        plan.new.append(NewTensor({part.name: part.entry}, *form, part.selections, part.taken))
    return plan


def _new_tensors(
    tensors: Mapping[str, TensorEntry],
    device: torch.device,
    dtype: DType,
    move: Callable[[torch.UntypedStorage, str], Any] | None,
) -> list[NewTensor]:
    """Return the new memory for whole tensors, of which keys with the same bytes share one."""
    found: dict[object, NewTensor] = {}
    for name, entry in tensors.items():
        wanted = loaded_dtype(entry, dtype)
        as_stored = len(entry.chunks) == 1 and is_host(device) and wanted is entry.dtype
        key: object = name
        if entry.nbytes and device.type != "meta":
            # As stored, all views of a storage share its memory.
            is_view = as_stored and entry.chunks[0].item is not None
            key = entry.chunks[0].place if is_view else value_key(name, entry)
        new = found.get(key)
        if new is None:
            new = found[key] = NewTensor({}, entry.shape, wanted, device, move)
            if as_stored:
                new.reads = [TensorRead(name, entry.dtype, entry.chunks[0])]
            elif device.type != "meta":
                _check_expanded(name, entry, entry.nbytes)
        elif as_stored:
            new.reads[0].shared = True
        new.keys[name] = entry
    return list(found.values())


def value_key(name: str, entry: TensorEntry) -> object:
    """Return a key that is equal for entries of the same values in the same bytes: for tied tensors."""
    if not entry.nbytes:
        return name
    item = entry.chunks[0].item  # several views of one storage have the same range of bytes
    view = None if item is None else (item.stride, item.storage_offset, item.conj, item.neg)
    return tuple(chunk.place for chunk in entry.chunks), entry.dtype, entry.shape, view


def _plan_out(
    plan: ReadPlan, path: str, part: ReadRequest, entry: TensorEntry, out: torch.Tensor, dtype: DType
) -> None:
    """Plan to fill a tensor of the caller."""
    plan.values[part.name] = out
    target = target_of(path, part.name, TensorEntry(entry.dtype, part.shape, entry.chunks), out, dtype)
    if target is None:
        raise TypeError(f"{part.name} can't be read into a {type(out).__name__}")
    for region in target.regions:
        tensor = _with_taken(region.tensor, part.taken)
        plan.fills += reads_of(part.name, entry, tensor, region.wanted or part.selections, fills=True)
    plan.filled += target.counted


def _with_taken(tensor: torch.Tensor, taken: Sequence[int]) -> torch.Tensor:
    """Return the tensor with dimensions of size one where integer indices removed them."""
    for dim in taken:
        tensor = tensor.unsqueeze(dim)
    return tensor


def _check_expanded(name: str, entry: TensorEntry, nbytes: int) -> None:
    """Refuse a small file that would need any amount of memory."""
    stored = sum(chunk.place.length for chunk in entry.chunks)
    is_indexed = any(chunk.item is not None for chunk in entry.chunks)
    if nbytes > stored and is_indexed:  # other items were checked to have at least a byte for each element
        raise LoadError(
            f"{nbytes} bytes are wanted of {name} but {stored} are stored, for its elements share memory; load it "
            "as a whole, to host memory and without dtype="
        )


def reads_of(
    name: str,
    entry: TensorEntry,
    target: torch.Tensor,
    wanted: Sequence[Selection] | None = None,
    *,
    fills: bool = False,
) -> list[TensorRead]:
    """Return one read for each stored chunk that overlaps the requested part of a tensor.

    ``target`` has the shape of the part; ``wanted`` is the part, per dimension (None: all).
    """
    if 0 in target.shape:
        return []
    if wanted is None and len(entry.chunks) == 1:
        return [TensorRead(name, entry.dtype, entry.chunks[0], None, target, fills)]
    chosen = [Selection(0, size) for size in entry.shape] if wanted is None else wanted
    found: list[TensorRead] = []
    for chunk in entry.chunks:
        common = overlap(chunk.offsets, chunk.sizes, chosen)
        if common is not None:
            is_whole = all(s == Selection(0, n) for s, n in zip(common.chunk, chunk.sizes, strict=True))
            region = target[common.target] if target.dim() else target
            found.append(TensorRead(name, entry.dtype, chunk, None if is_whole else common.chunk, region, fills))
    return found


def annotate_partial_load(error: LoadError, reads: Sequence[TensorRead], small: SmallRows | None = None) -> None:
    """Add to an error which of the caller's tensors, if there are any, were filled, and which hold only a part."""
    begun: dict[str, bool] = {}
    unfinished: set[str] = set()
    if small is not None and small.fills:
        begun = dict(zip(small.names, small.begun.tolist(), strict=True))
        unfinished = {small.names[number] for number in np.flatnonzero(~small.done).tolist()}
    for read in reads:
        if read.fills:
            begun[read.name] = begun.get(read.name, False) or read.begun
    if not begun:
        return
    unfinished |= {read.name for read in reads if read.fills and read.pending}
    placed = tuple(name for name in begun if name not in unfinished)
    annotate(error, len(begun), placed, tuple(name for name in begun if name in unfinished and begun[name]))


def annotate(error: LoadError, count: int, placed: tuple[str, ...], partly: tuple[str, ...] = ()) -> None:
    """Add to an error which of ``count`` tensors to fill were filled, and which hold only a part."""
    error.placed, error.partly_placed = placed, partly
    counts = [
        f"{len(names)} {how} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for names, how in ((placed, "had been filled"), (partly, "hold a part of it"))
        if names
    ]
    error._state = f" Of the {count} tensors to fill here, {'; '.join(counts) or 'no tensor was changed'}."
