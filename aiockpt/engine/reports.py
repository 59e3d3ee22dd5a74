"""Calls of observers and of progress callables: in threads of their own, so that neither saves nor loads wait."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiockpt.core.threads import DaemonThreads, Duty, Origin
from aiockpt.telemetry.observer import CallEvent, Observer, SaveEvent
from aiockpt.telemetry.progress import ReadReport
from aiockpt.telemetry.saves import LoadResult

if TYPE_CHECKING:
    from aiockpt.saving.job import SaveJob
    from aiockpt.telemetry.progress import OnProgress, Outcome, ProgressEvent, Reading
    from aiockpt.telemetry.saves import MirrorBacklog, MirrorResult, SaveResult

MOST_CALLS = 10_000
"""Calls of observers that may wait; further ones are dropped."""
END_S = 10.0
"""Limit for the calls that closing waits for."""

logger = logging.getLogger("aiockpt")
_numbers = itertools.count(1)


class Reports:
    """The observers of a checkpointer, and the progress callables of its loads. From any thread; never raises."""

    def __init__(self, observers: Sequence[Observer], origin: Origin) -> None:
        self._observers = tuple(observers)
        self._calls = DaemonThreads(1, "aiockpt-observers", duty=Duty(origin, "saves", "an observer"))
        self._displays = DaemonThreads(1, "aiockpt-progress", duty=Duty(origin, "saves", "a progress callable"))
        self._drops = 0
        self._is_over = False
        self.last_load: LoadResult | None = None

    # --- saves --------------------------------------------------------------------------------------

    def started(self, job: SaveJob) -> None:
        """Report a save that was queued, in a copy of the caller's context: a trace finds its parent span there."""
        if self._observers and not job.spec.is_refusal:
            job.number = next(_numbers)
            context = contextvars.copy_context()
            self._tell(lambda observer, event: context.copy().run(observer.save_started, event), _event_of(job))

    def staged(self, job: SaveJob) -> None:
        if job.number:
            self._tell(lambda observer, event: observer.staged(event), _event_of(job))

    def over(self, job: SaveJob, outcome: Outcome, result: SaveResult | None, error: BaseException | None) -> None:
        if not self._observers:
            return
        job.number = job.number or next(_numbers)  # skipped at the call
        event = _event_of(job)
        if result is not None:
            self._tell(lambda observer, event: observer.written(event, result), event)
        elif error is not None:
            self._tell(lambda observer, event: getattr(observer, outcome)(event, error), event)

    # --- loads and deletions --------------------------------------------------------------------------

    def read(self, what: Reading, path: str, progress: OnProgress | None) -> ReadReport:
        """Report to a progress callable how far a call is, and to the observers the end of a load."""
        return _FollowedReport(what, path, self, self._displays, progress)

    def loaded(self, report: ReadReport, error: BaseException | None) -> None:
        result = report.result if isinstance(report.result, LoadResult) else None
        self.last_load = result or self.last_load
        event = CallEvent(report.path, time.time(), report.elapsed_s, error)
        self._tell(lambda observer, event: observer.loaded(event, result), event)

    def deleted(self, path: str, elapsed_s: float, error: BaseException | None) -> None:
        self._tell(lambda observer, event: observer.deleted(event), CallEvent(path, time.time(), elapsed_s, error))

    def copied(
        self,
        path: str,
        elapsed_s: float,
        result: MirrorResult | None,
        error: BaseException | None,
        backlog: MirrorBacklog,
    ) -> None:
        def call(observer: Observer, event: CallEvent) -> None:
            observer.mirrored(event, result, backlog)

        self._tell(call, CallEvent(path, time.time(), elapsed_s, error))

    # --- calling --------------------------------------------------------------------------------------

    def _tell(self, call: Callable[[Observer, Any], object], event: SaveEvent | CallEvent) -> None:
        if not self._observers:
            return
        if self._calls.unfinished >= MOST_CALLS:
            if not self._drops:
                logger.error("%d calls of observers wait for one that blocks; further ones are dropped", MOST_CALLS)
            self._drops += 1
            return
        _submit(self._calls, lambda: self._call(call, event))

    def _call(self, call: Callable[[Observer, Any], object], event: SaveEvent | CallEvent) -> None:
        for observer in self._observers:
            try:
                call(observer, event)
            except BaseException:  # SystemExit would end nothing here but the calls of the others
                logger.exception("the observer %r has failed with %r", observer, event)

    def rest(self) -> None:
        """End the threads, without waiting, until there is something to call again."""
        self._displays.rest()
        self._calls.rest()

    def end(self) -> None:
        """Wait for the calls that are still to be made, and end the threads. Blocks; idempotent."""
        if self._is_over:
            return
        self._is_over = True
        deadline = time.monotonic() + END_S
        for threads in (self._displays, self._calls):
            if not threads.end(max(0.0, deadline - time.monotonic())):
                logger.error("an observer or a progress callable still runs after %g s; it is left behind", END_S)


class _FollowedReport(ReadReport):
    """Calls a progress callable, if there is one, with the newest figures: one call at a time for many changes."""

    def __init__(
        self, what: Reading, path: str, reports: Reports, threads: DaemonThreads, function: OnProgress | None
    ) -> None:
        super().__init__(what, path)
        self._reports = reports
        self._threads = threads
        self._function = function
        self._is_queued = False
        self._is_over = False
        self._note_change()

    def _note_change(self) -> None:
        """Schedule a call, unless one is scheduled."""
        if self._function is not None and not self._is_queued and not self._is_over:
            self._is_queued = True
            _submit(self._threads, self._call)

    def end(self, error: BaseException | None) -> None:
        """Schedule the last call, and report the end of a load."""
        super().end(error)
        self._is_over = True
        if self._function is not None:
            is_cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            event = self.event("done" if error is None else "cancelled" if is_cancelled else "failed")
            _submit(self._threads, lambda: self._tell(event))
        if self.what == "load":
            self._reports.loaded(self, error)

    def _call(self) -> None:
        self._is_queued = False  # before the figures are taken: a change after that needs another call
        event = self.event("reading")
        if not self._is_over:  # else the last event is older, and waits already
            self._tell(event)

    def _tell(self, event: ProgressEvent) -> None:
        function = self._function
        if function is None:
            return
        try:
            function(event)
        except BaseException:  # as of observers
            logger.exception("the progress callable %r has failed; it is not called again", function)
            self._function = None


def _submit(threads: DaemonThreads, function: Callable[[], object]) -> None:
    try:
        threads.submit(function)
    except RuntimeError as exc:  # no thread can be had, or it is too late
        logger.debug("an observer or a progress callable is not called: %s", exc)


def _event_of(job: SaveJob) -> SaveEvent:
    last = job.handle._last
    return SaveEvent(job.number, job.spec.path, time.time(), job.handle._elapsed(), last.total_bytes if last else 0)
