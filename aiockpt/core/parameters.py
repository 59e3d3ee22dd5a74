"""Methods whose parameters are the fields of a dataclass: declared, typed and documented in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_signature = functools.cache(inspect.signature)
_AFTER_ARGS = re.compile(r"^(Returns|Raises|Yields):", re.MULTILINE)


def parameters_of(request: Callable[P, R]) -> Callable[[Callable[[S, R], T]], Callable[Concatenate[S, P], T]]:
    """Call a method with one instance of a dataclass, which is built from the caller's arguments.

    Type checkers, `inspect.signature` and `help` show the fields of the dataclass as the method's parameters; those of
    its bases come last, as its own are what most callers need. The ``Attributes:`` of the dataclass and of its bases
    become the ``Args:`` of the method. Its ``gone`` are names of options that it had once, with what to do instead. Its
    ``renamed`` takes the keywords, and returns them with former names that still work replaced.
    """

    def decorate(method: Callable[[S, R], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return method(self, _bound(request, f"{type(self).__name__}.{method.__name__}", *args, **kwargs))

        _describe(call, method, request)
        return call

    return decorate


def arguments_of(request: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Call a function with one instance of a dataclass, as `parameters_of` does for methods."""

    def decorate(function: Callable[[R], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return function(_bound(request, function.__name__, *args, **kwargs))

        _describe(call, function, request)
        return call

    return decorate


def _bound(request: Callable[P, R], name: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the instance of the dataclass; errors name the function."""
    given = getattr(request, "renamed", dict)(kwargs)
    try:
        _signature(request).bind(*args, **given)
    except TypeError as exc:  # Python's own message would name the dataclass
        from difflib import get_close_matches

        known = _signature(request).parameters
        meant = [like for each in given if each not in known for like in get_close_matches(each, known, 1)]
        hints = [f": {text}" for each, text in getattr(request, "gone", {}).items() if each in given]
        hints += [f". Did you mean {like!r}?" for like in meant]
        raise TypeError(f"{name}() {exc}{hints[0] if hints else ''}") from None
    made = request(*args, **given)
    for flag in _flags(request):
        if (value := getattr(made, flag)) not in (True, False):  # a text such as "no" would count as true
            raise TypeError(f"{name}() {flag} must be True or False, not {value!r}")
    return made


@functools.cache
def _flags(request: Any) -> tuple[str, ...]:
    """Return the names of the fields that are True or False."""
    return tuple(each.name for each in dataclasses.fields(request) if each.type in (bool, "bool"))


def _describe(call: Any, own: Callable[..., object], request: Callable[..., object]) -> None:
    """Show the fields of the dataclass as parameters of ``call``, which stands for ``own``."""
    signature, fields = inspect.signature(own), _signature(request)
    own_first = {name: at for at, kind in [*enumerate(_mro(request))][::-1] for name in inspect.get_annotations(kind)}
    ordered = sorted(fields.parameters.values(), key=lambda each: (each.kind, own_first[each.name]))
    parameters = [*list(signature.parameters.values())[:-1], *ordered]
    call.__signature__ = fields.replace(parameters=parameters, return_annotation=signature.return_annotation)
    call.__doc__ = _with_args(own.__doc__, request)
    if hasattr(inspect, "markcoroutinefunction") and str(signature.return_annotation).startswith("Coroutine"):
        inspect.markcoroutinefunction(call)  # since Python 3.12


def _with_args(doc: str | None, request: object) -> str | None:
    """Return a docstring with an ``Args:`` section that is made of the attributes of a dataclass."""
    if doc is None:  # python -OO
        return None
    doc = inspect.cleandoc(doc)
    docs = [inspect.cleandoc(kind.__doc__ or "") for kind in _mro(request)]
    attributes = "\n".join(text.partition("Attributes:\n")[2].rstrip() for text in docs if "Attributes:\n" in text)
    args = f"Args:\n{attributes}"
    after = _AFTER_ARGS.search(doc)
    return f"{doc}\n\n{args}\n" if after is None else f"{doc[: after.start()]}{args}\n\n{doc[after.start() :]}"


def _mro(request: object) -> tuple[type, ...]:
    return request.__mro__ if isinstance(request, type) else ()


def outer_stacklevel() -> int:
    """Return the stack level, as seen by the caller, of the first frame outside this package; for `warnings.warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "aiockpt":
        level, frame = level + 1, frame.f_back
    return level
