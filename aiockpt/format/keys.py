"""Keys: selection by names and patterns, hints for missing ones, and dict keys other than text."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.errors import printable_key
from aiockpt.format.item.arrays import ARRAY_RECORD

if TYPE_CHECKING:
    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest.manifest import JsonValue

# --- keys other than text, as JSON ----------------------------------------------------------------
# Names and paths of leaves hold the text of a key, as DCP does; the record of the container holds the key itself.


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


# --- names of keys --------------------------------------------------------------------------------


_MAGIC = re.compile(r"[*?\[]")

# Wrappers that nest a model under a key of their own.
_WRAPPERS = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
}

_HINTED = 10  # missing keys compared one by one
_BESIDE = 30  # neighbouring names compared on each side of a key
_DEPTH = 16  # levels of containers compared
_COMPARED = 1000  # missing keys that a change of all keys is tried with
_LETTERS = 500  # longer names are not compared
_ALIKE = 0.7  # least ratio of `difflib` for similar names


def check_patterns(keys: object, option: str = "keys") -> tuple[str, ...] | None:
    """Return the patterns of an option as a tuple; raise TypeError for anything but None, text, or texts."""
    if keys is None:
        return None
    if isinstance(keys, str):
        return (keys,)
    patterns = tuple(keys) if hasattr(keys, "__iter__") else (keys,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} must be names and patterns such as 'model.*', not {type(pattern).__name__}")
    return patterns


def matching(names: Collection[str], patterns: Iterable[str]) -> tuple[set[str], tuple[str, ...]]:
    """Return the names that patterns select, and the patterns that select none.

    A pattern is a name; or the name of a container, which selects everything in it; or a glob pattern with ``*``,
    ``?`` and ``[...]``, which match dots as well.
    """
    found: set[str] = set()
    unmatched: list[str] = []
    for pattern in patterns:
        if pattern in names:
            found.add(pattern)
            continue
        prefix = pattern + "."
        hits = {name for name in names if name.startswith(prefix)}
        if not hits and _MAGIC.search(pattern):
            matches = re.compile(fnmatch.translate(pattern)).match
            hits = {name for name in names if matches(name)}
        found |= hits
        if not hits:
            unmatched.append(pattern)
    return found, tuple(unmatched)


def containers_of(names: Iterable[str]) -> set[str]:
    """Return the names of all containers around these names."""
    return {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}


def chooser(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function of one name: whether patterns select it, as by `matching`."""
    plain = frozenset(patterns)
    globs = [re.compile(fnmatch.translate(pattern)).match for pattern in plain if _MAGIC.search(pattern)]

    def chooses(name: str) -> bool:
        above = accumulate(name.split("."), "{}.{}".format)
        return not plain.isdisjoint(above) or any(glob(name) for glob in globs)

    return chooses


def hint(missing: Sequence[str], names: Iterable[str], asked: Container[str] = (), *, fills: bool = False) -> str:
    """Return sentences, after a space, on stored names that look like the missing ones; '' if none does.

    The first missing keys are compared with their neighbours among the names sorted from their beginnings and among
    those sorted from their ends: a slip at one place leaves either what is before it or what is behind it. Names in
    ``asked`` are not suggested for others; ``fills`` adds how to load into a target all the same.
    """
    missing = [key.removesuffix(".*") for key in missing[:_COMPARED] if len(key) < _LETTERS]
    candidates = [name for name in names if name not in asked and len(name) < _LETTERS]
    depths = {key.count(".") + 1 for key in missing[:_HINTED]}
    known = {*candidates}.union(*(_cut(candidates, depth) for depth in depths if depth <= _DEPTH))
    ordered, backwards = sorted(known), sorted(name[::-1] for name in known)
    beside = {
        key: [*_beside(ordered, key), *(name[::-1] for name in _beside(backwards, key[::-1]))]
        for key in missing[:_HINTED]
    }
    change = _common_change(beside, missing, known)
    if change is not None:
        key = next(key for key in missing if change.applied(key) in known)
        return " " + change.described(key, fills=fills)
    for key in missing[:_HINTED]:
        inside = next((name for name in candidates if name.startswith(f"{key}.")), None) if key in known else None
        if inside is not None:
            return f" '{printable_key(key)}' is a container of keys such as '{printable_key(inside)}'."
    alike = ((key, found) for key in beside for found in difflib.get_close_matches(key, beside[key], 1, _ALIKE))
    said = [f"'{printable_key(found)}' for '{printable_key(key)}'" for key, found in islice(alike, 3)]
    return f" What looks alike: {', '.join(said)}." if said else ""


class _Change(NamedTuple):
    """Levels of the path that the stored names have and the missing ones lack, or the other way round."""

    at: int  # how many levels are before them
    levels: tuple[str, ...]
    is_stored: bool  # the stored names have them

    def applied(self, key: str) -> str | None:
        """Return a key after the change; None if it does not apply."""
        parts = key.split(".")
        behind = self.at if self.is_stored else self.at + len(self.levels)
        if behind >= len(parts) or not (self.is_stored or tuple(parts[self.at : behind]) == self.levels):
            return None
        return ".".join([*parts[: self.at], *(self.levels if self.is_stored else ()), *parts[behind:]])

    def described(self, key: str, *, fills: bool) -> str:
        """Return the sentences about it, with a key as the example."""
        level, example = printable_key(".".join(self.levels)), printable_key(self.applied(key) or "")
        wrappers = " and ".join(_WRAPPERS[each] for each in self.levels if each in _WRAPPERS)
        text = (
            f"Its keys {'have' if self.is_stored else 'lack'} '{level}.', as in '{example}' for '{printable_key(key)}'"
        )
        if wrappers and self.is_stored:
            text += f": it was saved from a model within {wrappers}"
        elif wrappers:
            text += f": it was saved from a model that was not within {wrappers}"
        if not fills:
            return text + "."
        if not self.is_stored:
            return f"{text}. Load into what is below '{level}' in the target{', model.' + level if wrappers else ''}."
        nested = "".join(f"{{'{printable_key(each)}': " for each in self.levels)
        ends = "}" * len(self.levels)
        if wrappers:
            text += f". Load into {nested}model{ends} in place of model"
            return f"{text}; what is saved as model.{level} has no such keys."
        return f"{text}. Put a dict around what it fills: {nested}...{ends}."


def _cut(names: Sequence[str], depth: int) -> set[str]:
    """Return the containers of ``depth`` levels around names."""
    within = re.compile(r"[^.]*" + r"\.[^.]*" * (depth - 1) + r"(?=\.)")
    return {found[0] for found in map(within.match, names) if found}


def _beside(ordered: Sequence[str], key: str) -> Sequence[str]:
    at = bisect_left(ordered, key)
    return ordered[max(0, at - _BESIDE) : at + _BESIDE]


def _common_change(
    beside: Mapping[str, Sequence[str]], missing: Sequence[str], known: Container[str]
) -> _Change | None:
    """Return the change that turns most missing keys into stored names, if there is one, and one only."""
    found = Counter(change for key, names in beside.items() for change in _changes(key, names, known))
    best: list[_Change] = []
    most = len(missing) // 2 + 1  # the hits of the best
    for change, _ in found.most_common(_HINTED):
        hits = sum(change.applied(key) in known for key in missing)
        if hits >= most:
            best = [*(best if hits == most else ()), change]
            most = hits
    # A single key may become a stored name by several changes: then none of them is suggested.
    is_clear = len({change.applied(key) for change in best for key in missing[:1]}) == 1
    return best[0] if is_clear and (len(missing) > 1 or len(found) == 1) else None


def _changes(key: str, names: Iterable[str], known: Container[str]) -> set[_Change]:
    """Return the changes that turn a key into a stored name."""
    parts = tuple(key.split("."))
    if len(parts) > _DEPTH:
        return set()
    levels = range(len(parts))
    lost = (_Change(at, parts[at:behind], False) for behind in levels for at in range(behind))
    wrapped = (_Change(at, (each,), True) for each in _WRAPPERS for at in levels)
    found = {change for change in (*lost, *wrapped) if change.applied(key) in known}
    for name in names:
        longer = tuple(name.split("."))
        more = len(longer) - len(parts)
        if more > 0:
            found |= {
                _Change(at, longer[at : at + more], True) for at in levels if longer[:at] + longer[at + more :] == parts
            }
    return found


def containers_within(
    containers: Sequence[dict[str, object]],
    names: Sequence[str],
    paths: Sequence[ObjPath],
    kept: Collection[str],
    empty: Iterable[ObjPath] = (),
) -> list[dict[str, object]]:
    """Return the container records that remain meaningful if only the ``kept`` leaves are, and these empty containers.

    Other empty ones, which have no leaves, are kept if a container around them is kept as a whole.
    """
    before = [0]
    around: set[tuple[object, ...]] = set()  # containers with kept leaves
    cut: set[tuple[object, ...]] = set()  # containers with dropped leaves
    for name, path in zip(names, paths, strict=True):
        before.append(before[-1] + (name in kept))
        (around if name in kept else cut).update(path[:depth] for depth in range(len(path)))
    whole = around - cut
    around.update(path[:depth] for path in empty for depth in range(len(path) + 1))
    arrays = {path for name, path in zip(names, paths, strict=True) if name in kept}
    found: list[dict[str, object]] = []
    for record in containers:
        path = tuple(record["path"])  # type: ignore[arg-type]
        at = min(int(record["at"]), len(names))  # type: ignore[call-overload]
        if record["type"] == ARRAY_RECORD:
            if path in arrays:
                found.append({**record, "at": before[at]})
            continue
        if path in around or any(path[:depth] in whole for depth in range(len(path))):
            found.append({**record, "at": before[at]})
    return found
