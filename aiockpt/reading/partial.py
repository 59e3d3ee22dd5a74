"""Reading parts of an open checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.errors import LoadError, MissingKeysError
from aiockpt.format.index import ChunkEntry, Entry, Index, InlineEntry, ItemRange, ObjectEntry, TensorEntry, TensorItem
from aiockpt.format.keys import check_patterns, hint, matching
from aiockpt.options import target_device
from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.ranges import Selection, select
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.executor import ItemReader
from aiockpt.reading.open import read_index
from aiockpt.reading.read_plan import TensorRead, annotate_partial_load, reads_of
from aiockpt.reading.targets import Target, cast, target_of
from aiockpt.reading.whole import WholeLoad, check_expanded, new_tensor
from aiockpt.snapshot.optimizer_hooks import count_change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.options import LoadOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Source, Storage


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of one key.

    Attributes:
        name: the key.
        entry: what is stored.
        selections: for each dimension of a tensor, what is wanted; None: all of it.
        shape: the shape of the result.
        taken: the dimensions that are not part of it.
        out: what to fill.
    """

    name: str
    entry: Entry
    selections: tuple[Selection, ...] | None = None
    shape: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    out: torch.Tensor | None = None

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Give the bytes that reading it takes, when floating-point values are cast to ``dtype``."""
        if isinstance(self.entry, ObjectEntry):
            return self.entry.place.length
        if isinstance(self.entry, InlineEntry):
            return 0
        item = self.entry.chunks[0].item if len(self.entry.chunks) == 1 and self.selections is None else None
        # A view of a larger storage brings all of that.
        return max(math.prod(self.shape) * cast(self.entry.dtype, dtype).itemsize, item.nbytes if item else 0)

    @property
    def position(self) -> tuple[str, int]:
        """Where it begins: file and offset."""
        if isinstance(self.entry, InlineEntry):
            return "", 0
        chunks: Sequence[ChunkEntry] = self.entry.chunks if isinstance(self.entry, TensorEntry) else ()
        place = self.entry.place if isinstance(self.entry, ObjectEntry) else chunks[0].place if chunks else None
        return ("", 0) if place is None else (place.file, place.offset)


@dataclass(eq=False)
class OpenCheckpoint:
    """A checkpoint whose index is read.

    Attributes:
        source: its files.
        path: where they are.
        index: what they hold.
        known: what stands in items that were looked into.
    """

    source: Source
    path: str
    index: Index
    known: dict[ItemRange, TensorItem] = field(default_factory=dict)

    def names(self, keys: object) -> list[str]:
        """Give the keys that are meant by names, names of containers and patterns, in their order.

        Raises:
            MissingKeysError: one of them means nothing.
        """
        patterns = check_patterns(keys)
        if patterns is None:
            return list(self.index.entries)
        found: dict[str, None] = {}
        for pattern in patterns:
            names, unmatched = matching(self.index.entries.keys(), [pattern])
            if unmatched:
                raise MissingKeysError(
                    f"{self.path} holds nothing that is meant by {pattern!r}.{hint(unmatched, self.index.entries)}",
                    unmatched,
                )
            found |= dict.fromkeys(names if len(names) < 2 else [n for n in self.index.entries if n in names])
        return list(found)

    def want(self, name: str, index: object, out: torch.Tensor | None = None) -> Wanted:
        """Check a request.

        Raises:
            KeyError: there is no such key.
            TypeError: an object can't be indexed, or a tensor not so, or not into a distributed tensor.
            IndexError: the index does not fit.
            ShapeMismatchError: ``out`` does not.
        """
        entry = self.index.entries.get(name)
        if entry is None:
            raise KeyError(
                f"{self.path} has no {name!r}; keys() gives all that it has.{hint([str(name)], self.index.entries)}"
            )
        if out is not None and not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a tensor to fill, not a {type(out).__name__}")
        if not isinstance(entry, TensorEntry):
            if index is not None or out is not None:
                raise TypeError(f"{name} is an object, not a tensor: it is read as a whole")
            return Wanted(name, entry)
        if index is not None and is_distributed(out):
            raise TypeError(
                f"a part of {name} can't be read into a {type(out).__name__}, of which this rank's part is filled: "
                "leave the index out, or pass a plain tensor"
            )
        if index is None:
            return Wanted(name, entry, None, entry.shape, (), out)
        selections, shape, taken = select(entry.shape, index)
        return Wanted(name, entry, selections, shape, taken, out)


async def index_of(storage: Storage, path: str, options: LoadOptions, tools: LoadTools) -> OpenCheckpoint:
    """Open a checkpoint: read its index."""
    source = DecodedSource(await storage.open(path, workers=tools.workers), path, tools.transforms)
    try:
        index, _ = await tools.workers.run(
            read_index, source, path, safe_globals=options.safe_globals, trust=options.trust
        )
    except BaseException:
        with anyio.CancelScope(shield=True):
            await tools.workers.run(source.close)
        raise
    return OpenCheckpoint(source, path, index)


async def read_wanted(
    opened: OpenCheckpoint,
    wanted: Sequence[Wanted],
    options: LoadOptions,
    tools: LoadTools,
    ready: Mapping[torch.device, torch.Event],
) -> dict[str, Any]:
    """Read parts of an open checkpoint; give them by key. For ``ready`` see `aiockpt.reading.load.load_checkpoint`."""
    for device, event in ready.items():
        await tools.placer_for(device).begin(event)
    load = WholeLoad(opened.source, opened.path, opened.index, options, tools, opened.known)
    whole = {w.name: w.entry for w in wanted if w.selections is None and w.out is None}
    parts = [w for w in wanted if w.name not in whole]
    targets = _given(opened.path, parts, options)
    made = await _made(parts, options, tools)
    values = await load.values(whole) if whole else {}
    reads = _reads(parts, targets, made)
    filled = [tensor for target in targets.values() for tensor in target.counted]
    count_change(filled)
    try:
        await ItemReader(opened.source, opened.path, options, tools, opened.known).read(reads)
    except LoadError as exc:
        if filled:
            annotate_partial_load(exc, reads)
        raise
    finally:
        count_change(filled)
    values |= {each.name: made[each.name] if each.out is None else each.out for each in parts}
    return {each.name: values[each.name] for each in wanted}


def _given(path: str, parts: Sequence[Wanted], options: LoadOptions) -> dict[str, Target]:
    """Check the tensors that the caller gave to be filled."""
    targets: dict[str, Target] = {}
    for each in parts:
        if each.out is not None and isinstance(each.entry, TensorEntry):
            form = TensorEntry(each.entry.dtype, each.shape, each.entry.chunks)
            target = target_of(path, each.name, form, each.out, options.dtype)
            if target is not None:
                targets[each.name] = target
    return targets


async def _made(parts: Sequence[Wanted], options: LoadOptions, tools: LoadTools) -> dict[str, torch.Tensor]:
    """Make tensors for the parts that the caller gave none for."""
    device = target_device(options.map_location)
    made = [(each, each.entry) for each in parts if each.out is None and isinstance(each.entry, TensorEntry)]
    if device.type != "meta":
        for each, entry in made:
            check_expanded(each.name, entry, math.prod(each.shape) * entry.dtype.itemsize)
    forms = [(each.shape, cast(entry.dtype, options.dtype)) for each, entry in made]
    if device.type == "cpu":
        new = [new_tensor(tools, shape, dtype) for shape, dtype in forms]
    elif device.type == "meta":
        new = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
    else:
        new = await tools.new(device, forms)
    return {each.name: tensor for (each, _), tensor in zip(made, new, strict=True)}


def _reads(
    parts: Sequence[Wanted], targets: Mapping[str, Target], made: Mapping[str, torch.Tensor]
) -> list[TensorRead]:
    """Plan the reads of parts, into what the caller gave or what was made."""
    reads: list[TensorRead] = []
    for each in parts:
        if not isinstance(each.entry, TensorEntry):
            continue
        target = targets.get(each.name)
        if target is None:
            tensor = _unsqueezed(each, made[each.name])
            reads += [] if tensor.is_meta else reads_of(each.name, each.entry, tensor, each.selections)
            continue
        for tensor, wanted in target.regions:
            filled = _unsqueezed(each, tensor)
            reads += reads_of(each.name, each.entry, filled, wanted or each.selections, fills=True)
    return reads


def _unsqueezed(wanted: Wanted, target: torch.Tensor) -> torch.Tensor:
    """Give the target with a dimension of one for each that an integer took away."""
    for dim in wanted.taken:
        target = target.unsqueeze(dim)
    return target
