"""Which keys a live object's ``load_state_dict`` is known to copy, each to the tensor of the same name; pure.

Only these tensors may be filled before the object is given its state, which then shares their memory. Everything else
is given new memory, so that whatever the object does with its state comes out as if it had been loaded by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import TENSOR_TYPES
from aiockpt.reading.targets import is_encoding

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


class OwnLoading:
    """The loading of an object that decides all by itself, such as one of a class of the user's."""

    is_known = False  # whether torch's own code alone decides which keys it needs

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        """Return whether a leaf of the object's state dict may be filled in place."""
        return False


class OptimizerLoading(OwnLoading):
    """The loading of an optimizer of torch's, which takes over the tensors of its state as they are."""

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        return path[0] == "state" and not is_encoding(leaf)  # the groups may share the tensor of a learning rate


@dataclass(eq=False, slots=True)
class ModuleLoading(OwnLoading):
    """The loading of a module whose ``load_state_dict`` is torch's: of some submodules a copy, of others their own."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by key, of the submodules whose loading copies
    optional: set[str] = field(default_factory=set)  # of these keys, those that may be done without
    extras: set[str] = field(default_factory=set)  # keys of extra states
    foreign: list[str] = field(default_factory=list)  # prefixes of keys that belong to other code
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
        return OptimizerLoading() if is_plain and not list(_hooks(value, _OPTIMIZER_HOOKS)) else OwnLoading()
    if not isinstance(value, _Module):
        return OwnLoading()
    if not has_torchs_loading(value):
        return OwnLoading()
    loading = ModuleLoading()
    shared: set[int] = set()  # storages that other code may change while the module is loaded
    _walk(value, "", loading, shared)
    if loading.extras:
        shared |= _tied_extras(loading)
    if not loading.is_tried:  # torch's loading may fail at one of them, and has changed others by then
        return OwnLoading()
    if shared:
        loading.tensors = {key: each for key, each in loading.tensors.items() if _storage_of(each) not in shared}
    return loading


def has_torchs_loading(module: torch.nn.Module) -> bool:
    """Return whether ``load_state_dict`` of a module, which calls its submodules' own loading, is torch's."""
    return type(module).load_state_dict is _Module.load_state_dict and not _is_patched(module, ["load_state_dict"])


def _tied_extras(loading: ModuleLoading) -> set[int]:
    """Return the storages of modules with extra states that have several keys: `set_extra_state` comes in between."""
    prefixes = {each.removesuffix(_EXTRA) for each in loading.extras}
    count = Counter(_storage_of(tensor) for tensor in loading.tensors.values())
    own = {_storage_of(each) for key, each in loading.tensors.items() if key[: key.rfind(".") + 1] in prefixes}
    return {storage for storage in own if storage and count[storage] > 1}


def _walk(module: torch.nn.Module, prefix: str, loading: ModuleLoading, shared: set[int]) -> None:
    """Record the keys of a module and its submodules, in the way in which ``load_state_dict`` comes to them."""
    if not _only_copies(module):
        _leave(module, prefix, loading, shared)
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
            _leave(child, below, loading, shared)
        else:
            _walk(child, below, loading, shared)


def _leave(module: torch.nn.Module, prefix: str, loading: ModuleLoading, shared: set[int]) -> None:
    """Record that other code decides about a submodule and all below it: its hooks see and change all their keys."""
    loading.foreign.append(prefix)
    tensors = [*module.parameters(), *module.buffers()]
    loading.is_tried &= all(hasattr(each, "__tensor_flatten__") for each in tensors if is_encoding(each))
    shared.update(map(_storage_of, tensors))
    shared.discard(0)


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
