"""The engine of a checkpointer: its loop thread, its resources, the queue of saves, and loads beside them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from aiockpt.coordination.choose import choose_coordinator, is_distributed, may_be_of_several
from aiockpt.core.futures import Call, Completion
from aiockpt.core.lazy import importing
from aiockpt.core.threads import Origin, check_threads, start_thread, uninterrupted
from aiockpt.engine.loop import EngineLoop, logger
from aiockpt.engine.queue import Failures, SaveQueue, Statistics
from aiockpt.engine.reports import Reports
from aiockpt.engine.resources import EngineResources, shared_memory
from aiockpt.errors import (
    AiockptError,
    CheckpointerClosedError,
    CommitUncertainError,
    NoThreadError,
    SaveCancelledError,
    SaveError,
    SaveTimeoutError,
    unwrapped,
)
from aiockpt.options import SaveOptions
from aiockpt.planning.base import BaseMemory
from aiockpt.staging.pool import ArenaCache
from aiockpt.staging.runtime import current_streams
from aiockpt.staging.throttle import Throttle
from aiockpt.telemetry.progress import ReadReport

if TYPE_CHECKING:
    import torch
    from anyio.abc import TaskGroup

    from aiockpt.coordination.coordinator import Coordinator
    from aiockpt.coordination.protocol import RankCall
    from aiockpt.engine.loop import Work
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import CheckpointerOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.saving.collective import CollectiveResources
    from aiockpt.saving.job import SaveJob
    from aiockpt.saving.joint import Joint
    from aiockpt.saving.pipeline import SavePipeline
    from aiockpt.staging.pool import SharedMemory
    from aiockpt.telemetry.saves import SaveResult

T = TypeVar("T")

CANCEL_GRACE_S = 30.0  # for what was cancelled at the end to stop
_LEAVING_S = 5.0  # for a rank to tell the others that it closes
_TIMEOUT_GRACE_S = 5.0  # for a save past its `save_timeout` to stop; after that a thread of it hangs


class Engine:
    """Runs saves one after the other, and loads beside them. Starts at its first use.

    Public methods may be called from any thread. ``failures`` gets path and error of each save that fails; the engine
    does not keep it alive.
    """

    _stop: anyio.Event
    _tasks: TaskGroup

    def __init__(self, options: CheckpointerOptions, transforms: Sequence[Transform], failures: Failures) -> None:
        self.options = options
        self._transforms = transforms
        self._was_distributed = is_distributed()
        self.origin = Origin()
        self.reports = Reports(options.observers, self.origin)
        limits = options.on_busy, options.max_in_flight, options.on_failure
        self.queue = SaveQueue(*limits, self.origin, self.reports, weakref.ref(failures))
        self.loop = EngineLoop(self.origin, self._fail)
        self._lock = self.queue.lock
        # Held to start the loop's thread, or to begin to close; never by the main thread: handlers of signals run
        # there, which may save, or raise what leaves a lock held.
        self._starting = threading.Lock()
        self._throttle: Throttle | None = None
        if options.staging_window is not None:
            self._throttle = Throttle(options.staging_window, lambda *args: self.loop.post(*args))
        self._tools: EngineResources | None = None
        self._idle: asyncio.TimerHandle | None = None  # ends the thread, as nothing is in flight
        self._resting: list[threading.Thread | None] = []  # threads that were ended so, and may not have ended yet
        self._world: CollectiveResources | None = None
        self._calls: weakref.WeakSet[Call[Any]] = weakref.WeakSet()
        self.arenas = ArenaCache()
        self.base_memory = BaseMemory()
        self.joints: set[Joint] = set()  # transactions that have begun, and whose last step was not submitted
        self._last: SaveJob | None = None
        self._died: BaseException | None = None
        self._is_stuck = False  # a thread hangs and is left behind
        self._is_orphan = False  # the checkpointer was garbage-collected without being closed
        self._closed: Completion[None] | None = None
        self._is_over = False  # not even hooks and observers are served any more
        self._closer: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self.loop.thread else "idle"
        return f"<Engine {state}, {len(self.queue)} saves in flight>"

    @property
    def is_open(self) -> bool:
        """Whether it can still be used: it is not closed, has not failed, and belongs to this process."""
        return self._closed is None and self._died is None and self.origin.is_here

    # --- the loop's thread --------------------------------------------------------------------------

    def start(self, *, while_closing: bool = False) -> None:
        """Start the thread if it doesn't run, without waiting until it is ready; not to be called with the lock held.

        ``while_closing``: also after closing has begun. Whatever may fail for lack of resources is done within this
        call: it fails, and the next one tries again.
        """
        self.origin.check_process()
        self._check_open(while_closing)
        if self.loop.thread is not None:
            return
        try:
            uninterrupted(partial(self._start_loop, while_closing))
        except (OSError, ImportError, NoThreadError) as exc:
            raise AiockptError(
                f"the checkpointer can't start: {exc}. Close files, end threads, or raise the limits (see ulimit), "
                "and call again"
            ) from exc

    def _check_open(self, while_closing: bool) -> None:
        check_threads()
        if self._closed is not None and (self._is_over or not while_closing):
            raise CheckpointerClosedError("this checkpointer is closed; make a new one")
        if self._died is not None:
            raise AiockptError(f"this checkpointer's thread has failed: {self._died!r}; make a new one") from self._died

    def _start_loop(self, while_closing: bool) -> None:
        with self._starting, contextlib.ExitStack() as stack:
            self._check_open(while_closing)
            if self.loop.thread is not None:
                return
            shared = shared_memory(self.options)
            if shared is not None:
                stack.callback(shared.close)
            self.loop.start(partial(self._main, shared))
            stack.pop_all()
        _live.add(self)

    @contextlib.contextmanager
    def _running(self, *, while_closing: bool = False) -> Iterator[None]:
        """Hold the lock once the thread runs; start it if it doesn't."""
        while True:
            self.start(while_closing=while_closing)
            with self._lock:
                self._check_open(while_closing)
                if self.loop.thread is not None:  # else it has gone to rest since
                    yield
                    return

    async def _main(self, shared: SharedMemory | None) -> None:
        self._stop = stop = anyio.Event()
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
                self.loop.accept()
                self._has_idled()
                try:
                    if tools.writer is not None:
                        tools.writer.start(tasks)
                    await stop.wait()
                finally:
                    await self._give_up_joints()
                    if tools.writer is not None:
                        with anyio.CancelScope(shield=True):
                            await tools.writer.aclose()
                    tasks.cancel_scope.deadline = anyio.current_time() + _LEAVING_S
        except BaseException as exc:  # at once: what is posted from now on has no task group, and must be refused
            self._fail(unwrapped(exc))
            raise
        finally:
            try:
                tools.close()
            finally:
                if self._tools is tools:  # else it rests
                    if self._world is not None:
                        self._world.coordinator.close()
                    self.reports.end()

    async def _give_up_joints(self) -> None:
        """Remove what transactions have written that were never left. Not to be cancelled."""
        for joint in list(self.joints):
            with anyio.CancelScope(shield=True):
                try:
                    await joint.abort()
                except AiockptError as exc:
                    logger.warning("%s", exc)
            logger.warning("%s: its transaction was open when the checkpointer was closed; nothing is left", joint.path)

    def _fail(self, cause: BaseException) -> None:
        """Fail everything that is pending, after a defect of the engine, and end its loop. Idempotent."""
        with self._lock:
            is_first = self._died is None
            self._died = cause = self._died or cause
            calls = list(self._calls)
        error = AiockptError(f"the engine has failed: {cause!r}")
        error.__cause__ = cause
        pending: list[Work] = [*self.queue.fail_all(error), *calls]
        for work in pending:
            work.fail(cause)
        self.loop.cancel()
        if is_first:
            logger.critical("the thread of a checkpointer has failed, and with it what was pending", exc_info=cause)

    @property
    def tools(self) -> EngineResources:
        """Its resources, once its loop runs."""
        if self._tools is None:
            raise RuntimeError("the engine has not been started")
        return self._tools

    # --- saves --------------------------------------------------------------------------------------

    def coordinator(self) -> Coordinator | None:
        """Return the coordinator, chosen at the first call that finds other ranks; None if there are none."""
        self.origin.check_process()
        with self._lock:
            if self._world is None:
                group, timeout_s = self.options.process_group, self.options.coordination_timeout
                if may_be_of_several(group):
                    with importing():  # before there is a coordinator, of which all ranks must make as many
                        import aiockpt.saving.collective  # noqa: F401
                coordinator = choose_coordinator(group, timeout_s, was_distributed=self._was_distributed)
                if coordinator is None:
                    return None
                from aiockpt.planning.dcp_plan import DcpFormat, prefix_of
                from aiockpt.planning.planner import Planner
                from aiockpt.saving.collective import CollectiveResources

                planner = Planner(DcpFormat(self.options.writing_threads), prefix_of(coordinator.rank))
                self._world = CollectiveResources(coordinator, planner)
            return self._world.coordinator

    @property
    def leads(self) -> bool:
        """Whether this process decides which saves are skipped: it saves alone, or is rank 0."""
        return self._world is None or self._world.coordinator.leads

    def submit(self, job: SaveJob) -> None:
        """Queue a save. Raise the error of an earlier save that was not awaited, or that the engine is closed."""
        with self._running():  # saves get their places in the queue, the throttle and the loop in one order
            is_alone = job.spec.copies and job.spec.has_outcome  # else its transaction has passed these
            if is_alone:
                self.queue.raise_unreported()
            if self.leads and is_alone:
                self.queue.supersede(job.path)
            if self._throttle is not None:
                job.throttle = self._throttle.for_next_save()
            if job.spec.has_outcome:
                self.reports.started(job)
            self._enqueue(job)

    def refuse(self, job: SaveJob, error: BaseException) -> None:
        """Queue a save that only informs the other ranks of the error for which this one does not take part."""
        if not self.is_open:
            return
        try:
            with self._running():
                self._enqueue(job)
        except AiockptError:
            self._tell(job.spec.call, f"the save of {job.path}", error)

    def _tell(self, call: RankCall | None, operation: str, error: BaseException) -> None:
        """Fail a call on the other ranks if this one can't start the loop in which it would take part."""
        if call is None or self._world is None or self.loop.thread is not None:
            return
        if not self._world.coordinator.tell(call, operation, error):
            error.add_note("the other ranks could not be informed: they wait for coordination_timeout")

    def _enqueue(self, job: SaveJob) -> None:
        once = [job]
        try:
            self.queue.add(job)
            self.loop.post(lambda: self._begin_once(once))
        except BaseException:  # of a signal's handler: nobody gets the handle, and closing must not wait for its begin
            self.loop.post(lambda: self._begin_once(once))
            job.cancel()
            raise

    def _begin_once(self, jobs: list[SaveJob]) -> None:
        while jobs:
            self._begin(jobs.pop())

    def _begin(self, job: SaveJob) -> None:
        try:
            job.take_turn(self._last)
            self._tasks.start_soon(self._run, job)
        except BaseException as exc:  # delivered to the waiters of the save
            job.fail(exc)
            self.queue.remove(job)
            return
        self._last = job

    async def _run(self, job: SaveJob) -> None:
        try:
            await _run_save(job, self.queue, self.tools, self.options.save_timeout)
        finally:
            if self._last is job:
                self._last = None
                await self.tools.growth.fill(list(self.tools.stagers.values()))
            self._has_idled()

    def post(self, function: Callable[[], object], work: SaveJob) -> None:
        self.loop.post(function, work)

    def on_delivery(self, job: SaveJob) -> None:
        self.queue.mark_reported(job)

    def on_staged(self, job: SaveJob) -> None:
        self.reports.staged(job)

    def on_end(self, job: SaveJob, result: SaveResult | None, error: BaseException | None) -> None:
        self.queue.record(job, result, error)

    def open_window(self) -> None:
        """Allow staging to copy for one more window; see `StagingWindow`."""
        self.origin.check_process()
        with self._lock:
            if self.loop.thread is not None and self._throttle is not None:
                self._throttle.open()

    def statistics(self) -> Statistics:
        """Return the counts of saves by outcome, and the staging memory."""
        self.origin.check_process()
        if self._tools is None:
            return self.queue.statistics(0, 0)
        pool = self._tools.pool
        return self.queue.statistics(pool.made * pool.chunk_bytes, pool.quarantined * pool.chunk_bytes)

    # --- loads, and other calls -----------------------------------------------------------------------

    def call(
        self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str, rank_call: RankCall | None = None
    ) -> Call[T]:
        """Run a coroutine function on the engine's loop.

        ``what`` names it in messages; ``rank_call`` is the call that other ranks make too, with that as the operation.
        """
        try:
            return self._begin_call(function, what)
        except AiockptError as exc:
            self._tell(rank_call, what, exc)
            raise

    def _begin_call(self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str) -> Call[T]:
        with importing():
            import aiockpt.reading.executor  # noqa: F401 - before the engine's thread wants it

        self.origin.check(what, saves=False)
        streams = current_streams()  # the caller's, to which new tensors belong
        call = Call(
            lambda: function(replace(self.tools.loads, streams=streams, report=ReadReport())),
            what,
            self.origin,
            lambda *args: self.loop.post(*args),
        )
        # Closing waits for hooks and observers: what they ask for is still done.
        with self._running(while_closing=self.origin.is_served_here):
            try:
                self._calls.add(call)
                self.loop.post(lambda: self._tasks.start_soon(self._run_call, call), call)
            except BaseException:  # of a signal's handler: closing must not wait for what may never begin
                self._calls.discard(call)
                call.cancel()
                raise
        return call

    def start_behind(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what no caller waits for; closing gives it a few seconds to end. On the engine's loop."""
        self._tasks.start_soon(function)

    async def _run_call(self, call: Call[Any]) -> None:
        await call.run()
        self._has_idled()

    def prewarm(self, nbytes: int, devices: set[torch.device]) -> Completion[None]:
        """Allocate staging memory for a state of this size, and fault it in with several threads."""

        async def warm(_: LoadTools) -> None:
            tools = self.tools
            await tools.growth.prewarm(nbytes, [tools.stager_for(device) for device in devices])

        return self.call(warm, "prewarm").completion

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> Completion[None]:
        """Finish the saves in flight and end all threads, in the background; idempotent.

        Returns a future, with the error of a save that was not awaited, if there is one. Raises SaveError in a thread
        that closing would wait for.
        """
        closed = Completion[None]("the end of closing", self.origin)
        if not self.origin.is_here:  # in a forked process there is nothing to close
            closed._settle(None)
            return closed
        self.origin.check("closing")
        with self.origin.unlocked():
            has_begun = uninterrupted(partial(self._start_closer, closed))
        if has_begun:
            return self._closed or closed
        logger.warning("no thread can be started to close the checkpointer, so this one blocks until it is closed")
        self._finish(closed)
        return closed

    def _start_closer(self, closed: Completion[None]) -> bool:
        """Begin to close, unless that has begun; return whether there is a thread for it."""
        with self._starting, self._lock:
            if self._closed is not None:
                return True
            self._closed = closed
            if self.loop.thread is None:
                closed._settle(None)
                return True
            closer = threading.Thread(target=self._finish, args=(closed,), name="aiockpt-close", daemon=True)
            with contextlib.suppress(NoThreadError):
                start_thread(closer)
                self._closer = closer
            return self._closer is not None

    def join(self) -> None:
        """Wait for the thread that closes the engine, which has nothing left to do once `close` has completed."""
        for thread in (self._closer, *self._resting):
            if thread is not None and self.origin.is_here:
                thread.join()

    def _finish(self, closed: Completion[None]) -> None:
        error: BaseException | None = None
        try:
            late = self._drain(min(self.options.drain_timeout, threading.TIMEOUT_MAX))
            if late is not None:
                raise late
            self.queue.raise_unreported()
        except BaseException as exc:  # delivered to whoever closes
            error = exc
        try:
            self.reports.end()  # before the loop: they may still load
            with self._lock:
                self._is_over = True
            self._drain_calls(time.monotonic())  # loads of observers that are left behind
            if self.loop.thread is not None:
                self.loop.post(lambda: self._stop.set())
                if not self._is_stuck:  # if it has died, its saves are settled, but a thread of them may hang
                    self.loop.thread.join(None if self._died is None else CANCEL_GRACE_S)
        finally:
            self.arenas.clear()
            _live.discard(self)
            closed._settle(None, error)

    def _drain(self, timeout_s: float) -> SaveCancelledError | None:
        """Wait for all saves, then for all loads; cancel what is late. Return the error if saves were not written."""
        deadline = time.monotonic() + timeout_s
        for job in self.queue.staging():
            job.unthrottle()
        self.queue.wait_idle(timeout_s)
        late = self.queue.jobs
        for job in reversed(late):  # the last first: else a save would begin because the one before it has ended
            job.cancel()
        grace_s = min(CANCEL_GRACE_S, max((job.storage.traits.removal_s for job in late), default=CANCEL_GRACE_S))
        if not self.queue.wait_idle(grace_s / 2, abandoned=True):
            # A save waits for other ranks, or for the writer process, where a cancellation does not reach it.
            self.leave_ranks()
            if self._tools is not None and self._tools.writer is not None:
                self._tools.writer.kill()
            self._is_stuck = not self.queue.wait_idle(grace_s / 2 if late else 0.0, abandoned=True)
        self._drain_calls(deadline)
        return _late_error(late, timeout_s)

    def _drain_calls(self, deadline: float) -> None:
        """Wait for loads, and cancel them at the deadline."""
        late = []
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            try:
                call.completion.ended(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                call.cancel()
                late.append(call)
        self.leave_ranks()  # what still waits for other ranks has been cancelled, which takes effect after a round
        grace = time.monotonic() + CANCEL_GRACE_S / 3
        for call in late:
            try:
                call.completion.ended(max(0.0, grace - time.monotonic()))
            except TimeoutError:  # a thread of it hangs in the file system
                self._is_stuck = True

    def leave_ranks(self) -> None:
        """Make current and later rounds with other ranks fail."""
        if self._world is not None:
            self._world.coordinator.abandon()

    def close_when_idle(self, what: str) -> None:
        """End when everything in flight is done: the checkpointer (``what``) was garbage-collected.

        The garbage collector calls this in any thread, at any point: it takes no lock and never blocks.
        """
        self._is_orphan = True  # which the loop checks as it begins, if it hasn't yet
        if not self.origin.is_here or self.loop.thread is None or self._closed is not None:
            return
        self.loop.post_without_lock(self._end_if_orphan)
        warnings.warn(
            f"unclosed {what}: leave it by `with` or `async with`, or close it; what is in flight is finished",
            ResourceWarning,
            stacklevel=2,
        )

    @property
    def _is_busy(self) -> bool:
        return len(self.queue) > 0 or bool(self.joints) or not all(call.completion.done() for call in list(self._calls))

    def _has_idled(self) -> None:
        """Begin to count the ``idle_timeout`` anew, and end if the checkpointer is garbage. On the engine's loop."""
        timeout_s = self.options.idle_timeout
        is_awake = threading.current_thread() is self.loop.thread
        if timeout_s is not None and is_awake and self._world is None:  # other ranks would be left behind
            if self._idle is not None:
                self._idle.cancel()
            self._idle = asyncio.get_running_loop().call_later(timeout_s, self._rest)
        self._end_if_orphan()

    def _rest(self) -> None:
        """End the thread and free the memory, if nothing is in flight; the next call starts anew. On the loop."""
        with self._lock:
            if self._is_busy or self._closed is not None or self._died is not None or self._world is not None:
                return  # what is in flight counts anew when it ends
            self._resting = [each for each in (*self._resting, self.loop.thread) if each and each.is_alive()]
            self._last = self._tools = self._idle = None
            stop = self._stop
            self.loop = EngineLoop(self.origin, self._fail)
            self.reports.rest()
            self.arenas.clear()
        stop.set()

    def _end_if_orphan(self) -> None:
        """End if the checkpointer was garbage-collected and nothing is in flight. On the engine's loop."""
        if not self._is_orphan:
            return
        with self._lock:
            if self._is_busy or self._closed is not None:
                return
            self._is_over = True
            self._closed = Completion("the end of closing", self.origin)
            self._closed._settle(None)
        self.queue.log_unreported()
        self._stop.set()


async def _run_save(job: SaveJob, queue: SaveQueue, resources: EngineResources, timeout_s: float | None) -> None:
    """Run a save, and cancel it at its ``save_timeout``; when this returns, the next save has its turn."""
    try:
        async with anyio.create_task_group() as tasks:
            from aiockpt.saving.pipeline import SavePipeline  # imported already, by the thread that has submitted

            job.pipeline = pipeline = SavePipeline(job, resources)
            if timeout_s is not None:
                tasks.start_soon(_watch, job, pipeline, queue, resources, timeout_s)
            await pipeline.run()
            tasks.cancel_scope.cancel()
    except BaseException as exc:
        job.fail(exc)
        raise
    finally:
        queue.remove(job)
        await job.turn.finish_in_order()  # a save that has failed early must not let the next one overtake others
        # A caller may keep the handle, and with it the job; the hooks may refer to the checkpointer, which could
        # not be garbage-collected then.
        job.spec = replace(job.spec, options=SaveOptions())
        job.pipeline = None


async def _watch(
    job: SaveJob, pipeline: SavePipeline, queue: SaveQueue, resources: EngineResources, timeout_s: float
) -> None:
    """Cancel a save when its time is over; if it does not end, kill the writer; then abandon the save.

    A thread that hangs must not stop the saves behind it.
    """
    await job.turn.wait_for("reported")  # the time begins when the save before has ended
    await anyio.sleep(timeout_s)
    if job.committed:  # it is published: only its post_commit hook is left
        return
    what = f"the save of {job.path} was not done after save_timeout = {timeout_s:g} s and was given up"
    job.abort(SaveTimeoutError(f"{what}; nothing of it is left"), though_copied=True)
    grace_s = min(_TIMEOUT_GRACE_S, timeout_s)
    await anyio.sleep(grace_s / 2)
    if resources.writer is not None:
        resources.writer.kill()
    await anyio.sleep(grace_s / 2)
    if job.committed:
        return  # type: ignore[unreachable] # it has changed meanwhile
    pipeline.quarantine()
    job.settle(
        None,
        SaveTimeoutError(
            f"{what}; a thread of it hangs in the storage, and holds its memory until it returns. What was written is "
            "removed then, unless it was just being published. Look after the storage, and save elsewhere meanwhile"
        ),
    )
    job.turn.pass_milestone("reported")
    logger.error("a thread of the save of %s hangs in the storage; saving goes on without it", job.path)
    world = resources.world()
    if world is not None and job.spec.call is not None:
        await world.coordinator.give_up(job.spec.call, f"the save of {job.path}", SaveTimeoutError(what))
    workers = resources.io_workers
    job.turn.finish()
    workers.spare(workers.count)  # as many as the save may block
    queue.abandon(job)
    try:
        await anyio.sleep_forever()
    finally:
        workers.spare(-workers.count)


def _late_error(jobs: list[SaveJob], timeout_s: float) -> SaveCancelledError | None:
    """Return an error that names the saves that were not written in time, if any; settle those that hang."""
    hanging = [job for job in jobs if not job.handle.written.done()]
    publishing = [job for job in hanging if (pipeline := job.pipeline) is not None and pipeline.revoke()]
    failed = [job for job in jobs if job.handle.written._exception is not None]
    uncertain = [job for job in failed if isinstance(job.handle.written._exception, CommitUncertainError)]
    left = "a thread hangs in the storage; it is left behind"
    outcomes: Sequence[tuple[list[SaveJob], str, type[SaveError]]] = (
        (publishing, f"{left}, and it is not known whether it was published", CommitUncertainError),
        ([job for job in hanging if job not in publishing], left, SaveCancelledError),
        (uncertain, "it is not known whether it was published", CommitUncertainError),
        ([job for job in failed if job not in uncertain], "nothing of it is left", SaveCancelledError),
    )
    messages = []
    for group, outcome, kind in outcomes:
        if group:
            late = f"{', '.join(job.path for job in group)} was not done after drain_timeout = {timeout_s:g} s"
            messages.append(f"the save of {late} and was cancelled; {outcome}")
        for job in group:
            if job in hanging:  # else its waiters would never wake
                job.settle(None, kind(messages[-1]))
    if not messages:
        return None
    error = SaveCancelledError("; ".join(messages))
    error.__cause__ = failed[0].handle.written._exception if failed else None
    return error


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Finish saves in flight before the interpreter ends."""
    for engine in list(_live):
        if engine.origin.is_here:
            closed = engine.close()
            error = closed.exception()
            if error is not None:
                sys.excepthook(type(error), error, error.__traceback__)


# Not `atexit`, which runs when the interpreter already refuses new work for all executors. This hook runs before that:
# it is registered after the one of concurrent.futures, and they run in reverse order.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
