"""A pickle machine that builds plain data and records, and nothing else.

CPython's unpickler trusts its input: a memo index makes it resize an array, an announced length makes it allocate, and
any global that is not forbidden runs. Here every step costs time and memory in proportion to the bytes of the pickle
that asked for it, and globals mean what the caller says they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

_MAX_DIGITS = 640


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
        """Return the named fields."""
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


class Machine:
    """Runs one pickle.

    ``find_global`` maps a module and a name to a subclass of `Record`, a `Function` or a plain value;
    ``persistent_load`` resolves references to something outside the pickle. ``handlers`` has a function for each
    opcode: it takes the machine and the position after the opcode, and returns the position of the next.
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
        self.stacks: list[list[Any]] = []  # the stacks below each mark
        # Equal long texts are one object, so that two of them are compared letter by letter only once.
        self.texts: dict[str, str] = {}
        self.handlers = handlers

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


def read_line(m: Machine, at: int, limit: int | None = _MAX_DIGITS) -> tuple[bytes, int]:
    """Return the rest of the line, and the position of the next line."""
    end = m.data.find(b"\n", at, None if limit is None else at + limit + 1)
    if end < 0:
        raise PickleError(f"a line at byte {at} has no end, or is too long")
    return m.data[at:end], end + 1


def pop_mark(m: Machine) -> list[Any]:
    """Pop the values above the last mark, and return them."""
    items = m.stack
    m.stack = m.stacks.pop()
    return items
