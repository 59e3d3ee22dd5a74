"""Objects that are stored as pickle stores them, in states where they would be replaced by their state dicts."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

_CONTAINERS: tuple[type[Any], ...] = (dict, OrderedDict, defaultdict)
_KEYS = (str, int, float, bool, type(None))
_PLAIN = (*_KEYS, bytes, complex)


class _Whole:
    """Is pickled as the value that it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self.value,)


def _itself(value: Any) -> Any:
    return value


def with_whole_objects(value: Any) -> Any:
    """Return a value with the same contents, to be saved as a file of ``torch.save``, which it then equals.

    Modules and all other objects are pickled whole at the call, with their tensors, and so are dicts with keys that are
    neither text nor numbers. Tensors elsewhere are still copied beside training.
    """
    kind = type(value)
    if kind in _CONTAINERS and all(type(key) in _KEYS for key in value):
        items = {key: with_whole_objects(part) for key, part in value.items()}
        if all(items[key] is part for key, part in value.items()):
            return value
        return _Whole(value) if kind is defaultdict else kind(items)
    if kind is list or kind is tuple:
        parts = [with_whole_objects(part) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else kind(parts)
    return value if kind in _PLAIN or isinstance(value, torch.Tensor) else _Whole(value)
