"""State dicts as flat lists of leaves, and back again without loss.

Leaves get the names and paths that torch's DCP gives them: keys joined by dots, every key as text, list
positions as numbers. Unlike DCP, tuples that hold tensors are taken apart as well, and what DCP's paths
can't express (key types, tuples, ordered dicts, empty containers) is kept in container records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest import JsonValue

NameMemo = dict["ObjPath", tuple[list[str], list[str], "list[ObjPath]"]]
"""For the path of a dict its keys, and the names and paths that they give."""

_MEMO_KEYS = 1000
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class StructureError(ValueError):
    """A state dict has a structure that can't be saved; the message names the key."""


@dataclass(slots=True)
class FlatState:
    """A state dict taken apart.

    Attributes:
        names: the fully qualified name of each leaf.
        paths: the path of each leaf.
        leaves: the leaves themselves, in the order of the state dict.
        containers: JSON-able records of the containers that names and paths can't express.
        whole: see `flatten`.
        memo: see `flatten`.
    """

    names: list[str] = field(default_factory=list)
    paths: list[ObjPath] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    containers: list[dict[str, JsonValue]] = field(default_factory=list)
    whole: Container[str] = ()
    memo: NameMemo = field(default_factory=dict)


def flatten(state_dict: Mapping[Any, Any], *, whole: Container[str] = (), memo: NameMemo | None = None) -> FlatState:
    """Take a state dict apart.

    Args:
        state_dict: what to take apart; it is not changed.
        whole: names of sequences that stay one leaf, for DCP keeps tuples of tensors so.
        memo: names and paths of the large dicts of tensors that were seen before; is added to.

    Raises:
        StructureError: a key that is neither str nor int, two leaves with one name, or a container that
            holds itself.
    """
    if not isinstance(state_dict, Mapping):
        raise StructureError(
            f"the state must be a dict of names to values, not a {type(state_dict).__name__}; "
            "wrap it, for example in {'state': ...}"
        )
    flat = FlatState(whole=whole, memo={} if memo is None else memo)
    try:
        _walk_mapping(flat, (), "", state_dict)
    except RecursionError:
        raise StructureError(
            f"the state dict is nested too deeply, or holds itself, near {'.'.join(flat.names[-1:]) or 'its top'}"
        ) from None
    if len(set(flat.names)) != len(flat.names):
        seen: set[str] = set()
        twice = next(name for name in flat.names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise StructureError(
            f"two entries of the state dict are both called {twice!r} once keys are joined by dots; rename one"
        )
    return flat


def _walk(flat: FlatState, path: ObjPath, name: str, value: Any) -> None:
    kind = type(value)
    if kind in _TENSORS:
        pass
    elif isinstance(value, Mapping):
        _walk_mapping(flat, path, name, value)
        return
    elif (kind is list or kind is tuple) and name not in flat.whole and _has_parts(value):
        _walk_sequence(flat, path, name, value)
        return
    flat.names.append(name)
    flat.paths.append(path)
    flat.leaves.append(value)


def _walk_mapping(flat: FlatState, path: ObjPath, name: str, mapping: Mapping[Any, Any]) -> None:
    before = len(flat.leaves)
    ordered = isinstance(mapping, OrderedDict)
    kinds = set(map(type, mapping))
    record: dict[str, JsonValue] = {}
    if not kinds <= {str}:
        if not kinds <= {str, int}:
            key = next(key for key in mapping if type(key) not in (str, int))
            raise StructureError(
                f"{name or 'the state dict'} has the key {key!r} of type {type(key).__name__}; keys must be str or int"
            )
        if len(set(map(str, mapping))) != len(mapping):
            raise StructureError(f"{name or 'the state dict'} has a number and its text both as keys; rename one")
        integers: JsonValue = [str(key) for key in mapping if type(key) is int]
        record["int_keys"] = True if len(kinds) == 1 else integers
    if record or ordered or not mapping:
        record |= {"path": list(path), "type": "OrderedDict" if ordered else "dict", "at": before}
        if ordered and (attribute := _module_metadata(mapping)) is not None:
            record["module_metadata"] = attribute
        flat.containers.append(record)
    dot = name + "." if path else ""
    if set(map(type, mapping.values())) <= _TENSORS and len(kinds) == 1 and str in kinds:
        names, paths = _names_of(flat.memo, path, dot, list(mapping))
        flat.names += names
        flat.paths += paths
        flat.leaves += mapping.values()
        return
    for key, value in mapping.items():
        text = str(key)
        _walk(flat, (*path, text), dot + text, value)


def _names_of(memo: NameMemo, path: ObjPath, dot: str, keys: list[str]) -> tuple[list[str], list[ObjPath]]:
    """Give names and paths of the leaves of a dict; those of a large one are kept for the next time."""
    known = memo.get(path)
    if known is not None and known[0] == keys:
        return known[1], known[2]
    names, paths = [dot + key for key in keys], [(*path, key) for key in keys]
    if len(keys) >= _MEMO_KEYS:
        memo[path] = (keys, names, paths)
    return names, paths


def _walk_sequence(flat: FlatState, path: ObjPath, name: str, values: list[Any] | tuple[Any, ...]) -> None:
    before = len(flat.leaves)
    place = len(flat.containers)
    for i, value in enumerate(values):
        _walk(flat, (*path, i), f"{name}.{i}", value)
    if type(values) is tuple or len(flat.leaves) == before:
        record: dict[str, JsonValue] = {"path": list(path), "type": type(values).__name__, "at": before}
        flat.containers.insert(place, record)


def _has_parts(values: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether a sequence is taken apart: it holds a tensor or a dict. Else it is one leaf."""
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor | Mapping):
            return True
        if (kind is list or kind is tuple) and _has_parts(value):
            return True
    return False


def _module_metadata(mapping: Mapping[Any, Any]) -> JsonValue:
    """Give the versions that ``nn.Module.state_dict`` attaches, which ``load_state_dict`` looks at."""
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
    """Put a state dict together again; without container records, as DCP does.

    Raises:
        StructureError: two paths contradict each other.
    """
    pending = sorted(containers, key=lambda record: record["at"])
    root: dict[str, Any] = {}
    done = 0
    for count, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        while done < len(pending) and pending[done]["at"] <= count:
            _place_container(root, pending[done])
            done += 1
        _set(_container_of(root, path), path[-1], leaf)
    for record in pending[done:]:
        _place_container(root, record)
    return _finish(root, pending)


def _container_of(root: dict[str, Any], path: ObjPath) -> Any:
    """Make the containers along ``path`` as far as they are missing; give the last."""
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
        if part > len(container) + 1_000_000:
            raise StructureError(f"list position {part} is absurd")
        container.extend([None] * (part + 1 - len(container)))
        container[part] = value
    else:
        raise StructureError(f"{part!r} lies in something that is no container")


def _finish(root: dict[str, Any], records: list[Mapping[str, Any]]) -> Any:
    """Give each recorded container its own type, the deepest first."""
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
    if kind in ("tuple", "list"):
        values = container if isinstance(container, list) else []
        return tuple(values) if kind == "tuple" else values
    if not isinstance(container, dict):
        raise StructureError(f"{record['path']} should be a dict")
    integers = record.get("int_keys", ())
    if integers is True:
        container = {int(key): value for key, value in container.items()}
    elif integers:
        container = {int(key) if key in integers else key: value for key, value in container.items()}
    if kind != "OrderedDict":
        return container
    ordered: OrderedDict[Any, Any] = OrderedDict(container)
    if "module_metadata" in record:
        ordered._metadata = OrderedDict(record["module_metadata"])  # type: ignore[attr-defined]
    return ordered


def replace_leaves(container: Any, values: Mapping[ObjPath, Any], path: ObjPath = (), *, check: bool = False) -> Any:
    """Put values in their places of a state dict.

    Dicts and lists are changed in place; a tuple is made anew, and put in its place.

    Args:
        container: the state dict, or a part of it.
        values: what to put at which path, as `flatten` gives them.
        path: where ``container`` is.
        check: change nothing, only look whether it could be done.

    Returns:
        ``container``, or the tuple that takes its place.

    Raises:
        StructureError: a value is in a mapping that can't be changed.
    """
    parts = container.items() if isinstance(container, Mapping) else enumerate(container)
    fresh: dict[Any, Any] = {}
    for key, value in parts:
        here: ObjPath = (*path, str(key) if isinstance(container, Mapping) else key)
        if here in values:
            fresh[key] = values[here]
        elif isinstance(value, Mapping) or type(value) in (list, tuple):
            part = replace_leaves(value, values, here, check=check)
            if part is not value:
                fresh[key] = part
    if isinstance(container, tuple):
        return tuple(fresh.get(i, value) for i, value in enumerate(container)) if fresh else container
    if fresh and not isinstance(container, MutableMapping | list):
        name = ".".join(map(str, path)) or "the state dict"
        raise StructureError(f"{name} is a {type(container).__name__}, whose values can't be replaced")
    if isinstance(container, MutableMapping | list) and not check:
        for key, value in fresh.items():
            container[key] = value
    return container
