"""One save as the engine knows it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import anyio
import torch

from aiockpt.capture import saw_all
from aiockpt.errors import AiockptError, SaveError, TornSnapshotError
from aiockpt.format.names import SUFFIX
from aiockpt.handle import Completion, SaveHandle
from aiockpt.planning.dcp_plan import DcpForm
from aiockpt.planning.safetensors_plan import SafetensorsForm
from aiockpt.planning.source import Capture, Structure
from aiockpt.sharded import ShardingError, is_distributed, local_parts
from aiockpt.staging.pacing import Pace
from aiockpt.staging.runtime import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiockpt.format.index import ItemPlace
    from aiockpt.format.manifest import JsonValue
    from aiockpt.hooks import Hook
    from aiockpt.planning.plans import SaveForm
    from aiockpt.planning.world_planner import WorldPlanner
    from aiockpt.staging.base import Stager
    from aiockpt.storage.base import Storage
    from aiockpt.transforms.base import Transform
    from aiockpt.transforms.zstd import Zstd

SaveFormat = Literal["dcp", "safetensors"]


def choose_form(
    name: SaveFormat,
    path: str,
    metadata: Mapping[str, JsonValue],
    *,
    shard_bytes: int | None,
    separation_hint: str | Sequence[str] | None,
    files: int,
    together: bool,
) -> SafetensorsForm | DcpForm | None:
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
        return SafetensorsForm(metadata, single_file=path.endswith(SUFFIX), shard_bytes=shard_bytes)
    if name != "dcp":
        raise ValueError(f"format is {name!r}; it must be 'dcp' or 'safetensors'")
    if shard_bytes is not None:
        raise ValueError("shard_bytes is for format='safetensors'; the dcp format has io_threads files")
    return DcpForm(files, hints) if hints else None


@dataclass
class SaveJob:
    """One save: what is to be saved, and what is known of its course.

    ``form`` is the format to save in; None for DCP's. ``refused`` is why it can't be made: it is in line only to tell
    the other ranks. ``part`` plans the files of one that only adds files to a directory; ``places`` then tells where
    each leaf is, when it is written. ``compression`` tells for each leaf how it is compressed, ``transforms`` what is
    applied to all of them besides.

    Implements `aiockpt.handle.Control`. ``cancel`` and ``fence`` may be called from any thread.
    ``overlooked`` says that all changes are taken to come behind the copies, ``copied`` that these are done.
    """

    path: str
    storage: Storage
    overwrite: bool
    metadata: dict[str, JsonValue]
    capture: Capture
    started: float
    form: SaveForm | None = None
    pre_commit: Hook | None = None
    post_commit: Hook | None = None
    refused: BaseException | None = None
    part: WorldPlanner | None = None
    places: dict[int, ItemPlace] = field(default_factory=dict)
    compression: Sequence[Zstd | None] | None = None
    transforms: Sequence[Transform] = ()
    captured_s: float = 0.0
    handle: SaveHandle = field(init=False)
    post: Callable[[Callable[[], None]], object] = lambda _: None
    cancelled: Completion[bool] = field(default_factory=lambda: Completion[bool]("cancelled"))
    issued: threading.Event = field(default_factory=threading.Event)
    planned: anyio.Event = field(init=False)
    staging_over: anyio.Event = field(init=False)
    over: anyio.Event = field(init=False)
    scope: anyio.CancelScope = field(init=False)
    cancel_asked: bool = False
    overlooked: bool = False
    copied: bool = False
    torn: TornSnapshotError | None = None
    pace: Pace = field(default_factory=Pace)
    check_lock: threading.Lock = field(default_factory=threading.Lock)
    stagers: list[Stager] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handle = handle = SaveHandle(self.path, self, self.started)
        # Who awaits `written` may go on with other things meanwhile; who blocks can't.
        handle.staged._on_await = handle.staged._on_block = handle.written._on_block = self.hurry

    @classmethod
    def of_refusal(cls, path: str, storage: Storage, error: BaseException, started: float) -> Self:
        """Make a job that does nothing but to tell the other ranks why this one does not save."""
        nothing = Capture(Structure([], [], frozenset()), [], [], [])
        return cls(path, storage, overwrite=False, metadata={}, capture=nothing, started=started, refused=error)

    @property
    def is_transformed(self) -> bool:
        """Whether items are stored otherwise than as they are."""
        return self.compression is not None or bool(self.transforms)

    def admit(self) -> None:
        """Make what belongs to the engine's loop, in that loop."""
        self.planned = anyio.Event()
        self.staging_over = anyio.Event()
        self.over = anyio.Event()
        self.scope = anyio.CancelScope()

    def cancel(self) -> Completion[bool]:
        """See `SaveHandle.cancel`."""
        self.cancel_asked = True
        # The engine may be gone, and then the save is over and has said how it ended.
        with contextlib.suppress(RuntimeError):
            self.post(lambda: self.scope.cancel())
        return self.cancelled

    def hurry(self) -> None:
        """Copy without a pause from now on; from any thread."""
        self.pace.hurry()

    def fence(self, timeout: float | None) -> None:
        """See `SaveHandle.fence`."""
        timeout = check_timeout(timeout)
        if any(map(is_capturing, list(self.capture.events))):
            raise AiockptError(
                f"fence() was called while a CUDA graph is captured, which can't wait for the copies of {self.path}: "
                "call it before the capture, and before each replay"
            )
        if self.order_behind(timeout):
            self.allow_changes()
        else:
            self.handle.staged.result()

    def order_behind(self, timeout: float | None) -> bool:
        """Let the caller's current streams wait for the copies, and block until they are enqueued.

        Returns:
            Whether there is anything left to wait for; if not, the save is staged or has failed.

        Raises:
            TimeoutError: they were not enqueued in time.
        """
        timeout = check_timeout(timeout)
        self.hurry()
        if not self.issued.wait(timeout):
            raise TimeoutError(f"the copies of {self.path} were not enqueued within {timeout} s; the save goes on")
        if self.handle.staged.done():
            return False
        for stager in self.stagers:
            stager.fence()
        return True

    def give_up(self, reason: str) -> None:
        """Let the save fail, unless all is copied: its tensors are about to change. From any thread."""
        with self.check_lock:
            if self.copied or self.torn is not None:
                return
            self.torn = TornSnapshotError(f"the snapshot of {self.path} was given up: {reason}")
        self.handle.staged._settle(None, self.torn)
        with contextlib.suppress(RuntimeError):  # see `cancel`
            self.post(lambda: self.scope.cancel())

    def check_for_changes(self) -> None:
        """Compare the version counters, when all is copied.

        Raises:
            TornSnapshotError: a tensor was changed in place since `save()`, or may have been.
        """
        with self.check_lock:
            self._compare()
            self.copied = True

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
            if tensors is None or not any(stager.lags for stager in self.stagers):
                self.overlooked = True
                return
            memory = {_memory(part) for tensor in tensors for part in _parts(tensor)} - {None}
            host_is_copied = not all(stager.lags for stager in self.stagers)  # host memory has one that doesn't

            def is_safe(tensor: torch.Tensor) -> bool:
                if tensor.layout is not torch.strided or tensor.is_quantized:
                    return True  # it was pickled before any copy was issued
                return (host_is_copied and tensor.device.type == "cpu") or _memory(tensor) in memory

            self.capture.overlook(is_safe)

    def _compare(self) -> None:
        if self.torn is not None:
            raise self.torn
        if self.copied or self.overlooked:
            return
        changed = self.capture.changed()
        if not changed and saw_all(self.capture):
            return
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        what = f"{', '.join(changed[:3])}{more}" if changed else "what a step of an optimizer changes (see the log)"
        raise TornSnapshotError(
            f"{what} changed between save() and staged, so the copy of {self.path} may mix "
            "two states and was dropped. Await `staged` before the optimizer's step (or whatever changed it), "
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
