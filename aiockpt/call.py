"""One call of a coroutine function on the engine's loop, waited for from anywhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from aiockpt.errors import AiockptError
from aiockpt.handle import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiockpt.threads import Origin

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine function that runs on the engine's loop.

    Attributes:
        completion: its end.
        post: lets the engine's loop call a function; never raises.
    """

    def __init__(self, function: Callable[[], Coroutine[Any, Any, T]], what: str, origin: Origin) -> None:
        self.completion: Completion[T] = Completion(what, origin, saves=False)
        self.post: Callable[[Callable[[], object]], object] = lambda _: None
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._cancel_asked = False

    async def run(self) -> None:
        """Run it; never raises."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancel_asked:
                    self._scope.cancel()
                self.completion._settle(await self._function())
        except asyncio.CancelledError as exc:  # not by its own scope: the engine ends
            self.fail(exc)
            raise
        except BaseException as exc:  # delivered to who waits
            self.completion._settle(None, exc)
        self.completion._settle(None, asyncio.CancelledError("cancelled"))

    def fail(self, cause: BaseException) -> None:
        """Tell who waits that it can't be run, or stopped, as the engine has failed in this; from any thread."""
        error = AiockptError(f"{self.completion._what} failed with the engine: {cause!r}")
        error.__cause__ = cause
        self.completion._settle(None, error)

    async def wait(self, drop: Callable[[T], object] | None = None) -> T:
        """Wait for its result; who is cancelled stops it, and goes on when it has stopped.

        Args:
            drop: is given the result if it came too late for who waits.
        """
        try:
            return await self.completion
        except BaseException:
            if not self.completion.done():
                self.cancel()
            # The cancellation that is being delivered already stands for those that come now.
            await self._over()
            self._drop(drop)
            raise

    async def stop(self) -> None:
        """Stop it, and wait until it has stopped, whatever its end; a cancellation comes through afterwards."""
        if not self.completion.done():
            self.cancel()
        if await self._over():
            raise asyncio.CancelledError

    async def _over(self) -> bool:
        """Wait until it is over, however often this task is cancelled; tell whether it was.

        What the call uses must not be given back before, and a shielded scope lets native cancellation through.
        """
        cancelled = False
        while not self.completion.done():
            try:
                with anyio.CancelScope(shield=True):
                    await self.completion.settled()
            except asyncio.CancelledError:
                cancelled = True
        return cancelled

    def result(self, drop: Callable[[T], object] | None = None) -> T:
        """Block until it has ended; who is interrupted, by Ctrl-C above all, stops it, and goes on when it has stopped.

        Args:
            drop: see `wait`.
        """
        try:
            return self.completion.result()
        except BaseException:
            if not self.completion.done():
                self.cancel()
                self.completion.exception()
            self._drop(drop)
            raise

    def _drop(self, drop: Callable[[T], object] | None) -> None:
        if drop is not None and self.completion._error is None and self.completion._value is not None:
            drop(self.completion._value)

    def cancel(self) -> None:
        """Ask it to stop. From any thread; does not block."""
        self.post(self._cancel)

    def _cancel(self) -> None:
        self._cancel_asked = True
        if self._scope is not None:
            self._scope.cancel()
