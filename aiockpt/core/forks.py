"""State of a module in a forked child, which lacks the parent's other threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")


class ModuleLock:
    """A lock that lives as long as the process. In a forked child it is free, whoever held it in the parent."""

    def __init__(self, make: Callable[[], threading.Lock | threading.RLock] = threading.Lock) -> None:
        self._make = make
        self._lock = make()
        os.register_at_fork(after_in_child=self._renew)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Blocks."""
        with self._lock:  # the same one at the end, even in a child that was forked in between
            yield

    def _renew(self) -> None:
        self._lock = self._make()


def called_in_children(function: Callable[[T], object]) -> WeakSet[T]:
    """Return a set of objects, for each of which a function is called in every forked child as long as it lives."""
    found: WeakSet[T] = WeakSet()

    def call() -> None:
        for each in list(found):
            function(each)

    os.register_at_fork(after_in_child=call)
    return found
