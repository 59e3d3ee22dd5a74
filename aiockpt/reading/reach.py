"""Which memory code may come to, by all that it refers to and names; what can't be seen into counts as everything."""

from __future__ import annotations

import array
import builtins
import contextvars
import ctypes
import dis
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch

from aiockpt.core.extent import Range, overlapping, strided_parts

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
_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "aiockpt", "typing_extensions"})
_OF_CLASSES = frozenset({"torch", "numpy", "typing", "typing_extensions", "abc"})
"""Of these, the code that asks for attributes of any name asks for those of classes, or of its own objects."""
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
    walk = Reach(names, besides)
    return walk.ranges if walk.sees(code) else None


class Reach:
    """The memory and the objects that code may come to; for the arguments see `reached_by`."""

    def __init__(self, names: Iterable[str] | None = None, besides: Iterable[Any] = ()) -> None:
        self.ranges: list[Range] = []
        self.seen = {id(each): each for each in besides}  # by id; it keeps them, so that none is used twice
        self._names = set(names or ())  # of attributes that the code uses
        self._own_names: set[str] = set()  # those that are not used by code of torch's alone
        self._takes_all = names is None
        self._spaces: dict[int, Mapping[str, Any]] = {}  # of objects, classes and modules: the code uses what it names
        self._known: dict[int, Mapping[str, Any]] = {}  # those of Python's and torch's
        self._todo: list[Any] = []
        self._sees_all = True

    def sees(self, code: Iterable[Any]) -> bool:
        """Look at code, and all that it may come to; return False if there is something that can't be looked into."""
        self._todo += [each for each in code if id(each) not in self.seen]
        try:
            while self._todo and self._sees_all:
                each = self._todo.pop()
                if id(each) not in self.seen:
                    self.seen[id(each)] = each
                    self._sees_all = len(self.seen) <= _MANY_OBJECTS and self._looks_at(each)
                if not self._todo:
                    self._todo += [each for each in list(self._named()) if id(each) not in self.seen]
        except Exception:  # of a class that answers in its own way
            self._sees_all = False
        return self._sees_all

    def comes_to(self, extents: Sequence[Range]) -> list[bool]:
        """Return of each extent whether the code may come to it."""
        return overlapping(extents, self.ranges) if self._sees_all else [True] * len(extents)

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
            self._takes_all |= home not in _OF_CLASSES and not _ASKS.isdisjoint(used)  # such as a deepcopy
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
    if "__dict__" in used and all(
        after.argval == "update" for each, after in pairwise(dis.get_instructions(code)) if each.argval == "__dict__"
    ):
        used.remove("__dict__")  # `self.__dict__.update(state)` only sets attributes
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
