"""Live objects in a state: modules, optimizers, schedulers and all others that have a state dict and load one."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from aiockpt.coordination.ranks import Ranks, calling_ranks
from aiockpt.core.dataclasses import dataclass, field, fields, is_dataclass
from aiockpt.format.item.objects import TensorSeeker
from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import is_taken_apart

if TYPE_CHECKING:
    from aiockpt.errors import AiockptError
    from aiockpt.format.index import ObjPath

_PLAIN = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device}
)


class Stateful(Protocol):
    """An object with a state dict, such as a module or an optimizer."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""


class LiveObject(NamedTuple):
    """A live object in a state."""

    path: ObjPath
    name: str  # the path, joined by dots; empty for the state itself
    value: Any
    state: Any  # its state dict, in which inner live objects are state dicts too

    @property
    def described(self) -> str:
        return f"{self.name or 'the state'} ({type(self.value).__name__})"

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of an optimizer, in the order in which its state dict numbers them."""
        if not isinstance(self.value, torch.optim.Optimizer):
            return []
        return [parameter for group in self.value.param_groups for parameter in group["params"]]


@dataclass(slots=True)
class ResolvedState:
    """A state whose live objects are replaced by their state dicts.

    Containers without live objects are the caller's own. ``objects`` has inner objects before outer ones; an object
    with several keys is there for each.
    """

    tree: Any
    objects: list[LiveObject] = field(default_factory=list)


def is_live(value: object) -> bool:
    """Return whether a value has a state dict and can load one: the duck type of torch's ``Stateful``."""
    return (
        not isinstance(value, torch.Tensor | type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def resolve(state: Any, error: type[AiockptError], group: object = None) -> ResolvedState:
    """Call ``state_dict()`` of every live object in a state once, in the caller's thread; the state is not changed.

    Objects may ask which rank they belong to: ``group`` is the checkpointer's ``process_group``.

    Raise ``error`` if ``state_dict()`` fails, an object is part of its own state, or it is in a container that would
    be pickled whole, such as a named tuple; the message names the key.
    """
    walk = _Walk(error)
    calling = calling_ranks.set(group if isinstance(group, Ranks) else None)
    try:
        tree = walk.resolved((), "", state)
    except RecursionError:
        raise error("the state is nested too deeply, or holds itself") from None
    finally:
        calling_ranks.reset(calling)
    return ResolvedState(tree, walk.objects)


class _Walk:
    def __init__(self, error: type[AiockptError]) -> None:
        self.objects: list[LiveObject] = []
        self._error = error
        self._states: dict[int, Any] = {}
        self._open: set[int] = set()
        self._seeker = TensorSeeker()

    def resolved(self, path: ObjPath, name: str, value: Any) -> Any:
        """Return a value whose live objects are replaced by state dicts."""
        kind = type(value)
        if _is_plain(kind, value):
            return value
        if kind is list or kind is tuple:
            parts = [self.resolved((*path, i), _dotted(name, path, i), part) for i, part in enumerate(value)]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else kind(parts)
        if is_live(value):
            return self._state_of(path, name, value)
        if not is_taken_apart(value, self._seeker):
            if not isinstance(value, Mapping):  # which would have been taken apart
                self._refuse_hidden(name, value)
            return value
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        items = {
            key: part
            if _is_plain(type(part), part)  # as most are: an optimizer has a dict for each parameter
            else self.resolved((*path, text := _text(key)), _dotted(name, path, text), part)
            for key, part in value.items()
        }
        if all(items[key] is part for key, part in value.items()):
            return value
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        ordered.__dict__.update(vars(value))  # modules keep the versions of their submodules there
        return ordered

    def _refuse_hidden(self, name: str, value: Any) -> None:
        """Refuse a value that would be pickled whole, and contains live objects."""
        inside = _find_live(value, set(), self._seeker)
        if inside is not None:
            raise self._error(
                f"{name or 'the state'} is a {type(value).__name__} with a {type(inside).__name__} in it, which would "
                "be pickled as a whole: what has a state dict must be in dicts, lists and tuples alone. Put one of "
                "these in its place, such as _asdict() of a named tuple, a dict of a dataclass, a list of a deque"
            )

    def _state_of(self, path: ObjPath, name: str, value: Any) -> Any:
        label = f"{name or 'the state'} ({type(value).__name__})"
        if id(value) in self._open:
            raise self._error(f"{label} is part of its own state_dict(); leave it out there")
        if id(value) not in self._states:
            self._open.add(id(value))
            try:
                state = value.state_dict()
            except Exception as exc:
                raise self._error(f"state_dict() of {label} failed: {type(exc).__name__}: {exc}") from exc
            refuse_awaitable(state, f"state_dict() of {label}", self._error)
            self._states[id(value)] = self.resolved(path, name, state)
            self._open.remove(id(value))
        state = self._states[id(value)]
        self.objects.append(LiveObject(path, name, value, state))
        return state


def _is_plain(kind: type, value: Any) -> bool:
    """Return whether a value of this type is a leaf, or a container of leaves alone."""
    if kind in _PLAIN:
        return True
    if kind is dict or kind is OrderedDict:
        return _PLAIN.issuperset(map(type, value.values()))
    return (kind is list or kind is tuple) and _PLAIN.issuperset(map(type, value))


def _find_live(value: Any, seen: set[int], seeker: TensorSeeker) -> Any:
    """Return a live object within a container of any kind, or None."""
    for part in _parts(value, seeker):
        if type(part) not in _PLAIN and id(part) not in seen:
            seen.add(id(part))
            live = part if is_live(part) else _find_live(part, seen, seeker)
            if live is not None:
                return live
    return None


def _parts(value: Any, seeker: TensorSeeker) -> Iterable[Any]:
    if is_taken_apart(value, seeker):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, SimpleNamespace | Namespace):
        return vars(value).values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, member.name, None) for member in fields(value)]
    return ()


def refuse_awaitable(result: object, function: str, error: type[AiockptError]) -> None:
    """Raise an error if a function turns out to be asynchronous."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise error(f"{function} is asynchronous; it must be a plain function")


def _text(key: object) -> str:
    try:
        return str(key)
    except Exception:  # no text, or a number with too many digits: refused when the state is flattened
        return "?"


def _dotted(name: str, path: ObjPath, key: object) -> str:
    return f"{name}.{key}" if path else str(key)


def check_optimizers(
    objects: Sequence[LiveObject], error: type[AiockptError], leaves: Sequence[Any] = (), ranks: int = 1
) -> None:
    """Refuse optimizers whose state dicts mean something else on each rank.

    An optimizer's own state dict numbers its parameters, so the same key means another parameter on another rank if
    the ranks don't have the same parameters. If ``leaves``, the values to be saved, contain DTensors, but none
    of them spans all ranks, then the ranks are assumed to have different parameters, as the stages of a pipeline do.
    """
    tensors = [*leaves, *(parameter for live in objects for parameter in live.parameters)]
    widest = max((_mesh_size(tensor) for tensor in tensors if is_distributed(tensor)), default=ranks)
    for live in objects:
        if any(hasattr(p, "_fsdp_flattened") or hasattr(p, "_is_flat_param") for p in live.parameters):
            why = "its parameters are flattened by FullyShardedDataParallel, and each rank has others"
        elif widest < ranks and any(map(is_distributed, live.parameters)):
            why = f"its parameters are sharded over {widest} of {ranks} ranks, and the other ranks may have others"
        else:
            continue
        raise error(
            f"{live.described}: {why}, so the numbers that its state_dict() calls them by don't tell which they are. "
            "Use get_state_dict(model, optim) of torch.distributed.checkpoint.state_dict, whose keys are names, and "
            "set_state_dict after loading"
        )


def _mesh_size(value: Any) -> int:
    mesh = getattr(value, "device_mesh", None)  # a ShardedTensor has none
    return 0 if mesh is None else int(mesh.size())
