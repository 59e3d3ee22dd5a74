"""Futures that any thread and any asyncio loop can wait for, and calls on the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from aiockpt.core.threads import check_asyncio
from aiockpt.errors import AiockptError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from aiockpt.core.threads import Origin

logger = logging.getLogger("aiockpt")

T = TypeVar("T")


class Completion(Awaitable[T], Generic[T]):
    """A future that completes once, with a value or an error.

    Await it in any asyncio loop, as often as you like, or call `result` in any thread. Safe to cancel: cancelling a
    waiter, or closing its loop, affects neither other waiters nor the work::

        await save.staged
        save.written.result(timeout=60)

    A forked process can't wait for it, as it lacks the engine's threads. Nor can these threads themselves, and so the
    hooks that they run. If it has not completed, waiting there raises an error at once.
    """

    # Not a concurrent.futures.Future: that has no callbacks that can be removed, which a cancelled `await` needs, and
    # does not notice the first waiter.

    def __init__(self, what: str, origin: Origin | None = None, *, saves: bool = True) -> None:
        self._what = what  # for messages
        self._origin = origin  # the engine that completes it; None: everybody may wait
        self._saves = saves  # it completes when saves end
        self._condition = threading.Condition()
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._wakers: list[Any] = []  # of waiting loops
        self._waiting = 0
        self.observed = False  # the error was delivered
        self._on_block: Callable[[], object] | None = None  # called before a thread blocks
        self._on_await: Callable[[], object] | None = None  # called before a task waits
        self._on_observed: Callable[[], object] | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._done else f"failed: {self._error!r}" if self._error else "done"
        return f"<{self._what}: {state}>"

    @property
    def expected(self) -> bool:
        """Whether a waiter is waiting, or about to get the result."""
        return self._waiting > 0

    def done(self) -> bool:
        """Return whether it has completed."""
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Block until it completes; return its value or raise its error.

        Do not use it in the thread of an event loop, which it would block: await there.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: it has not completed in time. The work goes on.
            CheckpointerClosedError: it belongs to another process, from which this one was forked.
            SaveError: the caller is a hook of the same checkpointer, which can't wait for it.
        """
        self._block(timeout)
        return self._deliver()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until it completes; return its error, or None."""
        self._block(timeout)
        if self._error is not None:
            self._observe()
        return self._error

    def ended(self, timeout: float | None) -> None:
        """Block until it completes, without its value or error; raise TimeoutError if it does not in time."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"{self._what} has not come within {timeout} s")

    def _check(self) -> None:
        if self._origin is not None:
            self._origin.check(self._what, saves=self._saves)

    def _block(self, timeout: float | None) -> None:
        if self._done:
            return
        self._check()
        if self._on_block is not None:
            self._on_block()
        with self._condition:
            self._waiting += 1
            try:
                if not self._condition.wait_for(lambda: self._done, timeout):
                    raise TimeoutError(f"{self._what} has not come within {timeout} s; the work goes on")
            finally:
                self._waiting -= 1

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.settled().__await__()
        return self._deliver()

    async def settled(self) -> None:
        """Wait until it completes, without its value or error."""
        check_asyncio(self._what)
        if self._done:
            return
        self._check()
        if self._on_await is not None:
            self._on_await()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def arrive() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the waiter
                loop.call_soon_threadsafe(arrive)

        with self._condition:
            if self.done():
                return
            self._wakers.append(wake)
            self._waiting += 1
        try:
            await waiter
        finally:
            with self._condition:
                self._waiting -= 1
                if wake in self._wakers:
                    self._wakers.remove(wake)

    def _deliver(self) -> T:
        if self._error is not None:
            self._observe()
            raise self._error
        return self._value  # type: ignore[return-value]

    def _observe(self) -> None:
        self.observed = True
        if self._on_observed is not None:
            self._on_observed()

    def _settle(self, value: T | None, error: BaseException | None = None) -> bool:
        """Complete it; return False if it was complete before."""
        with self._condition:
            if self._done:
                return False
            self._value, self._error, self._done = value, error, True
            wakers, self._wakers = self._wakers, []
            self._condition.notify_all()
        for wake in wakers:
            try:
                wake()
            except Exception:  # of a loop of the caller's; waiters in other loops are woken all the same
                logger.exception("a loop that waits for %s can't be woken", self._what)
        return True


class Call(Generic[T]):
    """A coroutine function that runs on the engine's loop."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, T]], what: str, origin: Origin) -> None:
        self.completion: Completion[T] = Completion(what, origin, saves=False)
        self.post: Callable[[Callable[[], object], Any], object] = lambda *_: (
            None
        )  # calls one on the loop, for an owner
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._cancel_asked = False

    async def run(self) -> None:
        """Run it to its end, whatever that is."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancel_asked:
                    self._scope.cancel()
                self.completion._settle(await self._function())
        except asyncio.CancelledError as exc:  # not of its own scope: the engine ends
            self.fail(exc)
            raise
        except BaseException as exc:  # delivered to the waiter
            self.completion._settle(None, exc)
        self.completion._settle(None, asyncio.CancelledError("cancelled"))

    def fail(self, cause: BaseException) -> None:
        """Fail it, as the engine has failed to run or to stop it. From any thread."""
        error = AiockptError(f"{self.completion._what} failed with the engine: {cause!r}")
        error.__cause__ = cause
        self.completion._settle(None, error)

    async def wait(self, drop: Callable[[T], object] | None = None) -> T:
        """Return its result. If the waiter is cancelled, the call is stopped first; ``drop`` gets a late result."""
        try:
            return await self.completion
        except BaseException:
            if not self.completion.done():
                self.cancel()
            # Further cancellations are absorbed: the one that is being delivered stands for them.
            await self._over()
            self._drop(drop)
            raise

    async def stop(self) -> None:
        """Stop it and wait until it has stopped, whatever its outcome. A cancellation is raised afterwards."""
        if not self.completion.done():
            self.cancel()
        if await self._over():
            raise asyncio.CancelledError

    async def _over(self) -> bool:
        """Wait until it is over, however often this task is cancelled; return whether it was.

        The call's resources must not be freed before. A shielded scope is not enough: it lets cancellation by asyncio
        through.
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
        """Block for its result. If the caller is interrupted, as by Ctrl-C, the call is stopped first; see `wait`."""
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
        """Request it to stop. From any thread; does not block."""
        self.post(self._cancel, self)

    def _cancel(self) -> None:
        self._cancel_asked = True
        if self._scope is not None:
            self._scope.cancel()
