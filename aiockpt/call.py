"""One call of a coroutine function on the engine's loop, waited for from anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from aiockpt.handle import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine function that runs on the engine's loop.

    Attributes:
        completion: its end.
        post: lets the engine's loop call a function.
    """

    def __init__(self, function: Callable[[], Coroutine[Any, Any, T]], what: str) -> None:
        self.completion: Completion[T] = Completion(what)
        self.post: Callable[[Callable[[], None]], object] = lambda _: None
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._cancel_asked = False

    async def run(self) -> None:
        """Run it; never raises."""
        with anyio.CancelScope() as self._scope:
            if self._cancel_asked:
                self._scope.cancel()
            try:
                self.completion._settle(await self._function())
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as exc:  # delivered to who waits
                self.completion._settle(None, exc)
        self.completion._settle(None, asyncio.CancelledError("cancelled"))

    async def wait(self) -> T:
        """Wait for its result; who is cancelled stops it, and goes on when it has stopped."""
        try:
            return await self.completion
        finally:
            if not self.completion.done():
                self.cancel()
                with anyio.CancelScope(shield=True):
                    await self.completion.settled()

    def result(self) -> T:
        """Block until it has ended; who is interrupted, by Ctrl-C above all, stops it."""
        try:
            return self.completion.result()
        finally:
            if not self.completion.done():
                self.cancel()

    def cancel(self) -> None:
        """Ask it to stop. From any thread; does not block."""
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the call over
            self.post(self._cancel)

    def _cancel(self) -> None:
        self._cancel_asked = True
        if self._scope is not None:
            self._scope.cancel()
