"""Storages that wait, hang or fail on demand."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import anyio

from aiockpt.core.futures import Completion
from aiockpt.errors import CommitError, CorruptCheckpointError, LoadError, WriteError
from aiockpt.storage.wrapper import WrapperStorage

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import SharedTransaction, Storage


class GatedStorage(WrapperStorage):
    """Stops before the given steps until `open` is called, from any thread or loop.

    ::

        storage = GatedStorage(LocalStorage(), ["commit"])
        save = ckpt.save(state, path, storage=storage)
        await storage.reached["commit"]   # everything is written, nothing published
        storage.open("commit")

    A task that waits at a gate can be cancelled; one that waits for a `HangingStorage` can't.

    Args:
        inner: the storage that does the steps.
        steps: the steps to stop before; see `WrapperStorage.before`, or "read".
    """

    def __init__(self, inner: Storage, steps: Sequence[str]) -> None:
        super().__init__(inner)
        self.reached: dict[str, Completion[None]] = {step: Completion(f"reached {step}") for step in steps}
        self._gates: dict[str, Completion[None]] = {step: Completion(f"gate {step}") for step in steps}

    def open(self, step: str) -> None:  # type: ignore[override]
        """Release all tasks that stop before this step, now and later."""
        self._gates[step]._settle(None)

    async def before(self, step: str, name: str) -> None:
        """Wait at the gate of the step, if it has one."""
        if step in self._gates:
            self.reached[step]._settle(None)
            await self._gates[step]


class HangingStorage(WrapperStorage):
    """Hangs in the thread of a step, as with a dead disk or file server: it can't be cancelled.

    ::

        storage = HangingStorage(LocalStorage(), "write")
        save = ckpt.save(state, path, storage=storage)
        await storage.reached             # a thread hangs
        storage.recover()                 # required, or the thread never ends

    Args:
        inner: the storage that does the steps.
        step: the step that hangs, in every transaction: "begin", "join" or one of a transaction.
    """

    def __init__(self, inner: Storage, step: str) -> None:
        super().__init__(inner)
        self._step = step
        self._workers: Workers | None = None
        self._works = threading.Event()
        self.reached: Completion[None] = Completion(f"reached {step}")

    def recover(self) -> None:
        """Release all threads, now and later; from any thread."""
        self._works.set()

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        """See `Storage.begin`."""
        self._workers = workers
        return await super().begin(path, overwrite=overwrite, workers=workers, ticket=ticket)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        """See `SharedStorage.join`."""
        self._workers = workers
        return await super().join(path, ticket, workers=workers)

    async def before(self, step: str, name: str) -> None:
        """Hang, if this is the step."""
        if step == self._step and self._workers is not None:
            self.reached._settle(None)
            await self._workers.run(self._works.wait)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault.

    Attributes:
        step: the step that fails; see `WrapperStorage.before`, or "read".
        error: the error of the file system. Any other exception than an OSError is raised as it is, such as a
            MemoryError. None: the step does not fail, but is slow, or a read is short.
        nth: the first occurrence that fails, counted from 1, of those whose name matches.
        times: how many occurrences fail; None for all from there on.
        name: the file or path, as a pattern in which * stands for any text.
        delay_s: how much longer the step takes, in seconds.
        short_bytes: for "read": the file seems to end after so many bytes of the range.
    """

    step: str
    error: Exception | None = None
    nth: int = 1
    times: int | None = 1
    name: str = "*"
    delay_s: float = 0.0
    short_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Chances:
    """Random faults, the same ones each time for the same seed and order of steps.

    Attributes:
        of: for each step the probability that it fails.
        seed: of the random numbers.
        numbers: the error numbers to choose from.
    """

    of: Mapping[str, float]
    seed: int = 0
    numbers: Sequence[int] = field(default=(errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE))


class FaultyStorage(WrapperStorage):
    """Fails at given steps, or at random, as a file system would.

    ::

        FaultyStorage(LocalStorage(), "write", OSError(errno.ENOSPC, "No space left on device"), nth=3)
        FaultyStorage(LocalStorage(), faults=[
            Fault("finish", OSError(errno.EIO, "Input/output error"), name=".metadata"),
            Fault("abort", OSError(errno.EIO, "Input/output error")),       # the clean-up fails too
            Fault("write", delay_s=0.01, times=None),                       # every write is slow
        ])
        FaultyStorage(LocalStorage(), chances=Chances({"write": 0.01, "commit": 0.05}, seed=7))

    The step raises one of aiockpt's errors with the ``OSError`` as its cause. It fails before ``inner`` is called, so
    ``inner`` does not retry it.

    Args:
        inner: the storage that does the steps.
        step: the step that fails; see `WrapperStorage.before`, or "read".
        error: the error of the file system.
        nth: the occurrence of the step that fails, counted from 1.
        times: how many occurrences fail, from there on; None for all.
        faults: more planned faults.
        chances: random faults.

    Attributes:
        seen: how often each step was called.
        struck: how often each step was made to fail.
    """

    def __init__(
        self,
        inner: Storage,
        step: str = "",
        error: Exception | None = None,
        *,
        nth: int = 1,
        times: int | None = 1,
        faults: Sequence[Fault] = (),
        chances: Chances | None = None,
    ) -> None:
        super().__init__(inner)
        own = (Fault(step, error, nth=nth, times=times),) if step else ()
        self._faults = (*own, *faults)
        self._met = [0] * len(self._faults)
        self._chances = chances
        self._random = random.Random(0 if chances is None else chances.seed)
        self._counting = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        """Fail if a fault is due, in the thread that reads."""
        delay_s, error, short_bytes = self._due("read", name)
        if delay_s:
            time.sleep(delay_s)
        if error is not None:
            raise _wrapped("read", f"can't read {name} at offset {offset}: {error}", error)
        if short_bytes is not None and short_bytes < nbytes:
            raise CorruptCheckpointError(
                f"{name} ends at byte {offset + short_bytes}, {nbytes - short_bytes} bytes too early: it was truncated"
            )

    async def before(self, step: str, name: str) -> None:
        """Fail if a fault is due."""
        delay_s, error, _ = self._due(step, name)
        if delay_s:
            await anyio.sleep(delay_s)
        if error is not None:
            raise _wrapped(step, f"{step} {name}: {error}", error)

    def _due(self, step: str, name: str) -> tuple[float, Exception | None, int | None]:
        """Count an occurrence; return its delay, its error, and after how many bytes a read ends."""
        delay_s, error, short_bytes = 0.0, None, None
        # Reads come from several threads at once.
        with self._counting:
            self.seen[step] += 1
            for number, fault in enumerate(self._faults):
                if fault.step != step or not fnmatchcase(name, fault.name):
                    continue
                self._met[number] += 1
                later = self._met[number] - fault.nth
                if later >= 0 and (fault.times is None or later < fault.times):
                    delay_s += fault.delay_s
                    error = error or fault.error
                    short_bytes = fault.short_bytes if short_bytes is None else short_bytes
            chances = self._chances
            if error is None and chances and step in chances.of and self._random.random() < chances.of[step]:
                number = self._random.choice(chances.numbers)
                error = OSError(number, os.strerror(number))
            if error is not None or short_bytes is not None:
                self.struck[step] += 1
        return delay_s, error, short_bytes


def _wrapped(step: str, message: str, error: Exception) -> Exception:
    """Return the error that a storage raises for an OSError; other errors are returned as they are."""
    if not isinstance(error, OSError):
        return error
    kind = {"commit": CommitError, "open": LoadError, "read": LoadError}.get(step, WriteError)
    ours = kind(message)
    ours.__cause__ = error
    return ours
