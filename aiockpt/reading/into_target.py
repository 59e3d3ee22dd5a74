"""Loading into the tensors of a state dict, and into what live objects have."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import CorruptCheckpointError, LoadError, MissingKeysError, ShapeMismatchError, printable_key
from aiockpt.format.index import TensorEntry
from aiockpt.format.item.arrays import ARRAY_TYPES, array_of
from aiockpt.format.keys import hint, matching
from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import StructureError, Subtrees, flatten, replace_leaves
from aiockpt.reading.apply_live import Filled
from aiockpt.reading.read_plan import TensorRead, annotate_partial_load, reads_of
from aiockpt.reading.targets import Region, cast, find_twins, target_of
from aiockpt.reading.whole import WholeLoad
from aiockpt.snapshot.optimizer_hooks import count_change

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from aiockpt.format.index import Entry, ObjPath
    from aiockpt.planning.flatten import FlatState
    from aiockpt.reading.targets import Target
    from aiockpt.snapshot.live import LiveObject, ResolvedState

_SHARED_BYTES = 16 << 20
"""Below this, how something is read makes no difference."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to come into a target.

    Attributes:
        reads: what fills its tensors.
        filled: the tensors whose version counters tell of that.
        fresh: the entries that come into new memory.
        paths: where in the state those of them go that take the place of a leaf.
        places: the empty containers and Nones, by name, that take all that is stored below them.
        given: the live objects that are given a state.
        kept: what stays in the states of live objects, by name: tensors that are filled, leaves that are not loaded.
        missing: the keys that the checkpoint lacks.
        arrays: the NumPy arrays of the target, by name.
        enums: the classes of its Enum members, by name, which are allowed there.
        regions: the memory that the reads fill.
    """

    reads: list[TensorRead] = field(default_factory=list)
    filled: list[torch.Tensor] = field(default_factory=list)
    fresh: dict[str, Entry] = field(default_factory=dict)
    paths: dict[str, ObjPath] = field(default_factory=dict)
    places: dict[str, ObjPath] = field(default_factory=dict)
    given: list[LiveObject] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    enums: dict[str, type[Enum]] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)


class TargetLoad(WholeLoad):
    """A load into a state dict, or into live objects."""

    _prepared: _Plan
    _values: dict[ObjPath, Any]
    _gifts: list[tuple[LiveObject, Any]]
    _copies: list[tuple[NDArray[Any], NDArray[Any]]]

    async def prepare(self, target: ResolvedState, state_dict: Any) -> None:
        """Look at all that can be known without reading the tensors; nothing is changed.

        Args:
            target: the state without live objects.
            state_dict: the state as the caller has it.

        Raises:
            LoadError: it can't be loaded.
        """
        plan = await self._tools.workers.run(self._plan, target, state_dict)
        await self._compare(await self._tools.workers.run(find_twins, plan.regions))
        self._enums = plan.enums
        fresh = await self.state_values(plan.fresh)
        self._copies = self._copied(plan, fresh)
        self._values, self._gifts = await self._tools.workers.run(self._put_below, plan, target, fresh)
        await self._reader.prepare(plan.reads)
        self._prepared = plan

    @property
    def names(self) -> tuple[str, ...]:
        """The keys whose tensors are filled."""
        return tuple(dict.fromkeys(read.name for read in self._prepared.reads))

    def number(self) -> int:
        """Give a number for the bytes that are to be read, another for other bytes; 0 if there are few."""
        reads = self._prepared.reads
        if sum(read.target.nbytes for read in reads if read.target is not None) < _SHARED_BYTES:
            return 0
        parts = (
            f"{read.name} {read.chunk.offsets} {[(s.start, s.count, s.step) for s in read.selections or ()]}"
            for read in reads
        )
        return 1 + zlib.crc32("\n".join(parts).encode("utf-8", "surrogatepass"))

    async def fill(self, target: ResolvedState, state_dict: Any) -> Filled:
        """Load what was prepared.

        Raises:
            LoadError: bytes are damaged or can't be read; it says what was placed.
        """
        plan = self._prepared
        # Written behind autograd's back: let it notice, and a save that is copying them, however this ends.
        count_change(plan.filled)
        try:
            await self._reader.read(plan.reads)
        except LoadError as exc:
            annotate_partial_load(exc, plan.reads)
            raise
        finally:
            count_change(plan.filled)
        for array, value in self._copies:
            np.copyto(array, value)
        if () in self._values:
            state_dict.update(self._values[()])
        elif self._values:
            for each in _distinct(target.tree, state_dict):
                replace_leaves(each, self._values)
        return Filled(self._path, state_dict, self._gifts, plan.missing, strict=self._options.strict)

    async def _compare(self, twins: Sequence[tuple[Region, Region]]) -> None:
        """Look whether tied tensors that were stored by themselves, as DCP does, are the same.

        Raises:
            ShapeMismatchError: they are not.
        """
        options = replace(self._options, map_location=None)
        for one, other in twins:
            load = WholeLoad(self._source, self._path, self._index, options, self._tools)
            values = await load.values({one.name: one.entry, other.name: other.entry})
            a, b = (values[each.name].contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
            if not torch.equal(a, b):
                raise ShapeMismatchError(
                    f"{one.name} and {other.name} are the same memory in the target, but differ in {self._path}: "
                    "clone one of them"
                )

    # --- planning -------------------------------------------------------------------------------------

    def _plan(self, target: ResolvedState, state_dict: Any) -> _Plan:
        """Compare the target with what is stored."""
        with gc_pause():
            entries = dict(self._index.entries.items())
            objects = {name for name, entry in entries.items() if not isinstance(entry, TensorEntry)}
            for each in target.objects:  # of which one that is stored whole has no part
                objects.difference_update(".".join(map(str, each.path[:depth])) for depth in range(len(each.path)))
            stored = Subtrees(self._index.paths, self._index.containers)
            try:
                flat = flatten(target.tree, whole=objects, apart=stored)
            except StructureError as exc:
                raise LoadError(f"can't load into this state dict: {exc}") from None
            plan = _Plan()
            owner_of = _Owners(target.objects)
            places = _open_places(flat, entries, stored, owner_of)
            wanted = self._wanted(plan, flat, stored, [*places, *(each.name for each in target.objects)])
            for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
                if name in wanted and name not in places:
                    self._add(plan, name, path, leaf, entries.get(name), owner_of(path), stored)
            self._choose_places(plan, places, wanted, stored)
            self._choose_objects(plan, target.objects, wanted, stored, entries)
            self._add_below(plan, flat, wanted, stored, entries)
        self._check_missing(list(dict.fromkeys(plan.missing)), set(flat.names))
        self._check_replaceable(plan, target, state_dict)
        return plan

    def _wanted(self, plan: _Plan, flat: FlatState, stored: Subtrees, containers: Sequence[str]) -> set[str]:
        """Return the names that the options ask for, of those in the target and below what takes all."""
        names = set(flat.names)
        for container in containers:
            names.update(stored.below(container))
        if self._options.keys is None:
            return names
        wanted, unmatched = matching(names, self._options.keys)
        plan.missing.extend(name for name in unmatched if not (name in containers and stored.holds(name)))
        return wanted

    def _add(
        self,
        plan: _Plan,
        name: str,
        path: ObjPath,
        leaf: Any,
        entry: Entry | None,
        owner: LiveObject | None,
        stored: Subtrees,
    ) -> None:
        """Plan what comes into one leaf."""
        if entry is None:
            if owner is None or not owner.chooses_keys:
                plan.missing.append(name)
            elif not stored.holds(owner.name):
                plan.missing.append(owner.name)
            return
        target = self._target(name, entry, leaf, owner)
        if target is None or not isinstance(entry, TensorEntry):
            plan.fresh[name] = entry
            if isinstance(leaf, Enum):
                plan.enums[name] = type(leaf)
            if owner is None:
                plan.paths[name] = path
                if type(leaf) in ARRAY_TYPES:
                    plan.arrays[name] = leaf
            return
        self._fill(plan, name, entry, target)
        if owner is not None:
            plan.kept[name] = leaf

    def _target(self, name: str, entry: Entry, leaf: Any, owner: LiveObject | None) -> Target | None:
        """Return what is filled of a leaf; None: new memory takes its place."""
        try:
            return target_of(self._path, name, entry, leaf, self._options.dtype)
        except ShapeMismatchError:
            if owner is None or (owner.is_module and not torch.nn.parameter.is_lazy(leaf)):
                raise
            # torch's optimizers take any shape, and fail at their next step.
            if owner.parameters and isinstance(entry, TensorEntry) and leaf.shape != entry.shape:
                raise
            return None

    def _fill(self, plan: _Plan, name: str, entry: TensorEntry, target: Target) -> None:
        for tensor, wanted in target.regions:
            plan.reads.extend(reads_of(name, entry, tensor, wanted, fills=True))
            plan.regions.append(Region(name, tensor, wanted, entry))
        plan.filled.extend(target.counted)

    def _choose_places(self, plan: _Plan, places: Mapping[str, ObjPath], wanted: set[str], stored: Subtrees) -> None:
        """Choose the empty containers and Nones that take something."""
        for name, path in places.items():
            if not stored.holds(name):
                if self._options.keys is None and self._index.format in _RECORDS_EMPTY:
                    plan.missing.append(name)
            elif self._options.keys is None or not wanted.isdisjoint(stored.below(name)):
                plan.places[name] = path

    def _choose_objects(
        self,
        plan: _Plan,
        objects: Sequence[LiveObject],
        wanted: set[str],
        stored: Subtrees,
        entries: Mapping[str, Entry],
    ) -> None:
        """Choose the live objects that are given a state."""
        chosen: set[int] = set()
        for each in objects:
            if not stored.holds(each.name):
                if self._options.keys is None and not each.state and self._index.format in _RECORDS_EMPTY:
                    plan.missing.append(each.name)
                continue
            if self._options.keys is not None and wanted.isdisjoint(stored.below(each.name)):
                continue
            if each.name in entries and isinstance(each.state, Mapping):
                raise ShapeMismatchError(
                    f"{each.described} is to be given a state dict, but {each.name} is a single "
                    f"{'tensor' if isinstance(entries[each.name], TensorEntry) else 'object'} in {self._path}"
                )
            if id(each.value) not in chosen:
                chosen.add(id(each.value))
                plan.given.append(each)

    def _add_below(
        self, plan: _Plan, flat: FlatState, wanted: set[str], stored: Subtrees, entries: Mapping[str, Entry]
    ) -> None:
        """Plan the new memory for what the target has no leaves for."""
        if not plan.places and not plan.given:
            return
        leaves = dict(zip(flat.names, flat.leaves, strict=True))
        for container in plan.places:
            plan.fresh.update((name, entries[name]) for name in stored.below(container) if name in wanted)
        for owner in plan.given:
            sharded = any(map(is_distributed, owner.parameters))
            for name in stored.below(owner.name):
                if name not in wanted:
                    if name in leaves:
                        plan.kept[name] = leaves[name]
                elif name not in plan.kept and name not in plan.fresh:
                    self._add_fresh(plan, name, entries[name], owner if sharded else None)

    def _add_fresh(self, plan: _Plan, name: str, entry: Entry, sharded: LiveObject | None) -> None:
        like = None if sharded is None else self._sharded_like(name, entry, sharded)
        target = None if like is None else target_of(self._path, name, entry, like, self._options.dtype)
        if target is None or not isinstance(entry, TensorEntry):
            plan.fresh[name] = entry
            return
        self._fill(plan, name, entry, target)
        plan.kept[name] = like

    def _sharded_like(self, name: str, entry: Entry, owner: LiveObject) -> torch.Tensor | None:
        """Make the tensor for the state of a sharded parameter; None where it is whole on every rank, as a step is."""
        _, number, *_ = [*name[len(owner.name) + 1 if owner.name else 0 :].split("."), "", ""]
        if not isinstance(entry, TensorEntry) or not number.isdecimal() or int(number) >= len(owner.parameters):
            return None
        parameter = owner.parameters[int(number)]
        if not is_distributed(parameter) or not entry.shape:
            return None
        if entry.shape != tuple(parameter.shape):
            raise LoadError(
                f"{name} has the shape {entry.shape} and its parameter, which is sharded, {tuple(parameter.shape)}: "
                "how it is to be sharded can't be told. Load with get_state_dict and set_state_dict of "
                "torch.distributed.checkpoint.state_dict"
            )
        return torch.empty_like(parameter.detach(), dtype=cast(entry.dtype, self._options.dtype))

    def _check_missing(self, missing: Sequence[str], asked: set[str]) -> None:
        if missing and self._options.strict:
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            raise MissingKeysError(
                f"{self._path} lacks {len(missing)} of the keys asked for: "
                f"{', '.join(map(printable_key, missing[:10]))}{more}."
                f"{hint(missing, self._index.entries, asked, fills=True)} Pass strict=False to leave them as they are.",
                tuple(missing),
            )

    def _check_replaceable(self, plan: _Plan, target: ResolvedState, state_dict: Any) -> None:
        """Check that what is new can be put in its place."""
        if () in plan.places.values():
            if self._index.wrapped is not None:
                raise LoadError(
                    f"{self._path} holds no dict; load it without a state dict, or wrap it where it is saved"
                )
            if not isinstance(state_dict, MutableMapping):
                raise LoadError(f"the state is a {type(state_dict).__name__}, which can't be changed")
            return
        values = dict.fromkeys([*plan.paths.values(), *plan.places.values()])
        if not values:
            return
        try:
            for each in _distinct(target.tree, state_dict):
                replace_leaves(each, values, check=True)
        except StructureError as exc:
            raise LoadError(f"can't load into this state dict: {exc}; nothing was changed") from None

    # --- putting together -----------------------------------------------------------------------------

    def _copied(self, plan: _Plan, fresh: Mapping[str, Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the NumPy arrays of the target that are filled, each with what is stored; none of them is replaced.

        Raises:
            ShapeMismatchError: one does not fit.
        """
        copies = []
        for name, array in plan.arrays.items():
            value = array_of(fresh[name])
            if type(value) is not np.ndarray:
                continue  # it takes the place of the array
            if (value.shape, value.dtype) != (array.shape, array.dtype):
                raise ShapeMismatchError(
                    f"{name} is an array of {array.dtype} {array.shape} in the target but of {value.dtype} "
                    f"{value.shape} in {self._path}"
                )
            if not array.flags.writeable:
                raise ShapeMismatchError(f"{name} is a read-only array in the target, which can't be filled")
            copies.append((array, value))
            del plan.paths[name]
        return copies

    def _put_below(
        self, plan: _Plan, target: ResolvedState, fresh: Mapping[str, Any]
    ) -> tuple[dict[ObjPath, Any], list[tuple[LiveObject, Any]]]:
        """Make what takes places in the target, and the states that live objects are given."""
        stored = Subtrees(self._index.paths, self._index.containers)
        values: dict[ObjPath, Any] = {path: fresh[name] for name, path in plan.paths.items()}
        given = {**fresh, **plan.kept}
        try:
            for name, path in plan.places.items():
                values[path] = _numbered(stored.build(name, fresh), _groups_beside(target.tree, path))
            gifts = [(each, self._gift(each, stored.build(each.name, given))) for each in plan.given]
        except (StructureError, KeyError, TypeError, ValueError) as exc:
            raise CorruptCheckpointError(f"{self._path}: the structure of the state dict is damaged: {exc}") from exc
        return values, gifts

    def _gift(self, owner: LiveObject, state: Any) -> Any:
        """Add what formats that don't record containers have lost of a state dict."""
        if owner.parameters and isinstance(state, dict):
            state["state"] = _numbered(state.get("state", {}), owner.state.get("param_groups"))
        versions = getattr(owner.state, "_metadata", None)
        if owner.is_module and versions is not None and not hasattr(state, "_metadata"):
            state = OrderedDict(state)
            state._metadata = versions
        return state


_RECORDS_EMPTY = ("aiockpt", "torch")
"""The formats in which an empty container is stored as such."""


class _Owners:
    """Finds the innermost live object that a path lies in."""

    def __init__(self, objects: Iterable[LiveObject]) -> None:
        self._found: dict[ObjPath, LiveObject | None] = {each.path: each for each in objects}
        self._any = bool(self._found)

    def __call__(self, path: ObjPath) -> LiveObject | None:
        """Return it, or None."""
        if not self._any:
            return None
        if path in self._found or not path:
            return self._found.get(path)
        parent = path[:-1]
        if parent not in self._found:
            self._found[parent] = self(parent)
        return self._found[parent]


def _open_places(
    flat: FlatState, entries: Mapping[str, Entry], stored: Subtrees, owner_of: _Owners
) -> dict[str, ObjPath]:
    """Return by name what of a target takes all that is below it: empty containers, and None where one is stored."""
    found: dict[str, ObjPath] = {}
    containers: Sequence[Mapping[str, Any]] = flat.containers
    paths: list[ObjPath] = [tuple(record["path"]) for record in containers]
    for path, following, record in zip(paths, [*paths, None][1:], containers, strict=True):
        leaf = flat.paths[record["at"]] if record["at"] < len(flat.paths) else None
        if all(inside is None or inside[: len(path)] != path for inside in (leaf, following)):
            found[".".join(map(str, path))] = path
    found |= {
        name: path
        for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True)
        if _is_empty(leaf) and name not in entries and stored.holds(name)
    }
    return {name: path for name, path in found.items() if owner_of(path) is None}


def _is_empty(leaf: Any) -> bool:
    return leaf is None or (type(leaf) in (list, tuple) and not leaf)


def _distinct(*states: Any) -> list[Any]:
    """Return the state dicts that are to be changed: the caller's, and the one without live objects."""
    return [
        each for n, each in enumerate(states) if isinstance(each, Mapping) and all(each is not s for s in states[:n])
    ]


def _groups_beside(tree: Any, path: ObjPath) -> Any:
    """Return the parameter groups of an optimizer's state dict, of which a path is the state."""
    if not path or path[-1] != "state":
        return None
    for part in path[:-1]:
        tree = next((v for k, v in tree.items() if str(k) == part), None) if isinstance(tree, Mapping) else tree[part]
    return tree.get("param_groups")


def _numbered(state: Any, groups: Any) -> Any:
    """Make numbers of the keys of an optimizer's state where its groups have numbers, which DCP stores as text."""
    if not isinstance(state, dict) or not isinstance(groups, list):
        return state
    numbers = {n for group in groups if isinstance(group, Mapping) for n in group.get("params", ()) if type(n) is int}
    if not numbers:
        return state
    return {int(key) if type(key) is str and key.isdecimal() else key: value for key, value in state.items()}
