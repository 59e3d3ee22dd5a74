"""One save, as the engine, its queue and its caller see it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from aiockpt.core.futures import Completion
from aiockpt.errors import AiockptError, SaveCancelledError, SaveError, SaveSkippedError, TornSnapshotError
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.saving.handle import SaveHandle
from aiockpt.snapshot.consistency import Consistency
from aiockpt.staging.runtime import is_capturing
from aiockpt.staging.throttle import SaveThrottle

if TYPE_CHECKING:
    import anyio

    from aiockpt.coordination.protocol import Call
    from aiockpt.core.spans import Span
    from aiockpt.core.threads import Origin
    from aiockpt.format.index import ItemRange
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.zstd import Zstd
    from aiockpt.options import Hook, Replicas
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.planning.planner import FileFormat
    from aiockpt.saving.turn import Turn
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.saves import SaveResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSpec:
    """The request of a save: what to save, where and how. Never changes."""

    path: str
    storage: Storage
    snapshot: Snapshot
    started: float  # by time.perf_counter()
    overwrite: bool = False
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    form: FileFormat | None = None  # None: DCP's default form
    pre_commit: Hook | None = None
    post_commit: Hook | None = None
    append_planner: LocalPlanner | None = None  # only adds files to a directory, planned by this
    compression: Sequence[Zstd | None] | None = None  # for each leaf
    transforms: Sequence[Transform] = ()  # applied to every item, after compression
    warn_only: bool = False  # failures are not raised by `staged`, nor by fences
    fallback: str | None = None  # the path to use if this one can't be written
    replicas: Replicas = "check"
    call: Call | None = None  # of all ranks
    refusal: BaseException | None = None  # why it is not made: it only informs the other ranks

    @property
    def is_transformed(self) -> bool:
        """Whether items are stored in another form than `torch.save` gives them."""
        return self.compression is not None or bool(self.transforms)


class SaveJob:
    """A save in flight: its specification, how far it is, and how it ends.

    It is the `Control` behind the `SaveHandle`: `cancel` and `fence` may be called from any thread.
    """

    turn: Turn  # since it is on the engine's loop
    scope: anyio.CancelScope  # since then too

    def __init__(self, spec: SaveSpec, origin: Origin) -> None:
        self.spec = spec
        self.origin = origin
        self.path = spec.path  # becomes the fallback if it goes there
        self.overwrite = spec.overwrite
        self.fallback_error: BaseException | None = None  # why it goes to the fallback
        self.consistency = Consistency(spec.snapshot, spec.path)
        self.throttle = SaveThrottle()
        self.handle = handle = SaveHandle(self.path, self, spec.started, origin)
        self.cancelled: Completion[bool] = Completion(f"the end of cancelling {self.path}", origin)
        self.captured_s = 0.0
        self.number = 0  # for observers; 0: there are none
        self.spans: list[Span] = []  # of the work in this process
        self.item_ranges: dict[int, ItemRange] = {}  # of a save that adds files: where each leaf was written
        self.cancel_asked = False
        self.committed = False
        self.ended = False  # the queue has counted its outcome
        self.post: Callable[[Callable[[], object]], object] = lambda _: None  # calls it on the engine's loop
        # Called before the futures settle, with the result or the error.
        self.on_end: Callable[[SaveJob, SaveResult | None, BaseException | None], object] = lambda *_: None
        self.on_staged: Callable[[SaveJob], object] = lambda _: None
        self.quarantine: Callable[[], None] = lambda: None  # sets the chunks apart that its threads hold
        # Not `written._on_await`: a task that awaits `written` leaves its loop free to train, and to open windows.
        handle.staged._on_await = handle.staged._on_block = handle.written._on_block = self.unthrottle

    @classmethod
    def of_refusal(
        cls, path: str, storage: Storage, error: BaseException, started: float, origin: Origin, call: Call | None = None
    ) -> Self:
        """Make a job that only informs the other ranks why this one does not save."""
        nothing = Snapshot(Structure([], [], frozenset()), [], [], [])
        spec = SaveSpec(path=path, storage=storage, snapshot=nothing, started=started, refusal=error, call=call)
        return cls(spec, origin)

    @classmethod
    def of_failure(
        cls, path: str, storage: Storage, error: BaseException, started: float, origin: Origin, *, warn_only: bool
    ) -> Self:
        """Make a job that has failed before it was queued."""
        job = cls.of_refusal(path, storage, error, started, origin)
        job.spec = replace(job.spec, warn_only=warn_only)
        job.settle(None, error)
        return job

    @property
    def snapshot(self) -> Snapshot:
        """The state dict as it was at the call."""
        return self.spec.snapshot

    @property
    def paths(self) -> set[str]:
        """The paths that this save may write to."""
        return {self.path, self.spec.path, self.spec.fallback or self.path}

    # --- for the caller -----------------------------------------------------------------------------

    def cancel(self) -> Completion[bool]:
        if not self.cancelled.done():
            self.origin.check_process()
        self.cancel_asked = True
        self.post(lambda: self.scope.cancel())
        return self.cancelled

    def unthrottle(self) -> None:
        """Copy without a pause from now on, because a caller waits. From any thread."""
        self.consistency.awaited.set()
        self.throttle.unthrottle()

    def fence(self, timeout: float | None) -> None:
        timeout_s = check_timeout(timeout)
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
            self._settle_staged(error)
            self.post(lambda: self.scope.cancel())

    def fail(self, cause: BaseException) -> None:
        """End with an error because the engine has failed. Work of the save that still runs publishes nothing."""
        error = SaveError(f"the save of {self.path} failed with the engine: {cause!r}")
        error.__cause__ = cause
        self.consistency.abort_error = self.consistency.abort_error or error
        self.settle(None, error)

    def settle(self, result: SaveResult | None, error: BaseException | None) -> None:
        """Settle the futures, unless they are settled."""
        try:
            self.on_end(self, result, error)  # logs, and a handler of the caller's may raise: hence `finally`
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
