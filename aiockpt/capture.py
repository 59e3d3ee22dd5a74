"""What `save()` does before it returns: take hold of a state dict, in the caller's thread.

Tensors are held by reference; objects that could change are pickled; small tensors are copied at once.
For the others a version counter is noted, which tells later whether they changed while they were copied.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
import zlib
from collections.abc import Mapping as MappingType
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from aiockpt.errors import SaveError
from aiockpt.format.objects import encode_object, is_frozen
from aiockpt.planning.source import Capture, Structure, freed_message
from aiockpt.planning.tree import FlatState, StructureError, flatten
from aiockpt.sharded import (
    LocalPart,
    ShardingError,
    counted,
    is_distributed,
    local_parts,
    replica_of,
    whole_shape,
)
from aiockpt.staging.pool import Mapping as MappedMemory
from aiockpt.staging.pool import copy_small
from aiockpt.staging.runtime import reading_behind, ready_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from aiockpt.planning.source import Shard
    from aiockpt.planning.tree import NameMemo


EAGER_TENSOR_BYTES = 64 << 10
"""Tensors up to this size are copied at the call ..."""
EAGER_BYTES = 16 << 20
"""... until this much has been copied."""

logger = logging.getLogger("aiockpt")

_GUARDS = "_aiockpt_guards"


class _Token:
    """Lives as long as a capture that is not released."""

    __slots__ = ("__weakref__", "is_blind")

    def __init__(self) -> None:
        self.is_blind = False


_live: weakref.WeakSet[_Token] = weakref.WeakSet()
_live_lock = threading.Lock()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def count_change(tensors: Iterable[torch.Tensor]) -> None:
    """Advance the version counters of tensors that are changed by other means than torch's operators."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait where that was asked for, and only then count the change, as if it had happened. Raises nothing."""
    for wait in getattr(optimizer, _GUARDS, ()):
        wait()
    if not _live:
        return
    try:
        count_change(tensors_of(optimizer))
    except Exception:
        logger.warning(
            "what a step of %s changes can't be told, so the saves in flight are dropped",
            type(optimizer).__name__,
            exc_info=True,
        )
        with _live_lock:
            for token in _live:
                token.is_blind = True


def saw_all(capture: Capture) -> bool:
    """Tell whether all steps of optimizers since a capture could be counted."""
    return not getattr(capture.token, "is_blind", False)


def wait_before_steps(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Call a function before each step of an optimizer. It may be given to one optimizer once.

    A hook of the optimizer's own would come after `watch_optimizers`' one, which is for all.
    """
    watch_optimizers()
    setattr(optimizer, _GUARDS, (*getattr(optimizer, _GUARDS, ()), wait))


def wait_no_more(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Undo `wait_before_steps`. Idempotent."""
    setattr(optimizer, _GUARDS, tuple(each for each in getattr(optimizer, _GUARDS, ()) if each is not wait))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give all that a step is about to change: the parameters, and their state.

    These are counted before: operators do so when they are done, and what was copied meanwhile would be taken for
    good. Fused steps never do, nor do those that take many DTensors at once.
    """
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for value in list(optimizer.state.values()):
        found += _tensors_in(value)
    return found


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, MappingType):
        for each in list(value.values()):
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


@cache
def watch_optimizers() -> None:
    """Take note of the steps of all optimizers from now on; once for the process."""
    # A compiler that traced it would let it run once, or never.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]


def capture_state(
    state_dict: Mapping[Any, Any], memo: NameMemo | None = None, *, together: bool = False, once: bool = False
) -> Capture:
    """Take hold of a state dict. Blocks for the walk over it, and for pickling objects that could change.

    Args:
        state_dict: what to capture.
        memo: names of earlier captures, see `aiockpt.planning.tree.flatten`.
        together: whether other ranks save their parts of distributed tensors as well.
        once: leave out the parts of which another rank has the copy that counts.

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
    if any(is_distributed(leaf) or _is_coded(leaf) for leaf in kinds.values()):
        wholes = _take_parts(flat, shards, together=together, once=once)
    capture = _hold(flat, shards)
    capture.wholes = [
        (leaf, whole, whole._version) for leaf, whole in wholes.items() if capture.versions[leaf] is not None
    ]
    return capture


def capture_items(items: Sequence[tuple[str, torch.Tensor | bytes]]) -> Capture:
    """Take hold of tensors and of objects that are pickled already, as they come.

    Args:
        items: name and value of each; names need not be distinct.

    Raises:
        SaveError: naming what can't be saved.
    """
    flat = FlatState([name for name, _ in items], [(name,) for name, _ in items])
    blobs = {leaf: value for leaf, (_, value) in enumerate(items) if isinstance(value, bytes)}
    flat.leaves = [None if isinstance(value, bytes) else _dense(name, value) for name, value in items]
    return _hold(flat, {}, blobs)


def _hold(flat: FlatState, shards: dict[int, Shard], pickled: Mapping[int, bytes] | None = None) -> Capture:
    """Take hold of leaves, of which some may be pickled already."""
    if "torch._dynamo" in sys.modules:  # which every optimizer imports; without any this would take a second
        watch_optimizers()
    leaves = flat.leaves
    values: dict[int, Any] = {}
    blobs: dict[int, bytes] = dict(pickled or {})
    kinds = set(map(type, leaves))
    if not kinds <= _PLAIN:
        for leaf, value in enumerate(leaves):
            if type(value) not in _PLAIN and leaf not in blobs:
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
    _copy_small(capture, devices)
    capture.events = _ready_events(devices)
    capture.behind = reading_behind
    capture.token = token = _Token()
    with _live_lock:
        _live.add(token)
    return capture


def _take_parts(flat: FlatState, shards: dict[int, Shard], *, together: bool, once: bool) -> dict[int, torch.Tensor]:
    """Put this rank's parts in the place of distributed tensors, and dense tensors in that of quantized ones.

    Args:
        flat: the leaves.
        shards: is given where the parts belong that are not the whole of their tensors.
        together: see `capture_state`.
        once: see `capture_state`.

    Returns:
        For the leaves that are parts of a DTensor that tensor, whose version counter is another.
    """
    names, paths, leaves = flat.names, flat.paths, flat.leaves
    flat.names, flat.paths, flat.leaves = [], [], []
    wholes: dict[int, torch.Tensor] = {}
    moved: list[int] = []
    for name, path, value in zip(names, paths, leaves, strict=True):
        moved.append(len(flat.leaves))
        taken = [_dense(name, value)]
        if is_distributed(value):
            parts = [] if once and not _counts(name, value) else _parts_of(name, value, together=together)
            own = counted(value, ())
            wholes |= {len(flat.leaves) + number: own[0] for number in range(len(parts)) if own}
            taken = [_taken(part, len(flat.leaves) + number, shards) for number, part in enumerate(parts)]
        flat.names += [name] * len(taken)
        flat.paths += [path] * len(taken)
        flat.leaves += taken
    for record in flat.containers:
        at = record["at"]
        if isinstance(at, int):
            record["at"] = moved[at] if at < len(moved) else len(flat.leaves)
    return wholes


def _counts(name: str, value: Any) -> bool:
    """Tell whether this rank has the copy of its part that is saved; spread over the copies by the names."""
    index, count = replica_of(value)
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % count == index


def _taken(part: LocalPart, leaf: int, shards: dict[int, Shard]) -> torch.Tensor:
    """Note where a part belongs, unless it is the whole."""
    if 0 in part.shard.shape:
        return part.tensor.new_empty(part.shard.shape)  # there is nothing to share out
    if tuple(part.tensor.shape) != part.shard.shape:
        shards[leaf] = part.shard
    return part.tensor


def _parts_of(name: str, value: Any, *, together: bool) -> list[LocalPart]:
    try:
        parts = local_parts(name, value)
    except ShardingError as exc:
        raise SaveError(str(exc)) from None
    if not together and [tuple(part.tensor.shape) for part in parts] != [whole_shape(value)]:
        raise SaveError(
            f"{name} is a {type(value).__name__}, of which this process has a part only, and it saves alone: make the "
            "checkpointer with the process group of all ranks that have the others, or gather it with full_tensor()"
        )
    return parts


def _is_coded(value: Any) -> bool:
    """Tell whether a tensor stores its values in a form of its own, and knows how to give them back."""
    kind = type(value)
    return (
        isinstance(value, torch.Tensor)
        and kind not in _PLAIN
        and kind.dequantize is not torch.Tensor.dequantize
        and not is_distributed(value)
    )


def _dense(name: str, value: Any) -> Any:
    """Make a plain tensor of one that stores its values in a form of its own."""
    if not _is_coded(value):
        return value
    with torch.no_grad():
        dense = value.dequantize()
    if type(dense) not in _PLAIN:
        raise SaveError(f"{name} is a {type(value).__name__} whose dequantize() gave a {type(dense).__name__}")
    return dense.detach()


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


def _copy_small(capture: Capture, devices: set[torch.device]) -> None:
    """Copy the small tensors, up to a total: those that a forward pass may change, above all."""
    chosen: dict[torch.device, dict[int, int]] = {device: {} for device in devices}
    (only,) = devices if len(devices) == 1 else (None,)
    versions = capture.versions
    total = 0
    for leaf, tensor in enumerate(capture.tensors):
        if tensor is None or tensor.layout is not torch.strided:
            continue
        nbytes = tensor.nbytes
        if tensor.is_contiguous() and tensor.untyped_storage().nbytes() < nbytes:
            raise SaveError(freed_message(capture.structure.names[leaf]))
        if not 0 < nbytes <= EAGER_TENSOR_BYTES or tensor.is_quantized:
            continue
        if tensor.is_contiguous():
            chosen[only or tensor.device][leaf] = nbytes
            # Its form is taken now as well, not only its bytes. Not by detach(), which lets go of the interpreter; the
            # version counter, which this one does not share, is of no use for what is copied at once.
            capture.tensors[leaf] = tensor.data
        else:
            try:
                # The copy keeps the strides that it will be stored with, and is nobody else's.
                capture.tensors[leaf] = tensor.clone()
            except torch.OutOfMemoryError:
                continue  # it is copied with the large ones
        versions[leaf] = None
        total += nbytes
        if total > EAGER_BYTES:
            break
    for device, sizes in chosen.items():
        if sizes:
            try:
                capture.arenas[device] = _pack(capture, device, sizes)
            except torch.OutOfMemoryError:
                _copy_later(capture, sizes)


def _copy_later(capture: Capture, leaves: Iterable[int]) -> None:
    """Let tensors be copied with the large ones after all: their device has no memory to spare."""
    for leaf in leaves:
        tensor = capture.tensors[leaf]
        del capture.eager[leaf]
        capture.versions[leaf] = None if tensor is None or tensor.is_inference() else tensor._version


def _pack(capture: Capture, device: torch.device, sizes: dict[int, int]) -> torch.Tensor:
    tensors = [capture.tensors[leaf] for leaf in sizes]
    ends = list(accumulate(sizes.values()))
    for (leaf, nbytes), end in zip(sizes.items(), ends, strict=True):
        capture.eager[leaf] = (end - nbytes, nbytes)
    if device.type != "cpu":
        # One kernel on the caller's stream, so in order with whatever changes the tensors next.
        return torch.cat([_raw_bytes(tensor) for tensor in tensors if tensor is not None])
    arena = MappedMemory(ends[-1])
    target = arena.address
    for tensor, nbytes in zip(tensors, sizes.values(), strict=True):
        copy_small(target, tensor.data_ptr(), nbytes)  # type: ignore[union-attr]
        target += nbytes
    return arena.tensor


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """See the memory of a contiguous tensor as bytes, lazy conjugation and negation left aside."""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.reshape(-1).view(torch.uint8)


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
