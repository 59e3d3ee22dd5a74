"""How much a state dict comes to when it is taken apart.

What a pickle makes may hold one container many times, which holds another many times, and so on: a few hundred bytes
stand for more leaves than can be counted. As it is that costs nothing, but taken apart every one of them has a name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_PARTS_PER_BYTE = 64
_LEAST_PARTS = 2_000_000
_LEAST_LETTERS = 64 << 20
_MANY = 1 << 62
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = (Mapping, *_SEQUENCES)


class Extent(NamedTuple):
    """What a value comes to.

    Attributes:
        parts: itself, and everything within it, as often as it is there.
        letters: those of the names of these, below the value's own.
    """

    parts: int
    letters: int


_LEAF = Extent(1, 0)


def is_too_much(value: Any, nbytes: int) -> bool:
    """Tell whether a value is more, taken apart, than can be made of ``nbytes`` bytes without malice.

    Takes time in proportion to its distinct parts. One that holds itself is too much.
    """
    extent = _extent(value)
    return (
        extent is None
        or extent.parts > _PARTS_PER_BYTE * nbytes + _LEAST_PARTS
        or extent.letters > _PARTS_PER_BYTE * nbytes + _LEAST_LETTERS
    )


def _extent(value: Any) -> Extent | None:
    """Add up, each container once; None for one that holds itself."""
    known: dict[int, Extent | None] = {}  # None: its parts are being added up
    pending = [(value, _parts(value))]
    known[id(value)] = None
    while pending:
        container, parts = pending[-1]
        for _, part in parts:
            if not isinstance(part, _CONTAINERS):
                continue
            if id(part) not in known:
                known[id(part)] = None
                pending.append((part, _parts(part)))
                break
            if known[id(part)] is None:
                return None
        else:
            known[id(container)] = _sum(container, known)
            pending.pop()
    return known[id(value)]


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return iter(value.items())
    return ((None, part) for part in value) if isinstance(value, _SEQUENCES) else iter(())


def _sum(container: Any, known: Mapping[int, Extent | None]) -> Extent:
    count, letters = 1, 0
    for key, part in _parts(container):
        within = known.get(id(part)) or _LEAF
        count += within.parts
        letters += within.letters + within.parts * (len(key) if type(key) is str else 8)
    return Extent(min(count, _MANY), min(letters, _MANY))
