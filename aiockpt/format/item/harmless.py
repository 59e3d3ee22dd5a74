"""Unpickling plain data without Python's unpickler or torch's: such objects need no permission to be loaded.

NumPy arrays and scalars, paths, decimals, deques, counters, namespaces and the like are built by rules that check every
argument; no global that a pickle names is imported. `aiockpt.format.pickle.guard` charges the cost of each before.
"""

from __future__ import annotations

import argparse
import collections
import enum
import importlib
import io
import math
import pathlib
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from aiockpt.core.gc_pause import gc_pause
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.pickle.guard import CALLS, PATHS, Guard, Opaque, PickledValue, RefusedByTorch, Unbuilt, value_of
from aiockpt.format.pickle.machine import PickleError

_DTYPE = re.compile(r"[biufcSUVOMm]\d{0,10}")
_UNITS = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"})
_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"
_MAX_DIMS = 32
_reconstruct: Any = np.zeros(0).__reduce__()[0]
_scalar: Any = np.float64(0).__reduce__()[0]


def _standard(name: str) -> Any:
    module, _, last = name.replace("pathlib._local", "pathlib").rpartition(".")
    return getattr(importlib.import_module(module), last)


_STANDARD = {name: _standard(name) for name in CALLS if not name.startswith(("numpy.", "torch."))}
_GLOBALS: dict[str, Any] = {
    **_STANDARD,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "builtins.getattr": getattr,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
}
HARMLESS_NAMES = frozenset(name for name in _GLOBALS if not name.startswith("torch."))
"""The full names of the globals that are built here."""
# A path of another system can't be instantiated here.
_FOREIGN_PATH = pathlib.WindowsPath if sys.platform != "win32" else pathlib.PosixPath
HARMLESS = tuple(
    kind for kind in dict.fromkeys(_STANDARD.values()) if isinstance(kind, type) and kind is not _FOREIGN_PATH
)
"""Types of the standard library whose construction runs no code of the pickle's choice."""


class UnknownMemberError(Exception):
    """A pickle names a member that an allowed Enum class no longer has."""


class _Builder(Guard):
    """Makes the values of a pickle by rules that check every argument."""

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[str, Any],
        named: Mapping[str, Any],
        storages: Mapping[str, int],
        load: Callable[[Any], Any] | None,
        lenient: bool,
    ) -> None:
        super().__init__(data, storages, HARMLESS_NAMES | allowed.keys() | named.keys())
        self._load = load
        self._lenient = lenient
        self._names = {**named, **allowed}
        self.allowed = frozenset(map(id, allowed.values()))

    def find_value(self, name: str) -> Any:
        found = _GLOBALS.get(name, self._names.get(name))
        if found is None and not self._lenient:
            raise PickleError(f"{name} is no plain data")
        return Opaque(name) if found is None else found

    def load_storage(self, pid: Any) -> Any:
        if self._load is None:
            raise PickleError("the pickle refers to something outside itself")
        return self._load(pid)

    def call(self, function: Any, args: tuple[Any, ...], *, is_new: bool) -> Any:
        if id(function) in self.allowed:
            # A new object is made without __init__, as pickle does.
            return function.__new__(function, *args) if is_new and isinstance(function, type) else function(*args)
        if id(function) not in _CALLABLE:
            raise PickleError("a call of something that is not a function")
        rule = _RULES.get(function)
        return function(*args) if rule is None else rule(self, function, *args)

    def extend(self, items: list[Any]) -> None:
        super().extend(items)
        if self._is_made(_LISTS, "something is added to what is no list"):
            self.stack[-1].value.extend(map(value_of, items))

    def update(self, items: list[Any]) -> None:
        super().update(items)
        if self._is_made(_DICTS, "keys and values for what is no dict"):
            made = self.stack[-1].value
            for key, item in zip(items[::2], items[1::2], strict=True):
                if isinstance(key, PickledValue) and key.refused:
                    made[_OPAQUE_KEY] = Opaque(key.refused)
                else:
                    made[value_of(key)] = value_of(item)

    def _is_made(self, kinds: Collection[type], error: str) -> bool:
        """Return whether the container on top of the stack can get items, unless it is refused."""
        kind = type(self.stack[-1].value)
        if kind is Opaque:
            return False
        if kind not in kinds and id(kind) not in self.allowed:
            raise PickleError(error)
        self._check_permitted(self.stack[-1])
        return True

    def _check_permitted(self, target: PickledValue) -> None:
        """Refuse opaque values for code that is permitted."""
        if target.refused and id(type(target.value)) in self.allowed:
            raise PickleError("a permitted object holds one that is not")

    def set_state(self, target: PickledValue, state: Any) -> None:
        value = target.value
        self._check_permitted(target)
        if type(value) is Opaque:
            return
        if type(value) is Unbuilt:
            target.value = _array_of(*state) if value.text is None else _dtype_of(value.text, state)
        elif type(value) in (argparse.Namespace, types.SimpleNamespace):
            if type(state) is not dict or not set(map(type, state)) <= {str}:
                raise PickleError("a namespace of something other than names")
            vars(value).update(state)
        elif (
            type(value) is collections.OrderedDict
            and type(state) is dict
            and state.keys() <= {"_metadata"}  # of a module's state dict
            and not target.refused
        ):
            vars(value).update(state)
        elif type(value) is io.BytesIO:
            data, position, attributes = state
            if type(data) is not bytes or type(position) is not int or attributes is not None or position < 0:
                raise PickleError("a BytesIO of something other than bytes and a position")
            value.write(data)
            value.seek(position)
        elif id(type(value)) in self.allowed and not isinstance(value, enum.Enum):  # all of the process shares members
            _set_state(value, state)
        else:
            raise PickleError("a state for what has none")


def build_harmless(
    data: bytes,
    allowed: Mapping[str, Any],
    *,
    named: Mapping[str, Any] | None = None,
    storages: Mapping[str, int] | None = None,
    load: Callable[[Any], Any] | None = None,
    lenient: bool = False,
) -> Any:
    """Unpickle plain data.

    Args:
        data: the pickle.
        allowed: classes and functions by their full names, used as pickle would.
        named: other globals by their full names, which may be named but not called, such as types of storages.
        storages: the bytes of each storage by its key, if it may hold tensors.
        load: returns the storage of a persistent id.
        lenient: build `Opaque` values of all other globals.
    """
    machine = _Builder(data, allowed, named or {}, storages or {}, load, lenient)
    try:
        with gc_pause():  # collections would walk through all values so far, again and again
            return value_of(machine.run())
    except RefusedByTorch:
        raise PickleError("it names something other than plain data") from None
    except (PickleError, UnknownMemberError):
        raise
    except Warning:  # the program turns warnings into errors
        raise
    except Exception as exc:  # the constructors refuse what they can't take in ways of their own
        raise PickleError(f"{type(exc).__name__}: {exc}") from exc


# --- calls ------------------------------------------------------------------------------------------


def _path(_m: _Builder, kind: Any, *names: str) -> Any:
    if kind is _FOREIGN_PATH:
        kind = pathlib.PureWindowsPath if sys.platform != "win32" else pathlib.PurePosixPath
    return kind(*names)


def _empty(_m: _Builder, kind: Any) -> Any:
    return kind()


def _new_dtype(_m: _Builder, _kind: Any, text: Any, *_flags: Any) -> Any:
    if type(text) is not str or _DTYPE.fullmatch(text) is None:
        raise PickleError("an invalid dtype")
    return Unbuilt(text)


def _new_array(_m: _Builder, _function: Any, kind: Any, _shape: Any, _code: Any) -> Any:
    if kind is not np.ndarray:
        raise PickleError("an array of another class")
    return Unbuilt()


def _new_scalar(_m: _Builder, _function: Any, dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes or len(data) != dtype.itemsize:
        raise PickleError("a NumPy scalar whose bytes are not those of its dtype")
    return np.frombuffer(data, dtype=dtype)[0] if data else np.zeros((), dtype)[()]


def _default(_m: _Builder, kind: Any, factory: Any = None) -> Any:
    if factory is not None and (not isinstance(factory, type) or factory in (collections.defaultdict, range, slice)):
        raise PickleError("a defaultdict of something that makes no plain value")
    return kind(factory)


def is_no_member(kind: enum.EnumMeta, name: str) -> bool:
    """Return whether an Enum class has an attribute of this name that is no member, such as a method."""
    return name not in kind.__members__ and any(name in vars(base) for base in kind.__mro__)


def _member(m: _Builder, _function: Any, kind: Any, name: Any) -> Any:
    """Find a member of an Enum class, the only use of getattr that is allowed."""
    if id(kind) not in m.allowed or not isinstance(kind, enum.EnumMeta) or type(name) is not str:
        raise PickleError("an attribute of something other than an allowed Enum class")
    if is_no_member(kind, name):
        raise PickleError("an attribute of an Enum class that is none of its members")
    if name not in kind.__members__:
        raise UnknownMemberError(f"{kind.__module__}.{kind.__qualname__} has no member {name[:100]!r}")
    return kind.__members__[name]


_RULES: dict[Any, Callable[..., Any]] = {
    getattr: _member,
    **{getattr(pathlib, name): _path for name in PATHS},
    argparse.Namespace: _empty,
    types.SimpleNamespace: _empty,
    io.BytesIO: _empty,
    collections.defaultdict: _default,
    np.dtype: _new_dtype,
    _reconstruct: _new_array,
    _scalar: _new_scalar,
}


# --- states -----------------------------------------------------------------------------------------


def _set_state(target: Any, state: Any) -> None:
    """Set the state as Python's unpickler does."""
    set_state = getattr(target, "__setstate__", None)
    if set_state is not None:
        set_state(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        vars(target).update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _dtype_of(text: str, state: Any) -> np.dtype[Any]:
    """Return a dtype from its name and the state that NumPy pickles: (version, order, subarray, names, fields, ...)."""
    _, order, subarray, names, fields, itemsize, _, _, *rest = state
    if order not in ("<", ">", "|", "="):
        raise PickleError("a dtype of an unknown byte order")
    if text[0] in "Mm":
        _, (unit, count, *_) = rest[0]
        name = unit.decode() if type(unit) is bytes else unit
        if name not in _UNITS or type(count) is not int or not 0 < count < 1 << 31:
            raise PickleError("a time of an unknown unit")
        made = np.dtype(f"{text[0]}8" if name == "generic" else f"{text[0]}8[{count}{name}]")
    elif names is not None:
        made = _structured(names, fields, itemsize)
    elif subarray is not None:
        base, shape = subarray
        made = np.dtype((_real(base), _shape(shape)))
    else:
        made = np.dtype(text)
    return made.newbyteorder(order) if order == _FOREIGN_ORDER and names is None else made


def _structured(names: Any, fields: Any, itemsize: Any) -> np.dtype[Any]:
    if type(names) is not tuple or type(fields) is not dict or len(names) > 1000 or type(itemsize) is not int:
        raise PickleError("a structured dtype whose fields are none")
    formats, offsets = [], []
    for name in names:
        dtype, offset = fields[name]
        if type(name) is not str or type(offset) is not int:
            raise PickleError("a structured dtype whose fields are none")
        formats.append(_real(dtype))
        offsets.append(offset)
    return np.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": itemsize})


def _real(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype):
        raise PickleError("something else stands where a dtype belongs")
    return dtype


def _shape(shape: Any) -> Any:
    if (
        type(shape) is not tuple
        or len(shape) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    ):
        raise PickleError("something else stands where the shape of an array belongs")
    return shape


def _array_of(_version: Any, shape: Any, dtype: Any, is_fortran: Any, data: Any) -> np.ndarray[Any, Any]:
    """Return an array from the state that NumPy pickles."""
    shape, dtype = _shape(shape), _real(dtype)
    order: Any = "F" if is_fortran else "C"
    count = math.prod(shape)
    if dtype == np.dtype(object):
        if type(data) is not list or len(data) != count:
            raise PickleError("an array of other objects than it should have")
        flat = np.empty(count, dtype=object)
        for number, value in enumerate(data):
            flat[number] = value
        return flat.reshape(shape).copy(order=order)
    if dtype.hasobject or type(data) is not bytes or len(data) != count * dtype.itemsize:
        raise PickleError("an array whose bytes are not those of its shape and dtype")
    if not data:
        return np.empty(shape, dtype=dtype, order=order)
    # A copy, because an array of bytes is read-only.
    return np.frombuffer(data, dtype=dtype).reshape(shape, order=order).copy(order="K")


_OPAQUE_KEY = "(a key that needs permission)"
_LISTS = (list, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_CALLABLE = frozenset(id(value) for value in _GLOBALS.values() if not isinstance(value, torch.dtype)) - {id(np.ndarray)}
