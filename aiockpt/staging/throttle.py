"""Throttles staging by the caller's `StagingWindow`, so that copies and training don't compete for bandwidth.

`Budget` decides what may be copied when, without a clock or a loop; `Throttle` waits accordingly.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from aiockpt.options import StagingWindow

logger = logging.getLogger("aiockpt")


class Budget:
    """The bytes that a window allows, as a function of time.

    One copy may overdraw the allowance. Later copies wait until the debt is paid.
    """

    def __init__(self, window: StagingWindow) -> None:
        self._window = window
        self._free_at = -math.inf
        self._credit = 0

    def open(self) -> None:
        """Allow the bytes of one more window."""
        allowed = self._window.bytes_per_window
        if allowed is not None:
            self._credit = min(allowed, self._credit + allowed)

    def wait_s(self, now: float) -> float:
        """Return how long the next copy has to wait; infinity: until a window opens."""
        if self._window.bytes_per_window is not None and self._credit <= 0:
            return math.inf
        return max(0.0, self._free_at - now)

    def take(self, nbytes: int, now: float) -> None:
        """Spend bytes of the allowance."""
        if self._window.bytes_per_window is not None:
            self._credit = max(self._credit, 0) - nbytes
        if self._window.bytes_per_s is not None:
            self._free_at = now + nbytes / self._window.bytes_per_s


class Throttle:
    """Delays the copies of all saves of an engine, as a window requires.

    ``post`` schedules a function on the engine's loop from any thread, and never raises.
    """

    def __init__(self, window: StagingWindow, post: Callable[[Callable[[], object]], object]) -> None:
        self._budget = Budget(window)
        self._patience_s = window.patience_s
        self._post = post
        self._numbers = itertools.count(1)
        self._unthrottled = 0  # the number of the last save that is no longer delayed
        self._changed: anyio.Event | None = None
        self._opened_at = -math.inf

    def for_next_save(self) -> SaveThrottle:
        """Return the throttle of the next save; saves are staged in this order."""
        return SaveThrottle(self, next(self._numbers))

    def open(self) -> None:
        """Open a window. Thread-safe; does not wait."""
        self._post(self._open)

    def unthrottle(self, number: int) -> None:
        """Stop delaying a save and those before it. Thread-safe."""
        if number > self._unthrottled:
            self._post(partial(self._unthrottle, number))

    def wait_s(self, number: int) -> float:
        """Return how long the next copy of a save would wait."""
        if number <= self._unthrottled:
            return 0.0
        return self._budget.wait_s(anyio.current_time())

    async def acquire(self, number: int, nbytes: int) -> None:
        """Wait until a save may copy ``nbytes``. Safe to cancel."""
        begun = anyio.current_time()
        while wait_s := self.wait_s(number):
            if math.isinf(wait_s):  # the program may have stopped calling window(), as at the end of its training
                wait_s = max(begun, self._opened_at) + self._patience_s - anyio.current_time()
                if wait_s <= 0:
                    logger.warning("no window() for %s s: staging goes on without", self._patience_s)
                    self._unthrottle(number)
                    return
            if self._changed is None:
                self._changed = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._changed.wait()
        if number > self._unthrottled:  # an unthrottled save leaves no debt to later ones
            self._budget.take(nbytes, anyio.current_time())

    def _open(self) -> None:
        self._budget.open()
        self._opened_at = anyio.current_time()
        self._wake()

    def _unthrottle(self, number: int) -> None:
        self._unthrottled = max(self._unthrottled, number)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()


class SaveThrottle:
    """The throttle of one save; without arguments, it never delays a copy."""

    __slots__ = ("_number", "_throttle")

    def __init__(self, throttle: Throttle | None = None, number: int = 0) -> None:
        self._throttle = throttle
        self._number = number

    @property
    def is_held(self) -> bool:
        """Whether the next copy would wait."""
        return self._throttle is not None and self._throttle.wait_s(self._number) > 0

    async def acquire(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be copied. Safe to cancel."""
        if self._throttle is not None:
            await self._throttle.acquire(self._number, nbytes)

    def unthrottle(self) -> None:
        """Stop delaying this save and those before it. Thread-safe."""
        if self._throttle is not None:
            self._throttle.unthrottle(self._number)
