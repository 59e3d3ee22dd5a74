"""Which keys a live object's ``load_state_dict`` is known to copy, each to the tensor of the same name; pure.

Only these tensors may be filled before the object is given its state, which then shares their memory. Everything else
is given new memory, so that whatever the object does with its state comes out as if it had been loaded by hand.
"""

from __future__ import annotations

import array
import builtins
import contextvars
import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.extent import Range, extent_of, shared_among, strided_parts
from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import TENSOR_TYPES
from aiockpt.reading.targets import is_encoding, overlaps_itself

if TYPE_CHECKING:
    from aiockpt.format.index import ObjPath

# --- what a hook can reach ----------------------------------------------------------------------------
# By all that it refers to and names; what can't be seen into counts as everything.


_MANY_OBJECTS = 1 << 19
"""More than these are not looked through for what other code may change."""
_TELLS = 1 << 14
"""The flag of types whose objects tell the garbage collector what they refer to."""
_VALUES = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPAQUE: tuple[type, ...] = (
    *(bytearray, memoryview, mmap.mmap, array.array, ctypes._SimpleCData.__mro__[-2]),
    *(contextvars.ContextVar, contextvars.Context, threading.local, weakref.ProxyType, weakref.CallableProxyType),
    *(GeneratorType, Coroutine, AsyncGenerator, FrameType),
)
_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "aiockpt"})
_HIDES = frozenset(
    {"eval", "exec", "__import__", "import_module", "globals", "gc", "ctypes", "_getframe", "currentframe"}
)
"""Code that uses one of these may come to anything."""
_ASKS = frozenset(
    {"getattr", "vars", "__dict__", "attrgetter", "methodcaller", "getmembers", "getattr_static", "locals"}
)
"""Code that uses one of these may come to attributes of any name."""
_UNCALLED = frozenset({"__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__init__", "__new__"})
LOADING = frozenset({"load_state_dict", "_load_from_state_dict", "set_extra_state", "get_extra_state"})
"""The names by which torch calls what a module's own loading is."""


def reached_by(
    code: Iterable[Any], *, besides: Iterable[Any] = (), names: Iterable[str] | None = None
) -> list[Range] | None:
    """Return the memory that code may come to; None if that can't be said.

    Args:
        code: functions, and objects whose methods run.
        besides: objects that are not looked into.
        names: the methods that run; the others are looked into where code names them. None: all of them.
    """
    walk = _Reach(names, besides)
    try:
        return walk.ranges if walk.sees(code) else None
    except Exception:  # of a class that answers in its own way
        return None


class _Reach:
    def __init__(self, names: Iterable[str] | None, besides: Iterable[Any]) -> None:
        self.ranges: list[Range] = []
        self._seen = {id(each): each for each in besides}  # which keeps them, so that no id is used twice
        self._names = set(names or ())  # of attributes that the code uses
        self._own_names: set[str] = set()  # those that are not used by code of torch's alone
        self._takes_all = names is None
        self._spaces: dict[int, Mapping[str, Any]] = {}  # of objects, classes and modules: the code uses what it names
        self._known: dict[int, Mapping[str, Any]] = {}  # those of Python's and torch's
        self._todo: list[Any] = []

    def sees(self, code: Iterable[Any]) -> bool:
        """Look at code, and all that it may come to; return False if there is something that can't be looked into."""
        self._todo += code
        while self._todo:
            while self._todo:
                each = self._todo.pop()
                if id(each) in self._seen:
                    continue
                self._seen[id(each)] = each
                if len(self._seen) > _MANY_OBJECTS or not self._looks_at(each):
                    return False
            self._todo += [each for each in list(self._named()) if id(each) not in self._seen]
        return True

    def _named(self) -> Iterator[Any]:
        for space in self._known.values():  # others may have put something there
            for name in self._own_names & space.keys():
                yield space[name]
        for number, space in self._spaces.items():
            for name, value in space.items():
                # A module that is called has its tensors among what was named, whatever its forward() does.
                is_implicit = name.startswith("__") and name.endswith("__") and name not in _UNCALLED
                if self._takes_all or name in self._names or (is_implicit and number != id(torch.nn.Module)):
                    yield value

    def _looks_at(self, each: Any) -> bool:
        kind = type(each)  # isinstance() would ask a proxy for the class of what it stands for
        if issubclass(kind, _VALUES):
            return True
        if issubclass(kind, type):
            self._known |= {id(part): vars(part) for part in each.__mro__ if _is_known(part)}
            self._add_class(each)
            self._todo += [vars(part).get(name) for part in each.__mro__ if not _is_known(part) for name in _UNCALLED]
            return True
        if issubclass(kind, ModuleType):
            (self._known if _is_known(each) else self._spaces)[id(each)] = vars(each)
            return True
        self._add_class(kind)
        if issubclass(kind, torch.Tensor | torch.UntypedStorage | torch.TypedStorage | np.ndarray):
            self._add_memory(each)
        if kind is FunctionType:
            return self._reads(each)
        if issubclass(kind, weakref.ReferenceType):
            self._todo.append(each())
        elif issubclass(kind, _OPAQUE) or kind.__name__.startswith("Script"):
            return False
        elif kind is BuiltinFunctionType:
            self._todo.append(each.__self__)
            return not each.__module__ or _is_known(each)  # another one is compiled code of others
        elif not kind.__flags__ & _TELLS:
            return _is_known(kind)
        elif kind.__module__.partition(".")[0] != "aiockpt":
            self._add_parts(each, kind)
        return True

    def _add_parts(self, each: Any, kind: type) -> None:
        parts = [part for part in gc.get_referents(each) if part is not kind]
        if (
            kind.__dictoffset__
            and not issubclass(kind, torch.Tensor)
            and issubclass(kind, torch.nn.Module) >= _is_known(kind)
        ):
            self._spaces[id(each)] = named = object.__getattribute__(each, "__dict__")  # not by code of its class
            apart = {id(named), *map(id, named.values())}
            parts = [part for part in parts if id(part) not in apart]
        self._todo += parts

    def _add_class(self, kind: type) -> None:
        """Take up the classes of a value; of torch's, those of modules, whose methods call those of the user's."""
        for part in (*kind.__mro__, *(type(kind).mro(type(kind)) if type(kind) is not type else ())):
            if not _is_known(part) or issubclass(part, torch.nn.Module):
                self._spaces[id(part)] = vars(part)

    def _add_memory(self, each: Any) -> None:
        if isinstance(each, np.ndarray):
            begin = each.__array_interface__["data"][0]  # what is a view has a base
            self.ranges += [(begin, begin + each.nbytes)] if each.base is None else []
            self._todo += [each.base, *(each.flat if each.dtype.hasobject else ())]
            return
        if isinstance(each, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # what a wrapper holds is among its attributes
                self._todo.append(each.grad if each.is_leaf else None)
                if type(each).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    return
                parts = [each] if each.layout is torch.strided else strided_parts(each)
                storages = [part.untyped_storage() for part in parts if torch._C._has_storage(part)]
        else:
            storages = [each if isinstance(each, torch.UntypedStorage) else each.untyped()]
        self.ranges += [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each.data_ptr()]

    def _reads(self, function: FunctionType) -> bool:
        """Take up what a function refers to, and of all globals those that it names."""
        self._todo += [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]
        used, said = _names_in(function.__code__)
        space = function.__globals__
        if (home := str(space.get("__name__")).partition(".")[0]) in _KNOWN:
            self._takes_all |= home not in ("torch", "numpy") and not _ASKS.isdisjoint(used)  # such as a deepcopy
            self._names |= used - _ASKS
            return True
        if not _HIDES.isdisjoint(used) or {"sys", "modules"} <= used:
            return False
        self._takes_all |= not _ASKS.isdisjoint(used)
        self._names |= used | said
        self._own_names |= used | said
        package = space.get("__package__")
        for name in used:
            self._todo += [space.get(name), vars(builtins).get(name)]
            self._todo += [sys.modules.get(name), sys.modules.get(f"{package}.{name}")]
        return True


def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names that code uses, and the words that are text in it."""
    used, said = set(code.co_names), set[str]()
    for each in code.co_consts:
        if isinstance(each, CodeType):
            names, words = _names_in(each)
            used, said = used | names, said | words
        else:
            said |= {part for part in (each if isinstance(each, tuple) else (each,)) if isinstance(part, str)}
    return used, said


def _is_known(each: Any) -> bool:
    """Return whether a class, function or module is Python's, torch's or NumPy's."""
    home = each.__name__ if isinstance(each, ModuleType) else each.__module__
    return str(home).partition(".")[0] in _KNOWN


# --- plain loading ------------------------------------------------------------------------------------


_Module, _Optimizer = torch.nn.Module, torch.optim.Optimizer
_EXTRA = "_extra_state"
_COPIES: Mapping[str, tuple[object, ...]] = {
    "_load_from_state_dict": (_Module._load_from_state_dict, _NormBase._load_from_state_dict),
    "_save_to_state_dict": (_Module._save_to_state_dict,),
    "state_dict": (_Module.state_dict,),
    "__getattribute__": (object.__getattribute__,),
}
"""The methods of a submodule that only copy. That of `_NormBase` also does without a key, which old versions lack."""
_LOADS: tuple[object, ...] = (_Module.load_state_dict,)
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


@dataclass(eq=False, slots=True)
class OptimizerLoading(OwnLoading):
    """The loading of an optimizer of torch's, which takes over the tensors of its state as they are."""

    apart: set[int]  # the ids of tensors of its state that are more than that, or share memory with something

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        if path[0] != "state":  # the groups may share the tensor of a learning rate
            return False
        return id(leaf) not in self.apart if type(leaf) is torch.Tensor else is_distributed(leaf)


@dataclass(eq=False, slots=True)
class ModuleLoading(OwnLoading):
    """The loading of a module whose ``load_state_dict`` is torch's: of some submodules a copy, of others their own."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by key, of the submodules whose loading copies
    optional: set[str] = field(default_factory=set)  # of these keys, those that may be done without
    extras: set[str] = field(default_factory=set)  # keys of extra states
    foreign: list[str] = field(default_factory=list)  # prefixes of keys that belong to other code
    ties: list[list[str]] = field(default_factory=list)  # keys of one and the same tensor
    apart: set[str] = field(default_factory=set)  # keys whose memory others have too, or other code may come to
    is_tried: bool = True  # whether tensors with encodings of their own can be tried on a copy
    renames: bool = False  # hooks of torch's wrappers may rename keys

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return not self.foreign and not self.renames

    def fills(self, path: ObjPath, leaf: Any) -> bool:
        key = str(path[0])
        own = self.tensors.get(key) if len(path) == 1 else None
        if key in self.apart:
            return False
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
        return _optimizers(value)
    if not isinstance(value, _Module) or not has_torchs_loading(value):
        return OwnLoading()
    loading = ModuleLoading()
    odd: list[torch.nn.Module] = []
    _walk(value, "", loading, odd)
    extras = [value.get_submodule(each.removesuffix(_EXTRA).rstrip(".")) for each in loading.extras]
    own = [each for module in extras for each in (module._parameters, module._buffers)]  # loaded before the state
    reached = reached_by(odd, names=LOADING) if odd else []
    by_extras = reached_by(extras, besides=own, names=LOADING) if extras else []
    # Torch's loading may fail at one that can't be tried, and has changed others by then.
    if not loading.is_tried:
        return OwnLoading()
    _separate(loading, [*(reached or ()), *(by_extras or ())])
    if reached is None or by_extras is None:
        loading.apart.update(loading.tensors)
    return loading


def _optimizers(optimizer: torch.optim.Optimizer) -> OwnLoading:
    """Return what is known of an optimizer: nothing if it has hooks on states, or methods of others for them."""
    held = vars(optimizer)
    groups: Any = held.get("param_groups")
    state: Any = held.get("state")
    if (
        not all(_is_torchs(optimizer, name, "torch.optim.") for name in _OPTIMIZER_METHODS)
        or list(_hooks(optimizer, _OPTIMIZER_HOOKS))
        or type(state) not in (dict, defaultdict)
        or not isinstance(groups, list)
    ):
        return OwnLoading()
    parameters = [each for group in groups for each in group["params"]]
    rest = [value for name, value in held.items() if name not in ("state", "param_groups", "_aiockpt_guards")]
    rest += [value for group in groups for name, value in group.items() if name != "params"]
    rest += gc.get_referents(*(each for each in parameters if type(each) in TENSOR_TYPES))
    reached = reached_by([*rest, type(optimizer)], besides=[optimizer, torch.nn.Parameter, torch.Tensor])
    if reached is None:
        return OwnLoading()
    reached += [extent_of(each.grad) for each in parameters if each.is_leaf and each.grad is not None]
    reached += map(extent_of, parameters)
    tensors, odd, extents = _tensors_in(state), set(), []
    for each in tensors:  # of which there may be hundreds of thousands
        if each.layout is torch.strided and each.is_contiguous() and not each.requires_grad and not each.is_neg():
            begin = each.data_ptr()
            extents.append((begin, begin + each.nbytes))
        else:
            extents.append(extent_of(each))
            if each.layout is not torch.strided or each.requires_grad or each.is_neg() or overlaps_itself(each):
                odd.add(id(each))
    odd |= {id(each) for each in tensors if each.is_nested or each.is_conj()}
    return OptimizerLoading(odd | {id(tensors[number]) for number in shared_among(extents, reached)})


def _tensors_in(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state of no further class."""
    values = [
        value for each in state.values() for value in (each.values() if type(each) is dict else tree_leaves(each))
    ]
    kinds = set(map(type, values))
    if kinds <= {torch.Tensor}:
        return values
    return [leaf for value in values for leaf in tree_leaves(value) if type(leaf) is torch.Tensor]


def has_torchs_loading(module: torch.nn.Module) -> bool:
    """Return whether ``load_state_dict`` of a module, which calls its submodules' own loading, is torch's."""
    return _is_own(module, "load_state_dict", _LOADS)


def _separate(loading: ModuleLoading, reached: Sequence[Range]) -> None:
    """Record which tensors are one, and which share memory with others, or with what other code comes to."""
    keys: dict[object, list[str]] = {}
    extents: list[Range] = []
    for key, tensor in loading.tensors.items():
        own = getattr(tensor, "_local_tensor", tensor)
        begin, end = extent_of(own)
        view = (begin, end, own.dtype, own.shape, own.stride()) if end > begin else key
        if view not in keys:
            extents.append((begin, end))
        keys.setdefault(view, []).append(key)
    groups = list(keys.values())
    loading.ties = [group for group in groups if len(group) > 1]
    prefixes = {each.removesuffix(_EXTRA) for each in loading.extras}
    loading.apart = {key for number in shared_among(extents, reached) for key in groups[number]}
    # `set_extra_state` comes in between.
    tied = ({key[: key.rfind(".") + 1] for key in group} for group in loading.ties)
    loading.apart |= {key for group, own in zip(loading.ties, tied, strict=True) if own & prefixes for key in group}


def _walk(module: Any, prefix: str, loading: ModuleLoading, odd: list[Any]) -> None:
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


def _leave(module: Any, prefix: str, loading: ModuleLoading, odd: list[Any]) -> None:
    """Record that other code decides about a submodule and all below it: its hooks see and change all their keys."""
    loading.foreign.append(prefix)
    odd.append(module)
    if not isinstance(module, _Module):  # only something like one
        loading.is_tried = False
        return
    tensors = chain(module.parameters(), module.buffers())
    loading.is_tried &= all(hasattr(each, "__tensor_flatten__") for each in tensors if is_encoding(each))


def _only_copies(module: Any) -> bool:
    return (
        isinstance(module, _Module)
        and all(_is_own(module, name, known) for name, known in _COPIES.items())
        and all(_home(hook).startswith("torch.distributed.") for hook in _hooks(module, _MODULE_HOOKS))
        and all(type(each) in (dict, OrderedDict) for each in (module._parameters, module._buffers, module._modules))
        and all(type(tensor) in TENSOR_TYPES or is_distributed(tensor) for _, tensor in _own_tensors(module))
    )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``load_state_dict`` copies to in this module, without its submodules."""
    hidden = module._non_persistent_buffers_set
    buffers = ((name, tensor) for name, tensor in module._buffers.items() if name not in hidden)
    for name, tensor in chain(module._parameters.items(), buffers):
        if tensor is not None:
            yield name, tensor


def _is_own(value: object, name: str, known: Sequence[object]) -> bool:
    """Return whether the method that an object has under a name is a known one, as torch has written it."""
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return (
        found in known and name not in vars(value) and (not isinstance(found, FunctionType) or _wrote(found, "torch."))
    )


def _is_torchs(value: object, name: str, home: str) -> bool:
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return name not in vars(value) and _wrote(found.__func__ if isinstance(found, staticmethod) else found, home)


def _wrote(function: Any, home: str) -> bool:
    """Return whether a function was written there, and every function around it by torch."""
    while hasattr(function, "__wrapped__") and str(function.__globals__.get("__name__")).startswith("torch."):
        function = function.__wrapped__
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith(home)


def _hooks(value: object, tables: Collection[str]) -> Iterator[Any]:
    for table in tables:
        yield from getattr(value, table, {}).values()


def _home(function: Any) -> str:
    return str(getattr(getattr(function, "hook", function), "__module__", ""))
