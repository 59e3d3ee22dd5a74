"""One save as the engine knows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import anyio
import torch

from aiockpt.core.futures import Completion
from aiockpt.errors import (
    AiockptError,
    SaveCancelledError,
    SaveError,
    SaveSkippedError,
    SaveTimeoutError,
    TornSnapshotError,
)
from aiockpt.format.names import SUFFIX
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.dtensor import ShardingError, is_distributed, local_parts
from aiockpt.planning.safetensors_plan import SafetensorsFormat
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.saving.handle import SaveHandle
from aiockpt.snapshot.optimizer_hooks import samples_of, saw_all
from aiockpt.staging.runtime import is_capturing
from aiockpt.staging.throttle import SaveThrottle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiockpt.core.threads import Origin
    from aiockpt.format.index import ItemRange
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.zstd import Zstd
    from aiockpt.options import Hook, SaveFormat
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.planning.planner import FileFormat
    from aiockpt.saving.handle import SaveResult
    from aiockpt.staging.base import Stager
    from aiockpt.storage.base import Storage

_OPERATOR_S = 0.02
"""How long an operator in place may go on after the copies were made, to be seen all the same."""


def format_for(name: SaveFormat | None, path: str) -> SaveFormat:
    """Return the format to save in: the one that was asked for, or else the one that the path's ending means.

    Raises:
        ValueError: they contradict each other.
    """
    if name == "dcp" and path.endswith(SUFFIX):
        raise ValueError(f"{path} ends in {SUFFIX}, which contradicts format='dcp'; rename it, or leave out format")
    return name or ("safetensors" if path.endswith(SUFFIX) else "dcp")


def choose_form(
    name: SaveFormat | None,
    path: str,
    metadata: Mapping[str, JsonValue],
    *,
    shard_bytes: int | None,
    separation_hint: str | Sequence[str] | None,
    files: int,
    together: bool,
) -> SafetensorsFormat | DcpFormat | None:
    """Make what a plan in another form than DCP's own needs; None for that.

    Raises:
        ValueError: a format that is not known, or an option where it means nothing.
        SaveError: the metadata can't be stored in this format, or it is not for several ranks.
    """
    hints = (separation_hint,) if isinstance(separation_hint, str) else tuple(separation_hint or ())
    for hint in hints:
        if name != "dcp":
            raise ValueError("separation_hint is for format='dcp'")
        if not isinstance(hint, str) or not hint or "/" in hint or "\0" in hint or hint.startswith("."):
            raise ValueError(
                f"separation_hint has {hint!r}; it must be the beginning of names, and of file names: no '/', no '.' "
                "at its beginning"
            )
    if name == "safetensors":
        if together:
            raise SaveError(
                "format='safetensors' is written by one process: save whole tensors on one rank, with a checkpointer "
                "of process_group=None"
            )
        return SafetensorsFormat(metadata, single_file=path.endswith(SUFFIX), shard_bytes=shard_bytes)
    if name != "dcp":
        raise ValueError(f"format is {name!r}; it must be 'dcp' or 'safetensors'")
    if shard_bytes is not None:
        raise ValueError("shard_bytes is for format='safetensors'; the dcp format has io_threads files")
    return DcpFormat(files, hints) if hints else None


@dataclass(eq=False)
class SaveJob:
    """One save: what is to be saved, and what is known of its course.

    ``form`` is the format to save in; None for DCP's. ``refused`` is why it can't be made: it is in line only to tell
    the other ranks. ``part`` plans the files of one that only adds files to a directory; ``places`` then tells where
    each leaf is, when it is written. ``compression`` tells for each leaf how it is compressed, ``transforms`` what is
    applied to all of them besides.

    Implements `aiockpt.saving.handle.Control`. ``cancel`` and ``fence`` may be called from any thread.
    ``fenced`` says that somebody may have been let by, to change tensors behind the copies,
    ``overlooked`` says that all changes are taken to come behind the copies, ``copied`` that these are done.
    ``verdict`` is what it is to fail with though nothing of it has failed. A ``forgiving`` one does not raise its
    failure from ``staged``, nor from fences. ``fallback`` is where it goes if it can't be written to ``path``, which
    then becomes that; ``asked`` stays the path that it was to go to, and ``spoilt`` says why it didn't.
    ``quarantine`` sets the memory apart that its threads hold. ``on_end`` is told how it ends, before all others are;
    it sees to ``ended``. ``origin`` is the engine that makes it; ``post`` lets its loop call a function, and never
    raises.
    """

    path: str
    storage: Storage
    overwrite: bool
    metadata: dict[str, JsonValue]
    capture: Snapshot
    started: float
    origin: Origin
    form: FileFormat | None = None
    pre_commit: Hook | None = None
    post_commit: Hook | None = None
    refused: BaseException | None = None
    part: LocalPlanner | None = None
    places: dict[int, ItemRange] = field(default_factory=dict)
    compression: Sequence[Zstd | None] | None = None
    transforms: Sequence[Transform] = ()
    captured_s: float = 0.0
    handle: SaveHandle = field(init=False)
    post: Callable[[Callable[[], object]], object] = lambda _: None
    cancelled: Completion[bool] = field(init=False)
    issued: threading.Event = field(default_factory=threading.Event)
    awaited: threading.Event = field(default_factory=threading.Event)
    planned: anyio.Event = field(init=False)
    staging_over: anyio.Event = field(init=False)
    over: anyio.Event = field(init=False)
    told: anyio.Event = field(init=False)
    scope: anyio.CancelScope = field(init=False)
    cancel_asked: bool = False
    fenced: bool = False
    overlooked: bool = False
    copied: bool = False
    verdict: SaveError | None = None
    forgiving: bool = False
    fallback: str | None = None
    asked: str = field(init=False)
    spoilt: BaseException | None = None
    quarantine: Callable[[], None] = lambda: None
    on_end: Callable[[Self, BaseException | None], object] = lambda *_: None
    ended: bool = False
    committed: bool = False
    pace: SaveThrottle = field(default_factory=SaveThrottle)
    check_lock: threading.Lock = field(default_factory=threading.Lock)
    stagers: list[Stager] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asked = self.path
        self.handle = handle = SaveHandle(self.path, self, self.started, self.origin)
        self.cancelled = Completion(f"the end of cancelling {self.path}", self.origin)
        # Who awaits `written` may go on with other things meanwhile; who blocks can't.
        handle.staged._on_await = handle.staged._on_block = handle.written._on_block = self.hurry

    @classmethod
    def of_refusal(cls, path: str, storage: Storage, error: BaseException, started: float, origin: Origin) -> Self:
        """Make a job that does nothing but to tell the other ranks why this one does not save."""
        nothing = Snapshot(Structure([], [], frozenset()), [], [], [])
        return cls(
            path,
            storage,
            overwrite=False,
            metadata={},
            capture=nothing,
            started=started,
            origin=origin,
            refused=error,
        )

    @classmethod
    def of_failure(
        cls,
        path: str,
        storage: Storage,
        error: BaseException,
        started: float,
        origin: Origin,
        *,
        forgiving: bool = False,
    ) -> Self:
        """Make a job that is over before it has begun."""
        job = cls.of_refusal(path, storage, error, started, origin)
        job.forgiving = forgiving
        job.settle(None, error)
        return job

    @property
    def paths(self) -> set[str]:
        """The paths where it is, or may come to be."""
        return {self.path, self.asked} | ({self.fallback} if self.fallback is not None else set())

    @property
    def is_transformed(self) -> bool:
        """Whether items are stored otherwise than as they are."""
        return self.compression is not None or bool(self.transforms)

    def admit(self) -> None:
        """Make what belongs to the engine's loop, in that loop."""
        self.planned = anyio.Event()
        self.staging_over = anyio.Event()
        self.over = anyio.Event()
        self.told = anyio.Event()
        self.scope = anyio.CancelScope()

    def cancel(self) -> Completion[bool]:
        """See `SaveHandle.cancel`."""
        if not self.cancelled.done():
            self.origin.check_process()
        self.cancel_asked = True
        self.post(lambda: self.scope.cancel())
        return self.cancelled

    def hurry(self) -> None:
        """Copy without a pause from now on, for somebody waits; from any thread."""
        self.awaited.set()
        self.pace.unthrottle()

    def fence(self, timeout: float | None) -> None:
        """See `SaveHandle.fence`."""
        timeout = check_timeout(timeout)
        if any(map(is_capturing, list(self.capture.events))):
            raise AiockptError(
                f"fence() was called while a CUDA graph is captured, which can't wait for the copies of {self.path}: "
                "call it before the capture, and before each replay"
            )
        try:
            if self.order_behind(timeout):
                self.allow_changes()
            else:
                self.handle.staged.result()
        except TornSnapshotError:  # which the save finds as well
            if not self.forgiving:
                raise

    def order_behind(self, timeout: float | None) -> bool:
        """Let the caller's current streams wait for the copies, and block until they are enqueued.

        Returns:
            Whether there is anything left to wait for; if not, the save is staged or has failed.

        Raises:
            TimeoutError: they were not enqueued in time.
        """
        timeout = check_timeout(timeout)
        if not self.handle.staged.done():
            self.origin.check(f"fence() of {self.path}")
        self.hurry()
        while not self.fenced:
            if not self.issued.wait(timeout):
                raise TimeoutError(f"the copies of {self.path} were not enqueued within {timeout} s; the save goes on")
            with self.check_lock:
                self.fenced = self.issued.is_set()  # else they are made once more
        if self.handle.staged.done():
            return False
        for stager in self.stagers:
            stager.fence()
        return True

    def rewind(self) -> bool:
        """Get ready to copy once more; False if somebody may have been let by already, to change the tensors."""
        with self.check_lock:
            if self.fenced or self.copied or self.overlooked:
                return False
            self.issued.clear()
        return True

    def give_up(self, reason: str) -> None:
        """Let the save fail, unless all is copied: its tensors are about to change. From any thread."""
        self._judge(TornSnapshotError(f"the snapshot of {self.path} was given up: {reason}"))

    def give_way(self, error: SaveSkippedError) -> None:
        """Let the save end without a checkpoint, unless all is copied; its tensors may change. From any thread."""
        self._judge(error)

    def time_out(self, error: SaveTimeoutError) -> None:
        """Let the save fail, wherever it is, unless it is just being published. From the engine's loop."""
        self._judge(error, though_copied=True)

    def _judge(self, error: SaveError, *, though_copied: bool = False) -> None:
        with self.check_lock:
            if self.verdict is not None or (self.copied and not though_copied):
                return
            self.verdict = error
        self._settle_staged(error)
        self.post(lambda: self.scope.cancel())

    def check_verdict(self) -> None:
        """Raise what it is to fail with, if anything."""
        if self.verdict is not None:
            raise self.verdict

    def fail(self, cause: BaseException) -> None:
        """End it with an error, as the engine has failed in it; what still runs of it publishes nothing."""
        error = SaveError(f"the save of {self.path} failed with the engine: {cause!r}")
        error.__cause__ = cause
        self.verdict = self.verdict or error
        self.settle(None, error)

    def settle(self, result: SaveResult | None, error: BaseException | None) -> None:
        """Tell who waits how it has ended, if they have not been told yet."""
        try:
            self.on_end(self, error)  # which logs, by handlers of the caller's
            if error is not None:
                self._settle_staged(error)
            self.capture.release()
        finally:
            self.issued.set()
            self.handle.written._settle(result, error)
            self.handle._wake()
            self.cancelled._settle(isinstance(error, SaveCancelledError))

    def let_pass(self) -> None:
        """Let later saves, and what else waits for this one, go on. On the engine's loop."""
        self.planned.set()
        self.staging_over.set()
        self.over.set()
        self.told.set()

    def _settle_staged(self, error: BaseException) -> None:
        """Tell that the tensors may change: nothing of this save reads them any more, or counts."""
        is_calm = self.forgiving or isinstance(error, SaveSkippedError)
        self.handle.staged._settle(None, None if is_calm else error)

    def check_for_changes(self) -> None:
        """Compare the version counters, and samples of the bytes where there are any, when all is copied. Blocks.

        Raises:
            TornSnapshotError: a tensor was changed in place since `save()`, or may have been.
        """
        samples = samples_of(self.capture)
        self._give_time()
        with self.check_lock:
            self._compare()
            if samples is not None:
                samples.look(readable=self.capture.readable)
            self.copied = True
        # What a fence has looked at is known when the caller's stream has come that far: nobody waits for it meanwhile.
        changed = [] if samples is None else samples.changed()
        if changed:
            raise self._torn(changed, ", as their bytes show: by writes that no version counter shows")

    def _give_time(self) -> None:
        """Let an operator end that may be running in another thread, for it counts only when it has.

        Not where somebody waits for the copies: whose thread waits runs no operator.
        """
        has_host_tensors = any(not stager.is_async for stager in self.stagers)
        eager = self.capture.eager  # copied at the call itself
        is_any_left = any(tensor is not None and leaf not in eager for leaf, tensor in enumerate(self.capture.tensors))
        if has_host_tensors and is_any_left and not (self.overlooked or self.fenced):
            self.awaited.wait(_OPERATOR_S)

    def allow_changes(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Compare the version counters, and look no longer at what the caller, who comes behind the copies, changes.

        Args:
            tensors: what that is; None: it can be anything, so that no other's changes are seen either.

        Raises:
            TornSnapshotError: as `check_for_changes`.
        """
        with self.check_lock:
            if self.copied:
                return
            self._compare()
            if tensors is None or not any(stager.is_async for stager in self.stagers):
                self._look()
                self.overlooked = True
                return
            memory = {_memory(part) for tensor in tensors for part in _parts(tensor)} - {None}
            host_is_copied = not all(stager.is_async for stager in self.stagers)  # host memory has one that doesn't

            def is_safe(tensor: torch.Tensor) -> bool:
                if tensor.layout is not torch.strided or tensor.is_quantized:
                    return True  # it was pickled before any copy was issued
                return (host_is_copied and tensor.device.type == "cpu") or _memory(tensor) in memory

            self._look(is_safe)
            self.capture.ignore_changes(is_safe)

    def _look(self, chosen: Callable[[torch.Tensor], bool] | None = None) -> None:
        samples = samples_of(self.capture)
        if samples is not None:
            samples.look(chosen)

    def _compare(self) -> None:
        self.check_verdict()
        if self.copied or self.overlooked:
            return
        changed = self.capture.changed()
        if not changed and saw_all(self.capture):
            return
        raise self._torn(changed or ["what a step of an optimizer changes (see the log)"])

    def _torn(self, changed: Sequence[str], how: str = "") -> TornSnapshotError:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return TornSnapshotError(
            f"{', '.join(changed[:3])}{more} changed between save() and staged{how}, so the copy of {self.path} may "
            "mix two states and was dropped. Await `staged` before the optimizer's step (or whatever changed it), "
            "call fence() before it, or save a clone."
        )


def check_timeout(timeout: float | None) -> float | None:
    """Bound the seconds to wait by what a lock can take.

    Raises:
        ValueError: they are negative, or no number.
    """
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative, nor NaN; it is {timeout!r}")
    return min(timeout, threading.TIMEOUT_MAX)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Give the tensors of this process that hold the values."""
    if not is_distributed(tensor):
        return [tensor]
    try:
        return [part.tensor for part in local_parts("", tensor)]
    except ShardingError:  # such a one can't be saved either
        return []


def _memory(tensor: torch.Tensor) -> object:
    """Tell tensors apart by their memory: what shares it shares its version counter."""
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # it has none of its own, and what is saved of it is a copy
        return None
