"""Cost and abstract result of each call that ``torch.save`` pickles make, for `aiockpt.format.pickle.guard`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from aiockpt.core.strides import view_fits
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.pickle.machine import PickleError

_MAX_TEXT = 640  # a number of more digits takes time to read
_MAX_KEY = 2**64  # larger numbers can be chosen to have the same hash
_LARGE_KEY_COST = 1000
_RANGE_ELEMENT_BYTES = 40  # a number and the reference to it
_ELEMENT_BYTES = 8
_ENTRY_BYTES = 64  # of a set or a dict
_LATIN = ("latin1", "latin-1")
_ENDLESS = 1 << 62
_ELEMENTS_PER_BYTE = {"torch.QUInt4x2Storage": 2, "torch.QUInt2x4Storage": 4}


@dataclass(slots=True, eq=False)
class AbstractValue:
    """A value that the pickle would make. Plain numbers, texts and None represent themselves."""

    kind: str
    size: int = 0  # of a copy, in elements or bytes
    hashes: int = 1  # steps to hash it, or all that is in a container
    depth: int = 0  # of nested tuples
    items: list[Any] | None = None  # of a tuple
    name: str = ""  # full name of a global, or of a storage's type
    width: int = 1  # bytes of an element of a storage
    collisions: int = 0  # pairs of values in a container with one hash
    hashed: int = 0  # its hash; the same for all values whose hash is not known here
    hash_counts: dict[int, int] | None = None  # values in a container by hash, of those whose hash can be chosen

    @classmethod
    def of_tuple(cls, items: list[Any]) -> AbstractValue:
        """Return a tuple of the items."""
        value = cls("tuple", items=items, depth=1)
        for item in items:
            value.add(item)
        # Like a tuple's hash, it depends on the hashes of the items alone, and is as easy to make collide.
        value.hashed = hash(tuple([item.hashed if isinstance(item, AbstractValue) else hash(item) for item in items]))
        return value

    def add(self, item: Any) -> None:
        """Count one more element."""
        self.size += 1
        self.hashes = min(self.hashes + hash_cost(item), _ENDLESS)
        self.depth = max(self.depth, depth_of(item) + (self.kind == "tuple"))
        if self.kind != "tuple":
            self.collisions += self._add_hash(item)

    def _add_hash(self, key: Any) -> int:
        """Count one more value, and return how many have its hash already."""
        if not isinstance(key, AbstractValue) or key.kind == "time":
            return 0  # hashes of texts and times can't be foreseen, and few numbers have one hash
        if self.hash_counts is None:
            self.hash_counts = {}
        before = self.hash_counts.get(key.hashed, 0)
        self.hash_counts[key.hashed] = before + 1
        return before


class Guard(Protocol):
    """Accumulates the cost of calls, and raises `PickleError` when it exceeds the budget."""

    def charge(self, steps: int) -> None:
        """Charge time."""

    def charge_bytes(self, nbytes: int) -> None:
        """Charge memory."""

    def charge_key(self, key: Any) -> None:
        """Charge the lookup of a key."""

    def invoke(self, function: Any, args: list[Any]) -> Any:
        """Return the abstract result of a call, and charge its cost."""


def hash_cost(value: Any) -> int:
    """Return the steps to hash a value."""
    if type(value) is int and abs(value) >= _MAX_KEY:
        return _LARGE_KEY_COST
    return value.hashes if isinstance(value, AbstractValue) else 1


def depth_of(value: Any) -> int:
    """Return the depth of nested tuples in a value."""
    return value.depth if isinstance(value, AbstractValue) else 0


def weight(value: Any) -> int:
    """Return the steps to copy a value."""
    if isinstance(value, AbstractValue):
        return min(value.size, _ENDLESS) + 1
    return len(value) + 1 if type(value) is str else 1


def _plain(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    """Accept a few numbers and short texts, or values made of them."""
    if len(args) > 16 or any(weight(arg) > _MAX_TEXT for arg in args):
        raise PickleError(f"it calls {name} with more than a few short values")
    if name == "builtins.str" and any(isinstance(arg, AbstractValue) for arg in args):
        raise PickleError("it makes a text of something else")
    return AbstractValue("time" if name in _TIMES else "plain")


def _copy(kind: str, *, hashed: bool = False) -> Any:
    def rule(g: Guard, name: str, args: list[Any]) -> AbstractValue:
        made = AbstractValue(kind)
        for arg in args:
            g.charge(weight(arg))
            if isinstance(arg, AbstractValue) and arg.kind != "global":
                each = _RANGE_ELEMENT_BYTES if arg.kind == "range" else 0
                g.charge_bytes(arg.size * (each + (_ENTRY_BYTES if hashed else _ELEMENT_BYTES)))
                if hashed:
                    g.charge_key(arg)
                    g.charge(arg.collisions)
                made.size += arg.size
                made.hashed = arg.hashed
                made.hashes = min(made.hashes + arg.hashes, _ENDLESS)
                made.depth = max(made.depth, arg.depth + 1)
            elif type(arg) is str:
                made.size += len(arg)
        return made

    return rule


def _bytes(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    if len(args) > 1 and (len(args) > 2 or args[1] not in _LATIN):
        raise PickleError("it encodes a text in a way that bytes are not stored in")
    size = sum(max(arg, 0) if type(arg) is int else weight(arg) for arg in args)
    g.charge(size)
    return AbstractValue("bytes", size=size)


def _encode(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise PickleError("it encodes a text in a way that bytes are not stored in")
    g.charge(len(args[0]))
    return AbstractValue("bytes", size=len(args[0]))


def _range(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    if not 1 <= len(args) <= 3 or any(type(arg) is not int for arg in args) or (len(args) == 3 and args[2] == 0):
        raise PickleError("it makes a range of something else than numbers")
    numbers = range(*args)
    size = (numbers[-1] - numbers[0]) // numbers.step + 1 if numbers else 0
    return AbstractValue("range", size=min(size, _ENDLESS), hashes=min(size, _ENDLESS) + 1)


def _texts(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    """Accept texts, as paths and decimals do."""
    if any(type(arg) is not str for arg in args):
        raise PickleError(f"it calls {name} with something else than texts")
    g.charge(sum(map(weight, args)))
    return AbstractValue("time" if name.startswith("pathlib.") else "plain")  # hashes of paths can't be foreseen either


_PATHS = ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")
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
    def rule(g: Guard, name: str, args: list[Any]) -> AbstractValue:
        for arg in args:
            g.charge(weight(arg))
        return AbstractValue(kind)

    return rule


def call_user(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    """Accept any arguments, for globals that the user allowed."""
    if name.startswith("numpy."):
        # An array is made empty and filled from bytes afterwards: numbers are lengths that are not backed by bytes yet.
        numbers = [n for arg in args for n in ((arg.items or ()) if isinstance(arg, AbstractValue) else (arg,))]
        g.charge(math.prod(abs(n) for n in numbers if type(n) is int))
    return _anything("object")(g, name, args)  # type: ignore[no-any-return]


def _numbers(value: Any) -> tuple[int, ...]:
    items = value.items if isinstance(value, AbstractValue) else None
    if items is None or len(items) > MAX_DIMS or any(type(n) is not int for n in items):
        raise PickleError("it makes a tensor whose sizes or strides are none")
    return tuple(items)


def _tensor(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    if len(args) < 4 or not isinstance(args[0], AbstractValue) or args[0].kind != "storage" or type(args[1]) is not int:
        raise PickleError("it makes a tensor of no storage")
    storage, offset = args[0], args[1]
    shape, stride = _numbers(args[2]), _numbers(args[3])
    width = storage.width
    if name.endswith("_v3"):
        known = len(args) > 6 and isinstance(args[6], AbstractValue)
        dtype = DTYPES.get(args[6].name.removeprefix("torch.")) if known else None
        width = dtype.itemsize if dtype is not None else _ENDLESS
    is_quantized = name.endswith("_rebuild_qtensor")
    room = storage.size * (_ELEMENTS_PER_BYTE.get(storage.name, 1) if is_quantized else 1)
    is_overfull = is_quantized and math.prod(shape) * width > room
    if is_overfull or not view_fits(offset, shape, stride, width, room):
        raise PickleError(f"it makes a tensor of {shape} that reaches beyond its {storage.size} bytes")
    return AbstractValue("tensor")


def _from_type(g: Guard, name: str, args: list[Any]) -> AbstractValue:
    if len(args) != 4 or not isinstance(args[2], AbstractValue) or args[2].items is None:
        raise PickleError("it makes a tensor of a class in an unknown way")
    g.charge(weight(args[3]))
    g.invoke(args[0], args[2].items)
    return AbstractValue("tensor")


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
    **{f"{module}.{name}": _texts for module in ("pathlib", "pathlib._local") for name in _PATHS},
    "decimal.Decimal": _texts,
    "argparse.Namespace": call_user,
    "types.SimpleNamespace": call_user,
    "_io.BytesIO": call_user,
    **{f"numpy.{name}": call_user for name in (*_NUMPY, "_core.multiarray.scalar", "ndarray", "dtype")},
    "_codecs.encode": _encode,
    "torch.Size": _copy("object"),
    "torch.device": _plain,
    "torch.serialization._get_layout": _plain,
    **{f"torch._utils.{name}": _tensor for name in _TENSORS},
    **{f"torch._utils.{name}": _anything("tensor") for name in _OTHER_TENSORS},
    "torch._tensor._rebuild_from_type_v2": _from_type,
}
