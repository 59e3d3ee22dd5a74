"""State dicts as flat lists of leaves, and back again without loss.

Leaves get the names and paths that torch's DCP gives them: keys joined by dots, every key as text, list positions
as numbers. Unlike DCP, tuples that hold tensors are flattened too. Container records keep what DCP's paths can't
express: key types, tuples, ordered dicts, empty containers, and which tensors were arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.lazy import lazy_property
from aiockpt.core.wording import a
from aiockpt.format.item.arrays import ARRAY_RECORD, array_of
from aiockpt.format.item.objects import TensorSeeker
from aiockpt.format.keys import FACTORIES, MOST_BITS, check_hashes, containers_within, decode_key, encode_key, is_key

if TYPE_CHECKING:
    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest.manifest import JsonValue


_TEXT = frozenset({str})
TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that hold their values directly; subclasses may not."""


_DICTS = (dict, UserDict, ChainMap, MappingProxyType)


class StructureError(ValueError):
    """A state dict has a structure that can't be saved; the message names the key."""


_Known = tuple[list[str], list[str], "list[ObjPath]"]


class NameMemo:
    """The keys, names and paths of large dicts of tensors, by the path of the dict.

    Those of the last two state dicts are kept, so that keys which change with every save do not pile up.
    """

    def __init__(self) -> None:
        self._last: dict[ObjPath, _Known] = {}
        self._before: dict[ObjPath, _Known] = {}

    def __len__(self) -> int:
        return len(self._last.keys() | self._before.keys())

    def find(self, path: ObjPath) -> _Known | None:
        """Return the keys, names and paths of a dict, if known."""
        return self._last.get(path) or self._before.get(path)

    def keep(self, used: dict[ObjPath, _Known]) -> None:
        """Keep what a state dict used; drop what neither it nor the one before it used."""
        self._before, self._last = self._last, used


@dataclass(slots=True)
class FlatState:
    """A flattened state dict; `flatten` explains the options."""

    names: list[str] = field(default_factory=list)  # fully qualified
    paths: list[ObjPath] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)  # in the order of the state dict
    # JSON-able records of the containers that names and paths can't express
    containers: list[dict[str, JsonValue]] = field(default_factory=list)
    whole: Container[str] = ()
    apart: Container[str] = ()
    memo: NameMemo = field(default_factory=NameMemo)
    used: dict[ObjPath, _Known] = field(default_factory=dict)  # entries to keep in the memo
    seeker: TensorSeeker = field(default_factory=TensorSeeker)


def is_taken_apart(value: Any, seeker: TensorSeeker | None = None) -> bool:
    """Return whether a value is a dict, or another mapping that has tensors below it.

    Further mappings, such as configurations, are objects: what their parts share, or refer to, stays as it is.
    """
    return isinstance(value, _DICTS) or (isinstance(value, Mapping) and (seeker or TensorSeeker()).finds(value))


def flatten(
    state_dict: Mapping[Any, Any],
    *,
    whole: Container[str] = (),
    apart: Container[str] = (),
    memo: NameMemo | None = None,
) -> FlatState:
    """Flatten a state dict, without changing it. ``memo`` keeps names and paths of large dicts between calls.

    ``whole`` has names of sequences that stay one leaf, because DCP stores tuples of tensors so; ``apart`` those of
    sequences, and mappings, to flatten although they hold neither a tensor nor a dict.
    """
    flat = FlatState(whole=whole, apart=apart, memo=NameMemo() if memo is None else memo)
    if not (is_taken_apart(state_dict, flat.seeker) or (apart and isinstance(state_dict, Mapping))):
        raise StructureError(
            f"the state must be a dict of names to values, not {a(type(state_dict).__name__)}; "
            "wrap it, for example in {'state': ...}"
        )
    try:
        _walk_mapping(flat, (), "", state_dict)
    except RecursionError:
        raise StructureError(
            f"the state dict is nested too deeply, or holds itself, near {'.'.join(flat.names[-1:]) or 'its top'}"
        ) from None
    except StructureError:
        raise
    except (ValueError, NotImplementedError) as exc:  # a mapping of the user's may raise anything
        raise StructureError(
            f"the state dict can't be taken apart, behind {'.'.join(flat.names[-1:]) or 'its top'}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    flat.memo.keep(flat.used)
    if len(set(flat.names)) != len(flat.names):
        seen: set[str] = set()
        twice = next(name for name in flat.names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise StructureError(
            f"two entries of the state dict are both called {twice!r} once keys are joined by dots; rename one"
        )
    return flat


def _walk(flat: FlatState, path: ObjPath, name: str, value: Any) -> None:
    kind = type(value)
    if kind in TENSOR_TYPES:
        pass
    elif kind is dict or (isinstance(value, Mapping) and _walks_into(flat, name, value)):
        _walk_mapping(flat, path, name, value)
        return
    elif (kind is list or kind is tuple) and name not in flat.whole and (_has_parts(flat, value) or name in flat.apart):
        _walk_sequence(flat, path, name, value)
        return
    flat.names.append(name)
    flat.paths.append(path)
    flat.leaves.append(value)


def _walks_into(flat: FlatState, name: str, value: Mapping[Any, Any]) -> bool:
    if isinstance(value, _DICTS):
        return True
    return name not in flat.whole and (name in flat.apart or flat.seeker.finds(value))


def _walk_mapping(flat: FlatState, path: ObjPath, name: str, mapping: Mapping[Any, Any]) -> None:
    if type(mapping) is dict and mapping and _is_of_tensors(mapping):  # as an optimizer has for each parameter
        _add_tensors(flat, path, name, mapping)
        return
    before = len(flat.leaves)
    ordered = isinstance(mapping, OrderedDict)
    own = _kind_of(mapping)
    kinds = set(map(type, mapping))
    record: dict[str, JsonValue] = {}
    if not kinds <= {str}:
        record = _key_record(name or "the state dict", mapping, kinds)
    if record or own or not mapping:
        record |= {"path": list(path), "type": own or "dict", "at": before}
        factory = getattr(mapping, "default_factory", None) if own == "defaultdict" else None
        if factory is not None:
            record["factory"] = factory.__name__
        if ordered and (attribute := _module_metadata(mapping)) is not None:
            record["module_metadata"] = attribute
        flat.containers.append(record)
    if mapping and _is_of_tensors(mapping):
        _add_tensors(flat, path, name, mapping)
        return
    dot = name + "." if path else ""
    for key, value in mapping.items():
        text = str(key)
        _walk(flat, (*path, text), dot + text, value)


def _kind_of(mapping: Mapping[Any, Any]) -> str:
    """Return the name of a dict's type, as far as it is kept; '' for a plain dict or a type restored as one."""
    if isinstance(mapping, OrderedDict):
        return "OrderedDict"
    if type(mapping) is Counter:
        return "Counter"
    if type(mapping) is defaultdict and (mapping.default_factory in (None, *FACTORIES.values())):
        return "defaultdict"
    return ""


def _key_record(name: str, mapping: Mapping[Any, Any], kinds: set[type]) -> dict[str, JsonValue]:
    """Return the record of a dict's keys that are not text."""
    for key in mapping:
        if not is_key(key):
            raise StructureError(
                f"{name} has the key {_shown(key)} of type {type(key).__name__}; keys must be str, int, float, bool, "
                f"None or tuples of these, and numbers shorter than {MOST_BITS} bits"
            )
    texts = {str(key): key for key in mapping}
    if len(texts) != len(mapping):
        one, other = next((key, texts[str(key)]) for key in mapping if texts[str(key)] is not key)
        raise StructureError(f"{name} has the keys {_shown(one)} and {_shown(other)}, which have one name; rename one")
    record: dict[str, JsonValue] = {}
    if int in kinds:
        record["int_keys"] = True if len(kinds) == 1 else [str(key) for key in mapping if type(key) is int]
    if not kinds <= {str, int}:
        record["keys"] = {str(key): encode_key(key) for key in mapping if type(key) not in (str, int)}
    return record


def _shown(key: Any) -> str:
    try:
        return f"{key!r:.100}"
    except Exception:  # whatever its class raises, or a number of too many digits
        return "(which can't be shown)"


def _is_of_tensors(mapping: Mapping[Any, Any]) -> bool:
    return _TEXT.issuperset(map(type, mapping)) and TENSOR_TYPES.issuperset(map(type, mapping.values()))


def _add_tensors(flat: FlatState, path: ObjPath, name: str, mapping: Mapping[Any, Any]) -> None:
    """Add the leaves of a dict of tensors; names and paths are kept for the next save."""
    keys = list(mapping)
    known = flat.memo.find(path)
    if known is None or known[0] != keys:
        dot = name + "." if path else ""
        known = keys, [dot + key for key in keys], [(*path, key) for key in keys]
    flat.used[path] = known
    flat.names += known[1]
    flat.paths += known[2]
    flat.leaves += mapping.values()


def _walk_sequence(flat: FlatState, path: ObjPath, name: str, values: list[Any] | tuple[Any, ...]) -> None:
    before = len(flat.leaves)
    place = len(flat.containers)
    for i, value in enumerate(values):
        _walk(flat, (*path, i), f"{name}.{i}", value)
    if type(values) is tuple or len(flat.leaves) == before:
        record: dict[str, JsonValue] = {"path": list(path), "type": type(values).__name__, "at": before}
        # Whether a record is needed is known only now; it belongs before those of its parts.
        flat.containers.insert(place, record)


def _has_parts(flat: FlatState, values: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a sequence is flattened because it holds a tensor or a dict; otherwise it is one leaf."""
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor | dict) or is_taken_apart(value, flat.seeker):
            return True
        if (kind is list or kind is tuple) and _has_parts(flat, value):
            return True
    return False


def _module_metadata(mapping: Mapping[Any, Any]) -> JsonValue:
    """Return the versions that ``nn.Module.state_dict`` attaches and ``load_state_dict`` checks."""
    versions = getattr(mapping, "_metadata", None)
    if not isinstance(versions, Mapping):
        return None
    copy: dict[str, JsonValue] = {}
    for module, facts in versions.items():
        if type(module) is not str or type(facts) is not dict:
            return None
        if not all(type(k) is str and type(v) in (int, str, bool, float) for k, v in facts.items()):
            return None
        copy[module] = dict(facts)
    return copy


def unflatten(paths: Iterable[ObjPath], leaves: Iterable[Any], containers: Iterable[Mapping[str, Any]] = ()) -> Any:
    """Rebuild a state dict; without container records, as DCP does."""
    records = sorted(containers, key=lambda record: record["at"])
    pending = [record for record in records if record["type"] != ARRAY_RECORD]
    root: dict[str, Any] = {}
    done = 0
    for count, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        # Empty containers have no leaf: put in at their place among the leaves, they keep the order of the keys.
        while done < len(pending) and pending[done]["at"] <= count:
            _place_container(root, pending[done])
            done += 1
        _set(_container_of(root, path), path[-1], leaf)
    for record in pending[done:]:
        _place_container(root, record)
    return _finish(root, records)


def _container_of(root: dict[str, Any], path: ObjPath) -> Any:
    """Return the innermost container of ``path``; create those that are missing."""
    at: Any = root
    for part, following in pairwise(path):
        child = _get(at, part)
        if child is None:
            child = [] if isinstance(following, int) else {}
            _set(at, part, child)
        at = child
    return at


def _place_container(root: dict[str, Any], record: Mapping[str, Any]) -> None:
    path = tuple(record["path"])
    if path and _get(parent := _container_of(root, path), path[-1]) is None:
        _set(parent, path[-1], [] if record["type"] in ("tuple", "list") else {})


def _get(container: Any, part: str | int) -> Any:
    if isinstance(container, dict):
        return container.get(part)
    if isinstance(container, list) and isinstance(part, int):
        return container[part] if part < len(container) else None
    raise StructureError(f"{part!r} lies in something that is no container")


def _set(container: Any, part: str | int, value: Any) -> None:
    if isinstance(container, dict):
        container[part] = value
    elif isinstance(container, list) and isinstance(part, int):
        # A list is filled up with None to the position: a damaged path must not allocate all memory.
        if part > len(container) + 1_000_000:
            raise StructureError(f"list position {part} is too large")
        container.extend([None] * (part + 1 - len(container)))
        container[part] = value
    else:
        raise StructureError(f"{part!r} lies in something that is no container")


def _finish(root: dict[str, Any], records: list[Mapping[str, Any]]) -> Any:
    """Convert each recorded container, and array, to its recorded type, the deepest first."""
    for record in sorted(records, key=lambda record: -len(record["path"])):
        path = record["path"]
        if not path:
            return _typed(root, record)
        parent: Any = root
        for part in path[:-1]:
            parent = _get(parent, part)
        _set(parent, path[-1], _typed(_get(parent, path[-1]), record))
    return root


def _typed(container: Any, record: Mapping[str, Any]) -> Any:
    kind = record["type"]
    if kind == ARRAY_RECORD:
        return array_of(container)
    if kind in ("tuple", "list"):
        values = container if isinstance(container, list) else []
        return tuple(values) if kind == "tuple" else values
    if not isinstance(container, dict):
        raise StructureError(f"{record['path']} should be a dict")
    if "int_keys" in record or "keys" in record:
        container = _with_keys(container, record)
    if kind == "Counter":
        return Counter(container)
    if kind == "defaultdict":
        return defaultdict(FACTORIES[record["factory"]] if "factory" in record else None, container)
    if kind != "OrderedDict":
        return container
    ordered: OrderedDict[Any, Any] = OrderedDict(container)
    if "module_metadata" in record:
        ordered._metadata = OrderedDict(record["module_metadata"])  # type: ignore[attr-defined]
    return ordered


def _with_keys(container: dict[str, Any], record: Mapping[str, Any]) -> dict[Any, Any]:
    """Replace the texts of keys by the keys."""
    numbers, others = record.get("int_keys", ()), record.get("keys", {})
    every = numbers is True
    integers = () if every else frozenset(numbers)
    keys = [
        decode_key(others[text]) if text in others else int(text) if every or text in integers else text
        for text in container
    ]
    check_hashes(keys)
    typed = dict(zip(keys, container.values(), strict=True))
    if len(typed) != len(container):
        raise StructureError(f"{record['path']} has two keys that are equal")
    return typed


def replace_leaves(container: Any, values: Mapping[ObjPath, Any], path: ObjPath = (), *, check: bool = False) -> Any:
    """Put values, by the paths that `flatten` returns, into a state dict; return it, or the tuple that replaces it.

    Dicts and lists are changed in place; a tuple is rebuilt and replaced in its parent. With ``check`` nothing is
    changed.
    """
    parts = container.items() if isinstance(container, Mapping) else enumerate(container)
    fresh: dict[Any, Any] = {}
    for key, value in parts:
        here: ObjPath = (*path, str(key) if isinstance(container, Mapping) else key)
        if here in values:
            fresh[key] = values[here]
        elif isinstance(value, _DICTS) or type(value) in (list, tuple) or _is_above(here, value, values):
            part = replace_leaves(value, values, here, check=check)
            if part is not value:
                fresh[key] = part
    if isinstance(container, tuple):
        return tuple(fresh.get(i, value) for i, value in enumerate(container)) if fresh else container
    if fresh and not isinstance(container, MutableMapping | list):
        name = joined(path) or "the state dict"
        raise StructureError(f"{name} is a {type(container).__name__}, whose values can't be replaced")
    if isinstance(container, MutableMapping | list) and not check:
        for key, value in fresh.items():
            container[key] = value
    return container


def _is_above(path: ObjPath, value: Any, paths: Iterable[ObjPath]) -> bool:
    """Return whether a mapping was taken apart: it has no other values of interest, and may resolve them."""
    return isinstance(value, Mapping) and any(each[: len(path)] == path for each in paths)


# --- subtrees of a checkpoint -----------------------------------------------------------------------


class Subtrees:
    """The leaves and containers of a checkpoint, found by the name of a container around them.

    Names are joined by dots, whatever the path: a safetensors file has the key ``model.w`` where a state dict has
    ``{"model": {"w": ...}}``, and both are below ``model``.
    """

    def __init__(self, paths: Mapping[str, ObjPath], containers: Sequence[Mapping[str, Any]]) -> None:
        self._paths = paths
        self._containers = containers

    @lazy_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._paths)}

    @lazy_property
    def _names(self) -> list[str]:
        return sorted(self._paths)

    @lazy_property
    def _records(self) -> list[tuple[str, int]]:
        return sorted((joined(record["path"]), number) for number, record in enumerate(self._containers))

    @lazy_property
    def _record_names(self) -> list[str]:
        return [name for name, _ in self._records]

    def __contains__(self, name: object) -> bool:
        """Return whether there is a leaf below a name."""
        return isinstance(name, str) and bool(_ranges(self._names, name)[1])

    def holds(self, name: str) -> bool:
        """Return whether there is a leaf or a container at or below a name."""
        return not name or any(map(len, _ranges(self._names, name) + _ranges(self._record_names, name)))

    def below(self, name: str) -> list[str]:
        """Return the names of the leaves at or below a name, in their order; all of them for the empty name."""
        if not name:
            return list(self._paths)
        return sorted((self._names[at] for each in _ranges(self._names, name) for at in each), key=self._order.get)  # type: ignore[arg-type]

    def build(self, name: str, values: Mapping[str, Any]) -> Any:
        """Rebuild what is stored at or below a name: a recorded container, a leaf, or else an empty dict."""
        names = self.below(name)
        # Under one more key, because the result may be a list, or a leaf.
        paths: list[ObjPath] = [("", *_beyond(self._paths[each], name)) for each in names]
        orders = [self._order[each] for each in names]
        ranges = _ranges(self._record_names, name) if name else (range(len(self._records)),)
        records = [
            self._containers[number] for number in sorted(self._records[at][1] for each in ranges for at in each)
        ]
        containers: Any = [
            {**record, "path": ["", *_beyond(record["path"], name)], "at": bisect_left(orders, record["at"])}
            for record in records
        ]
        kept = [number for number, each in enumerate(names) if each in values]
        if len(kept) < len(names):
            containers = containers_within(containers, names, paths, values.keys())
        return unflatten([paths[n] for n in kept], [values[names[n]] for n in kept], containers).get("", {})


def _ranges(names: Sequence[str], name: str) -> tuple[range, range]:
    """Return the ranges of sorted names that equal a name, and that are below it."""
    at = bisect_left(names, name)
    # No character lies between the dot and the slash.
    return range(at, bisect_left(names, name + "\0", at)), range(
        bisect_left(names, name + ".", at), bisect_left(names, name + "/", at)
    )


def joined(path: Iterable[str | int]) -> str:
    """Return the name of a path."""
    return ".".join(map(str, path))


def _beyond(path: Sequence[str | int], name: str) -> ObjPath:
    """Return the rest of a path below the container of a name."""
    if not name:
        return tuple(path)
    length = -1
    for depth, part in enumerate(path):
        if length == len(name):
            return tuple(path[depth:])
        length += 1 + len(str(part))
    rest = joined(path)[len(name) + 1 :]
    return (rest,) if rest else ()
