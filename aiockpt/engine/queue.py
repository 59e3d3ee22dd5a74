"""The queue of saves: those in flight, those to be superseded, and the failures that were not delivered yet."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiockpt.core.futures import Completion
from aiockpt.errors import CheckpointerBusyError, SaveSkippedError
from aiockpt.telemetry.progress import Outcome, outcome_of

if TYPE_CHECKING:
    import weakref

    from aiockpt.core.threads import Origin
    from aiockpt.engine.reports import Reports
    from aiockpt.options import OnBusy, OnFailure
    from aiockpt.saving.job import SaveJob
    from aiockpt.telemetry.saves import SaveResult

KEPT = 100  # paths and errors for `Statistics`

logger = logging.getLogger("aiockpt")

Failures = deque[tuple[str, BaseException]]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of the saves of one checkpointer, by outcome.

    Attributes:
        in_flight: saves that are queued or running.
        abandoned: saves that were given up after ``save_timeout`` while a thread of theirs still hangs.
        written: saves that were written.
        skipped: saves that were skipped or superseded by a later one; see ``on_busy``.
        failed: saves that failed.
        cancelled: saves that were cancelled.
        skipped_paths: the paths of the last 100 skipped saves.
        failures: path and error of the last 100 failed saves.
        staging_bytes: the staging memory that is allocated, in bytes.
        quarantined_bytes: the part of it that abandoned saves still hold.
    """

    in_flight: int
    abandoned: int
    written: int
    skipped: int
    failed: int
    cancelled: int
    skipped_paths: tuple[str, ...] = field(repr=False)
    failures: tuple[tuple[str, BaseException], ...] = field(repr=False)
    staging_bytes: int = 0
    quarantined_bytes: int = 0


@dataclass(eq=False, repr=False)
class SaveQueue:
    """The saves in flight, in order. All methods may be called from any thread, also with ``lock`` held."""

    _on_busy: OnBusy
    _most: int  # saves in flight before the checkpointer is busy
    _on_failure: OnFailure
    _origin: Origin
    _reports: Reports  # get the outcome of each save
    # Weak: an error leads to the frames that it passed, which may hold the checkpointer and keep it alive.
    _failures: weakref.ref[Failures]

    def __post_init__(self) -> None:
        self.lock = self._origin.lock  # guards everything
        self._idle = threading.Condition(self.lock)
        self._jobs: list[SaveJob] = []
        self._abandoned: list[SaveJob] = []
        self._unreported: list[SaveJob] = []  # saves whose failure, if they fail, was not delivered yet
        self._ready_waiters: list[Completion[None]] = []
        self._counts: Counter[Outcome] = Counter()
        self._skipped: deque[str] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[SaveJob]:
        with self.lock:
            return list(self._jobs)

    def staging(self) -> list[SaveJob]:
        """Return the saves whose tensors are not all copied, in order; none in a forked process."""
        if not self._origin.is_here:
            return []
        return [job for job in self.jobs if job.spec.copies and not job.handle.staged.done()]

    def is_path_busy(self, path: str, *, overwrite: bool) -> bool:
        """Return whether a save in flight, or one that hangs, keeps another from this path."""
        with self.lock:
            if any(path in job.paths for job in self._abandoned):
                return True
            return not overwrite and any(path in job.paths for job in self._running)

    # --- the busy policy ------------------------------------------------------------------------------

    def admit(self, path: str) -> None:
        """Raise SaveSkippedError or CheckpointerBusyError if a save that is submitted now must not be made."""
        with self.lock:
            if self._on_busy not in ("skip", "error") or not self._busy:
                return
            running = self._running
            now = f"{len(running)} saves are in flight, the first of them to {running[0].path}"
            if self._on_busy == "error":
                raise CheckpointerBusyError(
                    f"{path} was not saved: {now}. Await ckpt.ready() first, or choose another on_busy"
                )
        raise SaveSkippedError(f"{path} was skipped: {now}, and on_busy is 'skip'")

    @property
    def _running(self) -> list[SaveJob]:
        # Without those that only inform other ranks, or end without a checkpoint: they delay no other save.
        return [
            job
            for job in self._jobs
            if not job.ended and job.consistency.abort_error is None and not job.spec.is_refusal
        ]

    @property
    def _busy(self) -> bool:
        return sum(job.spec.has_outcome for job in self._running) >= self._most

    def supersede(self, path: str) -> None:
        """End the queued saves that the save to this path supersedes, if that is the policy."""
        with self.lock:
            if self._on_busy != "supersede":
                return
            jobs = [job for job in self._running if job.spec.has_outcome]  # parts go with their transaction
            # The first ones always go on, so that something is written however fast saves are submitted.
            given = [job for job in jobs[self._most :] if not job.handle.staged.done()]
        for job in given:
            job.abort(
                SaveSkippedError(f"the save of {job.path} was superseded by the save of {path}; nothing of it is left")
            )

    def ready(self) -> Completion[None]:
        """Return a future that completes when a save would find the checkpointer not busy."""
        self._origin.check_process()
        completion = Completion[None]("ready()", self._origin)
        with self.lock:
            if self._busy:
                self._ready_waiters.append(completion)
            else:
                completion._settle(None)
        return completion

    # --- saves enter and leave --------------------------------------------------------------------------

    def add(self, job: SaveJob) -> None:
        with self.lock:
            self._jobs.append(job)
            if job.spec.has_outcome:
                self._unreported.append(job)

    def mark_reported(self, job: SaveJob) -> None:
        """Note that a caller got the failure of a save."""
        with self.lock:
            self._unreported = [other for other in self._unreported if other is not job]

    def record(self, job: SaveJob, result: SaveResult | None, error: BaseException | None) -> None:
        """Count the outcome of a save, right before its waiters wake up."""
        with self.lock:
            if job.ended:
                return
            job.ended = True
            if job.spec.has_outcome or (job.spec.is_refusal and job not in self._jobs):
                outcome = outcome_of(error)
                self._count(job, outcome, error)
                self._reports.over(job, outcome, result, error)

    def abandon(self, job: SaveJob) -> None:
        """Remove a save whose thread hangs; its paths stay taken, as the thread may still write or rename there."""
        with self.lock:
            if job in self._jobs:
                self._abandoned.append(job)
                self._take_out(job)

    def remove(self, job: SaveJob) -> None:
        """Remove a save that is over."""
        with self.lock:
            self._abandoned = [other for other in self._abandoned if other is not job]
            self._take_out(job)

    def _take_out(self, job: SaveJob) -> None:
        self._jobs = [other for other in self._jobs if other is not job]
        self._idle.notify_all()
        if not self._busy:
            ready, self._ready_waiters = self._ready_waiters, []
            for completion in ready:
                completion._settle(None)

    def _count(self, job: SaveJob, outcome: Outcome, error: BaseException | None) -> None:
        self._counts[outcome] += 1
        if outcome == "skipped":
            self._skipped.append(job.spec.path)
            logger.info("%s", error)
        elif outcome == "failed" and error is not None:
            failures = self._failures()
            if failures is not None:
                failures.append((job.spec.path, error))
            if self._on_failure == "warn":
                logger.error("a checkpoint was not written, training goes on: %s", error)
                logger.debug("the traceback of that:", exc_info=error)

    def fail_all(self, error: BaseException) -> list[SaveJob]:
        """Remove and return all saves, and fail the waiters of `ready`: the engine has failed."""
        with self.lock:
            jobs, self._jobs, self._abandoned = self._jobs + self._abandoned, [], []
            self._idle.notify_all()
            ready, self._ready_waiters = self._ready_waiters, []
        for completion in ready:
            completion._settle(None, error)
        return jobs

    def wait_idle(self, timeout_s: float, *, abandoned: bool = False) -> bool:
        """Wait until all saves have ended, abandoned ones too if wanted; return whether they have. Blocks."""
        with self.lock:
            return self._idle.wait_for(lambda: not self._jobs and not (abandoned and self._abandoned), timeout_s)

    # --- outcomes -------------------------------------------------------------------------------------

    def raise_unreported(self) -> None:
        """Raise the error of an earlier save that was not delivered to any caller."""
        with self.lock:
            for job in list(self._unreported):
                if not job.handle.written.done():
                    continue
                error = job.handle.written._exception
                # A caller that cancelled the save knows already; one that waits for it is about to receive the error.
                is_reported = self._on_failure == "warn" or job.handle.observed
                if is_reported or error is None or outcome_of(error) != "failed":
                    self.mark_reported(job)
                elif not any(future.expected for future in job.handle):
                    self.mark_reported(job)
                    error.add_note(f"(this is the failure of the earlier save to {job.path}, which nobody awaited)")
                    raise error

    def log_unreported(self) -> None:
        """Log the errors that were not delivered, when the checkpointer was garbage-collected."""
        while True:
            try:
                self.raise_unreported()
            except Exception:
                logger.exception("a save has failed after its checkpointer was garbage-collected")
            else:
                return

    def statistics(self, staging_bytes: int, quarantined_bytes: int) -> Statistics:
        """Return the counts, with the bytes of staging memory."""
        with self.lock:
            return Statistics(
                in_flight=sum(job.spec.has_outcome for job in self._running),
                abandoned=len(self._abandoned),
                written=self._counts["written"],
                skipped=self._counts["skipped"],
                failed=self._counts["failed"],
                cancelled=self._counts["cancelled"],
                skipped_paths=tuple(self._skipped),
                failures=tuple(self._failures() or ()),
                staging_bytes=staging_bytes,
                quarantined_bytes=quarantined_bytes,
            )
