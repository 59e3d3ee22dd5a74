"""The load pipeline: what is wanted, is it there and does it fit, read it, put the state dict together."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.capture import count_change
from aiockpt.errors import CorruptCheckpointError, LoadError, MissingKeysError
from aiockpt.format.index import Index, InlineEntry, ObjectEntry, TensorEntry
from aiockpt.index_reader import read_index
from aiockpt.item_reader import ItemReader, LoadTools
from aiockpt.load_options import LoadOptions, target_device
from aiockpt.map_reader import MapReader
from aiockpt.planning.selection import containers_within, matching
from aiockpt.planning.tree import StructureError, flatten, replace_leaves, unflatten
from aiockpt.reads import ObjectRead, TensorRead, reads_of, view_of
from aiockpt.targets import check_target, relocated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.index import Entry, ItemPlace, TensorItem
    from aiockpt.storage.base import Source, Storage


async def load_checkpoint(
    storage: Storage,
    path: str,
    state_dict: Mapping[Any, Any] | None,
    options: LoadOptions,
    tools: LoadTools,
    ready: Mapping[torch.device, torch.Event],
) -> Any:
    """Load a checkpoint; see `aiockpt.AsyncCheckpointer.load`.

    Args:
        storage: where it is kept.
        path: where it is there.
        state_dict: what to load into.
        options: how.
        tools: what the engine lends.
        ready: for each accelerator, the moment in the caller's stream from which on targets may be filled.
    """
    source = await storage.open(path, workers=tools.workers)
    try:
        index, _ = await tools.workers.run(
            read_index, source, path, safe_globals=options.safe_globals, trust=options.trust
        )
        for device, event in ready.items():
            await tools.placer_for(device).begin(event)
        if state_dict is None:
            whole = WholeLoad(source, path, index, options, tools)
            return await whole.run()
        return await _TargetLoad(source, path, index, options, tools).run(state_dict)
    finally:
        with anyio.CancelScope(shield=True):
            await tools.workers.run(source.close)


def chosen(path: str, index: Index, options: LoadOptions) -> Mapping[str, Entry]:
    """Give the entries that the options ask for.

    Raises:
        MissingKeysError: a key or pattern means nothing in this checkpoint.
    """
    if options.keys is None:
        return index.entries
    names, unmatched = matching(index.entries.keys(), options.keys)
    if unmatched and options.strict:
        raise MissingKeysError(
            f"{path} holds nothing that is meant by {', '.join(map(repr, unmatched[:10]))}; see what it holds with "
            "open(path), or pass strict=False",
            unmatched,
        )
    return {name: index.entries[name] for name in index.entries if name in names}


@dataclass(eq=False)
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
        known: dict[ItemPlace, TensorItem] | None = None,
    ) -> None:
        self._source = source
        self._path = path
        self._index = index
        self._options = options
        self._tools = tools
        self._reader = ItemReader(source, path, options, tools, known)

    async def run(self) -> Any:
        """Load; give the state dict."""
        values = await self.values(chosen(self._path, self._index, self._options))
        return self._nested(values)

    async def values(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Load tensors and objects into memory of their own; give them by name."""
        objects = [ObjectRead(name, e.place) for name, e in entries.items() if isinstance(e, ObjectEntry)]
        values: dict[str, Any] = {n: e.value for n, e in entries.items() if isinstance(e, InlineEntry)}
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorEntry)}
        device = target_device(self._options.map_location)
        await self._reader.read_objects(objects)
        values |= {read.name: read.value for read in objects}
        if device.type == "meta":
            return values | {
                n: torch.empty(e.shape, dtype=cast(e.dtype, self._options), device=device) for n, e in tensors.items()
            }
        if self._options.mmap:
            values |= await self._tools.workers.run(MapReader(self._source, self._path).tensors, tensors)
            return values
        stored = self._stored(tensors, device)
        await self._make_targets(stored, device)
        await self._reader.read([read for each in stored for read in each.reads])
        for each in stored:
            values |= self._seen(each, tensors)
        return values

    def _stored(self, tensors: Mapping[str, TensorEntry], device: torch.device) -> list[_Stored]:
        found: dict[object, _Stored] = {}
        for name, entry in tensors.items():
            first = entry.chunks[0] if len(entry.chunks) == 1 else None
            as_stored = first is not None and device.type == "cpu" and cast(entry.dtype, self._options) is entry.dtype
            each = found.get(key := _bytes_key(name, entry, as_stored=as_stored))
            if each is None:
                each = found[key] = _Stored(entry)
                if as_stored and first is not None:
                    each.reads = [TensorRead(name, entry.dtype, first)]
            each.names.append(name)
        return list(found.values())

    async def _make_targets(self, stored: Sequence[_Stored], device: torch.device) -> None:
        """Make the tensors that are not read into memory as they are stored."""
        wanted = [each for each in stored if not each.reads]
        forms = [(each.entry.shape, cast(each.entry.dtype, self._options)) for each in wanted]
        for each in wanted:
            self._check_expanded(each)
        if device.type == "cpu":
            made = [new_tensor(self._tools, shape, dtype) for shape, dtype in forms]
        else:
            made = await self._tools.placer_for(device).new(forms)
        for each, target in zip(wanted, made, strict=True):
            each.target = target
            each.reads = reads_of(each.names[0], each.entry, target)

    def _check_expanded(self, each: _Stored) -> None:
        stored = sum(chunk.place.length for chunk in each.entry.chunks)
        if each.entry.nbytes > stored:
            raise LoadError(
                f"{each.names[0]} has {each.entry.nbytes} bytes but {stored} are stored, for its elements share "
                "memory; load it without dtype= and to host memory"
            )

    def _seen(self, each: _Stored, tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Give the tensors of all keys that see the same bytes."""
        where = self._options.map_location
        # A device is callable too: it may decorate a function.
        move = where if callable(where) and not isinstance(where, torch.device) else None
        if each.target is not None:
            target = relocated(each.target, move) if move else each.target
            return {name: target if i == 0 else target.detach() for i, name in enumerate(each.names)}
        (read,) = each.reads
        if read.memory is None or read.item is None:
            raise RuntimeError(f"{read.name} was not read")
        memory = relocated(read.memory, move) if move else read.memory
        shared = len(each.names) > 1
        return {name: view_of(memory, tensors[name].chunks[0].item or read.item, lazily=shared) for name in each.names}

    def _nested(self, values: Mapping[str, Any]) -> Any:
        """Put the state dict together."""
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


def cast(dtype: torch.dtype, options: LoadOptions) -> torch.dtype:
    """Give the dtype that a stored tensor is loaded as: floating-point ones are cast, as ``nn.Module.to`` does."""
    wanted = options.dtype
    return dtype if wanted is None or not dtype.is_floating_point else wanted


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


class _TargetLoad(WholeLoad):
    """A load into the tensors of a state dict."""

    async def run(self, state_dict: Mapping[Any, Any]) -> Any:  # type: ignore[override]
        """Load; give ``state_dict``."""
        entries = self._index.entries
        objects = {name for name, entry in entries.items() if isinstance(entry, ObjectEntry | InlineEntry)}
        try:
            flat = flatten(state_dict, whole=objects)
        except StructureError as exc:
            raise LoadError(f"can't load into this state dict: {exc}") from None
        wanted = flat.names
        if self._options.keys is not None:
            names, unmatched = matching(set(flat.names), self._options.keys)
            self._check_missing(unmatched)
            wanted = [name for name in flat.names if name in names]
        self._check_missing([name for name in wanted if name not in entries])
        reads, fresh, filled = self._plan(flat.names, flat.paths, flat.leaves, set(wanted))
        try:
            replace_leaves(state_dict, dict.fromkeys(fresh.values()), check=True)
        except StructureError as exc:
            raise LoadError(f"can't load into this state dict: {exc}; nothing was changed") from None
        # Everything that can be wrong is looked at before the first byte is placed.
        values = await self.values({name: entries[name] for name in fresh})
        await self._reader.prepare(reads)
        # Written behind autograd's back: let it notice, and a save that is copying them, however this ends.
        count_change(filled)
        try:
            await self._reader.read(reads)
        except LoadError as exc:
            _say_what_was_placed(exc, reads)
            raise
        finally:
            count_change(filled)
        replace_leaves(state_dict, {path: values[name] for name, path in fresh.items()})
        return state_dict

    def _plan(
        self, names: Sequence[str], paths: Sequence[Any], leaves: Sequence[Any], wanted: set[str]
    ) -> tuple[list[TensorRead], dict[str, Any], list[torch.Tensor]]:
        """Give the reads into tensors, the paths of what is made anew, and the tensors that are filled."""
        reads: list[TensorRead] = []
        fresh: dict[str, Any] = {}
        filled: list[torch.Tensor] = []
        for name, path, leaf in zip(names, paths, leaves, strict=True):
            entry = self._index.entries.get(name) if name in wanted else None
            if entry is None:
                continue
            check_target(self._path, name, entry, leaf, functools.partial(cast, options=self._options))
            if isinstance(entry, TensorEntry) and isinstance(leaf, torch.Tensor):
                reads += reads_of(name, entry, leaf.detach(), fills=True)
                filled.append(leaf)
            else:
                fresh[name] = path
        return reads, fresh, filled

    def _check_missing(self, missing: Sequence[str]) -> None:
        if missing and self._options.strict:
            shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise MissingKeysError(
                f"{self._path} lacks {len(missing)} of the keys asked for: {shown}. Pass strict=False to leave "
                "them as they are.",
                tuple(missing),
            )


def _say_what_was_placed(error: LoadError, reads: Sequence[TensorRead]) -> None:
    """Add to an error which tensors of the caller's hold what by now."""
    begun: dict[str, bool] = {}
    for read in reads:
        if read.fills:
            begun[read.name] = begun.get(read.name, False) or read.begun
    unfinished = {read.name for read in reads if read.fills and read.pending}
    error.placed = tuple(name for name in begun if name not in unfinished)
    error.partly_placed = tuple(name for name in begun if name in unfinished and begun[name])
    told = [
        f"{len(names)} {how} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for names, how in ((error.placed, "had been filled"), (error.partly_placed, "hold a part of it"))
        if names
    ]
    said = "; ".join(told) if told else "no tensor was changed"
    error.args = (f"{error.args[0]} Of the {len(begun)} tensors to fill, {said}.", *error.args[1:])
