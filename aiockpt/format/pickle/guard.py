"""Interpretation of ``torch.save`` pickles with values that know their costs, which are charged before they are made.

``torch.load(weights_only=True)`` runs no foreign code, but it calls what it allows with any arguments: a list of a
range of a trillion numbers, a tensor over more memory than was stored, a set of tuples that take years to hash.
Here the pickle runs with values that know how much a copy of a value costs. In the machine of
`aiockpt.format.item.harmless` they hold the value too, so that plain data is unpickled in the same pass.
"""

from __future__ import annotations

import _compat_pickle
import importlib
import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.strides import view_fits
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.dtypes import DTYPES, QUANTIZED_STORAGE_DTYPES, STORAGE_DTYPES
from aiockpt.format.pickle.machine import Handler, Machine, PickleError, constant, handler_table

_STEPS_PER_BYTE = 64
_LEAST_STEPS = 100_000
_LEAST_BYTES = 64 << 20
_DEEPEST_KEY = 500
_DEEPEST = 10_000  # pickle and torch.save end at Python's limit of recursion, some 1,000
_STORAGE_BYTES = {  # of an element, by storage class
    f"torch.{name}": dtype.itemsize for name, dtype in (STORAGE_DTYPES | QUANTIZED_STORAGE_DTYPES).items()
}
_STORAGE_BYTES["torch.storage.UntypedStorage"] = 1
_MAX_TEXT = 640  # a number of more digits takes time to read
_MAX_KEY = 2**64  # larger numbers can be chosen to have the same hash
_LARGE_KEY_COST = 1000
_RANGE_ELEMENT_BYTES = 40  # a number and the reference to it
_ELEMENT_BYTES = 8
_ENTRY_BYTES = 64  # of a set or a dict
_LATIN = ("latin1", "latin-1")
_ENDLESS = 1 << 62
_LIKE = {"list": ("list", "deque"), "dict": ("dict", "defaultdict")}
_ELEMENTS_PER_BYTE = {"torch.QUInt4x2Storage": 2, "torch.QUInt2x4Storage": 4}


@cache
def torch_globals() -> Mapping[str, Any]:
    """Return what torch's restricted unpickler allows by default, by full names."""
    found = getattr(importlib.import_module("torch._weights_only_unpickler"), "_get_allowed_globals", dict)
    return dict(found())


class RefusedByTorch(Exception):
    """torch.load will reject this opcode itself, with a better message."""


@dataclass(slots=True, eq=False)
class Needs:
    """The globals that a pickle needs to be allowed, and whether the cost of loading it is justified."""

    names: dict[str, None] = field(default_factory=dict)  # full names of classes and functions, in order
    # of allowed `getattr` calls: full name ("" of a value), attribute
    lookups: set[tuple[str, str]] = field(default_factory=set)
    is_complete: bool = False  # it was interpreted to its end; if there is no error either, torch refuses it as well
    error: PickleError | None = None  # it costs too much, or does what no honest pickle does

    def note_lookup(self, args: list[Any]) -> None:
        match args:
            case [PickledValue(kind="global", name=name), str(attribute)]:
                self.lookups.add((name, attribute))
            case _:
                self.lookups.add(("", ""))


def check_object_pickle(data: bytes, records: Mapping[str, int], allowed: Collection[str]) -> Needs:
    """Return what a pickle needs, and whether its length and its storages justify the cost of loading it.

    ``records`` maps the key of each storage to its bytes; ``allowed`` holds the full names that the pickle may call
    besides torch's own list.
    """
    guard = Guard(data, records, allowed)
    try:
        with gc_pause():  # collections would walk through all values so far, again and again
            guard.run()
        guard.needs.is_complete = True
    except RefusedByTorch:
        pass
    except PickleError as exc:
        guard.needs.error = exc
    return guard.needs


def stored_sizes(data: bytes) -> dict[str, tuple[int, int]]:
    """Return the bytes of each storage that a pickle refers to, and of its elements, by its key; no empty ones."""
    guard = Guard(data, {}, (), _ENDLESS)
    try:
        with gc_pause():
            guard.run()
    except RefusedByTorch:
        raise PickleError("it has opcodes that torch.save does not write") from None
    return {key: (value.size, value.width) for key, value in guard.storages.items()}


# --- values -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PickledValue:
    """A value that the pickle makes. Plain numbers, texts and None represent themselves."""

    kind: str
    size: int = 0  # of a copy, in elements or bytes
    hashes: int = 1  # steps to hash it, or all that is in a container
    depth: int = 0  # of nested containers
    items: list[Any] | None = None  # of a tuple
    name: str = ""  # full name of a global, or of a storage's type
    width: int = 1  # bytes of an element of a storage
    collisions: int = 0  # pairs of values in a container with one hash
    hashed: int = 0  # its hash; the same for all values whose hash is not known here
    hash_counts: dict[int, int] | None = None  # values in a container by hash, of those whose hash can be chosen
    value: Any = None  # if the pickle is built; of an array or a dtype whose state is still to come, an `Unbuilt`
    refused: str = ""  # full name of a global that is not permitted, of which it was made, or what is in it

    @classmethod
    def of_tuple(cls, items: list[Any]) -> PickledValue:
        value = cls("tuple", items=items, depth=1, value=tuple(map(value_of, items)))
        for item in items:
            value.add(item)
        # As a tuple's hash, it depends on the hashes of the items alone: a file can make one collide as the other.
        value.hashed = hash(tuple([item.hashed if isinstance(item, PickledValue) else hash(item) for item in items]))
        return value

    def add(self, item: Any) -> None:
        self.size += 1
        self.hashes = min(self.hashes + _hash_cost(item), _ENDLESS)
        self.nest(item)
        if self.kind != "tuple":
            self.collisions += self._add_hash(item)

    def nest(self, item: Any) -> None:
        """Count the levels of containers that an item adds, and note what in it is refused."""
        if isinstance(item, PickledValue):
            self.refused = self.refused or item.refused
        self.depth = max(self.depth, _depth_of(item) + 1)
        if self.depth > _DEEPEST:
            raise PickleError(f"it nests containers deeper than {_DEEPEST} levels")

    def _add_hash(self, key: Any) -> int:
        """Count one more value, and return how many have its hash already."""
        if not isinstance(key, PickledValue) or key.kind == "time":
            return 0  # hashes of texts and times are salted, and few numbers have the same hash
        if self.hash_counts is None:
            self.hash_counts = {}
        before = self.hash_counts.get(key.hashed, 0)
        self.hash_counts[key.hashed] = before + 1
        return before


class Unbuilt:
    """A dtype or an array whose state is still to come."""

    __slots__ = ("text",)

    def __init__(self, text: str | None = None) -> None:
        self.text = text  # the name of a dtype; None for an array


def value_of(item: Any) -> Any:
    """Return the value that was built of a `PickledValue`, or of what represents itself."""
    value = item.value if isinstance(item, PickledValue) else item
    if type(value) is Unbuilt:
        raise PickleError("an array or a dtype is used before it has its state")
    return value


class Opaque:
    """Stands for what a pickle makes by a global that is not permitted: nothing of it was run."""

    __slots__ = ("name",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self.name = name  # of the global


# --- the machine -----------------------------------------------------------------------------------


class Guard(Machine):
    """Charges what a pickle asks for; a subclass makes it."""

    def __init__(self, data: bytes, records: Mapping[str, int], allowed: Collection[str], most: int = -1) -> None:
        super().__init__(data, self._find, self._storage, _HANDLERS)
        self._records = records
        self._most = most  # bytes of a storage that has no record
        self._allowed = allowed
        self.needs = Needs()
        self._steps_left = _STEPS_PER_BYTE * len(data) + _LEAST_STEPS
        self._bytes_left = _STEPS_PER_BYTE * len(data) + _LEAST_BYTES
        self.storages: dict[str, PickledValue] = {}

    # A subclass makes the values, whose cost was charged.

    def find_value(self, name: str) -> Any:
        """Return a global by its full name; `Opaque` if it is not permitted."""

    def load_storage(self, pid: Any) -> Any:
        """Return the storage of a persistent id."""

    def call(self, function: Any, args: tuple[Any, ...], *, is_new: bool) -> Any:
        """Return what a function returns; ``is_new``: an object of a class, without calling ``__init__``."""

    def set_state(self, target: PickledValue, state: Any) -> None:
        """Set the state of an object."""

    def new_list(self) -> PickledValue:
        return PickledValue("list", value=[])

    def new_dict(self) -> PickledValue:
        return PickledValue("dict", value={})

    def tuple_of(self, items: list[Any]) -> PickledValue:
        return PickledValue.of_tuple(items)

    def extend(self, items: list[Any]) -> None:
        target = self._target("list")
        for item in items:
            target.add(item)

    def update(self, items: list[Any]) -> None:
        target = self._target("dict")
        if len(items) % 2:
            raise PickleError("it has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.charge_key(key)
            collisions = target.collisions
            target.add(key)
            target.nest(value)
            self.charge(target.collisions - collisions)

    def _target(self, kind: str) -> PickledValue:
        target = self.stack[-1]
        if not isinstance(target, PickledValue) or target.kind not in (*_LIKE[kind], "object"):
            raise RefusedByTorch
        return target

    def charge(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PickleError("it would make far more than its bytes can stand for")

    def charge_bytes(self, nbytes: int) -> None:
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise PickleError("it would take far more memory than its bytes can stand for")

    def charge_key(self, key: Any) -> None:
        self.charge(_hash_cost(key))
        if _depth_of(key) > _DEEPEST_KEY:
            raise PickleError("it has a key of tuples in tuples, too deep to be hashed")

    def _find(self, module: str, name: str) -> PickledValue:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        full = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"
        if full not in CALLS and full not in self._allowed and not full.startswith("torch."):
            self.needs.names[full] = None
        value = self.find_value(full)
        return PickledValue("global", name=full, value=value, refused=full if type(value) is Opaque else "")

    def invoke(self, function: Any, args: list[Any]) -> Any:
        if not isinstance(function, PickledValue) or function.kind != "global":
            raise PickleError("it calls what is no function")
        rule = CALLS.get(function.name)
        if rule is None:
            if function.name not in self._allowed:
                if function.name in torch_globals():
                    raise PickleError(f"it calls {function.name}, which torch.save never does")
                self.needs.names[function.name] = None
            rule = _call_user
        if function.name == "builtins.getattr":
            self.needs.note_lookup(args)
        return rule(self, function.name, args)

    def _storage(self, pid: Any) -> PickledValue:
        found = self._checked_storage(pid)
        if found.value is None:
            found.value = self.load_storage(value_of(pid))
        return found

    def _checked_storage(self, pid: Any) -> PickledValue:
        items = (pid.items or []) if isinstance(pid, PickledValue) else []
        if len(items) not in (5, 6) or items[0] != "storage" or items[5:] not in ([], [None]):
            raise PickleError("it refers to something other than a storage")
        _, kind, key, _, numel = items[:5]
        width = _STORAGE_BYTES.get(kind.name) if isinstance(kind, PickledValue) else None
        if width is None or type(key) is not str or type(numel) is not int or numel < 0:
            raise PickleError("it refers to a storage without a type, a key or a length")
        if numel * width > self._records.get(key, self._most):
            raise PickleError(f"storage {key[:100]} would have {numel * width} bytes, more than are stored")
        if not numel:  # empty storages of several types may have one key
            return PickledValue("storage", size=0, width=width)
        known = self.storages.setdefault(key, PickledValue("storage", size=numel * width, name=kind.name, width=width))
        if (known.size, known.width) != (numel * width, width):
            raise PickleError(f"storage {key[:100]} has two lengths, or two types")
        return known


# --- rules: the cost and the abstract result of each call ------------------------------------------


def _hash_cost(value: Any) -> int:  # in steps
    if type(value) is int and abs(value) >= _MAX_KEY:
        return _LARGE_KEY_COST
    return value.hashes if isinstance(value, PickledValue) else 1


def _depth_of(value: Any) -> int:
    return value.depth if isinstance(value, PickledValue) else 0


def _weight(value: Any) -> int:  # steps to copy it
    if isinstance(value, PickledValue):
        return min(value.size, _ENDLESS) + 1
    return len(value) + 1 if type(value) is str else 1


def _plain(g: Guard, name: str, args: list[Any]) -> PickledValue:
    """Accept a few numbers and short texts, or values made of them."""
    if len(args) > 16 or any(_weight(arg) > _MAX_TEXT for arg in args):
        raise PickleError(f"it calls {name} with more than a few short values")
    if name == "builtins.str" and any(isinstance(arg, PickledValue) for arg in args):
        raise PickleError("it makes a text of something else")
    return PickledValue("time" if name in _TIMES else "plain")


def _copy(kind: str, *, hashed: bool = False) -> Any:
    def rule(g: Guard, name: str, args: list[Any]) -> PickledValue:
        made = PickledValue(kind)
        for arg in args:
            g.charge(_weight(arg))
            if isinstance(arg, PickledValue) and arg.kind != "global":
                each = _RANGE_ELEMENT_BYTES if arg.kind == "range" else 0
                g.charge_bytes(arg.size * (each + (_ENTRY_BYTES if hashed else _ELEMENT_BYTES)))
                if hashed:
                    g.charge_key(arg)
                    g.charge(arg.collisions)
                made.size += arg.size
                made.hashed = arg.hashed
                made.hashes = min(made.hashes + arg.hashes, _ENDLESS)
                made.nest(arg)
            elif type(arg) is str:
                made.size += len(arg)
        return made

    return rule


def _bytes(g: Guard, name: str, args: list[Any]) -> PickledValue:
    if len(args) > 1 and (len(args) > 2 or args[1] not in _LATIN):
        raise PickleError("it encodes a text in a way that bytes are not stored in")
    size = sum(max(arg, 0) if type(arg) is int else _weight(arg) for arg in args)
    g.charge(size)
    return PickledValue("bytes", size=size)


def _range(g: Guard, name: str, args: list[Any]) -> PickledValue:
    if not 1 <= len(args) <= 3 or any(type(arg) is not int for arg in args) or (len(args) == 3 and args[2] == 0):
        raise PickleError("it makes a range of something other than numbers")
    numbers = range(*args)
    size = (numbers[-1] - numbers[0]) // numbers.step + 1 if numbers else 0
    return PickledValue("range", size=min(size, _ENDLESS), hashes=min(size, _ENDLESS) + 1)


def _texts(g: Guard, name: str, args: list[Any]) -> PickledValue:
    """Accept texts, as paths and decimals do."""
    if any(type(arg) is not str for arg in args):
        raise PickleError(f"it calls {name} with something other than texts")
    g.charge(sum(map(_weight, args)))
    # Hashes of paths are salted, like those of times.
    return PickledValue("time" if name.startswith("pathlib.") else "plain")


PATHS = ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")
_NUMPY = ("core.multiarray._reconstruct", "_core.multiarray._reconstruct", "core.multiarray.scalar")
_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
_OTHER_TENSORS = (
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
    "_rebuild_sparse_tensor",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_wrapper_subclass",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_nested_tensor",
)
_TIMES = ("datetime.date", "datetime.datetime", "datetime.time")


def _anything(kind: str) -> Any:
    def rule(g: Guard, name: str, args: list[Any]) -> PickledValue:
        for arg in args:
            g.charge(_weight(arg))
        return PickledValue(kind)

    return rule


def _call_user(g: Guard, name: str, args: list[Any]) -> PickledValue:
    """Accept any arguments, for globals that the user allowed."""
    if name.startswith("numpy."):
        # An array is made empty and filled from bytes afterwards: numbers are lengths that are not backed by bytes yet.
        numbers = [n for arg in args for n in ((arg.items or ()) if isinstance(arg, PickledValue) else (arg,))]
        g.charge(math.prod(abs(n) for n in numbers if type(n) is int))
    return _anything("object")(g, name, args)  # type: ignore[no-any-return]


def _numbers(value: Any) -> tuple[int, ...]:
    items = value.items if isinstance(value, PickledValue) else None
    if items is None or len(items) > MAX_DIMS or any(type(n) is not int for n in items):
        raise PickleError("it makes a tensor whose sizes or strides are none")
    return tuple(items)


def _tensor(g: Guard, name: str, args: list[Any]) -> PickledValue:
    if len(args) < 4 or not isinstance(args[0], PickledValue) or args[0].kind != "storage" or type(args[1]) is not int:
        raise PickleError("it makes a tensor of no storage")
    storage, offset = args[0], args[1]
    shape, stride = _numbers(args[2]), _numbers(args[3])
    width = storage.width
    if name.endswith("_v3"):
        known = len(args) > 6 and isinstance(args[6], PickledValue)
        dtype = DTYPES.get(args[6].name.removeprefix("torch.")) if known else None
        width = dtype.itemsize if dtype is not None else _ENDLESS
    is_quantized = name.endswith("_rebuild_qtensor")
    room = storage.size * (_ELEMENTS_PER_BYTE.get(storage.name, 1) if is_quantized else 1)
    is_overfull = is_quantized and math.prod(shape) * width > room
    if is_overfull or not view_fits(offset, shape, stride, width, room):
        raise PickleError(f"it makes a tensor of {shape} that reaches beyond its {storage.size} bytes")
    return PickledValue("tensor")


def _from_type(g: Guard, name: str, args: list[Any]) -> PickledValue:
    if len(args) != 4 or not isinstance(args[2], PickledValue) or args[2].items is None:
        raise PickleError("it makes a tensor of a class in an unknown way")
    g.charge(_weight(args[3]))
    g.invoke(args[0], args[2].items)
    return PickledValue("tensor")


CALLS: dict[str, Any] = {
    **{f"builtins.{name}": _plain for name in ("bool", "int", "float", "complex", "str")},
    **{f"datetime.{name}": _plain for name in ("date", "datetime", "time", "timedelta", "timezone")},
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.list": _copy("list"),
    "builtins.tuple": _copy("object"),
    "builtins.dict": _copy("dict", hashed=True),
    "builtins.set": _copy("set", hashed=True),
    "builtins.frozenset": _copy("set", hashed=True),
    "builtins.range": _range,
    "builtins.slice": _anything("plain"),
    "collections.deque": _copy("deque"),
    "collections.defaultdict": _copy("defaultdict", hashed=True),
    "collections.OrderedDict": _copy("dict", hashed=True),
    "collections.Counter": _copy("dict", hashed=True),
    **{f"{module}.{name}": _texts for module in ("pathlib", "pathlib._local") for name in PATHS},
    "decimal.Decimal": _texts,
    "argparse.Namespace": _call_user,
    "types.SimpleNamespace": _call_user,
    "_io.BytesIO": _call_user,
    **{f"numpy.{name}": _call_user for name in (*_NUMPY, "_core.multiarray.scalar", "ndarray", "dtype")},
    "_codecs.encode": _bytes,
    "torch.Size": _copy("object"),
    "torch.device": _plain,
    "torch.serialization._get_layout": _plain,
    **{f"torch._utils.{name}": _tensor for name in _TENSORS},
    **{f"torch._utils.{name}": _anything("tensor") for name in _OTHER_TENSORS},
    "torch._tensor._rebuild_from_type_v2": _from_type,
}


# --- opcodes ---------------------------------------------------------------------------------------


def _unsupported(_g: Guard, _at: int) -> int:
    raise RefusedByTorch


def _short_text(g: Guard, at: int) -> int:
    end = at + 1 + g.data[at]
    g.stack.append(g.data[at + 1 : end].decode())  # of Python 2
    return end


def _empty_set(g: Guard, at: int) -> int:
    g.stack.append(PickledValue("set", value=set()))
    return at


def _call(*, is_new: bool) -> Handler:
    """Return the handler of an opcode that calls a function, or makes an object of a class."""

    def call(g: Guard, at: int) -> int:
        args, function = g.stack.pop(), g.stack[-1]
        if not isinstance(args, PickledValue) or args.items is None:
            raise PickleError("it calls a function without a tuple of arguments")
        g.charge(len(args.items))
        made = g.stack[-1] = g.invoke(function, args.items)
        made.refused = function.refused or args.refused
        made.value = Opaque(made.refused) if made.refused else g.call(function.value, args.value, is_new=is_new)
        return at

    return call


def _build(g: Guard, at: int) -> int:
    state = g.stack.pop()
    target = g.stack[-1]
    if not isinstance(target, PickledValue) or target.kind not in ("dict", "object"):
        raise PickleError("it gives a state to something that has none")
    # A state of two items is a pair of dicts: attributes and slots.
    cost = _weight(state) + sum(map(_weight, (state.items or ())[:2])) if isinstance(state, PickledValue) else 1
    g.charge(cost)
    target.refused = target.refused or (state.refused if isinstance(state, PickledValue) else "")
    g.set_state(target, value_of(state))
    return at


_OWN: dict[str, Handler] = {
    "U": _short_text,
    "\x8f": _empty_set,
    ")": constant(PickledValue.of_tuple([])),  # nothing changes a tuple: one is enough
    "R": _call(is_new=False),
    "\x81": _call(is_new=True),
    "b": _build,
}
_HANDLERS = handler_table(_OWN, shared="\x80.(N\x88\x89KMJ\x8aGXqrhjcQ]}ae\x85\x86\x87tsu", refuse=_unsupported)
