"""One save as the engine knows it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import torch

from aiockpt.errors import TornSnapshotError
from aiockpt.handle import Completion, SaveHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.format.manifest import JsonValue
    from aiockpt.planning.source import Capture
    from aiockpt.staging.base import Stager
    from aiockpt.storage.base import Storage


@dataclass
class SaveJob:
    """One save: what is to be saved, and what is known of its course.

    Implements `aiockpt.handle.Control`. ``cancel`` and ``fence`` may be called from any thread.
    """

    path: str
    storage: Storage
    overwrite: bool
    metadata: dict[str, JsonValue]
    capture: Capture
    started: float
    captured_s: float = 0.0
    handle: SaveHandle = field(init=False)
    post: Callable[[Callable[[], None]], object] = lambda _: None
    cancelled: Completion[bool] = field(default_factory=lambda: Completion[bool]("cancelled"))
    issued: threading.Event = field(default_factory=threading.Event)
    staging_over: anyio.Event = field(init=False)
    over: anyio.Event = field(init=False)
    scope: anyio.CancelScope = field(init=False)
    cancel_asked: bool = False
    checked: bool = False
    check_lock: threading.Lock = field(default_factory=threading.Lock)
    stagers: list[Stager] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handle = SaveHandle(self.path, self, self.started)

    def admit(self) -> None:
        """Make what belongs to the engine's loop, in that loop."""
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

    def fence(self, timeout: float | None) -> None:
        """See `SaveHandle.fence`."""
        if not self.issued.wait(timeout):
            raise TimeoutError(f"the copies of {self.path} were not enqueued within {timeout} s; the save goes on")
        if self.handle.staged.done():
            self.handle.staged.result()
            return
        for stager in self.stagers:
            for device, event in stager.fence():
                torch.accelerator.current_stream(device).wait_event(event)
        self.check_for_changes()

    def check_for_changes(self) -> None:
        """Compare the version counters, once.

        Raises:
            TornSnapshotError: a tensor was changed in place since `save()`.
        """
        with self.check_lock:
            if self.checked:
                return
            changed = self.capture.changed()
            if not changed:
                self.checked = True
                return
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise TornSnapshotError(
            f"{', '.join(changed[:3])}{more} changed between save() and staged, so the copy of {self.path} may mix "
            "two states and was dropped. Await `staged` before the optimizer's step (or whatever changed it), "
            "call fence() before it, or save a clone."
        )
