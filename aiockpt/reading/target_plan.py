"""The plan of a load into a state dict and its live objects, pure: nothing is read, and nothing is changed."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.wording import some_of
from aiockpt.errors import LoadError, MissingKeysError, ShapeMismatchError, printable_key
from aiockpt.format.index import Entry, Index, ObjPath, TensorEntry
from aiockpt.format.item.arrays import ARRAY_TYPES
from aiockpt.format.keys import containers_of, hint, matching
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.planning.dtensor import is_distributed, whole_shape
from aiockpt.planning.flatten import TENSOR_TYPES, FlatState, StructureError, Subtrees, flatten, replace_leaves
from aiockpt.reading.bulk import SmallFills, SmallRows
from aiockpt.reading.plain_loading import ModuleLoading, OptimizerLoading, OwnLoading, has_torchs_loading, loading_of
from aiockpt.reading.reach import LOADING, Reach
from aiockpt.reading.read_plan import ObjectRead, TensorRead, reads_of, value_key
from aiockpt.reading.targets import Region, find_twins, is_encoding, loaded_dtype, place_in_memory, target_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.options import LoadOptions
    from aiockpt.snapshot.live import LiveObject, ResolvedState


_FEW_BYTES = 16 << 20
"""Up to this size, sharing the reads of the ranks of a host makes no difference."""
_RECORDS_EMPTY = ("aiockpt", "torch")
"""The formats that store empty containers."""


@dataclass(eq=False, slots=True)
class TargetPlan:
    """The reads of a load into a state, and where new values go."""

    stored: Subtrees
    reads: list[TensorRead] = field(default_factory=list)  # into tensors of the target
    objects: Sequence[ObjectRead] = ()  # none: they are new values
    small: SmallRows | None = None  # of those that are read in bulk
    filled: list[torch.Tensor] = field(default_factory=list)  # the caller's, whose version counters change
    regions: list[Region] = field(default_factory=list)  # of memory, that the reads fill
    own: list[Region] = field(default_factory=list)  # of memory, that live objects fill by themselves
    twins: list[tuple[Region, Region]] = field(default_factory=list)  # that are one memory: their values must be equal
    fresh: dict[str, Entry] = field(default_factory=dict)  # read into new memory
    paths: dict[str, ObjPath] = field(default_factory=dict)  # of the leaves that fresh values replace
    containers: dict[str, ObjPath] = field(default_factory=dict)  # empty ones and Nones that take a whole subtree
    given: list[LiveObject] = field(default_factory=list)  # live objects that are given a state
    code: list[Any] = field(default_factory=list)  # that runs when they are, and may come to other objects
    asked: Collection[str] | None = None  # the names that the options ask for; None: all
    kept: dict[str, Any] = field(default_factory=dict)  # leaves of their states that are filled, or not loaded
    copied: set[str] = field(default_factory=set)  # those of them that an object may change, so that it gets copies
    # Their leaves with an encoding of their own, and whether the object takes over what it is given.
    encoded: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # keys that the checkpoint lacks
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # NumPy arrays of the target
    enums: dict[str, type[Enum]] = field(default_factory=dict)  # the classes of its Enum members, which are allowed

    @property
    def names(self) -> tuple[str, ...]:
        """The keys whose tensors are filled."""
        small = [] if self.small is None else self.small.names
        return tuple(dict.fromkeys([*(read.name for read in self.reads), *small]))

    def read_hash(self) -> int:
        """Return a hash of the byte ranges, equal on ranks that read the same; 0 for few bytes."""
        small = [] if self.small is None else self.small.tensors
        targets = [*(read.target for read in self.reads if read.target is not None), *small]
        if sum(target.nbytes for target in targets) < _FEW_BYTES:
            return 0
        ranges = [
            f"{read.name} {read.chunk.offsets} {[(s.start, s.count, s.step) for s in read.selections or ()]}"
            for read in self.reads
        ]
        ranges += [] if self.small is None else self.small.names
        # Never 0, which stands for few bytes. A key may hold lone surrogates, which strict UTF-8 refuses.
        return 1 + zlib.crc32("\n".join(ranges).encode("utf-8", "surrogatepass"))


@gc_pause()
def plan_target(
    path: str, index: Index, options: LoadOptions, target: ResolvedState, state_dict: Any, *, in_bulk: bool = False
) -> TargetPlan:
    """Compare a target, in which state dicts replace live objects, with what is stored."""
    planner = _TargetPlanner(path, index, options, target, {}, in_bulk)
    flat = planner.flatten()
    if tied := tied_names(flat, index.entries):
        planner = _TargetPlanner(path, index.with_names(tied), options, target, tied, False)
        flat = planner.flatten()
    while rivals := planner.plan_leaves(flat):
        planner = replace(planner, _apart=planner._apart | rivals)
        flat = planner.flatten()
    planner.plan_subtrees(flat)
    planner.check_keys(flat)
    planner.check_replaceable(state_dict)
    return planner.plan


def tied_names(flat: FlatState, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the names of tensors that are not stored but share their memory with one that is, with its name."""
    leaves = list(zip(flat.names, flat.leaves, strict=True))
    known = entries.numbers if isinstance(entries, IndexedEntries) else entries
    absent = {name: leaf for name, leaf in leaves if name not in known and isinstance(leaf, torch.Tensor)}
    if not absent:
        return {}
    places = {place_in_memory(leaf): name for name, leaf in reversed(leaves) if name in entries}
    found = {name: place_in_memory(leaf) for name, leaf in absent.items()}
    return {name: places[place] for name, place in found.items() if place is not None and place in places}


@dataclass(eq=False)
class _TargetPlanner:
    """Builds a `TargetPlan`."""

    _path: str
    _index: Index
    _options: LoadOptions
    _target: ResolvedState
    _tied: Mapping[str, str]  # names that were added to the index, with those of the tensors that they share
    _in_bulk: bool  # small tensors may be
    _apart: frozenset[str] = frozenset()  # the names of tensors of live objects whose memory other objects fill too
    _wanted: set[str] = field(default_factory=set)  # the names that the options ask for
    _open: dict[str, ObjPath] = field(default_factory=dict)  # containers and Nones that can take a subtree

    def __post_init__(self) -> None:
        entries = self._index.entries
        self._small = SmallFills(entries if self._in_bulk else {}, self._options.dtype)
        # Few of the others are asked for one by one.
        self._entries = entries if self._small.is_possible else dict(entries.items())
        self._stored = Subtrees(self._index.paths, self._index.containers)
        self._owner_of = _Owners(self._target.objects)
        self._loadings: dict[int, OwnLoading] = {}  # by the id of the live object
        self._unknown: dict[str, list[str]] = {}  # modules, with the stored keys that they would refuse
        self.plan = TargetPlan(self._stored)

    def flatten(self) -> FlatState:
        """Return the leaves of the target; an object that is stored whole is one leaf."""
        entries = self._entries
        if isinstance(entries, IndexedEntries):
            objects = set(entries.objects())
        else:
            objects = {name for name, entry in entries.items() if not isinstance(entry, TensorEntry)}
        for each in self._target.objects:  # a live object is never part of a leaf
            objects.difference_update(".".join(map(str, each.path[:depth])) for depth in range(len(each.path)))
        try:
            flat = flatten(self._target.tree, whole=objects, apart=self._stored)
        except StructureError as exc:
            raise LoadError(f"can't load into this state dict: {exc}") from None
        self._open = _open_containers(flat, self._entries, self._stored, self._owner_of)
        self._wanted = self._match(flat, [*self._open, *(each.name for each in self._target.objects)])
        return flat

    def _match(self, flat: FlatState, containers: Sequence[str]) -> set[str]:
        """Return the names of leaves, and of stored keys below the containers, that the options ask for."""
        names = set(flat.names)
        for container in containers:
            names.update(self._stored.below(container))
        if self._options.keys is None:
            return names
        wanted, unmatched = matching(names, self._options.keys)
        self.plan.asked = wanted
        self.plan.missing.extend(name for name in unmatched if not (name in containers and self._stored.holds(name)))
        return wanted

    # --- live objects -----------------------------------------------------------------------------

    def _look_at_objects(self) -> None:
        """Find which tensors of live objects may be filled in place; raise if torch's loading would refuse the keys."""
        reach = Reach(LOADING)
        for live in self._target.objects:
            is_inner = bool(live.path) and self._owner_of(live.path[:-1]) is not None
            is_loaded = self._stored.holds(live.name) and self._is_wanted(live.name)
            loading = known = self._loadings.get(id(live.value)) or loading_of(live.value)
            # The object around an inner one is given its tensors too.
            if is_inner or (is_loaded and self._has_turn(live, known, reach)):
                loading = OwnLoading()
            elif isinstance(loading, ModuleLoading) and is_loaded:
                loading = self._checked(live, loading)
            if isinstance(loading, ModuleLoading):
                self._separate(live, loading)
            self._loadings[id(live.value)] = loading
            self.plan.code += known.code_of(live.value) if is_loaded else []

    def _has_turn(self, live: LiveObject, loading: OwnLoading, reach: Reach) -> bool:
        """Return whether the code of earlier objects may see an object as it is now, or change it."""
        if not self.plan.code or not isinstance(loading, ModuleLoading | OptimizerLoading):
            return False
        return not reach.sees(self.plan.code) or id(live.value) in reach.seen or any(reach.comes_to(loading.extents))

    def _checked(self, live: LiveObject, loading: ModuleLoading) -> OwnLoading:
        """Compare the keys of a module with the stored ones.

        Where torch's own code decides, report what it would refuse. Otherwise the module's own loading decides, and if
        that may fail, none of its tensors is filled before.
        """
        prefix = f"{live.name}." if live.name else ""
        asked = self._wanted if self._options.keys is not None else None
        stored = self._stored.below(live.name)
        keys = {name[len(prefix) :] for name in stored if asked is None or name in asked}
        lacking = [key for key in loading.tensors if key not in keys and (asked is None or prefix + key in asked)]
        lacking += [
            key
            for key in loading.extras
            if not self._stored.holds(prefix + key) and (asked is None or prefix + key in asked)
        ]
        unknown = [] if live.name in self._entries else loading.unknown(keys)
        strict = self._options.strict
        if callable(strict):
            lacking = [key for key in lacking if strict(prefix + key)]
        elif not strict:
            lacking, unknown = [], []
        if loading.is_known and not (lacking and loading.optional.issuperset(lacking)):
            self.plan.missing += [prefix + key for key in lacking]
            if unknown:
                self._unknown[live.described] = [prefix + key for key in unknown]
            return loading
        fits = all(self._fits(prefix + key, tensor) for key, tensor in loading.tensors.items())
        return OwnLoading() if lacking or unknown or not fits else loading

    def _separate(self, live: LiveObject, loading: ModuleLoading) -> None:
        """Have no tensor filled that is stored under several names, and given to other code, or has several values."""
        prefix = f"{live.name}." if live.name else ""
        for group in loading.ties:
            names = [prefix + key for key in group if prefix + key in self._wanted]
            stored = [(name, self._entries.get(name)) for name in names]
            if len({value_key(name, entry) for name, entry in stored if isinstance(entry, TensorEntry)}) > 1:
                loading.apart.update(group)
        if loading.foreign or loading.extras:
            places: dict[object, list[str]] = {}
            for name in self._stored.below(live.name):
                entry = self._entries[name]
                if isinstance(entry, TensorEntry):
                    for chunk in entry.chunks:
                        places.setdefault(chunk.place, []).append(name[len(prefix) :])
            shared = (keys for keys in places.values() if not loading.tensors.keys() >= set(keys))
            loading.apart.update(key for keys in shared if len(keys) > 1 for key in keys)

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        entry = self._entries.get(name)
        shape = whole_shape(tensor) if is_distributed(tensor) else tuple(tensor.shape)
        return entry is None or (isinstance(entry, TensorEntry) and shape in (None, entry.shape))

    # --- leaves -----------------------------------------------------------------------------------

    def plan_leaves(self, flat: FlatState) -> set[str]:
        """Plan the value of each leaf that the options ask for; return what has to be apart for that, see `_rivals`."""
        self._look_at_objects()
        for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
            if name not in self._wanted or name in self._open:
                continue
            live = self._owner_of(path)
            if live is None:
                if not self._small.take(name, leaf):
                    self._plan_leaf(name, path, leaf)
            else:
                self._plan_live_leaf(name, path[len(live.path) :], leaf, live)
        self.plan.small = self._small.rows()
        self.plan.filled += self._small.tensors
        return self._rivals(flat)

    def _plan_leaf(self, name: str, path: ObjPath, leaf: Any) -> None:
        plan, entry = self.plan, self._entries.get(name)
        if entry is None:
            plan.missing.append(name)
        elif not self._fill(name, entry, leaf):
            self._plan_fresh(name, entry, leaf)
            plan.paths[name] = path
            if type(leaf) in ARRAY_TYPES:
                plan.arrays[name] = leaf

    def _plan_live_leaf(self, name: str, path: ObjPath, leaf: Any, live: LiveObject) -> None:
        loading = self._loadings[id(live.value)]
        fills = name not in self._apart and loading.fills(path, leaf)
        if fills and self._small.take(name, leaf):
            self.plan.kept[name] = leaf
            return
        entry = self._entries.get(name)
        if entry is None:
            # It may have other keys now than when it was saved; of modules, the keys were compared before.
            if not self._stored.holds(live.name):
                self.plan.missing.append(name if loading.is_known else live.name)
        elif not fills or self._is_taken_anyway(entry, leaf, loading):
            self._plan_own_leaf(name, entry, leaf, live)
        elif self._fill(name, entry, leaf):
            self.plan.kept[name] = leaf
        else:
            self._plan_fresh(name, entry, leaf)

    def _is_taken_anyway(self, entry: Entry, leaf: Any, loading: OwnLoading) -> bool:
        """Return whether torch takes what does not fit: an optimizer anything, a scalar a tensor of one element."""
        if not isinstance(entry, TensorEntry):
            return isinstance(loading, OptimizerLoading)
        if isinstance(loading, OptimizerLoading) and type(leaf) is torch.Tensor:
            return leaf.shape != entry.shape or leaf.dtype is not loaded_dtype(entry, self._options.dtype, leaf.dtype)
        return entry.shape == (1,) and isinstance(leaf, torch.Tensor) and not leaf.dim()

    def _plan_own_leaf(self, name: str, entry: Entry, leaf: Any, live: LiveObject) -> None:
        """Plan new memory for a value of which only the object knows what to do with it."""
        if type(leaf) in TENSOR_TYPES:
            self.plan.own.append(Region(name, TensorEntry(leaf.dtype, leaf.shape, ()), leaf.detach()))
        is_sharded = is_distributed(leaf) and hasattr(leaf, "device_mesh")
        if is_sharded and isinstance(entry, TensorEntry) and whole_shape(leaf) == entry.shape:
            dtype = loaded_dtype(entry, self._options.dtype, leaf.dtype)
            like = torch.empty_like(leaf.detach(), dtype=dtype)  # of which this rank has only its part
            self._fill(name, entry, like)
            self.plan.kept[name] = like
        elif is_distributed(leaf) and not is_sharded and self._fill(name, entry, leaf):
            self.plan.kept[name] = leaf  # a sharded tensor without a mesh can't be made anew
        else:
            self._plan_fresh(name, entry, leaf)
            is_taken_over = isinstance(live.value, torch.optim.Optimizer)
            # Where torch's loading would copy the plain values, a copy takes them before anything is changed.
            copies = is_taken_over or isinstance(self._loadings[id(live.value)], ModuleLoading)
            if copies and is_encoding(leaf) and isinstance(entry, TensorEntry):
                self.plan.encoded[name] = leaf, is_taken_over

    def _plan_fresh(self, name: str, entry: Entry, leaf: Any) -> None:
        self.plan.fresh[name] = entry
        if isinstance(leaf, Enum):
            self.plan.enums[name] = type(leaf)

    def _fill(self, name: str, entry: Entry, leaf: Any) -> bool:
        """Plan to fill the memory of a leaf; return False if a new value replaces it."""
        target = target_of(self._path, name, entry, leaf, self._options.dtype)
        if target is None:
            return False
        plan = self.plan
        if self._tied.get(name) not in self._wanted:  # else it is filled as the other
            for region in target.regions:
                plan.reads += reads_of(region.name, region.entry, region.tensor, region.wanted, fills=True)
            plan.regions += target.regions
            plan.filled += target.counted
        return True

    def _rivals(self, flat: FlatState) -> set[str]:
        """Return the names of tensors to fill whose memory another live object fills too: the last one decides.

        The values of other tensors that are one memory have to be equal.
        """
        found, regions, small = set[str](), self.plan.regions + self.plan.own, self.plan.small
        twins = find_twins(regions + ([] if small is None else small.contested(regions)))
        paths = dict(zip(flat.names, flat.paths, strict=True)) if twins else {}
        for pair in twins:
            one, other = (self._owner_of(paths[each.name]) for each in pair)
            filled = [each.name for each in pair if each.entry.chunks]
            if one is not None and other is not None and one is not other:
                found.update(filled)
            elif len(filled) == len(pair):
                self.plan.twins.append(pair)
        return found

    # --- subtrees ---------------------------------------------------------------------------------

    def plan_subtrees(self, flat: FlatState) -> None:
        """Plan the subtrees that empty containers take, and the states of live objects."""
        for name, path in self._open.items():
            if not self._stored.holds(name):
                self._report_unstored(name)
            elif self._is_wanted(name):
                self.plan.containers[name] = path
        self._choose_objects()
        plan = self.plan
        if not plan.containers and not plan.given:
            return
        leaves = dict(zip(flat.names, flat.leaves, strict=True))
        for container in plan.containers:
            below = self._stored.below(container)
            plan.fresh.update((name, self._entries[name]) for name in below if name in self._wanted)
        for live in plan.given:
            is_sharded = any(map(is_distributed, live.parameters))
            takes_part = isinstance(live.value, torch.nn.Module) and has_torchs_loading(live.value)
            for name in self._stored.below(live.name):
                if name not in self._wanted:
                    if name in leaves and not takes_part:
                        plan.kept[name] = leaves[name]
                        if not isinstance(self._loadings[id(live.value)], OptimizerLoading):
                            plan.copied.add(name)
                elif name not in plan.kept and name not in plan.fresh:
                    self._add_fresh(name, live if is_sharded else None)

    def _choose_objects(self) -> None:
        for each in self._target.objects:
            if not self._stored.holds(each.name):
                # The leaves of a state that is not empty were reported one by one.
                if not each.state:
                    self._report_unstored(each.name)
                continue
            if not self._is_wanted(each.name):
                continue
            if each.name in self._entries and isinstance(each.state, Mapping):
                raise ShapeMismatchError(
                    f"{each.described} is to be given a state dict, but {each.name} is a single "
                    f"{'tensor' if isinstance(self._entries[each.name], TensorEntry) else 'object'} in {self._path}"
                )
            self.plan.given.append(each)

    def _is_wanted(self, name: str) -> bool:
        """Return whether the options ask for anything below a container."""
        return self._options.keys is None or not self._wanted.isdisjoint(self._stored.below(name))

    def _report_unstored(self, name: str) -> None:
        """Record an empty container as missing, if the format would store it."""
        if self._options.keys is None and self._index.format in _RECORDS_EMPTY:
            self.plan.missing.append(name)

    def _add_fresh(self, name: str, sharded: LiveObject | None) -> None:
        """Plan a value for which the target has no leaf."""
        entry = self._entries[name]
        # The state of a new optimizer is empty. Each rank must not read all of a sharded parameter's state tensors.
        like = None if sharded is None else self._sharded_like(name, entry, sharded)
        if like is not None and self._fill(name, entry, like):
            self.plan.kept[name] = like
        else:
            self.plan.fresh[name] = entry

    def _sharded_like(self, name: str, entry: Entry, live: LiveObject) -> torch.Tensor | None:
        """Make the state tensor of a sharded parameter; None if it is replicated, as the step count is."""
        _, number, *_ = [*name[len(live.name) + 1 if live.name else 0 :].split("."), "", ""]
        if not isinstance(entry, TensorEntry) or not number.isdecimal() or int(number) >= len(live.parameters):
            return None
        parameter = live.parameters[int(number)]
        if not is_distributed(parameter) or not entry.shape:
            return None
        if entry.shape != tuple(parameter.shape):
            raise LoadError(
                f"{name} has the shape {entry.shape} and its parameter, which is sharded, {tuple(parameter.shape)}: "
                "its sharding can't be determined. Load with get_state_dict and set_state_dict of "
                "torch.distributed.checkpoint.state_dict"
            )
        return torch.empty_like(parameter.detach(), dtype=loaded_dtype(entry, self._options.dtype, parameter.dtype))

    # --- checks -----------------------------------------------------------------------------------

    def check_keys(self, flat: FlatState) -> None:
        """Raise MissingKeysError if keys are missing, and LoadError if a module lacks some, unless that is allowed."""
        missing, strict = list(dict.fromkeys(self.plan.missing)), self._options.strict
        if callable(strict):  # a container must be there if something in it must
            needed = [name for name in flat.names if name not in self._entries and strict(name)]
            within, above = containers_of(flat.names), containers_of(needed)
            missing = [name for name in missing if (name in above if name in within else strict(name))]
        if missing and strict:
            raise MissingKeysError(
                f"{self._path} lacks {len(missing)} of the keys asked for: "
                f"{some_of([printable_key(name) for name in missing], 10)}."
                f"{hint(missing, self._index.entries, set(flat.names), fills=True)} Pass strict=False to leave missing "
                "keys as they are, or keys= to load a part: a save with include= or exclude= leaves keys out.",
                tuple(missing),
            )
        for module, names in self._unknown.items():
            raise LoadError(
                f"{module} does not know {len(names)} of the keys that {self._path} has for it: "
                f"{some_of([printable_key(name) for name in names], 10)}. Nothing was changed. Make it as it was "
                "saved, or pass strict=False to leave these out"
            )

    def check_replaceable(self, state_dict: Any) -> None:
        """Raise if a new value could not be put in its place, such as in a tuple."""
        plan = self.plan
        if () in plan.containers.values():
            if self._index.wrapped is not None:
                raise LoadError(
                    f"{self._path} holds no dict; load it without a state dict, or wrap it where it is saved"
                )
            if not isinstance(state_dict, MutableMapping):
                raise LoadError(f"the state is a {type(state_dict).__name__}, which can't be changed")
            return
        values = dict.fromkeys([*plan.paths.values(), *plan.containers.values()])
        if not values:
            return
        try:
            for each in distinct_trees(self._target.tree, state_dict):
                replace_leaves(each, values, check=True)
        except StructureError as exc:
            raise LoadError(f"can't load into this state dict: {exc}; nothing was changed") from None


class _Owners:
    """Finds the innermost live object that contains a path."""

    # Not a nested function that calls itself: its closure is a reference cycle, which would keep the objects alive.
    def __init__(self, objects: Iterable[LiveObject]) -> None:
        self._found: dict[ObjPath, LiveObject | None] = {each.path: each for each in objects}
        self._any = bool(self._found)

    def __call__(self, path: ObjPath) -> LiveObject | None:
        if not self._any:
            return None
        if path not in self._found:
            self._found[path] = self(path[:-1]) if path else None
        return self._found[path]


def _open_containers(
    flat: FlatState, entries: Mapping[str, Entry], stored: Subtrees, owner_of: _Owners
) -> dict[str, ObjPath]:
    """Return the empty containers of a target, and the Nones where a container is stored, outside of live objects."""
    found: dict[str, ObjPath] = {}
    containers: Sequence[Mapping[str, Any]] = flat.containers
    paths: list[ObjPath] = [tuple(record["path"]) for record in containers]
    for path, following, record in zip(paths, [*paths, None][1:], containers, strict=True):
        # A container is empty if neither the next leaf nor the next container is inside it.
        leaf = flat.paths[record["at"]] if record["at"] < len(flat.paths) else None
        if all(inside is None or inside[: len(path)] != path for inside in (leaf, following)):
            found[".".join(map(str, path))] = path
    found |= {
        name: path
        for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True)
        if (leaf is None or (type(leaf) in (list, tuple) and not leaf)) and name not in entries and stored.holds(name)
    }
    return {name: path for name, path in found.items() if owner_of(path) is None}


def distinct_trees(*states: Any) -> list[Any]:
    """Return the state dicts to change: the caller's, and the one with state dicts in place of live objects."""
    return [
        each for n, each in enumerate(states) if isinstance(each, Mapping) and all(each is not s for s in states[:n])
    ]
