"""When staging may copy: a window that the caller sets, so that copies and training don't crowd each other.

What may be copied when is decided by `Budget`, which knows no clock and no loop; `Throttle` waits accordingly.
"""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.options import StagingWindow

logger = logging.getLogger("aiockpt")


class Budget:
    """What a window allows at a time; pure: times are given.

    An allowance may be overdrawn by one copy, never by more, and those after it wait until that is made up for.
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
        """Tell how long the next copy has to wait: 0 for not at all, infinity for until a window opens."""
        if self._window.bytes_per_window is not None and self._credit <= 0:
            return math.inf
        return max(0.0, self._free_at - now)

    def take(self, nbytes: int, now: float) -> None:
        """Use up so many bytes."""
        if self._window.bytes_per_window is not None:
            self._credit = max(self._credit, 0) - nbytes
        if self._window.bytes_per_s is not None:
            self._free_at = now + nbytes / self._window.bytes_per_s


class Throttle:
    """Lets copies go as a window allows, for all saves of an engine; waits in its loop.

    Args:
        window: what is allowed; None for everything.
        post: lets the engine's loop call a function, from any thread; never raises.
    """

    def __init__(self, window: StagingWindow | None, post: Callable[[Callable[[], object]], object]) -> None:
        self._budget = None if window is None else Budget(window)
        self._patience_s = math.inf if window is None else window.patience_s
        self._has_windows = window is not None and window.bytes_per_window is not None
        self._post = post
        self._numbers = itertools.count(1)
        self._hurried = 0
        self._news: anyio.Event | None = None
        self._opened_at = -math.inf

    def pace(self) -> SaveThrottle:
        """Give the next save its pace; saves are staged in this order."""
        return SaveThrottle(self, next(self._numbers))

    def open(self) -> None:
        """Open a window; from any thread. Does not wait."""
        if self._has_windows:
            self._post(self._open)

    def hurry(self, number: int) -> None:
        """Let a save, and those before it, go on without a pause; from any thread."""
        if self._budget is not None and number > self._hurried:
            self._post(partial(self._hurry, number))

    def wait_s(self, number: int) -> float:
        """Tell how long the next copy of a save would wait."""
        if self._budget is None or number <= self._hurried:
            return 0.0
        return self._budget.wait_s(anyio.current_time())

    async def admit(self, number: int, nbytes: int) -> None:
        """Wait until a save may copy so many bytes. Safe to cancel."""
        if self._budget is None:
            return
        begun = anyio.current_time()
        while wait_s := self.wait_s(number):
            if math.isinf(wait_s):  # a rate is kept whatever happens; windows may have been forgotten
                wait_s = max(begun, self._opened_at) + self._patience_s - anyio.current_time()
                if wait_s <= 0:
                    logger.warning("no window() for %s s: staging goes on without", self._patience_s)
                    self._hurry(number)
                    return
            if self._news is None:
                self._news = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._news.wait()
        if number > self._hurried:  # who is hurried leaves no debt to those that come after
            self._budget.take(nbytes, anyio.current_time())

    def _open(self) -> None:
        if self._budget is not None:
            self._budget.open()
        self._opened_at = anyio.current_time()
        self._wake()

    def _hurry(self, number: int) -> None:
        self._hurried = max(self._hurried, number)
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()


class SaveThrottle:
    """The pace of one save; without arguments, that of a save whose copies wait for nothing."""

    __slots__ = ("_number", "_pacing")

    def __init__(self, pacing: Throttle | None = None, number: int = 0) -> None:
        self._pacing = pacing
        self._number = number

    @property
    def is_held(self) -> bool:
        """Whether the next copy would wait."""
        return self._pacing is not None and self._pacing.wait_s(self._number) > 0

    async def admit(self, nbytes: int) -> None:
        """Wait until so many bytes may be copied. Safe to cancel."""
        if self._pacing is not None:
            await self._pacing.admit(self._number, nbytes)

    def hurry(self) -> None:
        """Let this save, and those before it, go on without a pause; from any thread."""
        if self._pacing is not None:
            self._pacing.hurry(self._number)
