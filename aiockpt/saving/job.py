"""One save, as the engine, its queue and its caller see it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import anyio

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.futures import Completion
from aiockpt.errors import AiockptError, SaveCancelledError, SaveError, SaveSkippedError, TornSnapshotError
from aiockpt.options import SaveOptions
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.saving.handle import SaveHandle
from aiockpt.snapshot.consistency import Consistency
from aiockpt.staging.runtime import is_capturing
from aiockpt.staging.throttle import SaveThrottle
from aiockpt.storage.base import room_coming

if TYPE_CHECKING:
    from aiockpt.coordination.protocol import RankCall
    from aiockpt.core.spans import Span
    from aiockpt.core.threads import Origin
    from aiockpt.format.index import ItemRange
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.zstd import Zstd
    from aiockpt.planning.base import DeltaSpec
    from aiockpt.planning.planner import FileFormat, Planner
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.saves import SaveResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSpec:
    """A save, as it was asked for: what, where and how. Other kinds of saves derive from it. Never changes."""

    path: str
    storage: Storage
    started: float  # by time.perf_counter()
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(Structure([], [], frozenset()), [], [], []))
    options: SaveOptions = field(default_factory=SaveOptions)  # as checked
    files: Mapping[str, bytes] = field(default_factory=dict)  # added to the checkpoint
    file_format: FileFormat | None = None  # None: DCP's default form
    compression: Sequence[Zstd | None] | None = None  # for each leaf
    transforms: Sequence[Transform] = ()  # applied to every item, after compression
    delta: DeltaSpec | None = None  # hashes are kept, and it may share files with a base
    warn_only: bool = False  # failures are not raised by `staged`, nor by fences
    fallback: tuple[Storage, str] | None = None  # the place to use if this one can't be written
    call: RankCall | None = None  # of all ranks

    has_outcome: ClassVar[bool] = True  # of its own, which is counted and reported
    is_refusal: ClassVar[bool] = False
    copies: ClassVar[bool] = True  # tensors to files of its own

    @property
    def parts(self) -> list[SaveJob]:
        """The saves of the transaction that this one ends."""
        return []

    @property
    def is_transformed(self) -> bool:
        """Whether items are stored in another form than `torch.save` gives them."""
        return self.compression is not None or bool(self.transforms)


class PartSpec(SaveSpec):
    """A save within a transaction, which reports its outcome."""

    has_outcome = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendSpec(SaveSpec):
    """A save that only adds files to a transaction of others."""

    planner: Planner
    ticket: str  # of the transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSpec(SaveSpec):
    """A save that is not made, and only informs the other ranks, or the waiters, why."""

    has_outcome, is_refusal, copies = False, True, False

    error: BaseException


class SaveOwner(Protocol):
    """The engine that runs a save, as the save sees it."""

    origin: Origin

    def post(self, function: Callable[[], object], work: SaveJob) -> None:
        """Call a function on the engine's loop."""

    def on_delivery(self, job: SaveJob) -> None:
        """Note that a caller gets the error."""

    def on_staged(self, job: SaveJob) -> None:
        """Note that all is copied."""

    def on_end(self, job: SaveJob, result: SaveResult | None, error: BaseException | None) -> None:
        """Count the outcome, right before the waiters wake up."""


class Revocable(Protocol):
    """The work of a save."""

    def revoke(self) -> bool:
        """Keep a hanging thread from publishing when it returns; return whether it may be doing so."""


class SaveJob:
    """A save in flight: its specification, how far it is, and how it ends."""

    turn: Turn  # since `take_turn`
    scope: anyio.CancelScope  # since then too
    pipeline: Revocable | None = None  # while it runs

    def __init__(self, spec: SaveSpec, owner: SaveOwner) -> None:
        self.spec = spec
        self.origin = owner.origin
        self._owner = owner
        self.path, self.storage = spec.path, spec.storage  # become those of the fallback if it goes there
        self.overwrite = spec.options.overwrite
        self.fallback_error: BaseException | None = None  # why it goes to the fallback
        self.consistency = Consistency(spec.snapshot, spec.path)
        self.throttle = SaveThrottle()
        self.handle = SaveHandle(self.path, self, spec.started, self.origin)
        self.cancelled: Completion[bool] = Completion(f"the end of cancelling {self.path}", self.origin)
        self.room_coming = room_coming.get()  # as the caller says
        self.captured_s = 0.0
        self.number = 0  # for observers; 0: there are none
        self.spans: list[Span] = []  # of the work in this process
        self.item_ranges: dict[int, ItemRange] = {}  # of a save that adds files: where each leaf was written
        self.single: FileFacts | None = None  # of a checkpoint that is one file, once it is written
        self.result: SaveResult | None = None
        self.cancel_asked = False
        self.committed = False
        self.ended = False  # the queue has counted its outcome

    @property
    def snapshot(self) -> Snapshot:
        """The state dict as it was at the call."""
        return self.spec.snapshot

    @property
    def paths(self) -> set[str]:
        """The paths that this save may write to."""
        return {self.path, self.spec.path, self.spec.fallback[1] if self.spec.fallback else self.path}

    def take_turn(self, before: SaveJob | None) -> None:
        """Take its turn behind the save before. On the engine's loop."""
        self.turn, self.scope = Turn(None if before is None else before.turn), anyio.CancelScope()

    # --- for the caller -----------------------------------------------------------------------------

    def cancel(self) -> Completion[bool]:
        if not self.cancelled.done():
            self.origin.check_process()
            for part in self.spec.parts:
                part.cancel()
            self.cancel_asked = True
            self._cancel_scope()
        return self.cancelled

    def _cancel_scope(self) -> None:
        self._owner.post(lambda: self.scope.cancel(), self)

    def on_wait(self, future: Completion[Any], *, blocks: bool) -> None:
        # A task that awaits `written` leaves its loop free to train, and to open windows.
        if blocks or future is self.handle.staged:
            self.unthrottle()

    def on_delivery(self) -> None:
        self._owner.on_delivery(self)

    def unthrottle(self) -> None:
        """Copy without a pause from now on, because a caller waits. From any thread."""
        self.consistency.awaited.set()
        self.throttle.unthrottle()
        for part in self.spec.parts:
            part.unthrottle()

    def fence(self, timeout: float | None) -> None:
        timeout_s = check_timeout(timeout)
        if self.spec.parts:
            for part in self.spec.parts:
                part.fence(timeout)
            return
        if any(map(is_capturing, list(self.snapshot.events))):
            raise AiockptError(
                f"fence() was called while a CUDA graph is captured, which can't wait for the copies of {self.path}: "
                "call it before the capture, and before each replay"
            )
        try:
            if self.order_behind(timeout_s):
                self.consistency.allow_changes()
            else:
                self.handle.staged.result()
        except TornSnapshotError:  # which the save finds as well
            if not self.spec.warn_only:
                raise

    def order_behind(self, timeout_s: float) -> bool:
        """Make the caller's current streams wait for the copies; block until these are enqueued.

        Returns whether there is anything left to wait for; if not, the save is staged or has failed.
        """
        if not self.handle.staged.done():
            self.origin.check(f"fence() of {self.path}")
        self.unthrottle()
        self.consistency.wait_until_issued(timeout_s)
        if self.handle.staged.done():
            return False
        for stager in self.consistency.stagers:
            stager.fence()
        return True

    # --- its end ------------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Fail, unless all is copied: the tensors are about to change. From any thread."""
        self.abort(TornSnapshotError(f"the snapshot of {self.path} was given up: {reason}"))

    def abort(self, error: SaveError, *, though_copied: bool = False) -> None:
        """End without a checkpoint, unless all is copied; the tensors may change. From any thread.

        ``though_copied``: abort in any phase before it is being published; on the engine's loop only.
        """
        if self.consistency.abort(error, though_copied=though_copied):
            for part in self.spec.parts:
                part.abort(error, though_copied=though_copied)
            if self.pipeline is not None:
                self.pipeline.revoke()  # no cancellation reaches a commit, which may hang
            self._settle_staged(error)
            self._cancel_scope()

    def fail(self, cause: BaseException) -> None:
        """End with an error because the engine has failed. Work of the save that still runs publishes nothing."""
        error = SaveError(f"the save of {self.path} failed with the engine: {cause!r}")
        error.__cause__ = cause
        self.consistency.abort_error = self.consistency.abort_error or error
        self.settle(None, error)

    @property
    def cancellation(self) -> SaveError:
        """The error of the save once it is cancelled: the one that it was aborted with, if it was."""
        text = f"the save of {self.path} was cancelled; nothing of it is left"
        return self.consistency.abort_error or SaveCancelledError(text)

    def torn_by(self, mismatch: BaseException) -> TornSnapshotError:
        """Return the error for a tensor that no longer fits the plan that was made from it."""
        torn = TornSnapshotError(
            f"{mismatch} changed its shape, dtype or device while {self.path} was being saved; await `staged` before "
            "changing tensors"
        )
        torn.__cause__ = mismatch
        return torn

    def settle_staged(self) -> None:
        """Settle `staged`: all is copied, and the tensors may change."""
        self._owner.on_staged(self)
        self.handle.staged._settle(None)

    def settle(self, result: SaveResult | None, error: BaseException | None) -> None:
        """Settle the futures, unless they are settled."""
        try:
            # This logs, and a handler of the caller's may raise: hence `finally`.
            self.result = result
            self._owner.on_end(self, result, error)
            if error is not None:
                self._settle_staged(error)
            self.snapshot.release()
        finally:
            self.consistency.issued.set()  # after `staged`: a fence() that this wakes looks there whether it has failed
            self.handle.written._settle(result, error)
            self.handle._wake()
            self.cancelled._settle(isinstance(error, SaveCancelledError))

    def _settle_staged(self, error: BaseException) -> None:
        """Settle `staged`: the tensors may change, since the save has ended or its copies are discarded."""
        is_silent = self.spec.warn_only or isinstance(error, SaveSkippedError)
        self.handle.staged._settle(None, None if is_silent else error)


def check_timeout(timeout: float | None) -> float:
    """Return the seconds to wait, bounded by what a lock can take."""
    if timeout is None:
        return threading.TIMEOUT_MAX
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative, nor NaN; it is {timeout!r}")
    return min(timeout, threading.TIMEOUT_MAX)


# --- the order of saves -----------------------------------------------------------------------------


Milestone = Literal["planned", "staged", "over", "reported"]


class Turn:
    """The order of saves: each milestone of a save waits until the save before it is past the same milestone.

    For the engine's loop.

    ==============  ===================================================================================
    past               what the next save may do then
    ==============  ===================================================================================
    ``planned``     meet the other ranks to plan: all ranks plan in the same order
    ``staged``      copy its tensors
    ``over``        create files, run its pre_commit hook and commit: commits keep the order of the calls
    ``reported``    count its save_timeout: the callers know how this one has ended
    ==============  ===================================================================================
    """

    def __init__(self, before: Turn | None) -> None:
        self._before = before
        self._past: dict[Milestone, anyio.Event] = {milestone: anyio.Event() for milestone in get_args(Milestone)}

    async def wait_for(self, milestone: Milestone) -> None:
        """Wait until the save before is past a milestone."""
        if self._before is not None:
            await self._before._past[milestone].wait()

    @property
    def before_is_over(self) -> anyio.Event | None:
        """Set when the save before is over; None if there is none."""
        return None if self._before is None else self._before._past["over"]

    def pass_milestone(self, milestone: Milestone) -> None:
        """Allow the next save to enter a milestone."""
        self._past[milestone].set()

    def finish(self) -> None:
        """Allow the next save to enter every milestone, at once."""
        for event in self._past.values():
            event.set()
        self._before = None  # else the chain of turns would keep every save of the run alive

    async def finish_in_order(self) -> None:
        """Allow the next save to enter each milestone, once the saves before are past it. Not to be cancelled."""
        milestones: tuple[Milestone, ...] = ("planned", "staged", "over")
        for milestone in milestones:
            await self.wait_for(milestone)
            self.pass_milestone(milestone)
        self.finish()
