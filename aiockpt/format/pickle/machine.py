"""A pickle machine that builds plain data and records, and nothing else.

CPython's unpickler trusts its input: a memo index makes it resize an array, an announced length makes it
allocate, and any name that is not forbidden runs. Here every step costs time and memory in proportion to the
bytes of the pickle that asked for it, and names mean what the caller says they mean.

Source of the opcodes: ``pickletools.py`` of CPython.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

_MAX_DIGITS = 640
_MAX_FIELDS = 64
_MAX_ARGS = 256


class PickleError(ValueError):
    """A pickle is damaged, or does something that plain data and records never need."""


class Record:
    """Stands for an object of a class; a subclass for each.

    Attributes:
        names: the names of its fields, or None where the pickle gives a tuple for them, or nothing.
        values: a sequence of its fields, or None where the pickle gives nothing.
    """

    __slots__ = ("names", "values")

    repeats = False
    """Whether records of this kind are often the same, byte for byte, and may then be one object."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        self.values: Any = None

    def fields(self) -> dict[str, Any]:
        """Give the named fields."""
        return dict(zip(self.names or (), self.values or (), strict=False))


class Function:
    """A function that a pickle may call. It must check its arguments, at a cost that does not grow with them."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class Nest(tuple[Any, ...]):
    """A tuple that holds containers. It can't be had twice, so no tree of them is larger than its pickle."""

    __slots__ = ()


CONTAINERS = frozenset({tuple, list, dict, Nest})
ONCE = object()
"""Stands in the memo for what can't be had twice."""


def _reconstruct(kind: Any, base: Any, state: Any) -> Record:
    if base is not object or state is not None:
        raise PickleError("an object that is made from another")
    return _new(kind)


_RECONSTRUCT = Function(_reconstruct)
# How protocols 0 and 1 make an object.
_OBJECT_NAMES = {("copy_reg", "_reconstructor"): _RECONSTRUCT, ("__builtin__", "object"): object}


class Machine:
    """Runs one pickle.

    Args:
        data: the pickle.
        find_global: gives what a module and a name mean: a subclass of `Record`, a `Function`, or a plain value.
        persistent_load: gives what a reference to something outside the pickle means.
        handlers: what each opcode does, given the position after it; each gives the position of the next.
    """

    def __init__(
        self,
        data: bytes,
        find_global: Callable[[str, str], Any],
        persistent_load: Callable[[Any], Any] | None,
        handlers: Sequence[Handler],
    ) -> None:
        self.data = data
        self.find_global = find_global
        self.persistent_load = persistent_load
        self.memo: list[Any] = []
        self.stack: list[Any] = []
        self.stacks: list[list[Any]] = []
        # Equal long texts are one object, so that two of them are compared letter by letter only once.
        self.texts: dict[str, str] = {}
        self.handlers = handlers

    def run(self) -> Any:
        """Run to the end, and give the value."""
        data, handlers = self.data, self.handlers
        at = 0
        try:
            while at >= 0:
                at = handlers[data[at]](self, at + 1)
        except (IndexError, UnicodeDecodeError, struct.error) as exc:
            raise PickleError(f"the pickle is damaged at byte {at} of {len(data)}: {exc}") from exc
        if len(self.stack) != 1 or self.stacks:
            raise PickleError("the pickle ends in the middle of a value")
        return self.stack[0]


# Of a machine, or of one of its subclasses.
Handler = Callable[[Any, int], int]


def read_line(m: Machine, at: int, limit: int | None = _MAX_DIGITS) -> tuple[bytes, int]:
    """Read up to the end of the line; give it, and where the next begins."""
    end = m.data.find(b"\n", at, None if limit is None else at + limit + 1)
    if end < 0:
        raise PickleError(f"a line at byte {at} has no end, or is too long")
    return m.data[at:end], end + 1


def pop_mark(m: Machine) -> list[Any]:
    """Take everything above the last mark."""
    items = m.stack
    m.stack = m.stacks.pop()
    return items


def memoize(m: Machine, at: int) -> int:
    """Remember the value on top of the stack."""
    top = m.stack[-1]
    m.memo.append(ONCE if type(top) is Nest else top)
    return at


def _put(m: Machine, index: int) -> None:
    if index != len(m.memo):
        raise PickleError(f"value {index} is remembered where {len(m.memo)} would be next")
    memoize(m, 0)


def put_n(width: int) -> Handler:
    """Make the opcode that remembers the value on top of the stack, with its number in ``width`` bytes."""

    def put(m: Machine, at: int) -> int:
        _put(m, int.from_bytes(m.data[at : at + width], "little"))
        return at + width

    return put


def put_line(m: Machine, at: int) -> int:
    """Remember the value on top of the stack, with its number in a line."""
    text, end = read_line(m, at)
    _put(m, _index(text, at))
    return end


def _index(text: bytes, at: int) -> int:
    if not text.isdigit():
        raise PickleError(f"no number at byte {at}")
    return int(text)


def get_line(m: Machine, at: int) -> int:
    """Push a remembered value, with its number in a line."""
    text, end = read_line(m, at)
    m.stack.append(m.memo[_index(text, at)])
    return end


def get_1(m: Machine, at: int) -> int:
    """Push a remembered value, one of the first 256."""
    m.stack.append(m.memo[m.data[at]])
    return at + 1


def get_4(m: Machine, at: int) -> int:
    """Push a remembered value."""
    m.stack.append(m.memo[int.from_bytes(m.data[at : at + 4], "little")])
    return at + 4


def _push_global(m: Machine, module: str, name: str) -> None:
    known = _OBJECT_NAMES.get((module, name))
    m.stack.append(m.find_global(module, name) if known is None else known)


def find_by_lines(m: Machine, at: int) -> int:
    """Push what two lines name."""
    module, at = read_line(m, at)
    name, at = read_line(m, at)
    _push_global(m, module.decode(), name.decode())
    return at


def find_by_texts(m: Machine, at: int) -> int:
    """Push what two texts name."""
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("a name that is no text")
    _push_global(m, module, name)
    return at


def call(m: Machine, at: int) -> int:
    """Call a function."""
    args = m.stack.pop()
    function = m.stack[-1]
    if type(function) is not Function or not isinstance(args, tuple) or len(args) > _MAX_ARGS:
        raise PickleError(f"a call of a {type(function).__name__} with a {type(args).__name__}")
    try:
        m.stack[-1] = function.call(*args)
    except TypeError as exc:
        raise PickleError(f"a call with the wrong arguments: {exc}") from exc
    return at


def is_record_kind(kind: Any) -> bool:
    """Tell whether a value is a class of records."""
    return type(kind) is type and issubclass(kind, Record)


def _new(kind: Any) -> Record:
    if not is_record_kind(kind):
        raise PickleError(f"a {type(kind).__name__} stands where a class belongs")
    record: Record = kind()
    return record


def new_object(m: Machine, at: int) -> int:
    """Make a record."""
    if m.stack.pop() != ():
        raise PickleError("an object that is made with arguments")
    m.stack[-1] = _new(m.stack[-1])
    return at


def build(m: Machine, at: int) -> int:
    """Give a record its state."""
    state = m.stack.pop()
    record = m.stack[-1]
    if not isinstance(record, Record) or record.values is not None:
        raise PickleError(f"a state is given to a {type(record).__name__}, or for the second time")
    if type(state) is dict and len(state) <= _MAX_FIELDS and set(map(type, state)) <= {str}:
        record.names, record.values = tuple(state), tuple(state.values())
    elif isinstance(state, tuple):
        record.values = state
    else:
        raise PickleError(f"a {type(record).__name__} is given a {type(state).__name__} as its state")
    return at


def _push_persistent(m: Machine, pid: Any) -> None:
    if m.persistent_load is None:
        raise PickleError("the pickle refers to something outside itself")
    m.stack.append(m.persistent_load(pid))


def persistent_line(m: Machine, at: int) -> int:
    """Push what a line refers to."""
    line, end = read_line(m, at)
    _push_persistent(m, line.decode("ascii"))
    return end


def persistent(m: Machine, at: int) -> int:
    """Push what the value on top of the stack refers to."""
    _push_persistent(m, m.stack.pop())
    return at
