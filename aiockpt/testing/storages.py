"""Storages that wait or fail on demand."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from aiockpt.errors import CommitError, LoadError, WriteError
from aiockpt.handle import Completion
from aiockpt.storage.wrapper import WrapperStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.storage.base import Storage


class GatedStorage(WrapperStorage):
    """Stops before the given steps until it is let go on, from any thread or loop.

    ::

        storage = GatedStorage(LocalStorage(), ["commit"])
        save = ckpt.save(state, path, storage=storage)
        await storage.reached["commit"]   # everything is written, nothing published
        storage.open("commit")

    Args:
        inner: where things really go.
        steps: where to stop; see `WrapperStorage.before`.
    """

    def __init__(self, inner: Storage, steps: Sequence[str]) -> None:
        super().__init__(inner)
        self.reached: dict[str, Completion[None]] = {step: Completion(f"reached {step}") for step in steps}
        self._gates: dict[str, Completion[None]] = {step: Completion(f"gate {step}") for step in steps}

    def open(self, step: str) -> None:  # type: ignore[override]
        """Let everything through that stops before this step, now and later."""
        self._gates[step]._settle(None)

    async def before(self, step: str, name: str) -> None:
        """Wait, if this is a step to stop at."""
        if step in self._gates:
            self.reached[step]._settle(None)
            await self._gates[step]


class FaultyStorage(WrapperStorage):
    """Fails at a step, as the file system would.

    Args:
        inner: where things really go.
        step: which step fails; see `WrapperStorage.before`, or "read".
        error: what the file system says.
        nth: which occurrence of the step fails, counted from 1.
        times: how many occurrences fail, from there on.
    """

    def __init__(self, inner: Storage, step: str, error: OSError, *, nth: int = 1, times: int = 1) -> None:
        super().__init__(inner)
        self._step = step
        self._error = error
        self._range = range(nth, nth + times)
        self.seen: Counter[str] = Counter()
        self._counting = threading.Lock()

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        """Raise the error, if this is the step and the occurrence."""
        with self._counting:
            self.seen["read"] += 1
            fails = self._step == "read" and self.seen["read"] in self._range
        if fails:
            raise LoadError(f"can't read {name} at offset {offset}: {self._error}") from self._error

    async def before(self, step: str, name: str) -> None:
        """Raise the error, if this is the step and the occurrence."""
        self.seen[step] += 1
        if step == self._step and self.seen[step] in self._range:
            kind = CommitError if step == "commit" else WriteError
            raise kind(f"{step} {name}: {self._error}") from self._error
