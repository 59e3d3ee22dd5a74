"""Worker threads, event loops of threads, and checks against threads that would wait for themselves.

A function in a worker thread is never abandoned. If the awaiting task is cancelled, the await still lasts until the
function returns, so a buffer that it uses can be released right after the await, whatever happened.
"""

from __future__ import annotations

import _thread as raw_threads
import asyncio
import contextlib
import contextvars
import errno
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import anyio
import anyio.lowlevel

from aiockpt.core import spans
from aiockpt.errors import AiockptError, CheckpointerClosedError, NoThreadError, SaveError, unwrapped

P = ParamSpec("P")
T = TypeVar("T")

SHORT_ITEMS = 100
"""Work on so many leaves of a state, or items, is short; see `Workers.run_unless`."""
SHORT_BYTES = 2 << 20
"""Copies and checksums of a file of this size are short: of a state of 1 MiB, with what stands around its tensors."""

_UVLOOP_DESCRIPTORS = 16
"""More than a uvloop loop needs: the first one in a process creates pipes too."""
_ASYNCIO_DESCRIPTORS = 4

# --- threads that must not wait for an engine ---------------------------------------------------------

Part = Literal["loop", "saves", "loads"]


class Origin:
    """The identity of an engine: its process, and its threads, which can't wait for what they complete."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: a signal handler may save while the main thread holds it.
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Free the lock if this thread holds it, as in a signal's handler: it is to wait for what needs the lock."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            yield
            return
        held = self.lock._release_save()  # type: ignore[attr-defined] # as `threading.Condition.wait` does
        try:
            yield
        finally:
            self.lock._acquire_restore(held)  # type: ignore[attr-defined]

    @property
    def is_here(self) -> bool:
        """Whether this is the engine's process, not a fork of it."""
        return os.getpid() == self._pid

    @property
    def is_served_here(self) -> bool:
        """Whether this thread runs a hook or an observer of the engine, or is waited for by one that does."""
        duty = _duty()
        return duty is not None and duty.origin is self

    def check_process(self) -> None:
        """Raise CheckpointerClosedError in a forked process: it lacks the threads, and their locks may stay held."""
        if not self.is_here:
            raise CheckpointerClosedError(
                "this checkpointer was made in another process, before a fork; make a new one in this process"
            )

    def check(self, what: str, *, saves: bool = True) -> None:
        """Raise SaveError if this thread works for the engine, so that the call ``what`` would wait for itself.

        A thread that saves may wait for loads (``saves=False``): hooks may load.
        """
        self.check_process()
        duty = _duty()
        if duty is None or duty.origin is not self or (duty.part == "saves" and not saves):
            return
        raise SaveError(
            f"{what} was called by {duty.what}, which would wait for itself. Do it when "
            "`written` has come, or with another checkpointer"
        )


def check_threads() -> None:
    """Raise AiockptError if this program has no real threads, CheckpointerClosedError if it exits."""
    # Not `start_new_thread`: debuggers wrap it.
    if threading.get_ident.__module__ != "_thread" or queue.SimpleQueue.__module__ not in ("_queue", "queue"):
        raise AiockptError(
            "a checkpointer needs the interpreter's threads and queues, which this program has monkey-patched: its "
            "threads are greenlets, as those of gevent and eventlet. Use it in a process that is not patched, or leave "
            "threads out: gevent.monkey.patch_all(thread=False, queue=False), eventlet.monkey_patch(thread=False)"
        )
    main = threading.main_thread()
    if threading.current_thread() is main and not main.is_alive():
        raise CheckpointerClosedError(
            "the program exits: no thread can be started any more, and nothing waits for a save. Save and load before "
            "the end of the main program, not in functions of atexit"
        )


class Duty:
    """The work of a thread for an engine; a context manager for its duration."""

    __slots__ = ("_before", "_token", "is_over", "origin", "part", "what")

    def __init__(self, origin: Origin, part: Part, what: str) -> None:
        self.origin = origin
        self.part = part
        self.what = what  # for messages
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
    """Return the duty of this thread, or of a thread that waits for this one, as with asyncio.to_thread."""
    if _off_duty.get():
        return None
    own: Duty | None = getattr(_thread, "duty", None)
    if own is not None:
        return own
    duty = _inherited.get()
    # A callback of a loop inherits the context too, but no thread on duty waits for it.
    return None if duty is None or duty.is_over or has_loop() else duty


@contextlib.contextmanager
def off_duty() -> Iterator[None]:
    """Allow a task or thread of an engine to wait like a caller: the engine does not wait for it."""
    token = _off_duty.set(True)
    try:
        yield
    finally:
        _off_duty.reset(token)


def has_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def check_asyncio(what: str, instead: str = "call result() in a thread") -> None:
    """Raise AiockptError if asyncio does not run this task, so that it can't await."""
    trio = sys.modules.get("trio")
    if has_loop() and not (trio is not None and trio.lowlevel.in_trio_task()):
        return
    raise AiockptError(
        f"{what} can be awaited in asyncio only, which does not run this task: {instead}; in trio with "
        "`await trio.to_thread.run_sync(...)`"
    )


# --- loops -----------------------------------------------------------------------------------------


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop: of uvloop, which other threads wake faster, if it is installed and safe to use.

    libuv aborts the process if it can't get the descriptors for its first loop, and if it closes one of the first
    three, which are free in a program that has closed its standard streams. So both are checked before. Raises
    OSError if there are no descriptors for asyncio's own loop either.
    """
    free = _free_descriptors(_UVLOOP_DESCRIPTORS)
    if len(free) == _UVLOOP_DESCRIPTORS and min(free) > 2:
        with contextlib.suppress(Exception):  # not installed, or broken: its import may raise anything
            loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
            return loop
    if len(free) < _ASYNCIO_DESCRIPTORS:  # else asyncio warns again when its half-made loop is collected
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return asyncio.SelectorEventLoop()  # not by the program's policy, which may make loops of uvloop


def _free_descriptors(count: int) -> list[int]:
    """Return the next free descriptors: ``count`` or one more, since they are made in pairs; fewer if none are left."""
    free: list[int] = []
    try:
        while len(free) < count:
            free += os.pipe()
    except OSError:
        pass  # there are no more
    for fd in free:
        os.close(fd)
    return free


# --- workers --------------------------------------------------------------------------------------------


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise NoThreadError if the system has no further one."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise NoThreadError(
            f"the thread {thread.name} can't be started ({exc}): end threads of this program, or raise the limits of "
            "threads and memory (see ulimit -u and -v, and the pids limit of the container)"
        ) from exc


def uninterrupted(function: Callable[[], T]) -> T:
    """Call a function that a signal does not interrupt: an exception of its handler, as of Ctrl-C, waits for its end.

    Python calls handlers in the main thread, between any two bytecodes, also within `threading.Thread.start`. So there
    the function runs in another thread: all of it, or if the exception came before that, nothing.
    """
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():  # no other thread runs then
        return function()
    turn, over = threading.Lock(), threading.Lock()
    ended: list[Future[T]] = []

    def run() -> None:
        if turn.acquire(blocking=False):
            task = _Task(function)
            task.run()
            ended.append(task.future)
            over.release()

    over.acquire()
    try:
        raw_threads.start_new_thread(run, ())
        over.acquire()
    except BaseException as exc:
        if not turn.acquire(blocking=False):  # it has begun
            if not ended:
                over.acquire()
        elif isinstance(exc, RuntimeError):  # there is no further thread, as the function will find out
            return function()
        raise
    return ended[0].result()


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a function in a new thread, never in the program's executor, which may be full; raise NoThreadError."""
    thread = DaemonThreads(1, "aiockpt-call")
    future = thread.submit(contextvars.copy_context().run, partial(function, *args, **kwargs))
    thread.rest()
    return future


async def outlast(awaitable: Awaitable[T]) -> T:
    """Await to its end what can't or must not be interrupted, however often this task is cancelled; return its result.

    A cancellation by anyio is raised at the caller's next await, and one by asyncio in place of the result: no scope
    keeps that out. A coroutine runs as a task of its own; a future is never cancelled.
    """
    future = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
    if cancelled is not None:
        raise cancelled from future.exception()
    return future.result()


async def _outlast_thread(future: Future[T]) -> T:
    """Do as `outlast` for a function in a thread; its end is two turns of the loop away from the task, not three."""
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            waiter: asyncio.Future[None] = loop.create_future()
            future.add_done_callback(partial(_wake, loop, waiter))
            try:
                await waiter
            except asyncio.CancelledError as exc:
                cancelled = exc
    if cancelled is not None:
        raise cancelled from future.exception()
    return future.result()


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], _: object) -> None:
    """End the wait of a task, from the thread of its function."""

    def wake() -> None:
        if not waiter.done():  # the task may have been cancelled
            waiter.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        loop.call_soon_threadsafe(wake)


async def run_each(function: Callable[[T], Awaitable[object]], items: Sequence[T], tasks: int) -> None:
    """Await ``function(item)`` for all items, in some tasks that each take the next item.

    Raises the first task's own exception instead of an exception group. Cancelling returns when the calls in progress
    are done.
    """
    pending = iter(items)

    async def work() -> None:
        for item in pending:
            await anyio.lowlevel.checkpoint_if_cancelled()  # a call into a thread is not a cancellation point
            await function(item)

    try:
        async with anyio.create_task_group() as group:
            for _ in range(min(tasks, len(items))):
                group.start_soon(work)
    except BaseExceptionGroup as failures:
        error = unwrapped(failures)
        raise error from error.__cause__


class DaemonThreads(Executor):
    """Daemon threads that run functions in order; each starts when it is first needed.

    Daemons, because a wait for another process or a disk that hangs can't be cancelled, and a thread that never
    returns must not keep the process alive.
    """

    def __init__(self, count: int, name: str, *, nice: int = 0, duty: Duty | None = None) -> None:
        self.count = count
        self._most = count  # with those that `spare` allows
        self._name = name
        self._nice = nice  # as in nice(1); on Linux
        self._duty = duty  # of threads that run functions of the caller's
        self._work: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._lock = threading.RLock()  # reentrant: a signal handler that saves may run while this thread holds it
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function after those submitted before have begun; raise NoThreadError if no thread can run it."""
        task = _Task(partial(fn, *args, **kwargs))
        with self._lock:
            if self._ended:
                raise RuntimeError(f"{self._name} has been shut down")
            self._unfinished += 1
            try:
                if len(self._threads) < min(self._unfinished, self._most):
                    uninterrupted(self._start_wanted)
            except BaseException as exc:
                # A thread that runs takes it, if it is only that no further one can start; but a Ctrl-C is not dropped.
                if not self._threads or not isinstance(exc, Exception):
                    self._unfinished -= 1
                    raise
            self._work.put(task)
        return task.future

    @property
    def unfinished(self) -> int:
        """Number of functions that wait or run."""
        return self._unfinished

    def spare(self, count: int) -> None:
        """Raise the limit of threads by ``count`` while some hang; lower it, if negative, when they have returned."""
        with self._lock:
            self._most += count
            if not self._ended:
                self._start_wanted()

    def _start_wanted(self) -> None:
        """Start threads until there is one for each unfinished task, up to the limit."""
        while len(self._threads) < min(self._unfinished, self._most):
            name = self._name if self._most == 1 else f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=self._serve, args=(self._work,), name=name, daemon=True)
            start_thread(thread)
            self._threads.append(thread)

    def _serve(self, work: queue.SimpleQueue[_Task[Any] | None]) -> None:
        if self._nice and sys.platform == "linux":
            with contextlib.suppress(OSError):  # not allowed here, and then not needed
                thread = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._nice)
        _thread.duty = self._duty
        while (task := work.get()) is not None:
            task.run()
            del task  # else this thread would keep its buffers alive until the next task comes
            with self._lock:
                self._unfinished -= 1
                if len(self._threads) > self._most and work is self._work and not self._ended:
                    self._threads.remove(threading.current_thread())
                    return

    def rest(self) -> None:
        """End the threads when all tasks are done, without waiting; the next task starts new ones."""
        with self._lock:
            if not self._ended:
                for _ in self._threads:
                    self._work.put(None)
                self._threads, self._work = [], queue.SimpleQueue()

    def end(self, timeout_s: float | None = None) -> bool:
        """End the threads when all tasks are done; return whether they have ended in time. Blocks.

        A task may have had the last reference to the owner, whose finaliser calls this in the task's thread then: that
        thread waits for all others.
        """
        with self._lock:
            if not self._ended:
                self._ended = True
                for _ in self._threads:
                    self._work.put(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, as `concurrent.futures.Executor.shutdown` does; idempotent."""
        if cancel_futures and not self._ended:  # else sentinels are queued among the tasks
            with contextlib.suppress(queue.Empty):
                while True:
                    if (task := self._work.get_nowait()) is not None:
                        task.future.cancel()
        self.end(None if wait else 0.0)


class _Task(Generic[T]):
    """A function to run in a thread, and its future."""

    __slots__ = ("_function", "_span", "future")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._span = spans.current.get()
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if self._span is not None:
            self._span.begin_in_thread()
        try:
            result = self._function()
        except BaseException as exc:  # delivered to the waiter
            self._end_span()
            self.future.set_exception(exc)
        else:
            self._end_span()
            self.future.set_result(result)

    def _end_span(self) -> None:
        if self._span is not None:  # before the waiter goes on, and closes it
            self._span.end_in_thread()


class Workers(DaemonThreads):
    """Threads that run blocking functions for an event loop."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in one of the threads; cancellation waits for it to end."""

        def call() -> T:
            try:
                return function(*args, **kwargs)
            except (KeyboardInterrupt, SystemExit, GeneratorExit) as exc:
                # These would end the loop, and with it the work of others.
                raise RuntimeError(f"{type(exc).__name__} was raised in a worker thread: {exc}") from exc

        return await _outlast_thread(self.submit(call))

    @contextlib.contextmanager
    def at_least(self, count: int) -> Iterator[int]:
        """Allow at least so many threads within the context; return how many there may be."""
        more = max(0, count - self.count)
        self.spare(more)
        try:
            yield self.count + more
        finally:
            self.spare(-more)

    async def run_unless(self, is_short: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the loop itself if it ``is_short``, else as `run`.

        A change of threads takes 5 ms beside a thread that keeps the GIL, so a small save makes as few as it can.
        """
        return function(*args, **kwargs) if is_short else await self.run(function, *args, **kwargs)

    def close(self) -> None:
        """Wait for the running functions and end the threads. Blocks; idempotent."""
        self.shutdown(wait=True, cancel_futures=True)
