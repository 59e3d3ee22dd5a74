"""The engine: a private event loop in a thread of its own, staging memory, worker threads, and the saves in line.

It is independent of the caller's loop: a loop that is held by training, or closed, does not hold up a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import torch

from aiockpt.call import Call
from aiockpt.engine_tools import EngineTools
from aiockpt.errors import AiockptError, CheckpointerClosedError, SaveCancelledError, SaveError
from aiockpt.format.torchzip import tensor_framing
from aiockpt.handle import Completion
from aiockpt.line import SaveLine
from aiockpt.planning.dcp_plan import prefix_of
from aiockpt.planning.world_planner import WorldPlanner
from aiockpt.save import let_pass_in_turn, run_save
from aiockpt.save_leading import WorldTools
from aiockpt.save_watch import watch
from aiockpt.staging.pacing import Pacing
from aiockpt.staging.runtime import current_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from anyio.abc import TaskGroup

    from aiockpt.coordination.base import Coordinator
    from aiockpt.item_reader import LoadTools
    from aiockpt.job import SaveJob
    from aiockpt.line import Statistics
    from aiockpt.options import EngineOptions

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_CANCEL_GRACE_S = 30.0


class Engine:
    """Runs saves one after the other, and loads beside them. Starts at its first use.

    Methods without ``_`` may be called from any thread.
    """

    _stop: anyio.Event
    _tasks: TaskGroup

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.io_threads = options.writing_threads
        self._pid = os.getpid()
        self.line = SaveLine(options.on_busy, options.max_in_flight, options.on_failure)
        self._lock = self.line.lock
        self._stuck = False
        self._died: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posting = threading.Lock()
        self._backlog: list[Callable[[], object]] = []
        self._closed: Completion[None] | None = None
        self._closer: threading.Thread | None = None
        self._calls: weakref.WeakSet[Call[Any]] = weakref.WeakSet()
        self._last: SaveJob | None = None
        self._tools: EngineTools | None = None
        self._world: WorldTools | None = None
        self._pacing = Pacing(options.staging_window, self._post)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._thread else "idle"
        return f"<Engine {state}, {len(self.line)} saves in flight>"

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, without waiting until it is ready."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        """Start the thread if needed; with the lock held."""
        if self._closed is not None:
            raise CheckpointerClosedError("this checkpointer is closed; make a new one")
        if self._died is not None:
            raise AiockptError(f"this checkpointer's thread has failed: {self._died!r}; make a new one") from self._died
        if self._pid != os.getpid():
            raise CheckpointerClosedError(
                "this checkpointer was made in another process, before a fork; make a new one in this process"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="aiockpt-engine", daemon=True)
            self._thread.start()
            _live.add(self)

    def _post(self, function: Callable[[], object]) -> None:
        """Let the engine's loop call a function, as soon as it runs; from any thread, without waiting."""
        with self._posting:
            if self._loop is None:
                self._backlog.append(function)
            else:
                self._loop.call_soon_threadsafe(function)

    def _accept(self) -> None:
        """Take over what was posted before the loop ran."""
        with self._posting:
            self._loop = asyncio.get_running_loop()
            for function in self._backlog:
                self._loop.call_soon(function)
            self._backlog.clear()

    def _serve(self) -> None:
        # uvloop wakes faster from other threads; without it asyncio's own loop does.
        try:
            importlib.import_module("uvloop")
            use_uvloop = True
        except Exception:  # missing, or broken: whatever its import raises
            use_uvloop = False
        try:
            anyio.run(self._main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})
        except BaseException as exc:
            self._fail(exc)
            raise

    def _fail(self, cause: BaseException) -> None:
        """Tell everybody who waits that the engine's thread has died, which is a defect."""
        with self._lock:
            self._died = cause
            calls = list(self._calls)
        for job in self.line.fail_all():
            error = SaveError(f"the save of {job.path} failed with the engine: {cause!r}")
            error.__cause__ = cause
            job.settle(None, error)
        for call in calls:
            call.completion._settle(None, AiockptError(f"the engine has failed: {cause!r}"))

    async def _main(self) -> None:
        self._stop = anyio.Event()
        self._tools = tools = EngineTools(
            self.options, lambda: self._world, lambda: len(self.line) > 0 or self._closed is not None
        )
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._accept()
                if tools.writer is not None:
                    tools.writer.start(tasks)
                # Torch's first steps in saving take a while: let them not delay the first save.
                await tools.copy_workers.run(tensor_framing, torch.float32, (1,), (1,))
                await self._stop.wait()
                if tools.writer is not None:
                    await tools.writer.aclose()
        finally:
            try:
                tools.close()
            finally:
                if self._world is not None:
                    self._world.coordinator.close()

    @property
    def tools(self) -> EngineTools:
        """What it works with, once its loop runs."""
        if self._tools is None:
            raise RuntimeError("the engine has not been started")
        return self._tools

    def meet(self, choose: Callable[[], Coordinator | None], *, decentralized: bool) -> Coordinator | None:
        """Give the way to the other ranks; it is chosen at the first use that finds any, and stays."""
        with self._lock:
            if self._world is None:
                coordinator = choose()
                if coordinator is None:
                    return None
                self._world = WorldTools(
                    coordinator, WorldPlanner(prefix_of(coordinator.rank)), decentralized=decentralized
                )
            return self._world.coordinator

    # --- work -------------------------------------------------------------------------------------

    def submit(self, job: SaveJob) -> None:
        """Put a save in line.

        Raises:
            AiockptError: an earlier save failed and nobody has been told: its error.
            CheckpointerClosedError: the engine is closed.
        """
        with self._lock:
            self.line.raise_unseen()
            self._start()
            if self._leads:
                self.line.supersede(job.path)
            job.pace = self._pacing.pace()
            self._enter(job)

    def refuse(self, job: SaveJob) -> None:
        """Put a save in line that only tells the other ranks why this one does not take part."""
        with self._lock:
            if self._closed is None and self._died is None and self._pid == os.getpid():
                self._start()
                self._enter(job)

    def _enter(self, job: SaveJob) -> None:
        job.post = self._post
        self.line.add(job)
        self._post(lambda: self._admit(job))

    @property
    def _leads(self) -> bool:
        """Whether this process decides which saves are left out: it saves alone, or is rank 0."""
        return self._world is None or self._world.coordinator.leads

    def admit(self, path: str) -> None:
        """Decide whether a save that comes now is made; see `SaveLine.admit`."""
        if self._leads:
            self.line.admit(path)

    def staging(self) -> list[SaveJob]:
        """Give the saves whose tensors are not all copied, in order."""
        return self.line.staging() if self._pid == os.getpid() else []

    def statistics(self) -> Statistics:
        """Sum up what has become of the saves."""
        if self._tools is None:
            return self.line.statistics(0, 0)
        pool = self._tools.pool
        return self.line.statistics(pool.made * pool.chunk_bytes, pool.quarantined * pool.chunk_bytes)

    def open_window(self) -> None:
        """Let staging copy what is allowed for one more window, see `StagingWindow`."""
        with self._lock:
            if self._thread is not None:
                self._pacing.open()

    def _admit(self, job: SaveJob) -> None:
        job.admit()
        previous, self._last = self._last, job
        self._tasks.start_soon(self._run, job, previous)

    async def _run(self, job: SaveJob, previous: SaveJob | None) -> None:
        tools, spare = self.tools, 0
        limit_s = self.options.save_timeout

        def shake() -> None:
            if tools.writer is not None:
                tools.writer.kill()

        def abandon() -> None:
            nonlocal spare
            if self._world is None:  # else the ranks have to stay in step
                job.let_pass()
                spare = tools.io_workers.count
                tools.io_workers.spare(spare)
                self.line.abandon(job)

        try:
            async with anyio.create_task_group() as tasks:
                if limit_s is not None:
                    tasks.start_soon(partial(watch, job, previous, limit_s, shake=shake, abandon=abandon))
                await run_save(job, tools.saves, previous)
                tasks.cancel_scope.cancel()
        finally:
            tools.io_workers.spare(-spare)
            self.line.remove(job)
            await let_pass_in_turn(job, previous)
            if self._last is job:
                self._last = None
                await tools.growth.fill(list(tools.stagers.values()))

    def call(self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str) -> Call[T]:
        """Run a coroutine function on the engine's loop, with the tools for reading."""
        streams = current_streams()  # the caller's, to which what is made belongs
        call = Call(lambda: function(replace(self.tools.loads, streams=streams)), what)
        with self._lock:
            self._start()
            call.post = self._post
            self._calls.add(call)
            self._post(lambda: self._tasks.start_soon(call.run))
        return call

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
        """
        with self._lock:
            if self._closed is not None:
                return self._closed
            closed = Completion[None]("closed")
            if self._thread is None or self._pid != os.getpid():
                closed._settle(None)
            else:
                closer = threading.Thread(target=self._finish, args=(closed,), name="aiockpt-close", daemon=True)
                closer.start()  # an interrupt before this leaves it open, to be closed once more
                self._closer = closer
            self._closed = closed
        return closed

    def join(self) -> None:
        """Wait for the thread that closed the engine, which has nothing left to do once `close` has completed."""
        if self._closer is not None:
            self._closer.join()

    def _finish(self, closed: Completion[None]) -> None:
        error: BaseException | None = None
        try:
            self._drain()
            self.line.raise_unseen()
        except BaseException as exc:  # delivered to who closes
            error = exc
        try:
            if self._thread is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed already, for the thread has failed
                    self._post(lambda: self._stop.set())
                if not self._stuck:
                    self._thread.join()
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
        for job in self.staging():
            job.hurry()
        self.line.ends_within(timeout)
        late = self.line.jobs
        for job in reversed(late):
            job.cancel()
        stuck = not self.line.ends_within(_CANCEL_GRACE_S / 3, abandoned=True)
        if stuck and self._world is not None:  # other ranks may have been waited for
            self._world.coordinator.abandon()
        if stuck and self._tools is not None and self._tools.writer is not None:
            self._tools.writer.kill()
        stuck = stuck and not self.line.ends_within(_CANCEL_GRACE_S * 2 / 3 if late else 0.0, abandoned=True)
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


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Let saves that are in flight end before the interpreter does."""
    for engine in list(_live):
        if engine._pid == os.getpid():
            closed = engine.close()
            error = closed.exception()
            if error is not None:
                sys.excepthook(type(error), error, error.__traceback__)


# Not `atexit`: that comes after the interpreter has refused new work to all executors. This hook comes
# before, for it is registered after the one of concurrent.futures, and they run in reverse order.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
