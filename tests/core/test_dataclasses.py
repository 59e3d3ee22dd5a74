"""Dataclasses whose functions are not compiled behave like those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aiockpt.core import dataclasses as ours

OPTIONS = [
    {},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "kw_only": True},
    {"slots": True, "eq": False},
    {"eq": False, "repr": False},
]


def kinds(decorator: Callable[..., Any], options: dict[str, Any], name: str = "Kind") -> tuple[Any, Any, Any]:
    """Return a class of three fields, one derived from it, and one with functions of its own."""
    base = decorator(**options)(
        type(
            name,
            (),
            {
                "__annotations__": {"a": int, "b": str, "c": object},
                "b": "x",
                "c": dataclasses.field(default=None, repr=False, compare=False),
            },
        )
    )
    derived = decorator(**options)(type("Derived", (base,), {"__annotations__": {"d": int}, "d": 4}))
    functions = {"__eq__": lambda self, other: True, "__repr__": lambda self: "own", "__hash__": lambda self: 7}
    return base, derived, decorator(**options)(type("Own", (), {"__annotations__": {"a": int}, **functions}))


def facts(base: Any, derived: Any, own: Any) -> list[object]:
    one, same, other = base(a=1), base(a=1, c=5), base(a=2)
    plain = type("Plain", (base,), {})
    changed = dataclasses.replace(derived(a=1), d=5)
    return [
        one == same, one == other, one == derived(a=1), derived(a=1) == one, changed == derived(a=1, d=5), one == 3,
        plain(a=1) == plain(a=1), plain(a=1) == one,
        base.__hash__ is None, own(a=1) == 3, hash(own(a=1)),
        repr(own(a=1)), dataclasses.astuple(changed), copy.copy(one) == one, base.__match_args__,
        [each.name for each in dataclasses.fields(derived)], derived.__slots__ if "__slots__" in vars(derived) else (),
    ]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_behave_like_those_of_the_standard_library(options: dict[str, Any]) -> None:
    mine, stock = kinds(ours.dataclass, options), kinds(dataclasses.dataclass, options)
    assert facts(*mine) == facts(*stock)
    if options.get("repr", True):
        assert [repr(kind(a=1)) for kind in mine] == [repr(kind(a=1)) for kind in stock]
    if options.get("frozen"):
        assert len({mine[0](a=1), mine[0](a=1), mine[0](a=2), mine[1](a=1)}) == 3


@ours.dataclass(frozen=True, slots=True)
class Sent:
    number: int
    inner: Sent | None = None


@ours.dataclass(frozen=True)
class Empty:
    pass


def test_they_can_be_sent_to_other_processes() -> None:
    value = Sent(1, Sent(2))
    assert pickle.loads(pickle.dumps(value)) == value


def test_without_fields_and_with_a_reference_to_itself() -> None:
    assert Empty() == Empty()
    assert hash(Empty()) == hash(Empty())
    assert repr(Empty()) == "Empty()"
    value = Sent(1)
    object.__setattr__(value, "inner", value)
    assert repr(value) == "Sent(number=1, inner=...)"
