"""Abstract interpretation of ``torch.save`` pickles: finds out what loading one would cost, without loading it.

``torch.load(weights_only=True)`` runs no foreign code, but it calls what it allows with any arguments: a list of a
range of a trillion numbers, a tensor over more memory than was stored, a set of tuples that take years to hash.
Here the pickle runs with abstract values, which know how much a copy of them costs.
"""

from __future__ import annotations

import _compat_pickle
import importlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.format.dtypes import QUANTIZED_STORAGE_DTYPES, STORAGE_DTYPES
from aiockpt.format.pickle.calls import CALLS, AbstractValue, call_user, depth_of, hash_cost, weight
from aiockpt.format.pickle.machine import Handler, Machine, PickleError, read_line
from aiockpt.format.pickle.opcodes import dict_handlers, handler_table, list_handlers, push_new, tuple_handlers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_STEPS_PER_BYTE = 64
_LEAST_STEPS = 100_000
_LEAST_BYTES = 64 << 20
_DEEPEST = 500
_STORAGE_BYTES = {  # of an element, by storage class
    f"torch.{name}": dtype.itemsize for name, dtype in (STORAGE_DTYPES | QUANTIZED_STORAGE_DTYPES).items()
}
_STORAGE_BYTES["torch.storage.UntypedStorage"] = 1


@cache
def torch_names() -> frozenset[str]:
    """Return the full names of the globals that torch's restricted unpickler allows by default."""
    names = getattr(importlib.import_module("torch._weights_only_unpickler"), "_get_allowed_globals", dict)
    return frozenset(names())


class Needs(NamedTuple):
    """The globals that a pickle needs to be allowed, and how it uses them."""

    names: tuple[str, ...]  # full names of classes and functions, in order
    made: frozenset[str]  # those of `names` whose results get a state: they have to be classes
    lookups: frozenset[tuple[str, Any]]  # arguments of allowed `getattr` calls: full name ("" of a value), attribute
    has_storages: bool  # it holds tensors
    fills: bool  # it adds elements to objects of the classes
    is_complete: bool  # it was interpreted to its end


def needs_of(data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> Needs:
    """Return the globals of a pickle that are neither allowed nor known; args as in `check_object_pickle`."""
    collector = _Collector(data, records, allowed)
    try:
        collector.run()
        is_complete = True
    except (PickleError, _RefusedByTorch):
        is_complete = False
    storages = bool(collector.storages)
    made, lookups = frozenset(collector.made), frozenset(collector.lookups)
    return Needs(tuple(collector.names), made, lookups, storages, collector.fills, is_complete)


class ForeignNameError(PickleError):
    """A pickle calls a function of torch that is on no allow-list; ``args`` holds its full name."""


class _RefusedByTorch(Exception):
    """torch.load will reject this opcode itself, with a better message."""


def check_object_pickle(data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> bool:
    """Check that the cost of loading a pickle is justified by its length and its storages.

    ``records`` maps the key of each storage to its bytes; ``allowed`` holds the full names that the pickle may call
    besides torch's own list. Returns whether the pickle was interpreted to its end; if not, torch refuses it as well.

    Raises:
        ForeignNameError: it calls a function of torch that is on no allow-list.
        PickleError: it would cost too much, or does what ``torch.save`` never writes.
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
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PickleError("it would make far more than its bytes can stand for")

    def charge_bytes(self, nbytes: int) -> None:
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise PickleError("it would take far more memory than its bytes can stand for")

    def charge_key(self, key: Any) -> None:
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
        """Handle a global that is neither allowed nor known."""
        raise _RefusedByTorch

    def note(self, target: AbstractValue, *, filled: bool) -> None:
        """Handle an object that gets a state or, if ``filled``, elements."""

    def invoke(self, function: Any, args: list[Any]) -> Any:
        """Return the abstract result of a call, and charge its cost."""
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
        """Handle a call of a function of torch that is neither allowed nor known."""
        raise ForeignNameError(name)

    def storage(self, pid: Any) -> AbstractValue:
        """Return the storage of a persistent id."""
        if not isinstance(pid, AbstractValue) or pid.items is None or len(pid.items) != 5 or pid.items[0] != "storage":
            raise PickleError("it refers to something other than a storage")
        _, kind, key, _, numel = pid.items
        width = _STORAGE_BYTES.get(kind.name) if isinstance(kind, AbstractValue) else None
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
    """Continues past globals that the guard stops at, and collects them."""

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


_LIKE = {"list": ("list", "deque"), "dict": ("dict", "defaultdict")}


def _extend(g: _Guard, items: list[Any]) -> None:
    target = _target(g, "list")
    for item in items:
        target.add(item)


def _target(g: _Guard, kind: str) -> AbstractValue:
    target = g.stack[-1]
    if not isinstance(target, AbstractValue) or target.kind not in (*_LIKE[kind], "object"):
        raise _RefusedByTorch
    if target.kind != kind:  # in a pickle with tensors torch fills lists and dicts alone
        g.note(target, filled=True)
    return target


def _set_items(g: _Guard, items: list[Any]) -> None:
    target = _target(g, "dict")
    if len(items) % 2:
        raise PickleError("it has a key without a value")
    for key in items[::2]:
        g.charge_key(key)
        collisions = target.collisions
        target.add(key)
        g.charge(target.collisions - collisions)


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
    # A state of two items is a pair of dicts: attributes and slots.
    cost = weight(state) + sum(map(weight, (state.items or ())[:2])) if isinstance(state, AbstractValue) else 1
    g.charge(cost)
    return at


def _persistent(g: _Guard, at: int) -> int:
    g.stack[-1] = g.storage(g.stack[-1])
    return at


_OWN: dict[str, Handler] = {
    "c": _global,
    "U": _short_bytes,
    "]": push_new(partial(AbstractValue, "list")),
    "}": push_new(partial(AbstractValue, "dict")),
    "\x8f": push_new(partial(AbstractValue, "set")),
    ")": push_new(lambda: AbstractValue.of_tuple([])),
    **tuple_handlers(AbstractValue.of_tuple),
    **list_handlers(_extend),
    **dict_handlers(_set_items),
    "R": _reduce,
    "\x81": _reduce,
    "b": _build,
    "Q": _persistent,
}
_HANDLERS = handler_table(_OWN, shared="\x80.(N\x88\x89KMJ\x8aGXqrhj", refuse=_unsupported)
