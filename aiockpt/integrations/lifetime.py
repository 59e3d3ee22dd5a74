"""The checkpointer of a plug-in: frameworks copy, pickle and fork their plug-ins, and end them twice or never."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from aiockpt.coordination.choose import is_distributed
from aiockpt.engine.facade import EngineAccess
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    import torch

    from aiockpt.core.futures import Completion
    from aiockpt.saving.fence import StepGuard

IDLE_S = 5.0
"""So many seconds after the last call a plug-in's threads end, unless it saves with other ranks."""


class Lifetime:
    """A checkpointer that is made at its first use, and anew after `end`, after a fork, or for other ranks.

    Copies and pickles of it have the options alone. For any thread.

    Args:
        options: those of `SyncCheckpointer`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"idle_timeout": IDLE_S, **options}
        SyncCheckpointer(**self._options)  # so that a wrong option fails here; it has not started anything
        self._forget()

    def _forget(self) -> None:
        self._checkpointer: SyncCheckpointer | None = None
        self._made_for: object = None
        self._lock = threading.RLock()
        self._guards: list[tuple[object, StepGuard]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def checkpointer(self) -> SyncCheckpointer:
        """The checkpointer. With several ranks, all of them use it in the same order."""
        key = os.getpid(), id(dist.group.WORLD) if is_distributed() else None
        if isinstance(self._made_for, tuple) and self._made_for[0] != key[0]:
            Lifetime._forget(self)  # its lock may be held by a thread of the parent
        with self._lock:
            held = self._checkpointer
            if held is not None and (self._made_for != key or not held._engine.is_open):
                if held._engine.is_open:
                    held.close()
                held = None
            if held is None:
                held, self._made_for = SyncCheckpointer(**self._options), key
            self._checkpointer = held
            return held

    @property
    def access(self) -> EngineAccess:
        """The engine of the checkpointer, for what it agrees on with the other ranks."""
        return EngineAccess(self.checkpointer)

    def guard(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Make the steps of these optimizers alone wait for the copies; return False if those of one can't."""
        is_complete = True
        for held, guard in self._guards:
            if not any(held is optimizer for optimizer in optimizers):
                guard.remove()
        self._guards = [pair for pair in self._guards if any(pair[0] is optimizer for optimizer in optimizers)]
        guarded = [held for held, _ in self._guards]
        for optimizer in optimizers:
            if any(optimizer is held for held in guarded):
                continue
            try:
                self._guards.append((optimizer, self.checkpointer.guard(optimizer)))
            except TypeError:  # its steps call no hooks
                is_complete = False
        return is_complete

    def is_over(self, path: str, written: Completion[Any]) -> bool:
        """Return whether the save of a path has ended; with several ranks, when all of them know it."""
        access = self.access
        if access.world_size == 1:
            return written.done()
        return access.agree(f"whether {path} is written", written.done(), all).result()

    def end(self) -> None:
        """Stop guarding, finish the saves in flight and end all threads. Blocks; idempotent.

        Raises:
            AiockptError: the failure of a save that nobody has awaited.
        """
        self.guard(())
        with self._lock:
            held, self._checkpointer = self._checkpointer, None
        if held is not None and held._engine.is_open:
            held.close()


def missing(framework: str, extra: str, error: ImportError) -> NoReturn:
    """Raise an ImportError that says what to install."""
    raise ImportError(f"{framework} is not installed: pip install 'aiockpt[{extra}]'", name=framework) from error
