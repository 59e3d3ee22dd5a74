"""Futures that any thread and any asyncio loop can wait for, and calls on the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import FINISHED
from typing import Any, Generic, Protocol, TypeVar

import anyio

from aiockpt.core.threads import Origin, check_asyncio, outlast
from aiockpt.errors import AiockptError, ungrouped

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_WAIT_S = 1.0
"""Longest single wait for a lock: Python may notice a signal only after it."""


class Listener(Protocol):
    """The work behind a future, which may go on in another way when somebody waits for it."""

    def on_wait(self, future: Completion[Any], *, blocks: bool) -> None:
        """Note that a task or a thread is about to wait; ``blocks``: a thread."""

    def on_delivery(self) -> None:
        """Note that a caller gets the error."""


class Completion(Future[T]):
    """A future that completes once, with a value or an error: a `concurrent.futures.Future` that can be awaited too.

    Await it in any asyncio loop, as often as you like, call `result` in any thread, or pass it to what takes such
    futures, as `concurrent.futures.wait`, `concurrent.futures.as_completed` and `asyncio.wrap_future`. Safe to cancel:
    cancelling a waiter, or closing its loop, affects neither other waiters nor the work::

        await save.staged
        save.written.result(timeout=60)
        save.written.add_done_callback(lambda written: print(written.exception()))

    An error is delivered when `result` or an ``await`` raises it, `exception` returns it, or `asyncio.wrap_future` has
    copied it. `concurrent.futures.wait`, `as_completed`, and callbacks that do not ask for it, do not deliver it.

    A forked process can't wait for it, as it lacks the engine's threads. Nor can these threads themselves, and so the
    hooks that they run. If it has not completed, waiting there raises an error at once.
    """

    _done_callbacks: list[Callable[[Future[T]], object]]

    def __init__(
        self, what: str, origin: Origin | None = None, *, saves: bool = True, listener: Listener | None = None
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # so that it can't be cancelled
        self._what = what  # for messages
        self._origin = origin  # the engine that completes it; None: any thread may wait
        self._saves = saves  # it completes when saves end
        self._listener = listener
        self._loop_waiters: list[asyncio.Future[None]] = []  # unlike done callbacks, they can be removed
        self._waiting = 0
        self._blocked: list[tuple[threading.Lock, bool]] = []  # of threads that wait, and whether they get the result
        self.observed = False  # the error was delivered

    def __repr__(self) -> str:
        state = "pending" if not self.done() else f"failed: {self._exception!r}" if self._exception else "done"
        return f"<{self._what}: {state}>"

    @property
    def expected(self) -> bool:
        """Whether a waiter is waiting, or about to get the result."""
        return self._waiting > 0 or any(delivers for _, delivers in list(self._blocked))

    # The next three take no lock: in a forked process, it may stay locked for ever.

    def done(self) -> bool:
        """Return whether it has completed."""
        return self._state == FINISHED

    def running(self) -> bool:
        """Return whether it has not completed, also if the work waits for its turn."""
        return not self.done()

    def cancelled(self) -> bool:
        """Return False: a cancelled save completes with `SaveCancelledError`."""
        return False

    def cancel(self) -> bool:
        """Return False, and cancel nothing: `SaveHandle.cancel` cancels a save."""
        return False

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
        if self._exception is not None:
            self._observe()
        return self._exception

    def set_exception(self, exception: BaseException | None) -> None:
        """Complete it with an error, of which the waiters get nothing of the groups that task groups raise."""
        super().set_exception(None if exception is None else ungrouped(exception))

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function with this future when it has completed; if it has, at once and in this thread.

        The callbacks of a future are called in the order of this call, in a thread of their own, where they may block:
        neither saves nor closing wait for them, only the end of the process does; if no thread can be had, in the one
        that completes the future. Their exceptions are logged.

        Raises:
            CheckpointerClosedError: it belongs to another process, from which this one was forked.
        """
        if self.done():  # without the lock, which may stay locked for ever in a forked process
            try:
                fn(self)
            except Exception:
                logger.exception("a callback of %s has failed", self._what)
            return
        if self._origin is not None:
            self._origin.check_process()
        if self._listener is not None:
            self._listener.on_wait(self, blocks=False)
        super().add_done_callback(fn)

    def ended(self, timeout: float | None) -> None:
        """Block until it completes, without its value or error; raise TimeoutError if it does not in time."""
        if not self._wait_done(timeout, delivers=False):
            raise TimeoutError(f"{self._what} did not complete within {timeout} s")

    def check_waiter(self) -> None:
        """Raise an error if this thread, or what it starts, can't wait for it."""
        if self._origin is not None and not self.done():
            self._origin.check(self._what, saves=self._saves)

    def _begin_to_wait(self, *, blocks: bool) -> bool:
        """Return whether there is anything to wait for; raise an error if this thread can't."""
        if self.done():
            return False
        self.check_waiter()
        if self._listener is not None:
            self._listener.on_wait(self, blocks=blocks)
        return True

    def _block(self, timeout: float | None) -> None:
        if not self._begin_to_wait(blocks=True):
            return
        if not self._wait_done(timeout, delivers=True):
            raise TimeoutError(f"{self._what} did not complete within {timeout} s; the work goes on")

    def _wait_done(self, timeout: float | None, *, delivers: bool) -> bool:
        # Not with the condition: the thread that completes this future needs it, while a signal's handler in this one
        # may wait for a later one. In short waits: a signal that another thread has taken, or that came right before,
        # does not end a wait for a lock, and Python runs its handler in the main thread only.
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        blocked = threading.Lock(), delivers
        blocked[0].acquire()
        self._blocked.append(blocked)  # before the look: whoever completes it looks at these after that
        try:
            with self._origin.unlocked() if self._origin is not None else contextlib.nullcontext():
                while not self.done() and (left_s := deadline - time.monotonic()) > 0:
                    blocked[0].acquire(timeout=min(_WAIT_S, left_s))
            return self.done()
        finally:
            self._blocked.remove(blocked)

    @property
    def _waiters(self) -> list[Any]:
        """The waiters of `concurrent.futures.wait` and `as_completed`, which call nothing else before they block."""
        self._begin_to_wait(blocks=True)
        return self._installed

    @_waiters.setter
    def _waiters(self, waiters: list[Any]) -> None:
        self._installed = waiters

    def _get_snapshot(self) -> tuple[bool, bool, T | None, BaseException | None]:
        """Return whether it is done and cancelled, and its outcome, for `asyncio.wrap_future` since Python 3.14."""
        if self._exception is not None:
            self._observe()
        return self.done(), False, self._result, self._exception

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.settled().__await__()
        return self._deliver()

    def settled(self) -> asyncio.Future[None]:
        """Return a future of the running loop that is done when this one is, and has neither value nor error."""
        check_asyncio(self._what)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._begin_to_wait(blocks=False):
            with self._condition:
                if not self.done():  # else since the check above, and nothing would wake the waiter
                    self._waiting += 1
                    self._loop_waiters.append(waiter)
                    waiter.add_done_callback(self._leave)
                    return waiter
        waiter.set_result(None)
        return waiter

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        with self._condition:
            self._waiting -= 1
            if waiter in self._loop_waiters:
                self._loop_waiters.remove(waiter)

    def _wake(self, waiter: asyncio.Future[None]) -> None:
        try:
            waiter.get_loop().call_soon_threadsafe(_arrive, waiter)
        except RuntimeError:  # the loop is closed, and with it the waiter
            self._leave(waiter)
        except Exception:  # of a loop of the caller's; waiters in other loops are woken all the same
            logger.exception("a loop that waits for %s can't be woken", self._what)

    def _deliver(self) -> T:
        if self._exception is not None:
            self._observe()
            raise self._exception
        return self._result  # type: ignore[return-value]

    def _observe(self) -> None:
        self.observed = True
        if self._listener is not None:
            self._listener.on_delivery()

    def _settle(self, value: T | None, error: BaseException | None = None) -> bool:
        """Complete it; return False if it was complete before."""
        try:
            if error is None:
                self.set_result(value)  # type: ignore[arg-type]
            else:
                self.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def _invoke_callbacks(self) -> None:
        """Wake the loops that wait. Call the callbacks in a new thread: this one may hold locks of the engine."""
        with self._condition:
            waiters, self._loop_waiters = self._loop_waiters, []
            callbacks, self._done_callbacks = self._done_callbacks, []
        for blocked, _ in list(self._blocked):
            blocked.release()
        for waiter in waiters:
            self._wake(waiter)
        if not callbacks:
            return
        # In an empty context: the engine's says that its threads can't wait for it.
        target, args = contextvars.Context().run, (self._call_back, callbacks)
        try:
            threading.Thread(target=target, args=args, name="aiockpt-callbacks", daemon=False).start()
        except RuntimeError:  # no thread can be had: rather here than a waiter that is never woken
            self._call_back(callbacks)

    def _call_back(self, callbacks: list[Callable[[Future[T]], object]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # of a caller's; the other callbacks are called all the same
                logger.exception("a callback of %s has failed", self._what)


def _arrive(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Call(Generic[T]):
    """A coroutine function that runs on the engine's loop."""

    def __init__(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        what: str,
        origin: Origin,
        post: Callable[[Callable[[], object], Call[Any]], object],
    ) -> None:
        self.completion: Completion[T] = Completion(what, origin, saves=False)
        # Calls a function on the loop. No closure over this call: such a cycle would keep its result, gigabytes, alive.
        self._post = post
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
                with contextlib.suppress(asyncio.CancelledError):  # the one that is being delivered stands for it
                    await outlast(self.completion.settled())
            self._drop(drop)
            raise

    async def stop(self) -> None:
        """Stop it and wait until it has stopped, whatever its outcome. A cancellation is raised afterwards."""
        if not self.completion.done():
            self.cancel()
            await outlast(self.completion.settled())  # the call's resources must not be freed before

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
        if drop is not None and self.completion._exception is None and self.completion._result is not None:
            drop(self.completion._result)

    def cancel(self) -> None:
        """Request it to stop. From any thread; does not block."""
        self._post(self._cancel, self)

    def _cancel(self) -> None:
        self._cancel_asked = True
        if self._scope is not None:
            self._scope.cancel()
