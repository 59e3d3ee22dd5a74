"""The saves in line: which are in flight, which give way to others, and whose failure has not been told."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from aiockpt.core.futures import Completion
from aiockpt.errors import CheckpointerBusyError, SaveCancelledError, SaveSkippedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.core.threads import Origin
    from aiockpt.options import OnBusy, OnFailure
    from aiockpt.saving.job import SaveJob

KEPT = 100
"""How many paths and errors are kept for `Statistics`."""

logger = logging.getLogger("aiockpt")

Outcome = Literal["written", "skipped", "failed", "cancelled"]
Failures = deque[tuple[str, BaseException]]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What has become of the saves of one checkpointer.

    Attributes:
        in_flight: how many are in line or under way.
        abandoned: how many were given up after ``save_timeout``, while a thread still is at them.
        written: how many were written.
        skipped: how many were left out, or gave way to a later one; see ``on_busy``.
        failed: how many have failed.
        cancelled: how many were cancelled.
        skipped_paths: the paths of the last 100 that were skipped.
        failures: path and error of the last 100 that have failed.
        staging_bytes: the staging memory that exists.
        quarantined_bytes: how much of it abandoned saves still hold.
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


def outcome_of(error: BaseException | None) -> Outcome:
    """Tell how a save has ended."""
    if error is None:
        return "written"
    if isinstance(error, SaveSkippedError):
        return "skipped"
    return "cancelled" if isinstance(error, SaveCancelledError) else "failed"


def superseded(staged: Sequence[bool], most: int) -> list[int]:
    """Choose which saves in flight give way to a new one: those that are not staged, behind the first ``most``.

    The first ones always go on, so that something gets written however fast saves come.

    Args:
        staged: for each save in flight, in order, whether its tensors are copied.
        most: how many are to be in flight at once.
    """
    return [number for number, is_staged in enumerate(staged) if number >= most and not is_staged]


class SaveQueue:
    """The saves in flight, in order. All methods may be called from any thread.

    Args:
        on_busy: what becomes of a save that comes while others are in flight.
        most: how many saves may be in flight before that counts as busy.
        on_failure: whether failures that nobody awaits are raised, or logged alone.
        origin: the engine.
        failures: gets path and error of each that fails, as long as somebody else has it; see `_see`.

    Attributes:
        lock: guards all of it; whoever holds it may call any method.
    """

    def __init__(self, on_busy: OnBusy, most: int, on_failure: OnFailure, origin: Origin, failures: Failures) -> None:
        self._origin = origin
        self._failures = weakref.ref(failures)
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._on_busy = on_busy
        self._most = most
        self._on_failure = on_failure
        self._jobs: list[SaveJob] = []
        self._abandoned: list[SaveJob] = []
        self._unseen: list[SaveJob] = []
        self._waiting: list[Completion[None]] = []
        self._counts: Counter[Outcome] = Counter()
        self._skipped: deque[str] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[SaveJob]:
        """The saves in flight."""
        with self.lock:
            return list(self._jobs)

    def staging(self) -> list[SaveJob]:
        """Give the saves whose tensors are not all copied, in order."""
        if not self._origin.is_here:
            return []
        return [job for job in self.jobs if not job.handle.staged.done() and not job.spec.refusal]

    def is_path_busy(self, path: str, *, overwrite: bool) -> bool:
        """Tell whether a save to this path is in the way of another."""
        with self.lock:
            if any(path in job.paths for job in self._abandoned):
                return True
            return not overwrite and any(path in job.paths and not job.spec.refusal for job in self._running)

    # --- when saves come faster than they are written -----------------------------------------------

    def admit(self, path: str) -> None:
        """Decide on a save that comes now.

        Raises:
            SaveSkippedError: it is to be left out.
            CheckpointerBusyError: the caller wants to be told so.
        """
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
        # Not those that only tell other ranks, or end without a checkpoint: they are in nobody's way.
        return [
            job
            for job in self._jobs
            if not job.ended and job.consistency.abort_error is None and job.spec.refusal is None
        ]

    @property
    def _busy(self) -> bool:
        return len(self._running) >= self._most

    def supersede(self, path: str) -> None:
        """Let those that only wait give way to the newest."""
        with self.lock:
            if self._on_busy != "supersede":
                return
            jobs = self._running
            given = [jobs[at] for at in superseded([job.handle.staged.done() for job in jobs], self._most)]
        for job in given:
            job.supersede(SaveSkippedError(f"the save of {job.path} gave way to that of {path}; nothing of it is left"))

    def ready(self) -> Completion[None]:
        """Give the moment when a save would find the checkpointer not busy."""
        self._origin.check_process()
        completion = Completion[None]("ready()", self._origin)
        with self.lock:
            if self._busy:
                self._waiting.append(completion)
            else:
                completion._settle(None)
        return completion

    # --- their course ------------------------------------------------------------------------------

    def add(self, job: SaveJob) -> None:
        """Put a save in line."""
        with self.lock:
            job.on_end = self.record
            self._jobs.append(job)
            if job.spec.refusal is None:
                self._unseen.append(job)
                # An error that was raised leads to the frames that it went through, which may have the checkpointer.
                job.handle.staged._on_observed = job.handle.written._on_observed = partial(self._see, job)

    def _see(self, job: SaveJob) -> None:
        with self.lock:
            self._unseen = [other for other in self._unseen if other is not job]

    def record(self, job: SaveJob, error: BaseException | None) -> None:
        """Take note of how a save ends, right before those who wait for it are told."""
        with self.lock:
            if job.ended:
                return
            job.ended = True
            if job.spec.refusal is None or job not in self._jobs:
                self._count(job, error)

    def abandon(self, job: SaveJob) -> None:
        """Let the others go on without a save that still has a thread; its paths stay taken."""
        with self.lock:
            if job in self._jobs:
                self._abandoned.append(job)
                self._leave(job)

    def remove(self, job: SaveJob) -> None:
        """Take out a save that is over, of which everybody has been told."""
        with self.lock:
            self._abandoned = [other for other in self._abandoned if other is not job]
            self._leave(job)

    def _leave(self, job: SaveJob) -> None:
        self._jobs = [other for other in self._jobs if other is not job]
        self._idle.notify_all()
        if not self._busy:
            ready, self._waiting = self._waiting, []
            for completion in ready:
                completion._settle(None)

    def _count(self, job: SaveJob, error: BaseException | None) -> None:
        outcome = outcome_of(error)
        self._counts[outcome] += 1
        if outcome == "skipped":
            self._skipped.append(job.spec.path)
            logger.info("%s", error)
        elif outcome == "failed" and error is not None:
            failures = self._failures()
            if failures is not None:
                failures.append((job.spec.path, error))
            if self._on_failure == "warn":
                logger.error("a checkpoint was not written, training goes on: %s", error, exc_info=error)

    def fail_all(self, error: BaseException) -> list[SaveJob]:
        """Take all out, and tell who waits until it is ready: the engine has failed."""
        with self.lock:
            jobs, self._jobs, self._abandoned = self._jobs + self._abandoned, [], []
            self._idle.notify_all()
            ready, self._waiting = self._waiting, []
        for completion in ready:
            completion._settle(None, error)
        return jobs

    def ends_within(self, timeout_s: float, *, abandoned: bool = False) -> bool:
        """Wait for all saves, or for those that were abandoned too; tell whether they have ended. Blocks."""
        with self.lock:
            return self._idle.wait_for(lambda: not self._jobs and not (abandoned and self._abandoned), timeout_s)

    # --- what has become of them -------------------------------------------------------------------

    def raise_unreported(self) -> None:
        """Raise the error of an earlier save that nobody has been told of."""
        with self.lock:
            for job in list(self._unseen):
                if not job.handle.written.done():
                    continue
                error = job.handle.written._error
                # Who cancels a save knows that it is not written; who waits for it is about to be told.
                is_told = self._on_failure == "warn" or job.handle.observed
                if is_told or error is None or outcome_of(error) != "failed":
                    self._unseen.remove(job)
                elif not job.handle.expected:
                    self._unseen.remove(job)
                    error.add_note(f"(this is the failure of the earlier save to {job.path}, which nobody awaited)")
                    raise error

    def log_unreported(self) -> None:
        """Log the errors of saves that nobody has been told of, and that nobody is left to be told of."""
        while True:
            try:
                self.raise_unreported()
            except Exception:
                logger.exception("a save has failed, and nobody has the checkpointer any more")
            else:
                return

    def statistics(self, staging_bytes: int, quarantined_bytes: int) -> Statistics:
        """Sum up."""
        with self.lock:
            return Statistics(
                in_flight=sum(job.spec.refusal is None for job in self._running),
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
