"""The engine: a private event loop in a thread of its own, staging memory, worker threads, and the saves in line.

It is independent of the caller's loop: a loop that is held by training, or closed, does not hold up a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import logging
import sys
import threading
import time
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import torch

from aiockpt.coordination.choose import choose_coordinator, is_distributed
from aiockpt.core.futures import Call, Completion
from aiockpt.core.threads import Duty, Origin, new_event_loop
from aiockpt.engine.queue import SaveQueue
from aiockpt.engine.resources import EngineResources, shared_memory
from aiockpt.engine.watchdog import watch
from aiockpt.errors import AiockptError, CheckpointerClosedError, SaveCancelledError
from aiockpt.format.item.item_framing import tensor_framing
from aiockpt.planning.collective.local import LocalPlanner
from aiockpt.planning.dcp_plan import prefix_of
from aiockpt.saving.collective_leader import CollectiveResources
from aiockpt.saving.pipeline import run_save
from aiockpt.saving.turn import Turn
from aiockpt.staging.runtime import current_streams
from aiockpt.staging.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from anyio.abc import TaskGroup

    from aiockpt.coordination.base import Coordinator
    from aiockpt.engine.queue import Failures, Statistics
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import CheckpointerOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.saving.job import SaveJob
    from aiockpt.staging.pool import SharedMemory

    Owner = SaveJob | Call[Any]

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_CANCEL_GRACE_S = 30.0


class Engine:
    """Runs saves one after the other, and loads beside them. Starts at its first use.

    Methods without ``_`` may be called from any thread.

    Args:
        options: how it works.
        failures: gets path and error of each save that fails; the engine does not hold it.
    """

    _stop: anyio.Event
    _tasks: TaskGroup
    _main_task: asyncio.Task[Any]

    def __init__(self, options: CheckpointerOptions, transforms: Sequence[Transform], failures: Failures) -> None:
        self.options = options
        self._transforms = transforms
        self._was_distributed = is_distributed()
        self.origin = Origin()
        self.queue = SaveQueue(options.on_busy, options.max_in_flight, options.on_failure, self.origin, failures)
        self._lock = self.queue.lock
        self._stuck = False
        self._died: BaseException | None = None
        self._is_orphan = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()
        self._posting = threading.RLock()  # what is collected as garbage meanwhile may post as well
        self._backlog: list[tuple[Callable[[], object], Owner | None]] = []
        self._closed: Completion[None] | None = None
        self._closer: threading.Thread | None = None
        self._calls: weakref.WeakSet[Call[Any]] = weakref.WeakSet()
        self._last: SaveJob | None = None
        self._tools: EngineResources | None = None
        self._world: CollectiveResources | None = None
        self._pacing = Throttle(options.staging_window, self._post)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._thread else "idle"
        return f"<Engine {state}, {len(self.queue)} saves in flight>"

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, without waiting until it is ready."""
        self.origin.check_process()
        with self._lock:
            self._start()

    def _start(self) -> None:
        """Start the thread if needed; with the lock held.

        What can fail for lack of something is done here, in the caller's thread: so the call fails, and the next one
        tries again. What is imported is so before there is a thread: a fork in the middle of an import would leave the
        child without the end of it.
        """
        if self._closed is not None:
            raise CheckpointerClosedError("this checkpointer is closed; make a new one")
        if self._died is not None:
            raise AiockptError(f"this checkpointer's thread has failed: {self._died!r}; make a new one") from self._died
        if self._thread is not None:
            return
        with contextlib.ExitStack() as stack:
            try:
                _import_all()
                loop = new_event_loop()
                stack.callback(loop.close)
                shared = shared_memory(self.options)
                if shared is not None:
                    stack.callback(shared.close)
                # In a context of its own, whatever the caller's says of the loop that it runs in.
                thread = threading.Thread(
                    target=contextvars.Context().run,
                    args=(self._serve, loop, shared),
                    name="aiockpt-engine",
                    daemon=True,
                )
                thread.start()
            except (OSError, ImportError, RuntimeError) as exc:
                raise AiockptError(
                    f"the checkpointer can't start: {exc}. Close files, end threads, or raise the limits (see ulimit), "
                    "and call again"
                ) from exc
            stack.pop_all()
        self._thread = thread
        _live.add(self)

    def _post(self, function: Callable[[], object], owner: Owner | None = None) -> None:
        """Let the engine's loop call a function, as soon as it runs; from any thread, without waiting. Never raises.

        It runs in the engine's context: in the caller's, anyio may find another event loop's mark, or none.

        Args:
            function: is called.
            owner: fails with an exception of it; None: the engine does, and with it all that is pending.
        """
        with self._posting:
            if self._loop is None:
                self._backlog.append((function, owner))
                return
        if not self.origin.is_here:  # the descriptor that would wake the loop is the parent's
            return
        # When the loop is closed, all that was pending has been told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call, function, owner, context=self._context.copy())

    def _accept(self) -> None:
        """Take over what was posted before the loop ran."""
        with self._posting:
            self._context = contextvars.copy_context()
            self._loop = loop = asyncio.get_running_loop()
            for function, owner in self._backlog:
                loop.call_soon(self._call, function, owner)
            self._backlog.clear()
        loop.set_exception_handler(self._on_exception)

    def _call(self, function: Callable[[], object], owner: Owner | None) -> None:
        """Call what was posted."""
        try:
            function()
        except BaseException as exc:
            if owner is None:
                raise  # which `_on_exception` is told of
            logger.exception("what belongs to %r has failed in the engine", owner)
            owner.fail(exc)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail when a callback has failed: nobody knows what will not happen now. Log other things."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._fail(error)
        else:
            loop.default_exception_handler(context)

    def _serve(self, loop: asyncio.AbstractEventLoop, shared: SharedMemory | None) -> None:
        with Duty(self.origin, "loop", "the thread of the checkpointer's own event loop"):
            try:
                anyio.run(self._main, shared, backend="asyncio", backend_options={"loop_factory": lambda: loop})
            except BaseException as exc:  # delivered to all who wait
                self._fail(exc)

    def _fail(self, cause: BaseException) -> None:
        """Tell everybody who waits that the engine has failed, which is a defect, and end its loop. Idempotent."""
        with self._lock:
            is_first = self._died is None
            self._died = cause = self._died or cause
            calls = list(self._calls)
        error = AiockptError(f"the engine has failed: {cause!r}")
        error.__cause__ = cause
        pending: list[Owner] = [*self.queue.fail_all(error), *calls]
        for owner in pending:
            owner.fail(cause)
        if self._loop is not None:  # else it has ended by itself
            self._main_task.cancel()
        if is_first:
            logger.critical("the thread of a checkpointer has failed, and with it what was pending", exc_info=cause)

    async def _main(self, shared: SharedMemory | None) -> None:
        self._main_task = asyncio.tasks.current_task()  # type: ignore[assignment]  # this is one
        self._stop = anyio.Event()
        self._tools = tools = EngineResources(
            self.options,
            self._transforms,
            lambda: self._world,
            lambda: len(self.queue) > 0 or self._closed is not None,
            origin=self.origin,
            shared=shared,
        )
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._accept()
                self._end_if_orphan()
                try:
                    if tools.writer is not None:
                        tools.writer.start(tasks)
                    # Torch's first steps in saving take a while: let them not delay the first save.
                    await tools.copy_workers.run(tensor_framing, torch.float32, (1,), (1,))
                    await self._stop.wait()
                finally:
                    if tools.writer is not None:
                        with anyio.CancelScope(shield=True):
                            await tools.writer.aclose()
        finally:
            try:
                tools.close()
            finally:
                if self._world is not None:
                    self._world.coordinator.close()

    @property
    def tools(self) -> EngineResources:
        """What it works with, once its loop runs."""
        if self._tools is None:
            raise RuntimeError("the engine has not been started")
        return self._tools

    def coordinator(self) -> Coordinator | None:
        """Return the coordinator with the other ranks, chosen when there first are any; None if there are none."""
        with self._lock:
            if self._world is None:
                group, timeout_s = self.options.process_group, self.options.coordination_timeout
                coordinator = choose_coordinator(group, timeout_s, was_distributed=self._was_distributed)
                if coordinator is None:
                    return None
                decentralized = self.options.planning == "decentralized"
                planner = LocalPlanner(prefix_of(coordinator.rank))
                self._world = CollectiveResources(coordinator, planner, decentralized=decentralized)
            return self._world.coordinator

    # --- work -------------------------------------------------------------------------------------

    def submit(self, job: SaveJob) -> None:
        """Put a save in line.

        Raises:
            AiockptError: an earlier save failed and nobody has been told: its error.
            CheckpointerClosedError: the engine is closed.
        """
        with self._lock:
            self.queue.raise_unreported()
            self._start()
            if self.leads:
                self.queue.supersede(job.path)
            job.throttle = self._pacing.for_next_save()
            self._enter(job)

    def refuse(self, job: SaveJob) -> None:
        """Put a save in line that only tells the other ranks why this one does not take part."""
        if not self.origin.is_here:
            return
        with self._lock:
            if self._closed is None and self._died is None:
                self._start()
                self._enter(job)

    def _enter(self, job: SaveJob) -> None:
        job.post = lambda function: self._post(function, job)
        self.queue.add(job)
        self._post(lambda: self._admit(job))

    @property
    def leads(self) -> bool:
        """Whether this process decides which saves are left out: it saves alone, or is rank 0."""
        return self._world is None or self._world.coordinator.leads

    def statistics(self) -> Statistics:
        """Sum up what has become of the saves."""
        self.origin.check_process()
        if self._tools is None:
            return self.queue.statistics(0, 0)
        pool = self._tools.pool
        return self.queue.statistics(pool.made * pool.chunk_bytes, pool.quarantined * pool.chunk_bytes)

    def open_window(self) -> None:
        """Let staging copy what is allowed for one more window, see `StagingWindow`."""
        self.origin.check_process()
        with self._lock:
            if self._thread is not None:
                self._pacing.open()

    def _admit(self, job: SaveJob) -> None:
        try:
            job.enter_loop(anyio.CancelScope(), Turn(None if self._last is None else self._last.turn))
            self._tasks.start_soon(self._run, job)
        except BaseException as exc:  # delivered to who waits for the save
            job.fail(exc)
            self.queue.remove(job)
            return
        self._last = job

    async def _run(self, job: SaveJob) -> None:
        tools, spare = self.tools, 0
        limit_s = self.options.save_timeout

        def shake() -> None:
            if tools.writer is not None:
                tools.writer.kill()

        def abandon() -> None:
            nonlocal spare
            if self._world is None:  # else the ranks have to stay in step
                job.turn.finish()
                spare = tools.io_workers.count
                tools.io_workers.spare(spare)
                self.queue.abandon(job)

        try:
            async with anyio.create_task_group() as tasks:
                if limit_s is not None:
                    tasks.start_soon(partial(watch, job, limit_s, shake=shake, abandon=abandon))
                await run_save(job, tools.saves)
                tasks.cancel_scope.cancel()
        except BaseException as exc:
            job.fail(exc)
            raise
        finally:
            tools.io_workers.spare(-spare)
            self.queue.remove(job)
            await job.turn.finish_in_order()
            job.drop_hooks()
            if self._last is job:
                self._last = None
                await tools.growth.fill(list(tools.stagers.values()))
            self._end_if_orphan()

    def call(self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str) -> Call[T]:
        """Run a coroutine function on the engine's loop, with the tools for reading."""
        self.origin.check(what, saves=False)
        streams = current_streams()  # the caller's, to which what is made belongs
        call = Call(lambda: function(replace(self.tools.loads, streams=streams)), what, self.origin)
        with self._lock:
            self._start()
            call.post = lambda function: self._post(function, call)
            self._calls.add(call)
            call.post(lambda: self._tasks.start_soon(self._run_call, call))
        return call

    async def _run_call(self, call: Call[Any]) -> None:
        await call.run()
        self._end_if_orphan()

    def prewarm(self, nbytes: int, devices: set[torch.device]) -> Completion[None]:
        """Make staging memory for a state of this size, and fault it in with several threads."""

        async def warm(_: LoadTools) -> None:
            tools = self.tools
            await tools.growth.prewarm(nbytes, [tools.stager_for(device) for device in devices])

        return self.call(warm, "prewarm").completion

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> Completion[None]:
        """Finish what is in flight and end all threads, in the background; idempotent.

        Returns:
            A completion that carries the error of a save that nobody has been told of, if there is one.

        Raises:
            SaveError: this is a thread that closing would wait for.
        """
        closed = Completion[None]("the end of closing", self.origin)
        if not self.origin.is_here:  # what a forked process has of it needs no closing
            closed._settle(None)
            return closed
        self.origin.check("closing")
        with self._lock:
            if self._closed is not None:
                return self._closed
            if self._thread is None:
                closed._settle(None)
            else:
                closer = threading.Thread(target=self._finish, args=(closed,), name="aiockpt-close", daemon=True)
                closer.start()  # an interrupt before this leaves it open, to be closed once more
                self._closer = closer
            self._closed = closed
        return closed

    def let_go(self, what: str) -> None:
        """End when what is in flight is done, as nobody has the checkpointer any more. From any thread; never blocks.

        The garbage collector calls it, within whatever a thread is at: it takes no lock that might be held there.

        Args:
            what: names the checkpointer in the warning.
        """
        if not self.origin.is_here or self._thread is None or self._closed is not None:
            return
        self._is_orphan = True
        if self._loop is not None:  # else it looks when it begins
            with contextlib.suppress(RuntimeError):  # it has failed, and is closed
                self._loop.call_soon_threadsafe(self._end_if_orphan, context=self._context.copy())
        warnings.warn(
            f"unclosed {what}: use it in a `with` block, or close it; what is in flight is finished",
            ResourceWarning,
            stacklevel=2,
        )

    def _end_if_orphan(self) -> None:
        """End, if nobody has the checkpointer any more and nothing is in flight. On the engine's loop."""
        if not self._is_orphan:
            return
        with self._lock:
            is_busy = len(self.queue) > 0 or not all(call.completion.done() for call in list(self._calls))
            if is_busy or self._closed is not None:
                return
            self._closed = Completion("the end of closing", self.origin)
            self._closed._settle(None)
        self.queue.log_unreported()
        self._stop.set()

    def join(self) -> None:
        """Wait for the thread that closed the engine, which has nothing left to do once `close` has completed."""
        if self._closer is not None and self.origin.is_here:
            self._closer.join()

    def _finish(self, closed: Completion[None]) -> None:
        error: BaseException | None = None
        try:
            self._drain()
            self.queue.raise_unreported()
        except BaseException as exc:  # delivered to who closes
            error = exc
        try:
            if self._thread is not None:
                self._post(lambda: self._stop.set())
                if not self._stuck:  # one that has failed may be: its saves are over, their threads maybe not
                    self._thread.join(None if self._died is None else _CANCEL_GRACE_S)
        finally:
            _live.discard(self)
            closed._settle(None, error)

    def _drain(self) -> None:
        """Wait for all saves, and loads; cancel what is left when the time is over. Blocks.

        Raises:
            SaveCancelledError: the time was not enough for a save.
        """
        timeout = min(self.options.drain_timeout, threading.TIMEOUT_MAX)
        deadline = time.monotonic() + timeout
        for job in self.queue.staging():
            job.unthrottle()
        self.queue.ends_within(timeout)
        late = self.queue.jobs
        for job in reversed(late):
            job.cancel()
        stuck = not self.queue.ends_within(_CANCEL_GRACE_S / 3, abandoned=True)
        if stuck and self._world is not None:  # other ranks may have been waited for
            self._world.coordinator.abandon()
        if stuck and self._tools is not None and self._tools.writer is not None:
            self._tools.writer.kill()
        stuck = stuck and not self.queue.ends_within(_CANCEL_GRACE_S * 2 / 3 if late else 0.0, abandoned=True)
        self._stuck = stuck
        self._drain_calls(deadline)
        _tell_of_cancelled(late, timeout)

    def _drain_calls(self, deadline: float) -> None:
        """Wait for loads; those that are on when the time is over are cancelled."""
        late = []
        for call in list(self._calls):
            try:
                call.completion.ended(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                call.cancel()
                late.append(call)
        if self._world is not None:
            self._world.coordinator.abandon()  # what still waits for other ranks has been cancelled
        grace = time.monotonic() + _CANCEL_GRACE_S / 3
        for call in late:
            try:
                call.completion.ended(max(0.0, grace - time.monotonic()))
            except TimeoutError:  # a thread of it hangs in the file system; it is left behind
                self._stuck = True


def _tell_of_cancelled(jobs: list[SaveJob], timeout_s: float) -> None:
    """Raise an error that names those of the saves that were not written in time after all.

    Raises:
        SaveCancelledError: there are any.
    """
    stuck = [job for job in jobs if not job.handle.written.done()]
    ended = [job for job in jobs if job.handle.written._error is not None]
    outcomes = ((stuck, "a thread hangs in the file system; it is left behind"), (ended, "nothing of it is left"))
    told = [
        f"the save of {', '.join(job.path for job in group)} was not done after drain_timeout = {timeout_s:g} s "
        f"and was cancelled; {outcome}"
        for group, outcome in outcomes
        if group
    ]
    for job in stuck:  # who waits for it is not to wait for ever
        job.settle(None, SaveCancelledError(told[0]))
    if told:
        raise SaveCancelledError("; ".join(told)) from (ended[0].handle.written._error if ended else None)


def _import_all() -> None:
    """Import what the engine's threads would import at their first use."""
    importlib.import_module("anyio._backends._asyncio")
    with contextlib.suppress(ImportError):  # torch's own place for it, which may change
        importlib.import_module("torch.utils.serialization.config")


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Let saves that are in flight end before the interpreter does."""
    for engine in list(_live):
        if engine.origin.is_here:
            closed = engine.close()
            error = closed.exception()
            if error is not None:
                sys.excepthook(type(error), error, error.__traceback__)


# Not `atexit`: that comes after the interpreter has refused new work to all executors. This hook comes
# before, for it is registered after the one of concurrent.futures, and they run in reverse order.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
