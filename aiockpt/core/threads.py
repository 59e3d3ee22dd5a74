"""Threads: the one thread hop, the loop of a thread, and who may wait for what in which thread.

A hop is never abandoned. When the awaiting task is cancelled the await still lasts until the thread is
done, so that a buffer which the thread uses can be given back right after the await, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import queue
import sys
import threading
import time
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import anyio

from aiockpt.errors import AiockptError, CheckpointerClosedError, SaveError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

P = ParamSpec("P")
T = TypeVar("T")

_UVLOOP_DESCRIPTORS = 16
"""More than a loop of uvloop's takes: the first one of libuv in a process makes pipes as well."""
_ASYNCIO_DESCRIPTORS = 4

# --- who may wait for what -------------------------------------------------------------------------

Part = Literal["loop", "saves", "loads"]


class Origin:
    """An engine, as its completions know it: a process, and threads that can't wait for what they bring about."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is its process, and not one that was forked from it."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Refuse a forked process: it has none of the engine's threads, and their locks may be held for ever.

        Raises:
            CheckpointerClosedError: this is another process.
        """
        if not self.is_here:
            raise CheckpointerClosedError(
                "this checkpointer was made in another process, before a fork; make a new one in this process"
            )

    def check(self, what: str, *, saves: bool = True) -> None:
        """Refuse a call that would wait for itself.

        Args:
            what: the call, for the message.
            saves: it waits for saves; loads may be waited for by those who save: by hooks.

        Raises:
            CheckpointerClosedError: see `check_process`.
            SaveError: this thread works for the engine.
        """
        self.check_process()
        duty = _duty()
        if duty is None or duty.origin is not self or (duty.part == "saves" and not saves):
            return
        raise SaveError(
            f"{what} was asked for by {duty.what}, which would wait for itself for ever. Do it when "
            "`written` has come, or with another checkpointer"
        )


class Duty:
    """What a thread does for an engine; a context for the time that it does it.

    Args:
        origin: the engine.
        part: which part of its work.
        what: what it is called in messages.
    """

    __slots__ = ("_before", "_token", "is_over", "origin", "part", "what")

    def __init__(self, origin: Origin, part: Part, what: str) -> None:
        self.origin = origin
        self.part = part
        self.what = what
        self.is_over = False

    def __enter__(self) -> None:
        self._before = getattr(_thread, "duty", None)
        self._token = _inherited.set(self)
        _thread.duty = self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        _thread.duty = self._before
        _inherited.reset(self._token)


_thread = threading.local()
_inherited: ContextVar[Duty | None] = ContextVar("aiockpt-duty", default=None)
_off_duty: ContextVar[bool] = ContextVar("aiockpt-off-duty", default=False)


def _duty() -> Duty | None:
    """Return what this thread does for an engine, or does for a thread that waits for it, as with asyncio.to_thread."""
    if _off_duty.get():
        return None
    own: Duty | None = getattr(_thread, "duty", None)
    if own is not None:
        return own
    duty = _inherited.get()
    # What is posted to a loop inherits the context as well, and nobody waits for it.
    return None if duty is None or duty.is_over or _has_loop() else duty


@contextlib.contextmanager
def off_duty() -> Iterator[None]:
    """Let a task or a thread of an engine wait for others as a caller does: the engine does not wait for it."""
    token = _off_duty.set(True)
    try:
        yield
    finally:
        _off_duty.reset(token)


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def check_asyncio(what: str, instead: str = "call result() in a thread") -> None:
    """Refuse to await where asyncio does not run this task.

    Raises:
        AiockptError: there is no asyncio loop, or trio runs this task.
    """
    trio = sys.modules.get("trio")
    if _has_loop() and not (trio is not None and trio.lowlevel.in_trio_task()):
        return
    raise AiockptError(
        f"{what} can be awaited in asyncio only, which does not run this task: {instead}; in trio with "
        "`await trio.to_thread.run_sync(...)`"
    )


# --- loops -----------------------------------------------------------------------------------------


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: uvloop's, which other threads wake faster, where it is installed and safe to use.

    libuv ends the process where it can't have the descriptors for its first loop, and when it closes one of the
    first three, which are free in a program that has closed its standard streams. So these are looked for before.

    Raises:
        OSError: there are no descriptors for asyncio's own loop either.
    """
    free = _free_descriptors(_UVLOOP_DESCRIPTORS)
    if len(free) == _UVLOOP_DESCRIPTORS and min(free) > 2:
        with contextlib.suppress(Exception):  # missing, or broken: whatever its import raises
            loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
            return loop
    if len(free) < _ASYNCIO_DESCRIPTORS:  # asyncio would complain once more when what it began is collected
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return asyncio.SelectorEventLoop()  # not by the policy, which may be uvloop's


def _free_descriptors(count: int) -> list[int]:
    """Return the numbers of the next descriptors, ``count`` of them if so many can be had."""
    free: list[int] = []
    try:
        while len(free) < count:
            free += os.pipe()
    except OSError:
        pass  # there are no more
    for fd in free:
        os.close(fd)
    return free


# --- the hop ---------------------------------------------------------------------------------------


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
        duty: what they do for an engine, where they run functions of the caller's.
    """

    def __init__(self, count: int, name: str, *, nice: int = 0, duty: Duty | None = None) -> None:
        self._count = count
        self._name = name
        self._nice = nice
        self._duty = duty
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
        _thread.duty = self._duty
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
        duty: what they do for an engine, where they run functions of the caller's.
    """

    def __init__(self, count: int, name: str, *, nice: int = 0, duty: Duty | None = None) -> None:
        self.count = count
        self.executor = DaemonThreads(count, name, nice=nice, duty=duty)

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
