"""Consistency of a snapshot: whether a tensor was changed before its copy was made, and when callers may change it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from aiockpt.core.wording import some_of
from aiockpt.errors import SaveError, TornSnapshotError
from aiockpt.planning.dtensor import ShardingError, is_distributed, local_parts
from aiockpt.snapshot.optimizer_hooks import samples_of, saw_all
from aiockpt.staging.runtime import is_host

if TYPE_CHECKING:
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.staging.base import Stager

_OPERATOR_S = 0.02
"""Wait after the copies for in-place operators that still run: they advance the version counter when they end."""


class Consistency:
    """Detects changes of a snapshot's tensors, from the call until all copies are made. Thread-safe."""

    def __init__(self, snapshot: Snapshot, path: str) -> None:
        self._snapshot = snapshot
        self._path = path
        self._lock = threading.Lock()
        self.issued = threading.Event()  # all copies are enqueued
        self.awaited = threading.Event()  # a caller waits for the copies
        self.stagers: list[Stager] = []
        self.abort_error: SaveError | None = None  # raised at the save's next check, though no step of it has failed
        self.copied = False  # all copies are made, and compared
        self._fenced = False  # a caller may have passed a fence, to change tensors behind the copies
        self._mutations_allowed = False  # later changes are ordered behind the copies
        self._leaves_at: dict[object, list[int]] | None = None  # by their memory; made when a guard first asks

    # --- the end of a save ------------------------------------------------------------------------

    def abort(self, error: SaveError, *, though_copied: bool = False) -> bool:
        """Make the save fail with an error, unless all is copied; return whether it will."""
        with self._lock:
            if self.abort_error is not None or (self.copied and not though_copied):
                return False
            self.abort_error = error
        return True

    def raise_if_aborted(self) -> None:
        if self.abort_error is not None:
            raise self.abort_error

    def reset_for_restage(self) -> bool:
        """Prepare to copy again; return False if a caller may have changed the tensors since."""
        with self._lock:
            if self._fenced or self.copied or self._mutations_allowed:
                return False
            self.issued.clear()
        return True

    # --- fences -----------------------------------------------------------------------------------

    def wait_until_issued(self, timeout: float | None) -> None:
        """Block until all copies are enqueued; raise TimeoutError if they are not in time."""
        while not self._fenced:
            if not self.issued.wait(timeout):
                raise TimeoutError(f"the copies of {self._path} were not enqueued within {timeout} s; the save goes on")
            with self._lock:
                self._fenced = self.issued.is_set()  # if not, the copies are being made again

    def allow_changes(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Compare the version counters, then ignore later changes by the caller, which are ordered behind the copies.

        ``tensors`` are those that the caller may change. None: any, so that changes by others go undetected too. Raise
        TornSnapshotError if a tensor was changed before.
        """
        with self._lock:
            if self.copied:
                return
            if tensors is None or not any(stager.is_async for stager in self.stagers):
                self._compare_versions()
                self._compare_samples()
                self._mutations_allowed = True
                return
            leaves = self._leaves_of(tensors)
            self._compare_versions(leaves)
            self._compare_samples(leaves)
            self._snapshot.ignore_changes(leaves)

    def _leaves_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the leaves in the memory of these tensors; at the first call, also those that are copied already.

        A guard asks at each step of its optimizer, of which there may be one for each parameter.
        """
        leaves: set[int] = set()
        if self._leaves_at is None:
            self._leaves_at = {}
            # The stager of host memory is not asynchronous: what it has issued is copied.
            host_is_copied = not all(stager.is_async for stager in self.stagers)
            for leaf, tensor in enumerate(self._snapshot.tensors):
                if tensor is None:
                    continue
                was_pickled = tensor.layout is not torch.strided or tensor.is_quantized  # before any copy was issued
                if was_pickled or (host_is_copied and is_host(tensor.device)):
                    leaves.add(leaf)
                elif (memory := _memory(tensor)) is not None:
                    self._leaves_at.setdefault(memory, []).append(leaf)
        for tensor in tensors:
            for part in _parts(tensor):
                leaves.update(self._leaves_at.get(_memory(part), ()))
        return leaves

    # --- comparing --------------------------------------------------------------------------------

    def check_for_changes(self) -> None:
        """Compare the version counters and the samples, when all is copied. Blocks.

        Raise TornSnapshotError if a tensor was changed in place since `save()`, or may have been.
        """
        samples = samples_of(self._snapshot)
        self._wait_for_operators()
        with self._lock:
            self._compare_versions()
            if samples is not None:
                samples.compare(readable=self._snapshot.readable)
            self.copied = True
        # A comparison made at a fence has its result when the caller's stream has reached it: wait outside of the lock.
        changed = [] if samples is None else samples.changed()
        if changed:
            raise self._torn(changed, ", as their bytes show: by writes that no version counter shows")

    def _wait_for_operators(self) -> None:
        """Wait a moment for an operator that another thread may be running: its counter changes when it ends.

        If a caller waits for the copies, return at once: its thread runs no operator.
        """
        eager = self._snapshot.eager  # copied at the call itself
        tensors = enumerate(self._snapshot.tensors)
        is_any_left = any(tensor is not None and leaf not in eager for leaf, tensor in tensors)
        if is_any_left and not (self._mutations_allowed or self._fenced):
            self.awaited.wait(_OPERATOR_S)

    def _compare_samples(self, leaves: Iterable[int] | None = None) -> None:
        samples = samples_of(self._snapshot)
        if samples is not None:
            samples.compare(leaves)

    def _compare_versions(self, leaves: Iterable[int] | None = None) -> None:
        self.raise_if_aborted()
        if self.copied or self._mutations_allowed:
            return
        changed = self._snapshot.changed(leaves)
        if not changed and saw_all(self._snapshot):
            return
        raise self._torn(changed or ["what a step of an optimizer changes (see the log)"])

    def _torn(self, changed: Sequence[str], how: str = "") -> TornSnapshotError:
        return TornSnapshotError(
            f"{some_of(changed, 3)} changed between save() and staged{how}, so the copy of {self._path} may "
            "mix two states and was dropped. Await `staged` before the optimizer's step (or whatever changed it), "
            "call fence() before it, or save a clone."
        )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of this process that hold the values."""
    if not is_distributed(tensor):
        return [tensor]
    try:
        return [part.tensor for part in local_parts("", tensor)]
    except ShardingError:  # can't be saved either
        return []


def _memory(tensor: torch.Tensor) -> object:
    """Return the identity of a tensor's memory: tensors that share it share its version counter."""
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # it has no memory of its own, and a copy is saved
        return None
