"""Methods whose parameters are the fields of a dataclass: declared, typed and documented in one place."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_AFTER_ARGS = re.compile(r"^(Returns|Raises|Yields):", re.MULTILINE)


def parameters_of(request: Callable[P, R]) -> Callable[[Callable[[S, R], T]], Callable[Concatenate[S, P], T]]:
    """Call a method with one instance of a dataclass, which is built from the caller's arguments.

    Type checkers, `inspect.signature` and `help` show the fields of the dataclass as the method's parameters; those of
    its bases come last, as its own are what most callers need. The ``Attributes:`` of the dataclass and of its bases
    become the ``Args:`` of the method.
    """

    def decorate(method: Callable[[S, R], T]) -> Callable[Concatenate[S, P], T]:
        own, fields = inspect.signature(method), inspect.signature(request)
        self_parameter, _ = own.parameters.values()

        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                fields.bind(*args, **kwargs)
            except TypeError as exc:  # Python's own message would name the dataclass
                raise TypeError(f"{type(self).__name__}.{method.__name__}() {exc}") from None
            return method(self, request(*args, **kwargs))

        own_first = {
            name: at for at, kind in [*enumerate(_mro(request))][::-1] for name in inspect.get_annotations(kind)
        }
        ordered = sorted(fields.parameters.values(), key=lambda each: (each.kind, own_first[each.name]))
        parameters = [self_parameter, *ordered]
        call.__signature__ = fields.replace(parameters=parameters, return_annotation=own.return_annotation)  # type: ignore[attr-defined]
        call.__doc__ = _with_args(method.__doc__, request)
        if hasattr(inspect, "markcoroutinefunction") and str(own.return_annotation).startswith("Coroutine"):
            inspect.markcoroutinefunction(call)  # since Python 3.12
        return call

    return decorate


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
