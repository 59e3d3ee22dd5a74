"""A pickle machine that builds plain data and records, and nothing else.

CPython's unpickler trusts its input: a memo index makes it resize an array, an announced length makes it allocate, and
any global that is not forbidden runs. Here every step costs time and memory in proportion to the bytes of the pickle
that asked for it, and globals mean what the caller says they mean. Opcodes that plain data does not need are refused,
and so are those of protocols 0 and 1, which no checkpoint has.

Source of the opcodes: ``pickletools.py`` of CPython.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiockpt.core.dataclasses import dataclass, field

_MAX_PROTOCOL = 5
_KEY_LIMIT = 1 << 60  # below, an int is its own hash: keys that all collide can't be chosen
_MAX_FIELDS = 64
_MAX_ARGS = 256
_MAX_LINE = 640  # of the name of a global


class PickleError(ValueError):
    """A pickle is damaged, or does something that plain data and records never need."""


class Record:
    """An object of a class that the pickle names; a subclass for each class."""

    __slots__ = ("names", "values")

    repeats = False  # True: records are often the same, byte for byte, and may then be one object

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None  # of the fields; None if the state is a tuple, or there is none
        self.values: Any = None  # a sequence of the fields; None if there is no state

    def fields(self) -> dict[str, Any]:
        return dict(zip(self.names or (), self.values or (), strict=False))


class Function:
    """A function that a pickle may call. It must check its arguments, at a cost that does not grow with them."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class Nest(tuple[Any, ...]):
    """A tuple that holds containers. The memo does not keep it, so no tree of them is larger than its pickle."""

    __slots__ = ()


CONTAINERS = frozenset({tuple, list, dict, Nest})
ONCE = object()
"""Takes the memo slot of a value that can't be pushed a second time."""


@dataclass(eq=False)
class Machine:
    """Runs one pickle.

    ``find_global`` maps a module and a name to a subclass of `Record`, a `Function` or a plain value;
    ``persistent_load`` resolves references to something outside the pickle. ``handlers`` has a function for each
    opcode: it takes the machine and the position after the opcode, and returns the position of the next.
    """

    data: bytes
    find_global: Callable[[str, str], Any]
    persistent_load: Callable[[Any], Any] | None
    handlers: Sequence[Handler]
    memo: list[Any] = field(default_factory=list)
    stack: list[Any] = field(default_factory=list)
    stacks: list[list[Any]] = field(default_factory=list)  # the stacks below each mark
    # Equal long texts are one object, so that two of them are compared letter by letter only once.
    texts: dict[str, str] = field(default_factory=dict)

    def new_list(self) -> Any:
        return []

    def new_dict(self) -> Any:
        return {}

    def tuple_of(self, items: list[Any]) -> Any:
        return tuple(items) if CONTAINERS.isdisjoint(map(type, items)) else Nest(items)

    def extend(self, items: list[Any]) -> None:
        """Add items to the list on top of the stack."""
        target = self.stack[-1]
        if type(target) is not list:
            raise PickleError(f"an append to a {type(target).__name__}")
        target += items

    def update(self, items: list[Any]) -> None:
        """Add alternating keys and values to the dict on top of the stack."""
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict or len(items) % 2:
            raise PickleError(f"{len(items)} keys and values for a {type(target).__name__}")
        for kind in {*map(type, keys)} - {str}:
            small = kind is int and all(type(key) is not int or abs(key) < _KEY_LIMIT for key in keys)
            if not (small or issubclass(kind, Record)):
                raise PickleError(f"a {kind.__name__} stands as the key of a dict")
        target.update(zip(keys, items[1::2], strict=True))

    def run(self) -> Any:
        """Run to the end and return the value."""
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


# The machine is a `Machine` or one of its subclasses.
Handler = Callable[[Any, int], int]


def read_line(m: Machine, at: int) -> tuple[bytes, int]:
    """Return the rest of the line, and the position of the next line."""
    end = m.data.find(b"\n", at, at + _MAX_LINE + 1)
    if end < 0:
        raise PickleError(f"a line at byte {at} has no end, or is too long")
    return m.data[at:end], end + 1


def pop_mark(m: Machine) -> list[Any]:
    """Pop the values above the last mark, and return them."""
    items = m.stack
    m.stack = m.stacks.pop()
    return items


# --- opcodes of plain values ------------------------------------------------------------------------


def _refused(m: Machine, at: int) -> int:
    raise PickleError(f"opcode {m.data[at - 1]:#04x} at byte {at - 1} is not one that plain data needs")


def _frame(_m: Machine, at: int) -> int:
    return at + 8  # it says only how much to read ahead


def _proto(m: Machine, at: int) -> int:
    if m.data[at] > _MAX_PROTOCOL:
        raise PickleError(f"pickle protocol {m.data[at]} is not known")
    return at + 1


def constant(value: Any) -> Handler:
    """Return the handler of an opcode that pushes a value."""

    def push(m: Machine, at: int) -> int:
        m.stack.append(value)
        return at

    return push


def _fixed(width: int, *, signed: bool = False) -> Handler:
    def push(m: Machine, at: int) -> int:
        m.stack.append(int.from_bytes(m.data[at : at + width], "little", signed=signed))
        return at + width

    return push


def _long1(m: Machine, at: int) -> int:
    end = at + 1 + m.data[at]
    m.stack.append(int.from_bytes(m.data[at + 1 : end], "little", signed=True))
    return end


def _binfloat(m: Machine, at: int) -> int:
    m.stack.extend(struct.unpack_from(">d", m.data, at))
    return at + 8


def _text(width: int) -> Handler:
    def push(m: Machine, at: int) -> int:
        begin = at + width
        end = begin + int.from_bytes(m.data[at:begin], "little")
        text = str(m.data[begin:end], "utf-8", "surrogatepass")
        m.stack.append(m.texts.setdefault(text, text))
        return end

    return push


def _mark(m: Machine, at: int) -> int:
    m.stacks.append(m.stack)
    m.stack = []
    return at


def _pop(m: Machine, at: int) -> int:
    m.stack.pop()
    return at


def _stop(_m: Machine, _at: int) -> int:
    return -1


# --- containers -------------------------------------------------------------------------------------


def _list(m: Machine, at: int) -> int:
    m.stack.append(m.new_list())
    return at


def _dict(m: Machine, at: int) -> int:
    m.stack.append(m.new_dict())
    return at


def _tuple(m: Machine, at: int) -> int:
    items = pop_mark(m)  # replaces the stack
    m.stack.append(m.tuple_of(items))
    return at


def _tuple_n(count: int) -> Handler:
    def push(m: Machine, at: int) -> int:
        stack = m.stack
        if len(stack) < count:
            raise PickleError(f"a tuple of too few values at byte {at - 1}")
        stack[-count:] = [m.tuple_of(stack[-count:])]
        return at

    return push


def _append(m: Machine, at: int) -> int:
    m.extend([m.stack.pop()])
    return at


def _appends(m: Machine, at: int) -> int:
    m.extend(pop_mark(m))
    return at


def _setitem(m: Machine, at: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    m.update([key, value])
    return at


def _setitems(m: Machine, at: int) -> int:
    m.update(pop_mark(m))
    return at


# --- the memo ---------------------------------------------------------------------------------------


def memoize(m: Machine, at: int) -> int:
    """Add the value on top of the stack to the memo."""
    top = m.stack[-1]
    m.memo.append(ONCE if type(top) is Nest else top)
    return at


def _put_n(width: int) -> Handler:
    def put(m: Machine, at: int) -> int:
        index = int.from_bytes(m.data[at : at + width], "little")
        if index != len(m.memo):
            raise PickleError(f"value {index} is put into the memo where {len(m.memo)} would be next")
        return memoize(m, at + width)

    return put


def _get_n(width: int) -> Handler:
    def get(m: Machine, at: int) -> int:
        m.stack.append(m.memo[int.from_bytes(m.data[at : at + width], "little")])
        return at + width

    return get


# --- globals, calls and objects ---------------------------------------------------------------------


def _global_of_lines(m: Machine, at: int) -> int:
    module, at = read_line(m, at)
    name, at = read_line(m, at)
    m.stack.append(m.find_global(module.decode(), name.decode()))
    return at


def _global_of_texts(m: Machine, at: int) -> int:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("a name that is no text")
    m.stack.append(m.find_global(module, name))
    return at


def _call(m: Machine, at: int) -> int:
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
    """Return whether a value is a subclass of `Record`."""
    return type(kind) is type and issubclass(kind, Record)


def _new_object(m: Machine, at: int) -> int:
    if m.stack.pop() != ():
        raise PickleError("an object that is made with arguments")
    kind = m.stack[-1]
    if not is_record_kind(kind):
        raise PickleError(f"a {type(kind).__name__} stands where a class belongs")
    m.stack[-1] = kind()
    return at


def build(m: Machine, at: int) -> int:
    """Set the state of the record below it."""
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


def _persistent(m: Machine, at: int) -> int:
    if m.persistent_load is None:
        raise PickleError("the pickle refers to something outside itself")
    m.stack[-1] = m.persistent_load(m.stack[-1])
    return at


OPCODES: dict[str, Handler] = {
    "\x80": _proto,
    "\x95": _frame,
    ".": _stop,
    "(": _mark,
    "0": _pop,
    "N": constant(None),
    "\x88": constant(True),
    "\x89": constant(False),
    "K": _fixed(1),
    "M": _fixed(2),
    "J": _fixed(4, signed=True),
    "\x8a": _long1,
    "G": _binfloat,
    "\x8c": _text(1),
    "X": _text(4),
    ")": constant(()),
    "t": _tuple,
    "\x85": _tuple_n(1),
    "\x86": _tuple_n(2),
    "\x87": _tuple_n(3),
    "]": _list,
    "a": _append,
    "e": _appends,
    "}": _dict,
    "s": _setitem,
    "u": _setitems,
    "\x94": memoize,
    "q": _put_n(1),
    "r": _put_n(4),
    "h": _get_n(1),
    "j": _get_n(4),
    "c": _global_of_lines,
    "\x93": _global_of_texts,
    "R": _call,
    "\x81": _new_object,
    "b": build,
    "Q": _persistent,
}


def handler_table(own: Mapping[str, Handler], shared: str, refuse: Handler = _refused) -> list[Handler]:
    """Return handlers by opcode: a machine's own, those of ``OPCODES`` that it shares, and ``refuse`` for the rest."""
    table = {**{code: OPCODES[code] for code in shared}, **own}
    return [table.get(chr(code), refuse) for code in range(256)]


HANDLERS: list[Handler] = handler_table(OPCODES, "")


# --- records that metadata holds thousands of times ---------------------------------------------------
# The opcodes of a record that repeats are run once. Where the same ones come again, its value is pushed, and the
# machine is left in the same state, but for this: the dict of a record's state can't be pushed again from the memo.

_HEAD = b")\x81\x94}\x94("  # a new object and the beginning of its state
_RUN_BYTES = 2048  # the longest run
_RUN_LENGTHS = 16
_BUILD = ord("b")


@dataclass(eq=False)
class _RepeatingMachine(Machine):
    # By opcodes: the record, and what they add to the memo.
    runs: dict[bytes, tuple[Any, list[Any]]] = field(default_factory=dict)
    run_lengths: list[int] = field(default_factory=list)
    # Records that may become runs: the stack of their state, their position, the length of the memo before.
    begun: list[tuple[list[Any], int, int]] = field(default_factory=list)


def _push_record(m: _RepeatingMachine, kind: Any, at: int, end: int) -> int:
    data = m.data
    for length in m.run_lengths:
        known = m.runs.get(data[at : at + length])
        if known is not None:
            m.stack.append(known[0])
            m.memo += known[1]
            return at + length
    if not data.startswith(_HEAD, end):
        m.stack.append(kind)
        return end
    record = kind()
    m.stack += (record, {})
    m.stacks.append(m.stack)
    m.stack = []
    if not m.begun:
        m.begun.append((m.stack, at, len(m.memo)))
    m.memo += (record, ONCE)
    return end + len(_HEAD)


def _get_or_record(width: int) -> Handler:
    """Return the handler that pushes a value from the memo, or the record that the next opcodes make of it."""

    def push(m: _RepeatingMachine, at: int) -> int:
        end = at + width
        value = m.memo[int.from_bytes(m.data[at:end], "little")]
        if is_record_kind(value) and value.repeats:
            return _push_record(m, value, at - 1, end)
        m.stack.append(value)
        return end

    return push


def _end_of_record(m: _RepeatingMachine, at: int) -> int:
    items = pop_mark(m)
    m.update(items)
    if not m.begun or m.begun[-1][0] is not items or m.data[at] != _BUILD:
        return at
    # Everything since the mark happened above it, so the same opcodes would push an equal record again.
    _, begin, before = m.begun.pop()
    at = build(m, at + 1)
    length = at - begin
    if length not in m.run_lengths and length < _RUN_BYTES and len(m.run_lengths) < _RUN_LENGTHS:
        m.run_lengths.append(length)
    if length in m.run_lengths:
        m.runs[m.data[begin:at]] = m.stack[-1], m.memo[before:]
    return at


_QUICK = {"h": _get_or_record(1), "j": _get_or_record(4), "u": _end_of_record}
_REPEATING = [_QUICK.get(chr(code), handler) for code, handler in enumerate(HANDLERS)]


def read_pickle(
    data: bytes, find_global: Callable[[str, str], Any], persistent_load: Callable[[Any], Any] | None = None
) -> Any:
    """Read a pickle of plain data and records, in time and memory proportional to its length; see `Machine`."""
    return _RepeatingMachine(bytes(data), find_global, persistent_load, _REPEATING).run()
