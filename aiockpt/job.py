"""One save as the engine knows it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import anyio
import torch

from aiockpt.errors import TornSnapshotError
from aiockpt.format.safetensors_writer import SUFFIX
from aiockpt.handle import Completion, SaveHandle
from aiockpt.planning.safetensors_plan import SafetensorsForm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiockpt.format.manifest import JsonValue
    from aiockpt.planning.plans import SaveForm
    from aiockpt.planning.source import Capture
    from aiockpt.staging.base import Stager
    from aiockpt.storage.base import Storage

SaveFormat = Literal["dcp", "safetensors"]


def choose_form(
    name: SaveFormat, path: str, metadata: Mapping[str, JsonValue], shard_bytes: int | None
) -> SafetensorsForm | None:
    """Make what a plan in another format than DCP's needs; None for that.

    Raises:
        ValueError: a format that is not known, or ``shard_bytes`` where it means nothing.
        SaveError: the metadata can't be stored in this format.
    """
    if name == "safetensors":
        return SafetensorsForm(metadata, single_file=path.endswith(SUFFIX), shard_bytes=shard_bytes)
    if name != "dcp":
        raise ValueError(f"format is {name!r}; it must be 'dcp' or 'safetensors'")
    if shard_bytes is not None:
        raise ValueError("shard_bytes is for format='safetensors'; the dcp format has io_threads files")
    return None


@dataclass
class SaveJob:
    """One save: what is to be saved, and what is known of its course.

    ``form`` is the format to save in; None for DCP's.

    Implements `aiockpt.handle.Control`. ``cancel`` and ``fence`` may be called from any thread.
    """

    path: str
    storage: Storage
    overwrite: bool
    metadata: dict[str, JsonValue]
    capture: Capture
    started: float
    form: SaveForm | None = None
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
