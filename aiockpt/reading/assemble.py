"""The last step of a load: tensors from the memory that was read, state dicts from values, values into a target."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import CorruptCheckpointError, ShapeMismatchError
from aiockpt.format.item.arrays import array_of
from aiockpt.format.keys import containers_within
from aiockpt.planning.flatten import StructureError, replace_leaves, unflatten
from aiockpt.reading.jobs import view_of
from aiockpt.reading.target_plan import TargetPlan, distinct_trees
from aiockpt.reading.targets import relocated

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.format.index import Index, ObjPath
    from aiockpt.options import MapLocation
    from aiockpt.reading.read_plan import NewTensor, ReadPlan
    from aiockpt.snapshot.live import LiveObject, ResolvedState

_DAMAGED = (StructureError, KeyError, TypeError, ValueError)


# --- values ---------------------------------------------------------------------------------------------


@gc_pause()
def build_values(plan: ReadPlan, map_location: MapLocation | None) -> BaseException | None:
    """Add the values of an executed plan to ``plan.values``.

    Returns the exception of a map_location function instead of raising it: a StopIteration can't pass a future.
    """
    # A device is callable too: it may decorate a function.
    move = map_location if callable(map_location) and not isinstance(map_location, torch.device) else None
    try:
        plan.values |= {read.name: read.value for read in plan.objects}
        for new in plan.new:
            _build_tensors(new, plan.values, move)
    except BaseException as exc:  # the caller raises it
        return exc
    return None


def _build_tensors(new: NewTensor, values: dict[str, Any], move: Any) -> None:
    """Add the tensors of all keys that share memory."""
    tensor = new.tensor if new.tensor is not None else new.reads[0].made
    if tensor is not None:
        tensor = relocated(tensor, move) if move else tensor
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
    memory = relocated(read.memory, move) if move else read.memory
    shared = len(new.keys) > 1  # then conjugating the memory for one key would change the values of the others
    for name, entry in new.keys.items():
        values[name] = view_of(memory, entry.chunks[0].item or read.item, lazily=shared).to(entry.dtype)


# --- a new state dict -----------------------------------------------------------------------------------


@gc_pause()
def build_state(path: str, index: Index, values: Mapping[str, Any]) -> Any:
    """Return the nested state dict of some or all keys of an index."""
    names = [name for name in index.paths if name in values]
    containers: Any = index.containers
    if len(names) < len(index.paths):
        containers = containers_within(containers, list(index.paths), list(index.paths.values()), values.keys())
    try:
        nested = unflatten([index.paths[n] for n in names], [values[n] for n in names], containers)
    except _DAMAGED as exc:
        raise _damaged_structure(path, exc) from exc
    return nested if index.wrapped is None else nested[index.wrapped]


def _damaged_structure(path: str, exc: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: the structure of the state dict is damaged: {exc}")


# --- into a target --------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class TargetValues:
    """New values that go into a target when its tensors are filled."""

    values: dict[ObjPath, Any]  # that replace leaves and empty containers
    gifts: list[tuple[LiveObject, Any]]  # live objects with their states
    copies: list[tuple[NDArray[Any], NDArray[Any]]]  # arrays of the target, with the stored ones

    def put(self, tree: Any, state_dict: Any) -> None:
        for array, value in self.copies:
            np.copyto(array, value)
        if () in self.values:
            state_dict.update(self.values[()])
        elif self.values:
            for each in distinct_trees(tree, state_dict):
                replace_leaves(each, self.values)


def build_target_values(path: str, plan: TargetPlan, target: ResolvedState, fresh: Mapping[str, Any]) -> TargetValues:
    """Build subtrees, states of live objects and array copies from new values; the target is not changed."""
    copies = _array_copies(path, plan, fresh)
    values: dict[ObjPath, Any] = {place: fresh[name] for name, place in plan.paths.items() if name not in copies}
    given = {**fresh, **plan.kept}
    try:
        for name, place in plan.containers.items():
            values[place] = _with_numbers(plan.stored.build(name, fresh), _groups_beside(target.tree, place))
        gifts = [(each, _complete(each, plan.stored.build(each.name, given))) for each in plan.given]
    except _DAMAGED as exc:
        raise _damaged_structure(path, exc) from exc
    return TargetValues(values, gifts, list(copies.values()))


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


def _complete(live: LiveObject, state: Any) -> Any:
    """Add to a live object's state what formats without containers lose: number keys, and a module's versions."""
    if live.parameters and isinstance(state, dict):
        state["state"] = _with_numbers(state.get("state", {}), live.state.get("param_groups"))
    versions = getattr(live.state, "_metadata", None)
    if live.is_module and versions is not None and not hasattr(state, "_metadata"):
        state = OrderedDict(state)
        state._metadata = versions
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
