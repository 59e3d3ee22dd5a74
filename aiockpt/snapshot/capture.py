"""What `save()` does before it returns: take hold of a state dict, in the caller's thread.

Tensors are held by reference, and so are NumPy arrays, as tensors that share their memory; objects that could change
are pickled; small tensors are copied at once. For the others a version counter is noted, which tells later whether
they changed while they were copied. Arrays have none: some of their bytes are noted instead.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.errors import SaveError
from aiockpt.format.item.arrays import ARRAY_RECORD, ARRAY_TYPES, tensor_of
from aiockpt.format.item.objects import encode_object, foreign_names, is_frozen
from aiockpt.planning.dtensor import any_distributed
from aiockpt.planning.flatten import FlatState, StructureError, flatten
from aiockpt.planning.planner import CHECKED_AHEAD
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.planning.specs import unstorable
from aiockpt.snapshot.eager_copy import copy_at_once
from aiockpt.snapshot.live import check_optimizers, resolve
from aiockpt.snapshot.optimizer_hooks import follow_steps, watch_optimizers
from aiockpt.snapshot.sampling import Samples
from aiockpt.snapshot.shards import PLAIN_TYPES, dense_form, is_coded, take_parts
from aiockpt.staging.runtime import reading_behind, ready_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiockpt.planning.flatten import NameMemo
    from aiockpt.planning.snapshot import Shard


def capture_state(
    state_dict: Any,
    memo: NameMemo | None = None,
    *,
    ranks: int | None = None,
    once: bool = False,
    sampled: bool = False,
) -> Snapshot:
    """Take hold of a state dict. Blocks for the walk over it, and for pickling objects that could change.

    Args:
        state_dict: what to capture; live objects in it are asked for their state dicts.
        memo: names of earlier captures, see `aiockpt.planning.flatten.flatten`.
        ranks: how many ranks save their parts of distributed tensors together; None: this process alone.
        once: leave out the parts of which another rank has the copy that counts.
        sampled: look at the bytes themselves as well, see `aiockpt.snapshot.sampling.Samples`.

    Raises:
        SaveError: naming the key of what can't be saved.
    """
    resolved = resolve(state_dict, SaveError)
    try:
        flat = flatten(resolved.tree, memo=memo)
    except StructureError as exc:
        raise SaveError(str(exc)) from None
    if ranks is not None:
        check_optimizers(resolved.objects, SaveError, flat.leaves, ranks)
    shards: dict[int, Shard] = {}
    wholes: dict[int, torch.Tensor] = {}
    kinds = {type(leaf): leaf for leaf in flat.leaves}
    if any_distributed(flat.leaves) or any(map(is_coded, kinds.values())):
        wholes = take_parts(flat, shards, together=ranks is not None, once=once)
    try:
        capture = _hold(flat, shards, sampled=sampled)
    except (RecursionError, ValueError, NotImplementedError) as exc:
        raise SaveError(f"{_culprit(flat)} can't be saved: {type(exc).__name__}: {exc}") from exc
    capture.wholes = [
        (leaf, whole, whole._version) for leaf, whole in wholes.items() if capture.versions[leaf] is not None
    ]
    return capture


def capture_items(items: Sequence[tuple[str, torch.Tensor | bytes]], *, sampled: bool = False) -> Snapshot:
    """Take hold of tensors and of objects that are pickled already, as they come.

    Args:
        items: name and value of each; names need not be distinct.
        sampled: see `capture_state`.

    Raises:
        SaveError: naming what can't be saved.
    """
    flat = FlatState([name for name, _ in items], [(name,) for name, _ in items])
    blobs = {leaf: value for leaf, (_, value) in enumerate(items) if isinstance(value, bytes)}
    flat.leaves = [None if isinstance(value, bytes) else dense_form(name, value) for name, value in items]
    return _hold(flat, {}, blobs, sampled=sampled)


def _hold(
    flat: FlatState, shards: dict[int, Shard], pickled: Mapping[int, bytes] | None = None, *, sampled: bool
) -> Snapshot:
    """Take hold of leaves, of which some may be pickled already."""
    if "torch._dynamo" in sys.modules:  # which every optimizer imports; without any this would take a second
        watch_optimizers()
    leaves = flat.leaves
    values: dict[int, Any] = {}
    blobs: dict[int, bytes] = dict(pickled or {})
    foreign: dict[int, tuple[str, dict[str, bool]]] = {}
    kinds = set(map(type, leaves))
    arrays = set() if kinds.isdisjoint(ARRAY_TYPES) else _take_arrays(flat)
    if not kinds <= PLAIN_TYPES:
        for leaf, value in enumerate(leaves):
            if type(value) not in PLAIN_TYPES and leaf not in blobs:
                _take_object(flat.names[leaf], leaf, value, values, blobs, foreign)
                leaves[leaf] = None
    tensors = leaves
    if torch.nn.Parameter in kinds:
        # A parameter's memory may be exchanged through `.data`; the detached tensor keeps what it is now.
        tensors = [t.detach() if type(t) is torch.nn.Parameter else t for t in leaves]
    objects = frozenset(values.keys() | blobs.keys())
    capture = Snapshot(
        Structure(flat.names, flat.paths, objects, shards),
        flat.containers,
        tensors,
        [],
        values=values,
        blobs=blobs,
        foreign=foreign,
    )
    devices = _check_devices(flat.names, tensors)
    _check_forms(flat.names, tensors)
    capture.versions = _versions(tensors)
    copy_at_once(capture, devices)
    samples = None
    if sampled:
        samples = Samples(flat.names, capture.tensors, besides=capture.eager)
    elif not arrays <= capture.eager.keys():  # NumPy counts no changes
        seen = [tensor if leaf in arrays else None for leaf, tensor in enumerate(capture.tensors)]
        samples = Samples(flat.names, seen, besides=capture.eager)
    capture.events = _ready_events(devices)
    capture.behind = reading_behind
    follow_steps(capture, samples)
    return capture


def _take_arrays(flat: FlatState) -> set[int]:
    """Put tensors in the places of NumPy arrays, and record which; return their positions."""
    arrays: set[int] = set()
    known: dict[int, torch.Tensor | None] = {}  # an array at two places is copied, if at all, once
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
    """Name the leaf that can't be taken hold of even alone."""
    for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
        try:
            _hold(FlatState([name], [path], [leaf]), {}, sampled=False)
        except Exception:  # which is what the caller tells
            return name
    return "the state dict"


def _take_object(
    name: str,
    leaf: int,
    value: Any,
    values: dict[int, Any],
    blobs: dict[int, bytes],
    foreign: dict[int, tuple[str, dict[str, bool]]],
) -> None:
    if is_frozen(value):
        values[leaf] = value
        return
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            raise SaveError(f"{name} is not initialised: run a batch through its lazy module before it is saved")
        if type(value).__module__.startswith("torch._subclasses"):
            raise SaveError(f"{name} is a {type(value).__name__}, which has no values: save outside of tracing")
        if value.device.type == "meta":
            raise SaveError(_meta_message(name))
    named: dict[Any, bool] = {}
    blobs[leaf] = encode_object(name, value, named)
    names = foreign_names(named)
    if names:
        foreign[leaf] = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."), names


def _check_devices(names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> set[torch.device]:
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if torch.device("meta") in devices:
        name = next(n for n, t in zip(names, tensors, strict=True) if t is not None and t.is_meta)
        raise SaveError(_meta_message(name))
    return devices


def _check_forms(names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuse tensors that have no memory of their own, or could be stored but not loaded; of very many the first."""
    names, tensors = names[:CHECKED_AHEAD], tensors[:CHECKED_AHEAD]
    forms = {
        (tensor.dtype, tensor.dim(), tensor.is_nested, _is_traced(tensor)) for tensor in tensors if tensor is not None
    }
    if not any(nested or traced or unstorable(dtype, dims) for dtype, dims, nested, traced in forms):
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
    """Return whether a tensor has no memory, for it is a stand-in of ``torch.func`` or of a compiler."""
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
    """Record, for each accelerator that holds tensors of a state dict, where the caller's stream is now."""
    if not torch.accelerator.is_available():
        return {}
    try:
        leaves = flatten(state_dict).leaves
    except StructureError:
        return {}  # which is told when it is loaded into
    return _ready_events({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)})


def _ready_events(devices: Iterable[torch.device]) -> dict[torch.device, torch.Event]:
    events = {device: ready_event(device) for device in devices if device.type not in ("cpu", "meta")}
    return {device: event for device, event in events.items() if event is not None}
