"""Dict keys other than text, as JSON: numbers, bools, None, and tuples of these and of texts.

Names and paths of leaves hold the text of a key, as DCP does; the record of the container holds the key itself.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiockpt.format.manifest.manifest import JsonValue

# Default factories that are kept, by name.
FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, deque, OrderedDict, Counter)
}
_PLAIN = frozenset({str, int, float, bool, type(None)})
MOST_BITS = 4096  # of an integer key: Python converts no much longer ones to text
_DEEPEST = 16
_MOST_ALIKE = 64
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def is_key(key: Any, depth: int = 0) -> bool:
    """Return whether a key can be stored."""
    kind = type(key)
    if kind is tuple:
        return depth < _DEEPEST and all(is_key(part, depth + 1) for part in key)
    return kind in _PLAIN and (kind is not int or key.bit_length() <= MOST_BITS)


def encode_key(key: Any) -> JsonValue:
    """Return the JSON form of a key for which `is_key` holds."""
    if type(key) is tuple:
        return [encode_key(part) for part in key]
    if type(key) is float and not math.isfinite(key):  # which JSON has no number for
        return {"float": str(key)}
    return key  # type: ignore[no-any-return]


def decode_key(value: Any) -> Any:
    """Return the key of a JSON form, without trusting it; raise ValueError if it is no key."""
    key = _decoded(value)
    if not is_key(key):
        raise ValueError("a key of a container is of a kind that no key has")
    return key


def _decoded(value: Any, depth: int = 0) -> Any:
    if type(value) is list and depth <= _DEEPEST:
        return tuple([_decoded(part, depth + 1) for part in value])
    if type(value) is dict and value.get("float") in _NOT_FINITE and len(value) == 1:
        return _NOT_FINITE[value["float"]]
    return value


def check_hashes(keys: Iterable[Any]) -> None:
    """Raise ValueError if many keys have one hash: building a dict of them would take quadratic time."""
    if any(count > _MOST_ALIKE for count in Counter(map(hash, keys)).values()):
        raise ValueError("the keys of a container all have one hash")
