"""A private event loop in a thread of its own: a caller's loop that is blocked or closed does not stop a save."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import torch

from aiockpt.core.threads import Duty, Origin, new_event_loop, start_thread

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.saving.job import SaveJob

    Work: TypeAlias = SaveJob | Call[Any]  # fails if a function posted for it raises

logger = logging.getLogger("aiockpt")


class EngineLoop:
    """The loop and its thread. If what has no `Work` fails, ``on_failure`` gets the exception, once or more."""

    def __init__(self, origin: Origin, on_failure: Callable[[BaseException], None]) -> None:
        self._origin = origin
        self._on_failure = on_failure
        self.thread: threading.Thread | None = None  # since `start`
        self._loop: asyncio.AbstractEventLoop | None = None  # since `accept`
        self._main_task: asyncio.Task[Any] | None = None
        self._context = contextvars.Context()
        self._posting = threading.RLock()  # reentrant: the garbage collector may run code that posts
        self._backlog: list[tuple[Callable[[], object], Work | None]] = []

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``main`` in a new thread, without waiting for it; raise OSError, ImportError or NoThreadError.

        To be called `uninterrupted`.

        All modules are imported before there is a thread, and operators are called for the first time: a process that
        is forked in the middle of that would lack the rest of it.
        """
        _import_all()
        # Not in this thread: modes of the caller's, as that of fake tensors, would get these calls.
        caller = threading.Thread(target=_call_operators, name="aiockpt-operators", daemon=True)
        start_thread(caller)
        caller.join()
        loop = new_event_loop()
        try:
            # In an empty context: the caller's may name the async library of the caller's loop.
            thread = threading.Thread(
                target=contextvars.Context().run, args=(self._serve, loop, main), name="aiockpt-engine", daemon=True
            )
            start_thread(thread)
        except BaseException:
            loop.close()
            raise
        self.thread = thread

    def _serve(self, loop: asyncio.AbstractEventLoop, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with Duty(self._origin, "loop", "the thread of the checkpointer's own event loop"):
            try:
                anyio.run(main, backend="asyncio", backend_options={"loop_factory": lambda: loop})
            except BaseException as exc:  # delivered to every waiter
                self._on_failure(exc)

    def accept(self) -> None:
        """Start to call posted functions, beginning with those posted before. For ``main``, in its task."""
        with self._posting:
            self._context = contextvars.copy_context()
            self._main_task = asyncio.current_task()
            self._loop = loop = asyncio.get_running_loop()
            for function, work in self._backlog:
                loop.call_soon(self._call, function, work)
            self._backlog.clear()
        loop.set_exception_handler(self._on_exception)

    def post(self, function: Callable[[], object], work: Work | None = None) -> None:
        """Call a function on the loop as soon as it runs. From any thread; never waits, never raises.

        The function runs in the engine's context: in the caller's, anyio may find the mark of another event loop.
        An exception of it fails the save or call that it is for, or the engine.
        """
        with self._posting:
            if self._loop is None:
                self._backlog.append((function, work))
                return
        if self._origin.is_here:  # in a forked process, the descriptor that wakes the loop is the parent's
            self._wake(self._call, function, work)

    def post_without_lock(self, function: Callable[[], object]) -> None:
        """Call a function on the loop if it runs already. Takes no lock, as the garbage collector may be the caller."""
        if self._loop is not None:
            self._wake(function)

    def _wake(self, function: Callable[..., object], *args: Any) -> None:
        # RuntimeError: the loop is closed, so everything that was pending has been settled.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args, context=self._context.copy())  # type: ignore[union-attr]

    def _call(self, function: Callable[[], object], work: Work | None) -> None:
        try:
            function()
        except BaseException as exc:
            if work is None:
                raise  # to `_on_exception`
            logger.exception("a function posted for %r has failed in the engine", work)
            work.fail(exc)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail the engine if a callback has failed: what was to follow it never happens. Log other reports."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._on_failure(error)
        else:
            loop.default_exception_handler(context)

    def cancel(self) -> None:
        """Cancel ``main``, if it runs. On the loop's thread."""
        if self._main_task is not None:
            self._main_task.cancel()


def _import_all() -> None:
    """Import what the engine's threads would import at their first use."""
    importlib.import_module("anyio._backends._asyncio")
    with contextlib.suppress(ImportError):  # a private place of torch's, which may change
        importlib.import_module("torch.utils.serialization.config")


def _call_operators() -> None:
    """Call torch's operators that the engine's threads call first.

    The first call of each initialises a static variable of C++. In a process that is forked meanwhile it stays locked,
    and the next call there never returns.
    """
    values = torch.frombuffer(bytearray(8), dtype=torch.uint8).view(torch.float32).as_strided((2,), (1,))
    torch.empty((2,), dtype=torch.float32, device="cpu").copy_(values)
    torch.empty_strided((2,), (1,), dtype=torch.float32, device="cpu").detach()
