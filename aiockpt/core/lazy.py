"""Properties that are computed once, and imports at the first use of what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar, overload

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import AiockptError

# --- imports at the first use -------------------------------------------------------------------------


@contextmanager
def importing() -> Iterator[None]:
    """Import in this context, in the caller's thread.

    A process that is forked while another thread imports would hang at its own next import.

    Raises:
        AiockptError: a file can't be opened, such as for lack of descriptors. A later call tries again.
    """
    try:
        with gc_pause():  # what is imported is no garbage: a collection would walk all of torch, and find nothing
            yield
    except (OSError, ImportError) as exc:
        raise AiockptError(
            f"the code for this call can't be imported: {exc}. Close files, or raise the limits (see ulimit), and call "
            "again"
        ) from exc


# --- properties ---------------------------------------------------------------------------------------


T = TypeVar("T")


class lazy_property(Generic[T]):
    """A property that is computed at its first access, and then is an attribute.

    Unlike `functools.cached_property` in Python 3.11 it has no lock: that one is shared by all instances, and in a
    child of a fork it may be held forever. Two threads may both compute it; the results must be equal.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        """Compute the value, and keep it in the instance, where it is found from then on."""
        if instance is None:
            return self
        return instance.__dict__.setdefault(self._name, self._function(instance))  # type: ignore[no-any-return]
