"""Dataclasses that cost the first save of a process little: of the functions of each, only ``__init__`` is compiled.

The standard library compiles six, and takes 0.6 ms, for more than a hundred. What users see are its own dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, asdict, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["KW_ONLY", "InitVar", "asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: Any = None, /, *, frozen: bool = False, eq: bool = True, repr: bool = True, **rest: Any) -> Any:
        """Make a dataclass; only type checkers refuse assignments to the fields of a frozen one."""
        if cls is None:
            return partial(dataclass, frozen=frozen, eq=eq, repr=repr, **rest)
        cls.__doc__ = cls.__doc__ or cls.__name__  # else its signature would be computed
        own = {*vars(cls)}
        made = dataclasses.dataclass(cls, eq=False, repr=False, **rest)
        if repr and "__repr__" not in own:
            made.__repr__ = _repr
        if eq and "__eq__" not in own:
            values = _values_of([each.name for each in fields(made) if each.compare])
            made.__eq__ = lambda a, b: values(a) == values(b) if type(a) is type(b) else NotImplemented
            if "__hash__" not in own:
                made.__hash__ = (lambda self: hash(values(self))) if frozen else None
        return made


def _values_of(names: list[str]) -> Callable[[object], Any]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


@recursive_repr()
def _repr(self: Any) -> str:
    values = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr]
    return f"{type(self).__qualname__}({', '.join(values)})"
