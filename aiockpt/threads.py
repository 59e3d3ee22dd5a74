"""The one thread hop: blocking functions on a bounded group of named threads.

A hop is never abandoned. When the awaiting task is cancelled the await still lasts until the thread is
done, so that a buffer which the thread uses can be given back right after the await, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

P = ParamSpec("P")
T = TypeVar("T")


async def drained(awaitable: Awaitable[T]) -> T:
    """Await something that can't be stopped half way, to its end, even when this task is cancelled.

    The cancellation is delivered at the caller's next await.
    """
    with anyio.CancelScope(shield=True):
        return await awaitable
    raise AssertionError("a shielded scope lets nothing but the result and errors through")


def _step_back(nice: int) -> None:
    """Let this thread step back when others want the processor."""
    if nice and sys.platform == "linux":
        with contextlib.suppress(OSError):  # not allowed here, and then not needed
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


class DaemonThreads(Executor):
    """Threads that run functions in order, and that nobody waits for when the process ends.

    For waits that can't be called off, those for other processes and for disks that hang: a thread that never comes
    back must not keep the process. Each thread starts when it is first needed.

    Args:
        count: how many threads there are at most.
        name: what they are called, for debuggers and profilers.
        nice: how far they step back when others want the processor, as in nice(1); on Linux.
    """

    def __init__(self, count: int, name: str, *, nice: int = 0) -> None:
        self._count = count
        self._name = name
        self._nice = nice
        self._work: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._lock = threading.Lock()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function after those that were submitted before have begun.

        Raises:
            RuntimeError: the threads have been told to end, or none can be started.
        """
        task = _Task(partial(fn, *args, **kwargs))
        with self._lock:
            if self._ended:
                raise RuntimeError(f"{self._name} has been shut down")
            self._unfinished += 1
            try:
                self._start_wanted()
            except BaseException:
                if not self._threads:  # else those that run come to it
                    self._unfinished -= 1
                    raise
            self._work.put(task)
        return task.future

    def spare(self, count: int) -> None:
        """Allow so many threads more, for some hang; or so many fewer, when these have come back."""
        with self._lock:
            self._count += count
            if not self._ended:
                self._start_wanted()

    def _start_wanted(self) -> None:
        """Start threads for what nobody is free to do."""
        while len(self._threads) < min(self._unfinished, self._count):
            name = self._name if self._count == 1 else f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self) -> None:
        _step_back(self._nice)
        while (task := self._work.get()) is not None:
            task.run()
            del task
            with self._lock:
                self._unfinished -= 1
                if len(self._threads) > self._count and not self._ended:
                    self._threads.remove(threading.current_thread())
                    return

    def end(self, timeout_s: float | None = None) -> bool:
        """End the threads when they have done what was submitted; tell whether they have ended in time. Blocks."""
        with self._lock:
            if not self._ended:
                self._ended = True
                for _ in self._threads:
                    self._work.put(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; idempotent.

        Args:
            wait: block until they have ended.
            cancel_futures: drop what has not begun.
        """
        if cancel_futures and not self._ended:  # else there are words to end among the work
            with contextlib.suppress(queue.Empty):
                while True:
                    if (task := self._work.get_nowait()) is not None:
                        task.future.cancel()
        self.end(None if wait else 0.0)


class _Task(Generic[T]):
    """A function that a thread is to run."""

    __slots__ = ("_function", "future")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as exc:  # delivered to who waits
            self.future.set_exception(exc)
        else:
            self.future.set_result(result)


class Workers:
    """A fixed number of threads that run blocking functions for an event loop.

    Args:
        count: the most threads that run at once; they start when first needed.
        name: what the threads are called, for debuggers and profilers.
        nice: how far the threads step back when others want the processor, as in nice(1); on Linux.
    """

    def __init__(self, count: int, name: str, *, nice: int = 0) -> None:
        self.count = count
        self.executor = DaemonThreads(count, name, nice=nice)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in one of the threads; cancellation waits for it to end."""

        def call() -> T:
            try:
                return function(*args, **kwargs)
            except (KeyboardInterrupt, SystemExit, GeneratorExit) as exc:
                # These would end the loop, and with it what belongs to others.
                raise RuntimeError(f"{type(exc).__name__} was raised in a worker thread: {exc}") from exc

        return await drained(asyncio.get_running_loop().run_in_executor(self.executor, call))

    def spare(self, count: int) -> None:
        """Allow so many threads more, for some hang in the file system; or fewer, when they have come back."""
        self.executor.spare(count)

    def close(self) -> None:
        """Wait for the running functions and end the threads. Blocks; idempotent."""
        self.executor.shutdown(wait=True, cancel_futures=True)
