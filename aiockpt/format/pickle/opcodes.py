"""What each opcode of a pickle does on a `pickle_machine.Machine`; those that are not here are refused."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from aiockpt.format.pickle.machine import (
    CONTAINERS,
    Handler,
    Machine,
    Nest,
    PickleError,
    Record,
    build,
    call,
    find_by_lines,
    find_by_texts,
    get_1,
    get_4,
    get_line,
    memoize,
    new_object,
    persistent,
    persistent_line,
    pop_mark,
    put_line,
    put_n,
    read_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_PROTOCOL = 5
_KEY_LIMIT = 1 << 60  # below, an int is its own hash: keys that all collide can't be chosen


def _refused(m: Machine, at: int) -> int:
    raise PickleError(f"opcode {m.data[at - 1]:#04x} at byte {at - 1} is not one that plain data needs")


def _ignored(width: int) -> Handler:
    return lambda _m, at: at + width


def _proto(m: Machine, at: int) -> int:
    if m.data[at] > _MAX_PROTOCOL:
        raise PickleError(f"pickle protocol {m.data[at]} is not known")
    return at + 1


def _constant(value: Any) -> Handler:
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


def _number(convert: Callable[[bytes], Any]) -> Handler:
    def push(m: Machine, at: int) -> int:
        text, end = read_line(m, at)
        try:
            m.stack.append(convert(text))
        except ValueError:
            raise PickleError(f"no number at byte {at}") from None
        return end

    return push


def _int(text: bytes) -> int:
    return text == b"01" if text in (b"00", b"01") else int(text)


def _long(text: bytes) -> int:
    return int(text.removesuffix(b"L"))


def push_text(m: Machine, text: str) -> None:
    """Push a text, as the one object that stands for it."""
    m.stack.append(m.texts.setdefault(text, text))


def _text(width: int) -> Handler:
    def push(m: Machine, at: int) -> int:
        begin = at + width
        end = begin + int.from_bytes(m.data[at:begin], "little")
        push_text(m, str(m.data[begin:end], "utf-8", "surrogatepass"))
        return end

    return push


def _unicode(m: Machine, at: int) -> int:
    line, end = read_line(m, at, None)
    push_text(m, str(line, "raw-unicode-escape"))
    return end


def _mark(m: Machine, at: int) -> int:
    m.stacks.append(m.stack)
    m.stack = []
    return at


def _pop(m: Machine, at: int) -> int:
    m.stack.pop()
    return at


def _pop_marked(m: Machine, at: int) -> int:
    pop_mark(m)
    return at


def _tuple_of(items: list[Any]) -> tuple[Any, ...]:
    return tuple(items) if CONTAINERS.isdisjoint(map(type, items)) else Nest(items)


def _tuple(m: Machine, at: int) -> int:
    items = pop_mark(m)
    m.stack.append(_tuple_of(items))
    return at


def _tuple_n(count: int) -> Handler:
    def push(m: Machine, at: int) -> int:
        stack = m.stack
        if len(stack) < count:
            raise PickleError(f"a tuple of too few values at byte {at - 1}")
        stack[-count:] = [_tuple_of(stack[-count:])]
        return at

    return push


def _empty(kind: Callable[[], Any]) -> Handler:
    def push(m: Machine, at: int) -> int:
        m.stack.append(kind())
        return at

    return push


def _list(m: Machine, at: int) -> int:
    items = pop_mark(m)
    m.stack.append(items)
    return at


def _extend(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not list:
        raise PickleError(f"an append to a {type(target).__name__}")
    target += items


def _append(m: Machine, at: int) -> int:
    _extend(m, [m.stack.pop()])
    return at


def _appends(m: Machine, at: int) -> int:
    _extend(m, pop_mark(m))
    return at


def set_items(target: Any, items: list[Any]) -> None:
    """Add keys and values, which follow each other in ``items``, to a dict."""
    keys = items[::2]
    if type(target) is not dict or len(items) % 2:
        raise PickleError(f"{len(items)} keys and values for a {type(target).__name__}")
    for kind in set(map(type, keys)):
        small = kind is int and all(type(key) is not int or abs(key) < _KEY_LIMIT for key in keys)
        if not (kind is str or small or issubclass(kind, Record)):
            raise PickleError(f"a {kind.__name__} stands as the key of a dict")
    target.update(zip(keys, items[1::2], strict=True))


def _dict(m: Machine, at: int) -> int:
    items, target = pop_mark(m), dict[Any, Any]()
    set_items(target, items)
    m.stack.append(target)
    return at


def _setitem(m: Machine, at: int) -> int:
    stack = m.stack
    value, key = stack.pop(), stack.pop()
    set_items(stack[-1], [key, value])
    return at


def _setitems(m: Machine, at: int) -> int:
    items = pop_mark(m)
    set_items(m.stack[-1], items)
    return at


def _stop(_m: Machine, _at: int) -> int:
    return -1


OPCODES: dict[str, Handler] = {
    "\x80": _proto,
    "\x95": _ignored(8),  # a frame, which says only how much to read ahead
    ".": _stop,
    "(": _mark,
    "0": _pop,
    "1": _pop_marked,
    "N": _constant(None),
    "\x88": _constant(True),
    "\x89": _constant(False),
    "K": _fixed(1),
    "M": _fixed(2),
    "J": _fixed(4, signed=True),
    "\x8a": _long1,
    "I": _number(_int),
    "L": _number(_long),
    "F": _number(float),
    "G": _binfloat,
    "\x8c": _text(1),
    "X": _text(4),
    "V": _unicode,
    ")": _constant(()),
    "t": _tuple,
    "\x85": _tuple_n(1),
    "\x86": _tuple_n(2),
    "\x87": _tuple_n(3),
    "]": _empty(list),
    "l": _list,
    "a": _append,
    "e": _appends,
    "}": _empty(dict),
    "d": _dict,
    "s": _setitem,
    "u": _setitems,
    "\x94": memoize,
    "p": put_line,
    "q": put_n(1),
    "r": put_n(4),
    "g": get_line,
    "h": get_1,
    "j": get_4,
    "c": find_by_lines,
    "\x93": find_by_texts,
    "R": call,
    "\x81": new_object,
    "b": build,
    "P": persistent_line,
    "Q": persistent,
}
HANDLERS: list[Handler] = [OPCODES.get(chr(code), _refused) for code in range(256)]
