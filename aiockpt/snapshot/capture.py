"""Captures a state dict in the caller's thread, before `save()` returns.

Tensors are held by reference, as are NumPy arrays, through tensors that share their memory. Mutable objects are
pickled, and small tensors copied, at once. For the other tensors the version counter is recorded, which later shows
whether they changed before they were copied. Arrays have no such counter: samples of their bytes are kept instead.
"""

from __future__ import annotations

import sys
from enum import Enum
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.extent import address_of, freed_message, is_freed, plain_memory
from aiockpt.errors import AiockptError, LoadError, SaveError, StageError
from aiockpt.format.checks import cover_of
from aiockpt.format.item.arrays import ARRAY_RECORD, ARRAY_TYPES, tensor_of
from aiockpt.format.item.objects import encode_object, foreign_names, is_frozen
from aiockpt.planning.dtensor import (
    LocalPart,
    ShardingError,
    any_distributed,
    counted,
    is_distributed,
    local_parts,
    whole_shape,
)
from aiockpt.planning.filters import filter_leaves
from aiockpt.planning.flatten import TENSOR_TYPES, FlatState, StructureError, flatten
from aiockpt.planning.planner import CHECKED_AHEAD
from aiockpt.planning.snapshot import Shard, Snapshot, Structure
from aiockpt.planning.specs import lazy_bits, unstorable
from aiockpt.snapshot.live import check_optimizers, resolve
from aiockpt.snapshot.optimizer_hooks import follow_steps, watch_optimizers
from aiockpt.snapshot.sampling import Samples
from aiockpt.staging.pool import ArenaCache, copy_small
from aiockpt.staging.runtime import (
    CAPTURING,
    UNORDERED,
    has_events,
    in_default_stream,
    is_capturing,
    is_host,
    reading_behind,
    ready_event,
    use_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiockpt.planning.filters import Filter
    from aiockpt.planning.flatten import NameMemo

# --- shards of distributed tensors, and encoded tensors -------------------------------------------


def _take_local_parts(flat: FlatState, shards: dict[int, Shard], *, together: bool) -> dict[int, torch.Tensor]:
    """Replace distributed tensors in ``flat`` by this rank's parts, and encoded tensors by dense ones.

    ``shards`` gets the position of each part that is not the whole of its tensor. ``together``: other ranks save their
    parts as well. Return the DTensor of each leaf that is a part of one, which has a version counter of its own.
    """
    names, paths, leaves = flat.names, flat.paths, flat.leaves
    flat.names, flat.paths, flat.leaves = [], [], []
    wholes: dict[int, torch.Tensor] = {}
    moved: list[int] = []
    for name, path, value in zip(names, paths, leaves, strict=True):
        moved.append(len(flat.leaves))
        taken = [dense_form(name, value)]
        if is_distributed(value):
            parts = _parts_of(name, value, together=together)
            own = counted(value, ())
            wholes |= {len(flat.leaves) + number: own[0] for number in range(len(parts)) if own}
            taken = [_taken(part, len(flat.leaves) + number, shards) for number, part in enumerate(parts)]
        flat.names += [name] * len(taken)
        flat.paths += [path] * len(taken)
        flat.leaves += taken
    for record in flat.containers:
        first = record["at"]
        if isinstance(first, int):
            record["at"] = moved[first] if first < len(moved) else len(flat.leaves)
    return wholes


def _taken(part: LocalPart, leaf: int, shards: dict[int, Shard]) -> torch.Tensor:
    """Record where a part belongs, unless it is the whole."""
    if 0 in part.shard.shape:
        return part.tensor.new_empty(part.shard.shape)  # an empty tensor has no shards
    if tuple(part.tensor.shape) != part.shard.shape:
        shards[leaf] = part.shard
    return part.tensor


def _parts_of(name: str, value: Any, *, together: bool) -> list[LocalPart]:
    try:
        parts, shape = local_parts(name, value), whole_shape(value)
    except ShardingError as exc:
        raise SaveError(str(exc)) from None
    parts = [part._replace(tensor=dense_form(name, part.tensor)) for part in parts]
    for part in parts:
        if type(part.tensor) not in TENSOR_TYPES:
            raise SaveError(
                f"{name} is a {type(value).__name__} whose part here is a {type(part.tensor).__name__}, which can't be "
                "saved as a part of a tensor; put a plain tensor in its place"
            )
    if together or [tuple(part.tensor.shape) for part in parts] == [shape]:
        return parts
    boxes = [(part.shard.offsets, tuple(part.tensor.shape)) for part in parts]
    if shape is None or cover_of(shape, boxes).error:
        raise SaveError(
            f"{name} is a {type(value).__name__}, of which this process has a part only, and it saves alone: make the "
            "checkpointer with the process group of all ranks that have the others, or gather it with full_tensor()"
        )
    whole = parts[0].tensor.new_empty(shape)
    for part, (offsets, sizes) in zip(parts, boxes, strict=True):
        whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] = part.tensor
    return [LocalPart(whole, Shard(shape, (0,) * len(shape)))]


def is_encoded(value: Any) -> bool:
    """Return whether a tensor stores its values in an encoding of its own, and can dequantize them."""
    kind = type(value)
    return (
        isinstance(value, torch.Tensor)
        and kind not in TENSOR_TYPES
        and kind.dequantize is not torch.Tensor.dequantize
        and not is_distributed(value)
    )


def dense_form(name: str, value: Any) -> Any:
    """Return a plain tensor of the values of an encoded one."""
    if not is_encoded(value):
        return value
    try:
        with torch.no_grad():
            dense = value.dequantize()
    except torch.OutOfMemoryError as exc:
        raise SaveError(
            f"{value.device} has no memory for the plain values of {name}, a {type(value).__name__}"
        ) from exc
    if type(dense) not in TENSOR_TYPES:
        raise SaveError(f"{name} is a {type(value).__name__} whose dequantize() gave a {type(dense).__name__}")
    return dense.detach()


# --- capture --------------------------------------------------------------------------------------


_CPU = torch.device("cpu")
_IS_CPU = attrgetter("is_cpu")  # of many tensors, these are read in C
_FORM = attrgetter("dtype", "ndim", "is_nested")

EAGER_TENSOR_BYTES = 64 << 10
"""Tensors up to this size are copied at the call ..."""
EAGER_BYTES = 16 << 20
"""... until this much has been copied."""


def capture_state(
    state_dict: Any,
    memo: NameMemo | None = None,
    *,
    ranks: int | None = None,
    sampled: bool = False,
    include: Filter | None = None,
    exclude: Filter | None = None,
    arenas: ArenaCache | None = None,
    group: object = None,
    together: bool = False,
) -> Snapshot:
    """Capture a state dict. Blocks for the walk over it, and for pickling objects that could change.

    ``ranks`` is how many save their parts of distributed tensors together (None: this process alone). ``sampled``:
    keep samples of all tensors, see `Samples`. ``include`` and ``exclude``: see `aiockpt.options.SaveOptions`.
    ``arenas``: memory for the copies of small tensors. ``group``: see `resolve`. ``together``: pickle the objects also
    as one, which keeps what they share.
    """
    resolved = resolve(state_dict, SaveError, group)
    flat = _flattened(resolved.tree, memo)
    filter_leaves(flat, include, exclude, may_be_empty=ranks is not None)
    try:
        _check_captures(flat.leaves, SaveError)
    except RuntimeError as exc:
        raise StageError(f"the device can't be used: {exc}") from exc
    if ranks is not None:
        saved = [live for live in resolved.objects if any(path[: len(live.path)] == live.path for path in flat.paths)]
        check_optimizers(saved, SaveError, flat.leaves, ranks)
    shards: dict[int, Shard] = {}
    wholes: dict[int, torch.Tensor] = {}
    encoded = _encoded(zip(flat.names, flat.leaves, strict=True))
    if encoded or any_distributed(flat.leaves):
        wholes = _take_local_parts(flat, shards, together=ranks is not None)
    try:
        snapshot = _capture_leaves(flat, shards, sampled=sampled, arenas=arenas)
        if together and len(snapshot.blobs) > 1:
            snapshot.together = encode_object("the state", {leaf: flat.leaves[leaf] for leaf in snapshot.blobs})
    except (RecursionError, ValueError, NotImplementedError) as exc:
        raise SaveError(f"{_culprit(flat)} can't be saved: {type(exc).__name__}: {exc}") from exc
    except RuntimeError as exc:  # an earlier kernel of the program has failed, and its error comes at the next call
        raise StageError(f"capturing the state failed: {exc}") from exc
    snapshot.encoded = encoded
    snapshot.wholes = {
        leaf: (whole, whole._version) for leaf, whole in wholes.items() if snapshot.versions[leaf] is not None
    }
    return snapshot


def capture_items(items: Sequence[tuple[str, torch.Tensor | bytes]], *, sampled: bool = False) -> Snapshot:
    """Capture tensors, and objects that are pickled already; their names need not be distinct."""
    _check_captures((value for _, value in items), SaveError)
    flat = FlatState([name for name, _ in items], [(name,) for name, _ in items])
    blobs = {leaf: value for leaf, (_, value) in enumerate(items) if isinstance(value, bytes)}
    flat.leaves = [None if isinstance(value, bytes) else dense_form(name, value) for name, value in items]
    snapshot = _capture_leaves(flat, {}, blobs, sampled=sampled)
    snapshot.encoded = _encoded(items)
    return snapshot


def _flattened(tree: Any, memo: NameMemo | None) -> FlatState:
    try:
        return flatten(tree, memo=memo)
    except StructureError as exc:
        raise SaveError(str(exc)) from None


def _encoded(items: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the classes of encoded tensors, each with the name of the last one."""
    kinds = {type(value): (name, value) for name, value in items}
    return {kind.__name__: name for kind, (name, value) in kinds.items() if is_encoded(value)}


def _capture_leaves(
    flat: FlatState,
    shards: dict[int, Shard],
    pickled: Mapping[int, bytes] | None = None,
    *,
    sampled: bool,
    arenas: ArenaCache | None = None,
) -> Snapshot:
    """Capture leaves, some of which may be pickled already."""
    if "torch._dynamo" in sys.modules:  # every optimizer imports it; without one, the import would take a second
        watch_optimizers()
    kinds = set(map(type, flat.leaves))
    arrays = set() if kinds.isdisjoint(ARRAY_TYPES) else _replace_arrays(flat)
    objects, tensors = _Objects(dict(pickled or {})), list(flat.leaves)
    if not kinds <= TENSOR_TYPES:
        for leaf, value in enumerate(flat.leaves):
            if type(value) not in TENSOR_TYPES and leaf not in objects.blobs:
                objects.take(flat.names, leaf, value)
                tensors[leaf] = None
    if torch.nn.Parameter in kinds:
        # Assigning to a parameter's `.data` replaces its memory; the detached tensor keeps the present one.
        tensors = [t.detach() if type(t) is torch.nn.Parameter else t for t in tensors]
    structure = Structure(flat.names, flat.paths, frozenset(objects.values.keys() | objects.blobs.keys()), shards)
    snapshot = Snapshot(structure, flat.containers, tensors, [], values=objects.values, blobs=objects.blobs)
    snapshot.foreign, snapshot.shared = objects.foreign, objects.shared
    devices = _check_devices(flat.names, tensors)
    _check_kinds(flat.names, tensors)
    snapshot.versions = _versions(tensors)
    _copy_small_tensors(snapshot, devices, arenas or ArenaCache())
    snapshot.addresses = _addresses(snapshot, devices)
    samples = None
    if sampled or not arrays <= snapshot.eager.keys():  # NumPy counts no changes
        seen = [tensor if sampled or leaf in arrays else None for leaf, tensor in enumerate(snapshot.tensors)]
        samples = Samples(flat.names, seen, besides=snapshot.eager)
    # After the packing and the sampling: the staging stream waits for these events, and reads what those kernels write.
    snapshot.events = _ready_events(devices)
    snapshot.behind = reading_behind
    follow_steps(snapshot, samples)
    return snapshot


def _addresses(snapshot: Snapshot, devices: set[torch.device]) -> list[int | None]:
    """Return where each tensor is that is on a device and copied later; None of others."""
    addresses: list[int | None] = [None] * len(snapshot.tensors)
    if not all(map(is_host, devices)):
        for leaf, tensor in enumerate(snapshot.tensors):
            if tensor is None or leaf in snapshot.eager or is_host(tensor.device):
                continue
            if tensor.layout is torch.strided:
                addresses[leaf] = address_of(tensor)
    return addresses


def _replace_arrays(flat: FlatState) -> set[int]:
    """Replace NumPy arrays by tensors, and record which; return their positions."""
    arrays: set[int] = set()
    known: dict[int, torch.Tensor | None] = {}  # an array with two keys is copied at most once
    for leaf, value in enumerate(flat.leaves):
        if type(value) not in ARRAY_TYPES:
            continue
        if id(value) not in known:
            known[id(value)] = tensor_of(value)
        tensor = known[id(value)]
        if tensor is not None:
            flat.leaves[leaf] = tensor
            flat.containers.append({"path": list(flat.paths[leaf]), "type": ARRAY_RECORD, "at": leaf})
            arrays.add(leaf)
    return arrays


def _culprit(flat: FlatState) -> str:
    """Return the name of the leaf whose capture fails, by capturing each alone."""
    for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
        try:
            _capture_leaves(FlatState([name], [path], [leaf]), {}, sampled=False)
        except Exception:  # the caller raises it
            return name
    return "the state dict"


@dataclass(slots=True)
class _Objects:
    """The objects of a state, by their leaves: themselves if they can't change, else pickled."""

    blobs: dict[int, bytes]
    values: dict[int, Any] = field(default_factory=dict)
    foreign: dict[int, tuple[str, dict[str, bool]]] = field(default_factory=dict)
    shared: tuple[str, str, str] | None = None  # two leaves, and the class of an object that is in both
    _owners: dict[int, tuple[int, Any]] = field(default_factory=dict)  # of objects, by their ids: they are not freed

    def take(self, names: Sequence[str], leaf: int, value: Any) -> None:
        """Keep or pickle an object; raise SaveError if that is none to save."""
        name = names[leaf]
        if is_frozen(value):
            self.values[leaf] = value
            return
        if isinstance(value, torch.Tensor):
            if torch.nn.parameter.is_lazy(value):
                raise SaveError(f"{name} is not initialised: run a batch through its lazy module before it is saved")
            if type(value).__module__.startswith("torch._subclasses"):
                raise SaveError(f"{name} is a {type(value).__name__}, which has no values: save outside of tracing")
            if value.device.type == "meta":
                raise SaveError(_meta_message(name))
        named: dict[Any, bool] = {}
        met: dict[int, Any] = {}
        self.blobs[leaf] = encode_object(name, value, named, met)
        foreign = foreign_names(named)
        if foreign:
            full = f"{type(value).__module__}.{type(value).__qualname__}"
            self.foreign[leaf] = full.removeprefix("builtins."), foreign
        for identity in met.keys() & self._owners.keys() if self.shared is None else ():
            kind = type(met[identity])
            if not issubclass(kind, torch.Tensor | Enum) and foreign_names({kind: False}):
                self.shared = names[self._owners[identity][0]], name, kind.__qualname__
                break
        self._owners |= {identity: (leaf, thing) for identity, thing in met.items()}


def _check_devices(names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> set[torch.device]:
    present = [tensor for tensor in tensors if tensor is not None]
    are_all_here = present and all(map(_IS_CPU, present))  # to make a device object for each takes twice as long
    devices = {_CPU} if are_all_here else {tensor.device for tensor in present}
    for device in devices:
        if not is_host(device) and not has_events(device):
            name = next(n for n, t in zip(names, tensors, strict=True) if t is not None and t.device == device)
            how = _meta_message(name) if device.type == "meta" else f"{name} can't be saved: {UNORDERED.format(device)}"
            raise SaveError(how)
    return devices


def _check_captures(leaves: Iterable[Any], error: type[AiockptError]) -> None:
    """Refuse tensors of a device whose current stream captures a graph, before a kernel or an event is added to it."""
    if not torch.accelerator.is_available():
        return
    for device in {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}:
        if not is_host(device) and is_capturing(device):
            raise error(CAPTURING.format(device))


def _check_kinds(names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuse tensors that have no memory, or that could be stored but not loaded. Of very many, check the first."""
    names, tensors = names[:CHECKED_AHEAD], tensors[:CHECKED_AHEAD]
    present = [tensor for tensor in tensors if tensor is not None]
    forms = set(map(_FORM, present))
    is_special = (
        any(is_nested for *_, is_nested in forms)
        or any(map(torch._is_functional_tensor, present))
        or not all(map(torch._C._has_storage, present))
    )
    if not (is_special or any(unstorable(dtype, dims) for dtype, dims, _ in forms)):
        return
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        wrong = None if tensor.is_quantized else unstorable(tensor.dtype, tensor.dim())
        if tensor.is_nested and tensor.layout is torch.strided:
            wrong = "is a nested tensor of the strided layout; make it one of layout=torch.jagged"
        if _is_traced(tensor):
            wrong = "stands for a value within a function that torch transforms; save outside of it"
        if wrong is not None:
            raise SaveError(f"{name} {wrong}")


def _is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory, because ``torch.func`` or a compiler traces it."""
    return torch._is_functional_tensor(tensor) or not (
        torch._C._has_storage(tensor) or tensor.layout is not torch.strided
    )


def _meta_message(name: str) -> str:
    return f"{name} is on the meta device: it has no data to save. Materialise the model first (to_empty and load)."


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    try:
        return [None if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made under inference_mode have no counter
        return [None if t is None or t.is_inference() else t._version for t in tensors]


def ready_events(state_dict: Mapping[Any, Any]) -> dict[torch.device, torch.Event]:
    """Record an event in the caller's stream of each accelerator that holds tensors of a state dict.

    Raise LoadError if that stream captures a graph, or if the device has failed.
    """
    if not torch.accelerator.is_available():
        return {}
    try:
        leaves = flatten(state_dict).leaves
    except StructureError:
        return {}  # reported by the load that follows
    try:
        _check_captures(leaves, LoadError)
        return _ready_events({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)})
    except RuntimeError as exc:
        raise LoadError(f"the device of what is to be filled has failed: {exc}") from exc


def _ready_events(devices: Iterable[torch.device]) -> dict[torch.device, torch.Event]:
    return {device: event for device in devices if (event := ready_event(device)) is not None}


# --- small tensors --------------------------------------------------------------------------------


def _copy_small_tensors(snapshot: Snapshot, devices: set[torch.device], arenas: ArenaCache) -> None:
    """Copy small tensors, up to a total: among them those that a forward pass may change.

    Tensors that reach out of their storage are refused. Of very many, those not copied here are checked when staged.
    """
    chosen: dict[torch.device, dict[int, int]] = {device: {} for device in devices}
    (only,) = devices if len(devices) == 1 else (None,)
    tensors, versions, strided = snapshot.tensors, snapshot.versions, torch.strided
    clones: dict[object, torch.Tensor] = {}
    # Where memory that is freed may go to kernels of another stream: most tensors belong to the default one.
    apart = {device for device in devices if not (is_host(device) or in_default_stream(device))}
    total = 0
    for leaf, tensor in enumerate(tensors):
        if total > EAGER_BYTES and leaf >= CHECKED_AHEAD:
            break
        if tensor is None:
            continue
        nbytes = tensor.nbytes if tensor.layout is strided else 0
        is_small = 0 < nbytes <= EAGER_TENSOR_BYTES
        is_contiguous = nbytes > 0 and tensor.is_contiguous()
        # `is_freed` takes thrice as long as to see that a tensor has the whole of a storage with an address.
        is_whole = is_contiguous and only == _CPU and tensor.untyped_storage().nbytes() == nbytes
        if not (is_whole and not tensor.storage_offset() and address_of(tensor)) and is_freed(tensor):
            raise SaveError(freed_message(snapshot.structure.names[leaf], tensor))
        if not is_small or total > EAGER_BYTES or tensor.is_quantized:
            continue
        if is_contiguous:
            chosen[only or tensor.device][leaf] = nbytes
            # Capture the shape and strides too, not only the bytes. `.data` instead of `.detach()`, which releases the
            # GIL; that `.data` has a version counter of its own does not matter for a tensor that is copied here.
            tensors[leaf] = tensor.data
        else:
            copy = _cloned(tensor, clones)
            if copy is None:
                continue  # copied with the large ones
            tensors[leaf] = copy
        versions[leaf] = None
        total += nbytes
        if apart and tensor.device in apart:
            use_in(None, tensor)
    for device, sizes in chosen.items():
        if sizes:
            _pack_or_leave(snapshot, device, sizes, arenas)


def _cloned(tensor: torch.Tensor, clones: dict[object, torch.Tensor]) -> torch.Tensor | None:
    """Return a copy with the strides that will be stored, which only tied tensors share; None: no memory to spare."""
    form = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy_bits(tensor)
    try:
        if form not in clones:
            clones[form] = tensor.clone()
    except torch.OutOfMemoryError:
        return None
    return clones[form]


def _pack_or_leave(snapshot: Snapshot, device: torch.device, sizes: dict[int, int], arenas: ArenaCache) -> None:
    """Copy tensors together, or leave them to be copied with the large ones if their device has no memory to spare."""
    try:
        snapshot.arenas[device] = _pack(snapshot, device, sizes, arenas)
    except torch.OutOfMemoryError:
        for leaf in sizes:
            tensor = snapshot.tensors[leaf]
            del snapshot.eager[leaf]
            snapshot.versions[leaf] = None if tensor is None or tensor.is_inference() else tensor._version


def _pack(snapshot: Snapshot, device: torch.device, sizes: dict[int, int], arenas: ArenaCache) -> torch.Tensor:
    tensors = [snapshot.tensors[leaf] for leaf in sizes]
    starts = [0, *accumulate(sizes.values())]
    total = starts.pop()
    snapshot.eager.update(zip(sizes, zip(starts, sizes.values(), strict=True), strict=True))
    if not is_host(device):
        # One kernel on the caller's stream, so ordered before later changes of the tensors.
        return torch.cat([plain_memory(t).reshape(-1).view(torch.uint8) for t in tensors if t is not None])
    arena = arenas.take(total)
    target = arena.data_ptr()
    for tensor, start, nbytes in zip(tensors, starts, sizes.values(), strict=True):
        copy_small(target + start, tensor.data_ptr(), nbytes)  # type: ignore[union-attr]
    return arena
