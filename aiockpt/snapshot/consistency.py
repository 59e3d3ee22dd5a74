"""Whether the copies of a snapshot show one state: who may change tensors when, and whether one was changed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from aiockpt.errors import TornSnapshotError
from aiockpt.planning.dtensor import ShardingError, is_distributed, local_parts
from aiockpt.snapshot.optimizer_hooks import samples_of, saw_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aiockpt.errors import SaveError
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.staging.base import Stager

_OPERATOR_S = 0.02
"""How long an in-place operator may run on after the copies were made and still be seen: it counts when it ends."""


class Consistency:
    """Watches over one snapshot from the call until its copies are made. From any thread.

    Args:
        snapshot: what is copied.
        path: names the save in errors.
    """

    def __init__(self, snapshot: Snapshot, path: str) -> None:
        self._snapshot = snapshot
        self._path = path
        self._lock = threading.Lock()
        self.issued = threading.Event()  # all copies are enqueued
        self.awaited = threading.Event()  # a caller waits for the copies
        self.stagers: list[Stager] = []
        self.abort_error: SaveError | None = None  # the save is to fail with it, though no step of it has failed
        self.copied = False  # all copies are made, and compared
        self._fenced = False  # a caller may have passed a fence, to change tensors behind the copies
        self._mutations_allowed = False  # whatever changes now is ordered behind the copies

    # --- the end of a save ------------------------------------------------------------------------

    def abort(self, error: SaveError, *, though_copied: bool = False) -> bool:
        """Let the save fail with an error, unless all is copied; return whether it will."""
        with self._lock:
            if self.abort_error is not None or (self.copied and not though_copied):
                return False
            self.abort_error = error
        return True

    def raise_if_aborted(self) -> None:
        """Raise what the save is to fail with, if anything."""
        if self.abort_error is not None:
            raise self.abort_error

    def reset_for_restage(self) -> bool:
        """Get ready to copy once more; return False if a caller may have changed the tensors by now."""
        with self._lock:
            if self._fenced or self.copied or self._mutations_allowed:
                return False
            self.issued.clear()
        return True

    # --- fences -----------------------------------------------------------------------------------

    def wait_until_issued(self, timeout: float | None) -> None:
        """Block until all copies are enqueued.

        Raises:
            TimeoutError: they were not in time.
        """
        while not self._fenced:
            if not self.issued.wait(timeout):
                raise TimeoutError(f"the copies of {self._path} were not enqueued within {timeout} s; the save goes on")
            with self._lock:
                self._fenced = self.issued.is_set()  # else they are made once more

    def allow_changes(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Compare the version counters, and stop looking at what the caller, who comes behind the copies, changes.

        Args:
            tensors: what that is. None: it can be anything, so that changes by others go unseen too.

        Raises:
            TornSnapshotError: a tensor was changed before.
        """
        with self._lock:
            if self.copied:
                return
            self._compare()
            if tensors is None or not any(stager.is_async for stager in self.stagers):
                self._look()
                self._mutations_allowed = True
                return
            memory = {_memory(part) for tensor in tensors for part in _parts(tensor)} - {None}
            host_is_copied = not all(stager.is_async for stager in self.stagers)  # host memory has one that doesn't

            def is_safe(tensor: torch.Tensor) -> bool:
                if tensor.layout is not torch.strided or tensor.is_quantized:
                    return True  # it was pickled before any copy was issued
                return (host_is_copied and tensor.device.type == "cpu") or _memory(tensor) in memory

            self._look(is_safe)
            self._snapshot.ignore_changes(is_safe)

    # --- comparing --------------------------------------------------------------------------------

    def check_for_changes(self) -> None:
        """Compare version counters, and samples of the bytes if there are any, when all is copied. Blocks.

        Raises:
            TornSnapshotError: a tensor was changed in place since `save()`, or may have been.
        """
        samples = samples_of(self._snapshot)
        self._wait_for_operators()
        with self._lock:
            self._compare()
            if samples is not None:
                samples.compare(readable=self._snapshot.readable)
            self.copied = True
        # What a fence has looked at is known when the caller's stream has come that far: nobody waits for it meanwhile.
        changed = [] if samples is None else samples.changed()
        if changed:
            raise self._torn(changed, ", as their bytes show: by writes that no version counter shows")

    def _wait_for_operators(self) -> None:
        """Wait a moment for an operator that another thread may be running: its counter changes when it ends.

        Not if a caller waits for the copies: its thread runs no operator.
        """
        has_host_tensors = any(not stager.is_async for stager in self.stagers)
        eager = self._snapshot.eager  # copied at the call itself
        tensors = enumerate(self._snapshot.tensors)
        is_any_left = any(tensor is not None and leaf not in eager for leaf, tensor in tensors)
        if has_host_tensors and is_any_left and not (self._mutations_allowed or self._fenced):
            self.awaited.wait(_OPERATOR_S)

    def _look(self, chosen: Callable[[torch.Tensor], bool] | None = None) -> None:
        samples = samples_of(self._snapshot)
        if samples is not None:
            samples.compare(chosen)

    def _compare(self) -> None:
        self.raise_if_aborted()
        if self.copied or self._mutations_allowed:
            return
        changed = self._snapshot.changed()
        if not changed and saw_all(self._snapshot):
            return
        raise self._torn(changed or ["what a step of an optimizer changes (see the log)"])

    def _torn(self, changed: Sequence[str], how: str = "") -> TornSnapshotError:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return TornSnapshotError(
            f"{', '.join(changed[:3])}{more} changed between save() and staged{how}, so the copy of {self._path} may "
            "mix two states and was dropped. Await `staged` before the optimizer's step (or whatever changed it), "
            "call fence() before it, or save a clone."
        )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of this process that hold the values."""
    if not is_distributed(tensor):
        return [tensor]
    try:
        return [part.tensor for part in local_parts("", tensor)]
    except ShardingError:  # such a one can't be saved either
        return []


def _memory(tensor: torch.Tensor) -> object:
    """Return the identity of a tensor's memory: tensors that share it share its version counter."""
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # it has none of its own, and what is saved of it is a copy
        return None
