"""Items in memory, of which parts are asked for again and again."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE_BYTES = 256 << 20
"""How much is kept of them; two are kept whatever their size."""


@dataclass(eq=False, slots=True)
class ExpansionBudget:
    """Bytes that several items draw on, each once, from any thread.

    Attributes:
        left: how many are left.
    """

    left: int
    _drawn: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, name: str, nbytes: int) -> bool:
        """Let an item have so many in all; tell whether there are as many. If not, it has none."""
        with self._lock:
            drawn = self._drawn.pop(name, 0)
            self.left += drawn
            if nbytes > self.left:
                return False
            self._drawn[name] = max(nbytes, drawn)
            self.left -= self._drawn[name]
            return True


@dataclass(eq=False, slots=True)
class DecodedCache:
    """Items that were made whole, the last used ones; each is made once, however many threads ask for it.

    Attributes:
        lengths: of all items that were ever made.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _items: dict[str, memoryview] = field(default_factory=dict)
    _making: dict[str, Future[memoryview]] = field(default_factory=dict)
    _closed: bool = False

    def has(self, name: str) -> bool:
        """Tell whether an item is kept, or being made."""
        return name in self._items or name in self._making

    def get(self, name: str, make: Callable[[], memoryview]) -> memoryview:
        """Give an item; make it if it is not kept."""
        with self._lock:
            data = self._items.pop(name, None)
            if data is not None:
                self._items[name] = data  # used last
                return data
            making = self._making.get(name)
            mine = making is None
            if making is None:
                making = self._making[name] = Future()
        if mine:
            self._make(name, make, making)
        return making.result()

    def _make(self, name: str, make: Callable[[], memoryview], making: Future[memoryview]) -> None:
        try:
            data = make()
        except BaseException as exc:  # for all who wait
            making.set_exception(exc)
        else:
            making.set_result(data)
        with self._lock:
            del self._making[name]
            if making.exception() is None and not self._closed:
                self.lengths[name] = len(data)
                self._items[name] = data
                while len(self._items) > 2 and sum(map(len, self._items.values())) > CACHE_BYTES:
                    del self._items[next(iter(self._items))]

    def clear(self) -> None:
        """Keep nothing, from now on."""
        with self._lock:
            self._closed = True
            self._items.clear()
