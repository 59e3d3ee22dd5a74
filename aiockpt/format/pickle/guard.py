"""What a pickle of ``torch.save`` would do, found out without doing it.

``torch.load(weights_only=True)`` runs no foreign code, but it calls what it allows with any arguments: a list of a
range of a trillion numbers, a tensor over more memory than was stored, a set of tuples that take years to hash.
Here the pickle runs with stand-ins for its values, which know how much a copy of them costs.
"""

from __future__ import annotations

import _compat_pickle
import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.format.pickle.calls import CALLS, AbstractValue, call_user, depth_of, hash_cost, weight
from aiockpt.format.pickle.fast_pickle import DTYPES
from aiockpt.format.pickle.machine import Handler, Machine, PickleError, pop_mark, read_line
from aiockpt.format.pickle.opcodes import OPCODES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_STEPS_PER_BYTE = 64
_LEAST_STEPS = 100_000
_LEAST_BYTES = 64 << 20
_DEEPEST = 500
_STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
_STORAGES = {f"torch.{name}Storage": DTYPES[dtype].itemsize for name, dtype in _STORAGE_DTYPES.items()}
_STORAGES["torch.storage.UntypedStorage"] = 1


@cache
def torch_names() -> frozenset[str]:
    """Return the full names of what torch's restricted unpickler calls by itself."""
    names = getattr(importlib.import_module("torch._weights_only_unpickler"), "_get_allowed_globals", dict)
    return frozenset(names())


class Needs(NamedTuple):
    """What a pickle needs to be allowed.

    Attributes:
        names: the full names of classes and functions, in order.
        made: those of ``names`` whose results are given a state: they have to be classes.
        lookups: what ``builtins.getattr``, where it is allowed, is called for: full names ("" of values) and names.
        has_storages: it holds tensors.
        fills: it adds elements to objects of the classes.
        is_whole: it was followed to its end.
    """

    names: tuple[str, ...]
    made: frozenset[str]
    lookups: frozenset[tuple[str, Any]]
    has_storages: bool
    fills: bool
    is_whole: bool


def needs_of(data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> Needs:
    """Find out what a pickle names that is neither allowed nor known; it is not run. Args as `check_object_pickle`."""
    collector = _Collector(data, records, allowed)
    try:
        collector.run()
        whole = True
    except (PickleError, _RefusedByTorch):
        whole = False
    storages = bool(collector.storages)
    made, lookups = frozenset(collector.made), frozenset(collector.lookups)
    return Needs(tuple(collector.names), made, lookups, storages, collector.fills, whole)


class ForeignNameError(PickleError):
    """A pickle calls something of torch that is on nobody's list; ``args`` holds its full name."""


class _RefusedByTorch(Exception):
    """From here on torch would not go on either, and says why better."""


def check_object_pickle(data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> bool:
    """Check that a pickle can be loaded at a cost that its length and its storages justify.

    Args:
        data: the pickle.
        records: the length in bytes of each storage, by key.
        allowed: the full names of what it may call besides torch's own list.

    Returns:
        Whether it was followed to its end; if not, torch refuses it as well.

    Raises:
        ForeignNameError: it calls something that nobody has allowed.
        PickleError: saying what it would do.
    """
    guard = _Guard(data, records, allowed)
    try:
        guard.run()
    except _RefusedByTorch:
        return False
    return True


class _Guard(Machine):
    def __init__(self, data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> None:
        super().__init__(data, self._find, None, _HANDLERS)
        self._records = records
        self._allowed = allowed
        self._steps_left = _STEPS_PER_BYTE * len(data) + _LEAST_STEPS
        self._bytes_left = _STEPS_PER_BYTE * len(data) + _LEAST_BYTES
        self.storages: dict[str, AbstractValue] = {}

    def charge(self, steps: int) -> None:
        """Count what something costs."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PickleError("it would make far more than its bytes can stand for")

    def charge_bytes(self, nbytes: int) -> None:
        """Count memory that something takes."""
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise PickleError("it would take far more memory than its bytes can stand for")

    def charge_key(self, key: Any) -> None:
        """Count what it costs to look up a key."""
        self.charge(hash_cost(key))
        if depth_of(key) > _DEEPEST:
            raise PickleError("it has a key of tuples in tuples, too deep to be hashed")

    def _find(self, module: str, name: str) -> AbstractValue:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        full = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"
        if full not in CALLS and full not in self._allowed and not full.startswith("torch."):
            self.miss(full)
        return AbstractValue("global", name=full)

    def miss(self, name: str) -> None:
        """Take note of a name that is neither allowed nor known."""
        raise _RefusedByTorch

    def note(self, target: AbstractValue, *, filled: bool) -> None:
        """Take note of an object that is given a state, or elements."""

    def invoke(self, function: Any, args: list[Any]) -> Any:
        """Give what a call would give, and count what it costs."""
        if not isinstance(function, AbstractValue) or function.kind != "global":
            raise PickleError("it calls what is no function")
        rule = CALLS.get(function.name)
        if rule is None:
            if function.name not in self._allowed:
                if function.name in torch_names():
                    raise PickleError(f"it calls {function.name}, which torch.save never does")
                self.miss_call(function.name)
            rule = call_user
        return rule(self, function.name, args)

    def miss_call(self, name: str) -> None:
        """Take note of a function of torch that is neither allowed nor known."""
        raise ForeignNameError(name)

    def storage(self, pid: Any) -> AbstractValue:
        """Give the storage that a persistent id stands for."""
        if not isinstance(pid, AbstractValue) or pid.items is None or len(pid.items) != 5 or pid.items[0] != "storage":
            raise PickleError("it refers to something other than a storage")
        _, kind, key, _, numel = pid.items
        width = _STORAGES.get(kind.name) if isinstance(kind, AbstractValue) else None
        if width is None or type(key) is not str or type(numel) is not int or numel < 0:
            raise PickleError("it refers to a storage without a type, a key or a length")
        if numel * width > self._records.get(key, -1):
            raise PickleError(f"storage {key[:100]} would have {numel * width} bytes, more than are stored")
        if not numel:  # empty storages of several types may have one key
            return AbstractValue("storage", size=0, width=width)
        known = self.storages.setdefault(key, AbstractValue("storage", size=numel * width, name=kind.name, width=width))
        if (known.size, known.width) != (numel * width, width):
            raise PickleError(f"storage {key[:100]} has two lengths, or two types")
        return known


class _Collector(_Guard):
    """Goes on where the guard stops, and keeps what it stopped at."""

    def __init__(self, data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> None:
        super().__init__(data, records, allowed)
        self.names: dict[str, None] = {}
        self.made: set[str] = set()
        self.lookups: set[tuple[str, Any]] = set()
        self.fills = False

    def miss(self, name: str) -> None:
        self.names[name] = None

    def miss_call(self, name: str) -> None:
        self.names[name] = None

    def note(self, target: AbstractValue, *, filled: bool) -> None:
        self.fills |= filled
        if not filled and target.kind == "object":
            self.made.add(target.name)

    def invoke(self, function: Any, args: list[Any]) -> Any:
        made = super().invoke(function, args)
        if function.name == "builtins.getattr":
            owner, attribute = args if len(args) == 2 else (None, None)
            if isinstance(owner, AbstractValue) and owner.kind == "global" and type(attribute) is str:
                self.lookups.add((owner.name, attribute))
            else:
                self.lookups.add(("", ""))
        if isinstance(made, AbstractValue) and made.kind == "object":
            made.name = function.name
        return made


def _unsupported(_g: _Guard, _at: int) -> int:
    raise _RefusedByTorch


def _global(g: _Guard, at: int) -> int:
    module, at = read_line(g, at)
    name, at = read_line(g, at)
    g.stack.append(g.find_global(module.decode(), name.decode()))
    return at


def _short_bytes(g: _Guard, at: int) -> int:
    g.stack.append(AbstractValue("bytes", size=g.data[at]))
    return at + 1 + g.data[at]


def _empty(kind: str) -> Handler:
    def push(g: _Guard, at: int) -> int:
        g.stack.append(AbstractValue(kind))
        return at

    return push


def _tuple(g: _Guard, at: int) -> int:
    items = pop_mark(g)
    g.stack.append(AbstractValue.of_tuple(items))
    return at


def _no_items(g: _Guard, at: int) -> int:
    g.stack.append(AbstractValue.of_tuple([]))
    return at


def _tuple_n(count: int) -> Handler:
    def push(g: _Guard, at: int) -> int:
        items = g.stack[-count:]
        if len(items) < count:
            raise PickleError(f"a tuple of too few values at byte {at - 1}")
        g.stack[-count:] = [AbstractValue.of_tuple(items)]
        return at

    return push


_LIKE = {"list": ("list", "deque"), "dict": ("dict", "defaultdict")}


def _extend(g: _Guard, items: list[Any]) -> None:
    target = _target(g, "list")
    for item in items:
        target.add(item)


def _target(g: _Guard, kind: str) -> AbstractValue:
    target = g.stack[-1]
    if not isinstance(target, AbstractValue) or target.kind not in (*_LIKE[kind], "object"):
        raise _RefusedByTorch
    if target.kind != kind:  # beside tensors torch fills lists and dicts alone
        g.note(target, filled=True)
    return target


def _append(g: _Guard, at: int) -> int:
    _extend(g, [g.stack.pop()])
    return at


def _appends(g: _Guard, at: int) -> int:
    _extend(g, pop_mark(g))
    return at


def _set_items(g: _Guard, items: list[Any]) -> None:
    target = _target(g, "dict")
    if len(items) % 2:
        raise PickleError("it has a key without a value")
    for key in items[::2]:
        g.charge_key(key)
        rivals = target.rivals
        target.add(key)
        g.charge(target.rivals - rivals)


def _setitem(g: _Guard, at: int) -> int:
    value, key = g.stack.pop(), g.stack.pop()
    _set_items(g, [key, value])
    return at


def _setitems(g: _Guard, at: int) -> int:
    _set_items(g, pop_mark(g))
    return at


def _args(value: Any) -> list[Any]:
    if not isinstance(value, AbstractValue) or value.items is None:
        raise PickleError("it calls a function without a tuple of arguments")
    return value.items


def _reduce(g: _Guard, at: int) -> int:
    args = _args(g.stack.pop())
    g.charge(len(args))
    g.stack[-1] = g.invoke(g.stack[-1], args)
    return at


def _build(g: _Guard, at: int) -> int:
    state = g.stack.pop()
    target = g.stack[-1]
    if not isinstance(target, AbstractValue) or target.kind not in ("dict", "object"):
        raise PickleError("it gives a state to something that has none")
    g.note(target, filled=False)
    g.charge(
        weight(state) + sum(weight(part) for part in (state.items or ())[:2]) if isinstance(state, AbstractValue) else 1
    )
    return at


def _persistent(g: _Guard, at: int) -> int:
    g.stack[-1] = g.storage(g.stack[-1])
    return at


_SAME = "\x80.(N\x88\x89KMJ\x8aGXqrhj"
_OWN: dict[str, Handler] = {
    "c": _global,
    "U": _short_bytes,
    "]": _empty("list"),
    "}": _empty("dict"),
    "\x8f": _empty("set"),
    ")": _no_items,
    "t": _tuple,
    "\x85": _tuple_n(1),
    "\x86": _tuple_n(2),
    "\x87": _tuple_n(3),
    "a": _append,
    "e": _appends,
    "s": _setitem,
    "u": _setitems,
    "R": _reduce,
    "\x81": _reduce,
    "b": _build,
    "Q": _persistent,
}
_HANDLERS: list[Handler] = [
    _OWN.get(chr(code)) or (OPCODES[chr(code)] if chr(code) in _SAME else _unsupported) for code in range(256)
]
