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
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

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


class LoneThread(Executor):
    """One thread that runs functions in order, and that nobody waits for when the process ends.

    For waits that can't be called off: those for other processes. It starts when it is first needed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function after those that were submitted before."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as exc:  # delivered to who waits
                    future.set_exception(exc)
                else:
                    future.set_result(result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(run)
        return future

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()
            del run

    def end(self, timeout_s: float) -> bool:
        """End the thread when it has done what was submitted; tell whether it has ended in time. Blocks."""
        self._work.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class Workers:
    """A fixed number of threads that run blocking functions for an event loop.

    Args:
        count: the most threads that run at once; they start when first needed.
        name: what the threads are called, for debuggers and profilers.
        nice: how far the threads step back when others want the processor, as in nice(1); on Linux.
    """

    def __init__(self, count: int, name: str, *, nice: int = 0) -> None:
        self.count = count
        self.executor = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_step_back, initargs=(nice,))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in one of the threads; cancellation waits for it to end."""

        def call() -> T:
            try:
                return function(*args, **kwargs)
            except (KeyboardInterrupt, SystemExit, GeneratorExit) as exc:
                # These would end the loop, and with it what belongs to others.
                raise RuntimeError(f"{type(exc).__name__} was raised in a worker thread: {exc}") from exc

        return await drained(asyncio.get_running_loop().run_in_executor(self.executor, call))

    def close(self) -> None:
        """Wait for the running functions and end the threads. Blocks; idempotent."""
        self.executor.shutdown(wait=True, cancel_futures=True)
