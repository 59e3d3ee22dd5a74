"""Which keys a live object's ``load_state_dict`` is known to copy, each to the tensor of the same name; pure.

Only these tensors may be filled before the object is given its state, which then shares their memory. Everything else
is given new memory, so that whatever the object does with its state comes out as if it had been loaded by hand.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import TENSOR_TYPES
from aiockpt.reading.targets import is_encoding, overlaps_itself

if TYPE_CHECKING:
    from aiockpt.format.index import ObjPath

_Module, _Optimizer = torch.nn.Module, torch.optim.Optimizer
_EXTRA = "_extra_state"
_COPIES: Mapping[str, tuple[object, ...]] = {
    "_load_from_state_dict": (_Module._load_from_state_dict, _NormBase._load_from_state_dict),
    "_save_to_state_dict": (_Module._save_to_state_dict,),
    "state_dict": (_Module.state_dict,),
}
"""The methods of a submodule that only copy. That of `_NormBase` also does without a key, which old versions lack."""
_MODULE_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_OPTIMIZER_METHODS = ("load_state_dict", "state_dict", "__setstate__", "_process_value_according_to_param_policy")
_OPTIMIZER_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names of submodules that the hooks of torch's wrappers leave out of the keys."""
_MANY_OBJECTS = 1 << 19
"""More than these are not looked through for what other code may change."""


class OwnLoading:
    """The loading of an object that decides all by itself, such as one of a class of the user's."""

    is_known = False  # whether torch's own code alone decides which keys it needs

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        """Return whether a leaf of the object's state dict may be filled in place."""
        return False


@dataclass(eq=False, slots=True)
class OptimizerLoading(OwnLoading):
    """The loading of an optimizer of torch's, which takes over the tensors of its state as they are."""

    apart: set[int]  # storages that its parameters, or several values of its state, share

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        if path[0] != "state" or is_encoding(leaf):  # the groups may share the tensor of a learning rate
            return False
        if not isinstance(leaf, torch.Tensor) or is_distributed(leaf) or leaf.layout is not torch.strided:
            return True
        is_plain = type(leaf) is torch.Tensor and not leaf.requires_grad
        return is_plain and _storage_of(leaf) not in self.apart and not overlaps_itself(leaf)


@dataclass(eq=False, slots=True)
class ModuleLoading(OwnLoading):
    """The loading of a module whose ``load_state_dict`` is torch's: of some submodules a copy, of others their own."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by key, of the submodules whose loading copies
    optional: set[str] = field(default_factory=set)  # of these keys, those that may be done without
    extras: set[str] = field(default_factory=set)  # keys of extra states
    foreign: list[str] = field(default_factory=list)  # prefixes of keys that belong to other code
    apart: set[int] = field(default_factory=set)  # storages that other code may come to while the module is loaded
    is_tried: bool = True  # whether tensors with encodings of their own can be tried on a copy
    renames: bool = False  # hooks of torch's wrappers may rename keys

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return not self.foreign and not self.renames

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        key = str(path[0])
        own = self.tensors.get(key) if len(path) == 1 else None
        if is_distributed(leaf):  # FSDP makes shards for its state dict, and their loading copies
            return own is not None or (self.renames and not self.is_foreign(key))
        return (
            own is not None
            and _storage_of(own) not in self.apart
            and type(leaf) in TENSOR_TYPES
            and not is_distributed(own)
            and (leaf.dtype, leaf.shape) == (own.dtype, own.shape)
            and (leaf.layout is not torch.strided or leaf.stride() == own.stride())
            and (leaf.layout is not torch.strided or leaf.data_ptr() == own.data_ptr())
        )

    def is_foreign(self, key: str) -> bool:
        """Return whether a key belongs to a submodule with other loading, or is below one."""
        return any(map(key.startswith, self.foreign))

    def unknown(self, keys: Collection[str]) -> list[str]:
        """Return the keys that torch's loading reports as unexpected; below an extra state, all are known."""
        return [key for key in keys if key not in self.tensors and not self._is_extra(key) and not self.is_foreign(key)]

    def _is_extra(self, key: str) -> bool:
        return bool(self.extras) and any(key == each or key.startswith(f"{each}.") for each in self.extras)


def loading_of(value: Any) -> OwnLoading:
    """Return what is known of the loading of a live object."""
    if isinstance(value, _Optimizer):
        is_plain = all(_home(getattr(type(value), name)).startswith("torch.optim.") for name in _OPTIMIZER_METHODS)
        is_plain = is_plain and not _is_patched(value, _OPTIMIZER_METHODS)
        is_plain = is_plain and not list(_hooks(value, _OPTIMIZER_HOOKS))
        return OptimizerLoading(_shared_in(value)) if is_plain else OwnLoading()
    if not isinstance(value, _Module):
        return OwnLoading()
    if not has_torchs_loading(value):
        return OwnLoading()
    loading = ModuleLoading()
    odd: list[torch.nn.Module] = []
    _walk(value, "", loading, odd)
    extras = [value.get_submodule(each.removesuffix(_EXTRA).rstrip(".")) for each in loading.extras]
    own = (id(each) for module in extras for each in (module._parameters, module._buffers))  # loaded before the state
    reached, by_extras = _reached(odd), _reached(extras, own)
    # Torch's loading may fail at one that can't be tried, and has changed others by then.
    if not loading.is_tried or reached is None or by_extras is None:
        return OwnLoading()
    loading.apart = reached | by_extras | _tied_extras(loading)
    return loading


def _reached(code: Iterable[Any], besides: Iterable[int] = ()) -> set[int] | None:
    """Return the storages of all tensors that modules with their hooks refer to; None if they refer to too much.

    Other code may read them before they are loaded, or change them; ``besides``: ids of objects not to look into.
    """
    seen, storages, todo = set(besides), {0}, list(code)
    while todo:
        each = todo.pop()
        kind = type(each)  # isinstance() would ask a proxy for the class of what it stands for
        if id(each) in seen or issubclass(kind, type | ModuleType | CodeType | str | int | float):
            continue
        seen.add(id(each))
        if len(seen) > _MANY_OBJECTS:
            return None
        if issubclass(kind, torch.Tensor):
            storages.add(_storage_of(each))
        elif kind is FunctionType:  # of all globals, those that it uses
            named = (each.__globals__.get(name) for name in each.__code__.co_names)
            todo += [each.__closure__, each.__defaults__, each.__kwdefaults__, *named]
        else:
            todo += [each()] if issubclass(kind, ReferenceType) else gc.get_referents(each)
    return storages - {0}


def _shared_in(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the storages of an optimizer's parameters, and those that several values of its state share."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    values = [each for each in tree_leaves([*optimizer.state.values()]) if isinstance(each, torch.Tensor)]
    count = Counter(map(_storage_of, [*parameters, *parameters, *values]))
    return {storage for storage, times in count.items() if storage and times > 1}


def has_torchs_loading(module: torch.nn.Module) -> bool:
    """Return whether ``load_state_dict`` of a module, which calls its submodules' own loading, is torch's."""
    return type(module).load_state_dict is _Module.load_state_dict and not _is_patched(module, ["load_state_dict"])


def _tied_extras(loading: ModuleLoading) -> set[int]:
    """Return the storages of modules with extra states that have several keys: `set_extra_state` comes in between."""
    prefixes = {each.removesuffix(_EXTRA) for each in loading.extras}
    count = Counter(_storage_of(tensor) for tensor in loading.tensors.values())
    own = {_storage_of(each) for key, each in loading.tensors.items() if key[: key.rfind(".") + 1] in prefixes}
    return {storage for storage in own if storage and count[storage] > 1}


def _walk(module: torch.nn.Module, prefix: str, loading: ModuleLoading, odd: list[torch.nn.Module]) -> None:
    """Record the keys of a module and its submodules, in the way in which ``load_state_dict`` comes to them."""
    if not _only_copies(module):
        _leave(module, prefix, loading, odd)
        return
    homes = [_home(hook) for hook in _hooks(module, _MODULE_HOOKS)]
    # FSDP2's hooks only bring its parameters into their sharded form.
    loading.renames |= any(not home.startswith("torch.distributed.fsdp._fully_shard") for home in homes)
    for name, tensor in _own_tensors(module):
        loading.tensors[prefix + name] = tensor
    if isinstance(module, _NormBase):
        loading.optional.add(f"{prefix}num_batches_tracked")
    has_extra = type(module).set_extra_state is not _Module.set_extra_state
    if has_extra:
        loading.extras.add(prefix + _EXTRA)
    for name, child in module._modules.items():
        if child is None:
            continue
        below = prefix if homes and name in _WRAPPED else f"{prefix}{name}."
        if has_extra:  # set_extra_state is called before the submodules are loaded, and may do anything with them
            _leave(child, below, loading, odd)
        else:
            _walk(child, below, loading, odd)


def _leave(module: torch.nn.Module, prefix: str, loading: ModuleLoading, odd: list[torch.nn.Module]) -> None:
    """Record that other code decides about a submodule and all below it: its hooks see and change all their keys."""
    loading.foreign.append(prefix)
    odd.append(module)
    tensors = chain(module.parameters(), module.buffers())
    loading.is_tried &= all(hasattr(each, "__tensor_flatten__") for each in tensors if is_encoding(each))


def _only_copies(module: torch.nn.Module) -> bool:
    return (
        all(getattr(type(module), name) in known for name, known in _COPIES.items())
        and not _is_patched(module, _COPIES)
        and all(_home(hook).startswith("torch.distributed.") for hook in _hooks(module, _MODULE_HOOKS))
        and isinstance(module._parameters, dict)
        and isinstance(module._buffers, dict)
        and all(type(tensor) in TENSOR_TYPES or is_distributed(tensor) for _, tensor in _own_tensors(module))
    )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``load_state_dict`` copies to in this module, without its submodules."""
    hidden = module._non_persistent_buffers_set
    buffers = ((name, tensor) for name, tensor in module._buffers.items() if name not in hidden)
    for name, tensor in chain(module._parameters.items(), buffers):
        if tensor is not None:
            yield name, tensor


def _is_patched(value: object, names: Collection[str]) -> bool:
    """Return whether methods are replaced on the object itself."""
    return not vars(value).keys().isdisjoint(names)


def _hooks(value: object, tables: Collection[str]) -> Iterator[Any]:
    for table in tables:
        yield from getattr(value, table, {}).values()


def _home(function: Any) -> str:
    return str(getattr(getattr(function, "hook", function), "__module__", ""))


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none of its own."""
    if type(tensor) not in TENSOR_TYPES or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()
