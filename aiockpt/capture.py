"""What `save()` does before it returns: take hold of a state dict, in the caller's thread.

Tensors are held by reference; objects that could change are pickled; small tensors are copied at once.
For the others a version counter is noted, which tells later whether they changed while they were copied.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.eager import copy_at_once
from aiockpt.errors import SaveError
from aiockpt.format.objects import encode_object, is_frozen
from aiockpt.parts import PLAIN_TYPES, dense_form, is_coded, take_parts
from aiockpt.planning.source import Capture, Structure
from aiockpt.planning.tree import FlatState, StructureError, flatten
from aiockpt.sampling import Samples
from aiockpt.sharded import is_distributed
from aiockpt.staging.runtime import reading_behind, ready_event
from aiockpt.steps import follow_steps, watch_optimizers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiockpt.planning.source import Shard
    from aiockpt.planning.tree import NameMemo


def capture_state(
    state_dict: Mapping[Any, Any],
    memo: NameMemo | None = None,
    *,
    together: bool = False,
    once: bool = False,
    sampled: bool = False,
) -> Capture:
    """Take hold of a state dict. Blocks for the walk over it, and for pickling objects that could change.

    Args:
        state_dict: what to capture.
        memo: names of earlier captures, see `aiockpt.planning.tree.flatten`.
        together: whether other ranks save their parts of distributed tensors as well.
        once: leave out the parts of which another rank has the copy that counts.
        sampled: look at the bytes themselves as well, see `aiockpt.sampling.Samples`.

    Raises:
        SaveError: naming the key of what can't be saved.
    """
    try:
        flat = flatten(state_dict, memo=memo)
    except StructureError as exc:
        raise SaveError(str(exc)) from None
    shards: dict[int, Shard] = {}
    wholes: dict[int, torch.Tensor] = {}
    kinds = {type(leaf): leaf for leaf in flat.leaves}
    if any(is_distributed(leaf) or is_coded(leaf) for leaf in kinds.values()):
        wholes = take_parts(flat, shards, together=together, once=once)
    capture = _hold(flat, shards, sampled=sampled)
    capture.wholes = [
        (leaf, whole, whole._version) for leaf, whole in wholes.items() if capture.versions[leaf] is not None
    ]
    return capture


def capture_items(items: Sequence[tuple[str, torch.Tensor | bytes]], *, sampled: bool = False) -> Capture:
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
) -> Capture:
    """Take hold of leaves, of which some may be pickled already."""
    if "torch._dynamo" in sys.modules:  # which every optimizer imports; without any this would take a second
        watch_optimizers()
    leaves = flat.leaves
    values: dict[int, Any] = {}
    blobs: dict[int, bytes] = dict(pickled or {})
    kinds = set(map(type, leaves))
    if not kinds <= PLAIN_TYPES:
        for leaf, value in enumerate(leaves):
            if type(value) not in PLAIN_TYPES and leaf not in blobs:
                _take_object(flat.names[leaf], leaf, value, values, blobs)
                leaves[leaf] = None
    tensors = leaves
    if torch.nn.Parameter in kinds:
        # A parameter's memory may be exchanged through `.data`; the detached tensor keeps what it is now.
        tensors = [t.detach() if type(t) is torch.nn.Parameter else t for t in leaves]
    objects = frozenset(values.keys() | blobs.keys())
    capture = Capture(
        Structure(flat.names, flat.paths, objects, shards), flat.containers, tensors, [], values=values, blobs=blobs
    )
    devices = _check_devices(flat.names, tensors)
    capture.versions = _versions(tensors)
    copy_at_once(capture, devices)
    samples = Samples(flat.names, capture.tensors, besides=capture.eager) if sampled else None
    capture.events = _ready_events(devices)
    capture.behind = reading_behind
    follow_steps(capture, samples)
    return capture


def _take_object(name: str, leaf: int, value: Any, values: dict[int, Any], blobs: dict[int, bytes]) -> None:
    if is_frozen(value):
        values[leaf] = value
        return
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        raise SaveError(_meta_message(name))
    blobs[leaf] = encode_object(name, value)


def _check_devices(names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> set[torch.device]:
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if torch.device("meta") in devices:
        name = next(n for n, t in zip(names, tensors, strict=True) if t is not None and t.is_meta)
        raise SaveError(_meta_message(name))
    return devices


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
