"""Loads, from top to bottom: open, plan, execute, assemble."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import torch

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.spans import record_to, span
from aiockpt.core.wording import some_of
from aiockpt.errors import CorruptCheckpointError, LoadError, MissingKeysError, ShapeMismatchError
from aiockpt.format.item.arrays import array_names, array_of
from aiockpt.format.keys import containers_within, hint, matching
from aiockpt.format.manifest.columnar_index import IndexedEntries, IndexedPaths
from aiockpt.options import LoadOptions, target_device
from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import StructureError, replace_leaves, unflatten
from aiockpt.reading.apply_live import Filled, Gift
from aiockpt.reading.executor import LoadTools, ReadExecutor
from aiockpt.reading.jobs import view_of
from aiockpt.reading.open import OpenCheckpoint, open_checkpoint
from aiockpt.reading.plain_loading import loads_as_torch
from aiockpt.reading.read_plan import NewTensor, ReadPlan, ReadRequest, TensorRead, plan_reads
from aiockpt.reading.sharing import FILLS, NEW, hash_of
from aiockpt.reading.target_plan import TargetPlan, distinct_trees, plan_target
from aiockpt.reading.targets import Region, check_same, encoded_copy, relocated
from aiockpt.telemetry.progress import ReadReport

if TYPE_CHECKING:
    from enum import Enum

    from numpy.typing import NDArray

    from aiockpt.format.index import Entry, Index, ObjPath
    from aiockpt.reading.collective import Gathering
    from aiockpt.reading.known_items import KnownItems
    from aiockpt.snapshot.live import LiveObject, ResolvedState
    from aiockpt.storage.base import Storage


_DAMAGED = (StructureError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class CheckpointLoad:
    """A load whose arguments were checked at the call; see `aiockpt.AsyncCheckpointer.load`."""

    storage: Storage
    path: str
    options: LoadOptions
    state_dict: Any = None  # to load into, as the caller passed it; None: load into a new one
    target: ResolvedState | None = None  # the same with state dicts in place of live objects
    ready: Mapping[torch.device, torch.Event] = field(default_factory=dict)  # after which targets may be filled
    report: ReadReport = field(default_factory=ReadReport)
    opened: OpenCheckpoint | None = None  # that is open already, and stays open
    known: KnownItems | None = None  # what the target has from the last load

    async def run(self, tools: LoadTools, gathering: Gathering | None = None) -> Filled:
        """Run the engine's part of the load; ``gathering``: with the other ranks."""
        record_to(self.report.spans)
        with span("open"):
            opened = self.opened or await open_checkpoint(self.storage, self.path, self.options, tools)
        try:
            await tools.begin(self.ready)
            # What is shared, or compared with what the target has, has an object each.
            in_bulk = self.known is None and (gathering is None or not gathering.shares(opened.source))
            tools_here = replace(tools, report=self.report)
            loader = _OpenLoad(opened, self.options, tools_here, in_bulk, self.known)
            if self.target is None:
                return await loader.load_new(gathering)
            return await loader.load_into(self.target, self.state_dict, gathering)
        finally:
            if opened is not self.opened:
                with anyio.CancelScope(shield=True):
                    await tools.workers.run(opened.source.close)


async def read_requests(
    opened: OpenCheckpoint,
    requests: Sequence[ReadRequest],
    options: LoadOptions,
    tools: LoadTools,
    ready: Mapping[torch.device, torch.Event],
) -> dict[str, Any]:
    """Return the values of requests by key; for ``ready`` see `CheckpointLoad`."""
    await tools.begin(ready)
    whole = {each.name: each.entry for each in requests if each.is_whole}
    load = _OpenLoad(opened, options, tools)
    values = await load.execute(await load.plan(whole, [each for each in requests if not each.is_whole]))
    return {each.name: values[each.name] for each in requests}


@dataclass(eq=False)
class _OpenLoad:
    """One load of an open checkpoint."""

    _opened: OpenCheckpoint
    _options: LoadOptions
    _tools: LoadTools
    _in_bulk: bool = False
    _known: KnownItems | None = None

    def __post_init__(self) -> None:
        opened = self._opened
        self._path, self._run = opened.path, self._tools.workers.run
        self._executor = ReadExecutor(opened.source, opened.path, self._options, self._tools, opened.known)

    async def load_new(self, gathering: Gathering | None) -> Filled:
        """Load into a new state dict."""
        index = self._opened.index
        entries, unmatched = chosen_entries(self._path, index, self._options)
        plan = await self.plan(entries, arrays=self._arrays)
        async with self._sharing(gathering, plan, ()):
            values = await self.execute(plan)
        if gathering is not None:
            await gathering.meet()
        with span("assemble"):
            state = await self._run(build_state, self._path, index, values)
        return Filled(self._path, state, missing=unmatched, strict=False)

    async def load_into(self, target: ResolvedState, state_dict: Any, gathering: Gathering | None) -> Filled:
        """Load into the tensors of a state dict, and read what live objects are given."""
        run, options = self._run, self._options
        # All checks come before the first byte reaches the target: a load that is refused changes nothing.
        with span("plan"):
            plan = await run(
                plan_target, self._path, self._opened.index, options, target, state_dict, in_bulk=self._in_bulk
            )
        await self._compare(plan.twins)
        if self._known is not None:
            await run(self._known.leave_out, plan, self._opened.index.entries)
        new = await self.plan(plan.fresh, enums=plan.enums, arrays=self._arrays)
        async with self._sharing(gathering, new, plan.reads):
            fresh = await self.execute(new)
            new_values = await run(build_target_values, self._opened, plan, target, fresh)
            await self._executor.prepare(plan.reads)
            if gathering is not None and await gathering.meet(reads=await run(plan.read_hash)):
                # Another rank of this host reads the same bytes: O_DIRECT would read the disk once for each of them.
                self._opened.source.share()
            await self._executor.fill(plan, FILLS)
        # Last, and checked to succeed: a failed read leaves only tensors changed, and its error names them.
        new_values.put(target.tree, state_dict)
        if gathering is not None:
            gathering.filled = plan.names
        return Filled(self._path, state_dict, new_values.gifts, plan.missing, options.strict, plan.names)

    async def plan(
        self,
        whole: Mapping[str, Entry],
        parts: Sequence[ReadRequest] = (),
        *,
        enums: Mapping[str, type[Enum]] | None = None,
        arrays: Collection[str] = (),
        options: LoadOptions | None = None,
    ) -> ReadPlan:
        """Plan to read entries and parts of tensors; see `plan_reads`."""
        with span("plan"):
            arguments = self._path, whole, parts, options or self._options, enums or {}
            return await self._run(plan_reads, *arguments, in_bulk=self._in_bulk, arrays=arrays)

    async def execute(self, plan: ReadPlan) -> dict[str, Any]:
        """Return the values of what is planned by key."""
        await self._executor.execute(plan, NEW)
        with span("assemble"):
            error = await self._run(build_values, plan)
        if error is not None:
            raise error
        return plan.values

    @property
    def _arrays(self) -> Collection[str]:
        """The entries that are NumPy arrays when they are loaded."""
        is_meta = target_device(self._options.map_location).type == "meta"
        return () if is_meta else array_names(self._opened.index.containers)

    @contextlib.asynccontextmanager
    async def _sharing(
        self, gathering: Gathering | None, plan: ReadPlan, fills: Sequence[TensorRead]
    ) -> AsyncIterator[None]:
        """Share what is planned with the other ranks, if this rank does."""
        source = self._opened.source
        if gathering is None or not gathering.shares(source):
            yield
            return
        workers, executor = self._tools.workers, self._executor
        with gc_pause():  # all ranks would wait for a collection of one
            with span("share"):
                await executor.allocate(plan)
                needs = await executor.needs((), fills, FILLS) + await executor.needs(plan.objects, plan.reads, NEW)
                checkpoint = await workers.run(hash_of, self._opened.index)
                executor.shared = shared = await gathering.share(checkpoint, needs, source, workers)
            try:
                yield
            finally:
                shared.close()

    async def _compare(self, twins: Sequence[tuple[Region, Region]]) -> None:
        """Raise ShapeMismatchError if tied tensors, which DCP stores one by one, have different values."""
        for one, other in twins:
            check_same(one, other)
            entries, on_host = {one.name: one.entry, other.name: other.entry}, replace(self._options, map_location=None)
            values = await self.execute(await self.plan(entries, options=on_host))
            # As bytes: NaN is equal to itself, and 0.0 is not -0.0.
            a, b = (values[each.name].contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
            if not torch.equal(a, b):
                raise ShapeMismatchError(
                    f"{one.name} and {other.name} are the same memory in the target, but differ in {self._path}: "
                    "clone one of them"
                )


def chosen_entries(path: str, index: Index, options: LoadOptions) -> tuple[Mapping[str, Entry], tuple[str, ...]]:
    """Return the entries that the options ask for, and the keys and patterns that match nothing."""
    if options.keys is None:
        return index.entries, ()
    names, unmatched = matching(index.entries.keys(), options.keys)
    if unmatched and options.strict:
        raise MissingKeysError(
            f"{path} has no key that matches {', '.join(map(repr, unmatched[:10]))}; see what it holds with "
            f"aiockpt.open(path), or pass strict=False.{hint(unmatched, index.entries, names)}",
            unmatched,
        )
    entries = index.entries
    if isinstance(entries, IndexedEntries):
        return entries.at(np.array(sorted(map(entries.numbers.__getitem__, names)), np.int64)), unmatched
    return {name: entries[name] for name in entries if name in names}, unmatched


# --- values ---------------------------------------------------------------------------------------------


@gc_pause()
def build_values(plan: ReadPlan) -> BaseException | None:
    """Add the values of an executed plan to ``plan.values``.

    Returns the exception of a map_location function instead of raising it: a StopIteration can't pass a future.
    """
    try:
        plan.values |= {read.name: read.value for read in plan.objects}
        if plan.small is not None:
            plan.values.update(plan.small.values())
        for new in plan.new:
            _build_tensors(new, plan.values)
        plan.values |= {name: array_of(plan.values[name]) for name in plan.arrays}
    except BaseException as exc:  # the caller raises it
        return exc
    return None


def _build_tensors(new: NewTensor, values: dict[str, Any]) -> None:
    """Add the tensors of all keys that share memory."""
    tensor = new.tensor if new.tensor is not None else new.reads[0].made
    if tensor is not None:
        tensor = relocated(tensor, new.move) if new.move else tensor
        if tensor.dtype != new.dtype:
            tensor = tensor.to(new.dtype)
        first, *others = new.keys
        values[first] = tensor
        for name in others:
            values[name] = tensor.detach()
        return
    (read,) = new.reads
    if read.memory is None or read.item is None:
        raise RuntimeError(f"{read.name} was not read")
    memory = relocated(read.memory, new.move) if new.move else read.memory
    shared = len(new.keys) > 1  # then conjugating the memory for one key would change the values of the others
    for name, entry in new.keys.items():
        values[name] = view_of(memory, entry.chunks[0].item or read.item, lazily=shared).to(entry.dtype)


# --- a new state dict -----------------------------------------------------------------------------------


@gc_pause()
def build_state(path: str, index: Index, values: Mapping[str, Any]) -> Any:
    """Return the nested state dict of some or all keys of an index."""
    containers: Any = index.containers
    if isinstance(index.paths, IndexedPaths) and not containers and not index.paths.has_positions:
        nested = index.paths.nest(values)
        return nested if index.wrapped is None else nested.get(index.wrapped)
    names = [name for name in index.paths if name in values]
    if len(names) < len(index.paths):
        containers = containers_within(containers, list(index.paths), list(index.paths.values()), values.keys())
    try:
        nested = unflatten([index.paths[n] for n in names], [values[n] for n in names], containers)
    except _DAMAGED as exc:
        raise _damaged_structure(path, exc) from exc
    return nested if index.wrapped is None else nested.get(index.wrapped)


def _damaged_structure(path: str, exc: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: the structure of the state dict is damaged: {exc}")


# --- into a target --------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class TargetValues:
    """New values that go into a target when its tensors are filled."""

    values: dict[ObjPath, Any]  # that replace leaves and empty containers
    gifts: list[Gift]
    copies: list[tuple[NDArray[Any], NDArray[Any]]]  # arrays of the target, with the stored ones

    def put(self, tree: Any, state_dict: Any) -> None:
        for array, value in self.copies:
            np.copyto(array, value)
        if () in self.values:
            state_dict.update(self.values[()])
        elif self.values:
            for each in distinct_trees(tree, state_dict):
                replace_leaves(each, self.values)


def build_target_values(
    opened: OpenCheckpoint, plan: TargetPlan, target: ResolvedState, fresh: Mapping[str, Any]
) -> TargetValues:
    """Build subtrees, states of live objects and array copies from new values; the target is not changed."""
    path, versions = opened.path, opened.index.versions
    copies = _array_copies(path, plan, fresh)
    values: dict[ObjPath, Any] = {place: fresh[name] for name, place in plan.paths.items() if name not in copies}
    given = {**fresh, **plan.kept}
    given |= {name: _copy(plan.kept[name]) for name in plan.copied}
    for name, (leaf, is_taken_over) in plan.encoded.items():
        encoded = encoded_copy(path, name, leaf, fresh[name])
        if is_taken_over:
            given[name] = encoded
    try:
        for name, place in plan.containers.items():
            values[place] = _with_numbers(plan.stored.build(name, fresh), _groups_beside(target.tree, place))
        gifts = [
            Gift(each, _complete(each, plan.stored.build(each.name, given), versions), plan.asked)
            for each in plan.given
        ]
    except _DAMAGED as exc:
        raise _damaged_structure(path, exc) from exc
    for gift in gifts:
        _check_groups(path, gift)
    return TargetValues(values, gifts, list(copies.values()))


def _check_groups(path: str, gift: Gift) -> None:
    """Raise LoadError if torch's optimizer would refuse a state for its groups: others have been filled by then."""
    stored = gift.state.get("param_groups") if isinstance(gift.state, dict) else None
    if not isinstance(stored, list) or not loads_as_torch(gift.live.value):
        return
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in stored):
        return  # torch says what it misses
    mine, its = ([len(group["params"]) for group in groups] for groups in (gift.live.value.param_groups, stored))
    if mine != its:
        raise LoadError(
            f"{gift.live.described} has groups of {some_of(list(map(str, mine)), 10)} parameters, but those in {path} "
            f"have {some_of(list(map(str, its)), 10)}. Nothing was changed. Make it as it was saved"
        )


def _array_copies(
    path: str, plan: TargetPlan, fresh: Mapping[str, Any]
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return the NumPy arrays of the target that are filled, with the stored ones; all others are replaced."""
    copies = {}
    for name, array in plan.arrays.items():
        value = array_of(fresh[name])
        if type(value) is not np.ndarray:
            continue
        if (value.shape, value.dtype) != (array.shape, array.dtype):
            raise ShapeMismatchError(
                f"{name} is an array of {array.dtype} {array.shape} in the target but of {value.dtype} "
                f"{value.shape} in {path}"
            )
        if not array.flags.writeable:
            raise ShapeMismatchError(f"{name} is a read-only array in the target, which can't be filled")
        copies[name] = array, value
    return copies


def _copy(leaf: Any) -> Any:
    """Return a copy of a value that an object is to keep, in host memory: it may change both."""
    if not isinstance(leaf, torch.Tensor):
        return leaf.copy() if type(leaf) is np.ndarray else leaf
    return leaf.detach().clone() if is_distributed(leaf) else leaf.detach().to("cpu", copy=True)


def _complete(live: LiveObject, state: Any, versions: Mapping[str, Mapping[str, Any]]) -> Any:
    """Add to a live object's state what formats without containers lose: number keys, and a module's versions."""
    if live.parameters and isinstance(state, dict):
        state["state"] = _with_numbers(state.get("state", {}), live.state.get("param_groups"))
    if live.name in versions and isinstance(state, dict) and not hasattr(state, "_metadata"):
        state = OrderedDict(state)
        state._metadata = OrderedDict(versions[live.name])
    return state


def _groups_beside(tree: Any, path: ObjPath) -> Any:
    """Return the ``param_groups`` beside a path that ends in ``state``, as in an optimizer's state dict."""
    if not path or path[-1] != "state":
        return None
    for part in path[:-1]:
        tree = next((v for k, v in tree.items() if str(k) == part), None) if isinstance(tree, Mapping) else tree[part]
    return tree.get("param_groups")


def _with_numbers(state: Any, groups: Any) -> Any:
    """Return an optimizer's state with int keys, which DCP stores as text, if its groups refer to ints."""
    if not isinstance(state, dict) or not isinstance(groups, list):
        return state
    numbers = {n for group in groups if isinstance(group, Mapping) for n in group.get("params", ()) if type(n) is int}
    if not numbers:
        return state
    return {int(key) if type(key) is str and key.isdecimal() else key: value for key, value in state.items()}
