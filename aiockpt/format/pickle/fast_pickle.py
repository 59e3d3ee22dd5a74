"""A pickle machine with fast paths for the opcode sequences that metadata holds thousands of times.

A fast path runs many opcodes in one step and leaves the machine in the same state. One difference: the dict that a
record got its state from can't be pushed again from the memo.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from aiockpt.format.pickle.machine import (
    HANDLERS,
    ONCE,
    Handler,
    Machine,
    Record,
    build,
    is_record_kind,
    pop_mark,
    set_items,
)

_REF = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4})"
# A function called with one tuple of a few numbers: torch.Size.
_CALL = _REF + rb"(?:\)|" + _INT + rb"{1,3}[\x85-\x87]\x94|\(" + _INT + rb"{4,64}t\x94)\x85\x94R\x94"
_ATOM = rb"(N|" + _INT + rb"|" + _CALL + rb"|" + _REF + rb")"
_HEAD = b")\x81\x94}\x94("  # a new object and the beginning of its state
_FIELD = rb"(" + _REF + rb")" + _ATOM
# A new object of two or three fields.
_FLAT = rb"(" + _REF + rb")\)\x81(?:\x94}\x94|})\(" + _FIELD + _FIELD + rb"(?:" + _FIELD + rb")?ub"

_match_flat = re.compile(_FLAT, re.DOTALL).match

_SHORTEST_CALL = 7
_RUN_BYTES = 2048  # the longest run
_RUN_LENGTHS = 16
_MEMOIZE = 0x94
_BUILD = ord("b")
_SIGNED = ord("J")


class _Operands(dict[bytes, Any]):
    """Caches the values that memo references, numbers and calls push; none of them ever changes."""

    def __init__(self, machine: _FastMachine) -> None:
        super().__init__({b"N": None})
        self._machine = machine

    def __missing__(self, opcodes: bytes) -> Any:
        if len(opcodes) >= _SHORTEST_CALL:
            value = self._machine.call(opcodes)
        elif opcodes[0] in b"hj":
            value = self._machine.memo[int.from_bytes(opcodes[1:], "little")]
        else:
            value = int.from_bytes(opcodes[1:], "little", signed=opcodes[0] == _SIGNED)
        self[opcodes] = value
        return value


class _FastMachine(Machine):
    def __init__(
        self,
        data: bytes,
        find_global: Callable[[str, str], Any],
        persistent_load: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(data, find_global, persistent_load, _FAST)
        self.at = 0
        self.operands = _Operands(self)
        self.calls: dict[bytes, list[Any]] = {}  # by opcodes: what they add to the memo
        self.runs: dict[bytes, tuple[Any, list[Any]]] = {}  # by opcodes: the record, and what they add to the memo
        self.run_lengths: list[int] = []
        # Records that may become runs: the stack of their state, their position, the length of the memo before.
        self.begun: list[tuple[list[Any], int, int]] = []
        self.templates: dict[tuple[bytes, ...], tuple[Any, tuple[str, ...]]] = {}

    def call(self, opcodes: bytes) -> Any:
        """Run a `_CALL`, found behind ``at``, for the first time; return what it pushes."""
        before, at = len(self.memo), self.data.index(opcodes, self.at)
        end = at + len(opcodes)
        while at < end:
            at = HANDLERS[self.data[at]](self, at + 1)
        self.calls[opcodes] = self.memo[before:]
        del self.memo[before:]
        return self.stack.pop()

    def template(self, opcodes: tuple[bytes, ...]) -> tuple[Any, tuple[str, ...]] | None:
        """Look up the class and the field names of a `_FLAT` for the first time; None if it is no class of records."""
        kind, *names = [self.operands[each] for each in opcodes if each is not None]
        if not is_record_kind(kind) or not set(map(type, names)) <= {str} or len(set(names)) != len(names):
            return None
        known = self.templates[opcodes] = kind, tuple(names)
        return known


def _push_record(m: _FastMachine, kind: Any, at: int, end: int) -> int:
    data = m.data
    if kind.repeats:
        for length in m.run_lengths:
            known = m.runs.get(data[at : at + length])
            if known is not None:
                m.stack.append(known[0])
                m.memo += known[1]
                return at + length
    else:
        past = _push_flats(m, at)
        if past != at:
            return past
    if not data.startswith(_HEAD, end):
        m.stack.append(kind)
        return end
    record = kind()
    m.stack += (record, {})
    m.stacks.append(m.stack)
    m.stack = []
    if kind.repeats and not m.begun:
        m.begun.append((m.stack, at, len(m.memo)))
    m.memo += (record, ONCE)
    return end + len(_HEAD)


def _push_flats(m: _FastMachine, at: int) -> int:
    """Push consecutive records whose fields are numbers, memo references or calls."""
    data, memo, operands, calls, templates = m.data, m.memo, m.operands, m.calls, m.templates
    while match := _match_flat(data, at):
        kind, name1, field1, name2, field2, name3, field3 = match.groups()
        opcodes = (kind, name1, name2, name3)
        template = templates.get(opcodes) or m.template(opcodes)
        if template is None:
            return at
        fields = (field1, field2) if field3 is None else (field1, field2, field3)
        m.at = at
        record = template[0]()
        record.names, record.values = template[1], [operands[field] for field in fields]
        if data[at + len(kind) + 2] == _MEMOIZE:
            memo += (record, ONCE)
        for field in fields:
            if field in calls:
                memo += calls[field]
        m.stack.append(record)
        at = match.end()
    return at


def _get(width: int) -> Handler:
    """Return the handler that pushes a value from the memo, or the record that the next opcodes make of it."""

    def push(m: _FastMachine, at: int) -> int:
        end = at + width
        value = m.memo[int.from_bytes(m.data[at:end], "little")]
        if type(value) is type and issubclass(value, Record):
            return _push_record(m, value, at - 1, end)
        m.stack.append(value)
        return end

    return push


def _setitems(m: _FastMachine, at: int) -> int:
    items = pop_mark(m)
    set_items(m, items)
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


_OWN = {"h": _get(1), "j": _get(4), "u": _setitems}
_FAST = [_OWN.get(chr(code), handler) for code, handler in enumerate(HANDLERS)]


def read_pickle(
    data: bytes, find_global: Callable[[str, str], Any], persistent_load: Callable[[Any], Any] | None = None
) -> Any:
    """Read a pickle of plain data and records, in time and memory proportional to its length; see `Machine`."""
    return _FastMachine(bytes(data), find_global, persistent_load).run()
