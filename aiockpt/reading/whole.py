"""Loading into new memory: tensors and objects by name, and the state dict made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import Index, ObjectEntry, TensorEntry
from aiockpt.format.item.arrays import array_names, array_of
from aiockpt.format.keys import containers_within
from aiockpt.options import LoadOptions, target_device
from aiockpt.planning.flatten import StructureError, unflatten
from aiockpt.reading.executor import ItemReader, LoadTools
from aiockpt.reading.mmap import MapReader
from aiockpt.reading.read_plan import ObjectRead, TensorRead, reads_of, view_of
from aiockpt.reading.targets import cast, relocated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from enum import Enum

    from aiockpt.format.index import Entry, ItemRange, TensorItem
    from aiockpt.storage.base import Source


@dataclass(eq=False, slots=True)
class _Stored:
    """Bytes that one or more keys see: read once, so that tied tensors share memory again."""

    entry: TensorEntry
    reads: list[TensorRead] = field(default_factory=list)
    target: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)


class WholeLoad:
    """A load into a new state dict.

    Args:
        source: the files.
        path: where they are, for messages.
        index: what they hold.
        options: how to load.
        tools: what the engine lends.
        known: what stands in items that were looked into before; is added to.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        index: Index,
        options: LoadOptions,
        tools: LoadTools,
        known: dict[ItemRange, TensorItem] | None = None,
    ) -> None:
        self._source = source
        self._path = path
        self._index = index
        self._options = options
        self._tools = tools
        self._enums: dict[str, type[Enum]] = {}  # by name, those of the members that objects take the place of
        self._reader = ItemReader(source, path, options, tools, known)

    async def run(self, entries: Mapping[str, Entry]) -> Any:
        """Load these entries; give the state dict."""
        values = await self.state_values(entries)
        return await self._tools.workers.run(self._nested, values)

    async def state_values(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Load as `values` does, but what was a NumPy array as one, so always to host memory."""
        arrays = {name: entries[name] for name in array_names(self._index.containers) if name in entries}
        where = self._options.map_location
        if not arrays or target_device(where).type == "meta":
            return await self.values(entries)
        if where is None:
            values = await self.values(entries)
        else:
            options = replace(self._options, map_location=None)
            host = WholeLoad(self._source, self._path, self._index, options, self._tools)
            values = await self.values({name: entry for name, entry in entries.items() if name not in arrays})
            values |= await host.values(arrays)
        return values | {name: array_of(values[name]) for name in arrays}

    async def values(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Load tensors and objects into memory of their own; give them by name."""
        values: dict[str, Any] = {}
        device = target_device(self._options.map_location)
        objects, tensors, stored = await self._tools.workers.run(self._sort, entries, device, values)
        await self._reader.read_objects(objects)
        values |= {read.name: read.value for read in objects}
        if device.type == "meta":
            forms = {name: (entry.shape, cast(entry.dtype, self._options.dtype)) for name, entry in tensors.items()}
            return values | {n: torch.empty(shape, dtype=dtype, device=device) for n, (shape, dtype) in forms.items()}
        if self._options.mmap:
            return values | await self._tools.workers.run(MapReader(self._source, self._path).tensors, tensors)
        await self._make_targets(stored, device)
        await self._reader.read([read for each in stored for read in each.reads])
        where = self._options.map_location
        # A device is callable too: it may decorate a function.
        move = where if callable(where) and not isinstance(where, torch.device) else None
        error = await self._tools.workers.run(self._see_all, stored, tensors, values, move)
        if error is not None:
            raise error
        return values

    def _sort(
        self, entries: Mapping[str, Entry], device: torch.device, values: dict[str, Any]
    ) -> tuple[list[ObjectRead], dict[str, TensorEntry], list[_Stored]]:
        """Tell tensors from objects; those that are in the index already go to ``values``."""
        objects: list[ObjectRead] = []
        tensors: dict[str, TensorEntry] = {}
        with gc_pause():
            for name, entry in entries.items():
                if isinstance(entry, TensorEntry):
                    tensors[name] = entry
                elif isinstance(entry, ObjectEntry):
                    objects.append(ObjectRead(name, entry.place, member_of=self._enums.get(name)))
                else:
                    values[name] = entry.value
            return objects, tensors, self._stored(tensors, device)

    def _stored(self, tensors: Mapping[str, TensorEntry], device: torch.device) -> list[_Stored]:
        found: dict[object, _Stored] = {}
        for name, entry in tensors.items():
            first = entry.chunks[0] if len(entry.chunks) == 1 else None
            as_stored = (
                first is not None and device.type == "cpu" and cast(entry.dtype, self._options.dtype) is entry.dtype
            )
            each = found.get(key := _bytes_key(name, entry, as_stored=as_stored))
            if each is None:
                each = found[key] = _Stored(entry)
                if as_stored and first is not None:
                    each.reads = [TensorRead(name, entry.dtype, first)]
            each.names.append(name)
        for each in found.values():
            for read in each.reads:
                read.shared = len(each.names) > 1
        return list(found.values())

    async def _make_targets(self, stored: Sequence[_Stored], device: torch.device) -> None:
        """Make the tensors that are not read into memory as they are stored."""
        wanted = [each for each in stored if not each.reads]
        forms = [(each.entry.shape, cast(each.entry.dtype, self._options.dtype)) for each in wanted]
        for each in wanted:
            check_expanded(each.names[0], each.entry, each.entry.nbytes)
        if device.type == "cpu":
            made = [new_tensor(self._tools, shape, dtype) for shape, dtype in forms]
        else:
            made = await self._tools.new(device, forms)
        for each, target in zip(wanted, made, strict=True):
            each.target = target
            each.reads = reads_of(each.names[0], each.entry, target)

    def _see_all(
        self, stored: Sequence[_Stored], tensors: Mapping[str, TensorEntry], values: dict[str, Any], move: Any
    ) -> BaseException | None:
        """Make the tensors; give what the caller's function raised, whatever it is."""
        try:
            with gc_pause():
                for each in stored:
                    self._see(each, tensors, values, move)
        except BaseException as exc:  # raised again where it reaches the caller as it is
            return exc
        return None

    @staticmethod
    def _see(each: _Stored, tensors: Mapping[str, TensorEntry], values: dict[str, Any], move: Any) -> None:
        """Give the tensors of all keys that see the same bytes."""
        made = each.target if each.target is not None else each.reads[0].made
        if made is not None:
            made = relocated(made, move) if move else made
            values[each.names[0]] = made
            for name in each.names[1:]:
                values[name] = made.detach()
            return
        (read,) = each.reads
        if read.memory is None or read.item is None:
            raise RuntimeError(f"{read.name} was not read")
        memory = relocated(read.memory, move) if move else read.memory
        shared = len(each.names) > 1
        for name in each.names:
            values[name] = view_of(memory, tensors[name].chunks[0].item or read.item, lazily=shared)

    def _nested(self, values: Mapping[str, Any]) -> Any:
        """Put the state dict together."""
        with gc_pause():
            return self._put_together(values)

    def _put_together(self, values: Mapping[str, Any]) -> Any:
        index = self._index
        names = [name for name in index.paths if name in values]
        containers: Any = index.containers
        if len(names) < len(index.paths):
            containers = containers_within(containers, list(index.paths), list(index.paths.values()), values.keys())
        try:
            nested = unflatten([index.paths[n] for n in names], [values[n] for n in names], containers)
        except (StructureError, KeyError, TypeError, ValueError) as exc:
            raise CorruptCheckpointError(f"{self._path}: the structure of the state dict is damaged: {exc}") from exc
        return nested if index.wrapped is None else nested[index.wrapped]


def check_expanded(name: str, entry: TensorEntry, nbytes: int) -> None:
    """Refuse to make more of a tensor than there is of it.

    Raises:
        LoadError: its elements share memory, and all that is wanted of it would have more bytes than are stored.
    """
    stored = sum(chunk.place.length for chunk in entry.chunks)
    if nbytes > stored:
        raise LoadError(
            f"{nbytes} bytes are wanted of {name} but {stored} are stored, for its elements share memory; load it "
            "as a whole, to host memory and without dtype="
        )


def new_tensor(tools: LoadTools, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a host tensor to be filled."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < 1 << 20:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return tools.memory.take(nbytes).view(dtype).view(shape)


def _bytes_key(name: str, entry: TensorEntry, *, as_stored: bool) -> object:
    """Give what two keys have in common if they are to share memory."""
    if not entry.nbytes:
        return name
    item = entry.chunks[0].item
    if as_stored and item is not None:
        return entry.chunks[0].place
    form = None if item is None else (item.stride, item.storage_offset)
    return tuple(chunk.place for chunk in entry.chunks), entry.dtype, entry.shape, form
