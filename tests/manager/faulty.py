"""Runs whose saves and deletions fail, and processes killed during them.

This module does not import hypothesis, because forked ranks import it.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.registry import Storages
from tests.manager.runs import state_of
from tests.places import storage_of


@dataclass(frozen=True)
class Keep:
    """A second implementation of the retention policies."""

    latest: int = 0
    every: int = 0
    best: int = 0
    both: tuple[int, int] = (0, 0)  # (n, multiple): of the latest n steps, the multiples
    all: bool = False

    def policy(self) -> Any:
        made: list[Any] = [
            *([aiockpt.KeepLatest(self.latest)] if self.latest else []),
            *([aiockpt.KeepEvery(self.every)] if self.every else []),
            *([aiockpt.KeepBest(self.best, "loss")] if self.best else []),
            *([aiockpt.KeepLatest(self.both[0]) & aiockpt.KeepEvery(self.both[1])] if self.both[0] else []),
        ]
        return None if self.all else made or aiockpt.KeepIf(lambda info: False)

    def kept(self, losses: dict[int, float | None]) -> set[int]:
        steps = sorted(losses, reverse=True)
        if self.all:
            return set(steps)
        valued = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        found = set(steps[: self.latest])
        found |= {step for step in steps if self.every and step % self.every == 0}
        found |= {-step for _, step in valued[: self.best]}
        found |= {step for step in steps[: self.both[0]] if step % self.both[1] == 0}
        return found


@dataclass(frozen=True)
class Stored:
    """A step whose save was announced, or that was found after a kill."""

    version: int
    loss: float | None
    harm: str = ""

    @property
    def looks_complete(self) -> bool:
        return self.harm in ("", "flip")


class Faults(WrapperStorage):
    """A storage that fails, or kills its process, before the nth occurrence of a step."""

    def __init__(self, folder: str) -> None:
        storage = storage_of(folder)
        is_local = isinstance(storage, LocalStorage)
        super().__init__(LocalStorage(fsync=False, direct_io=False, retries=0) if is_local else storage)
        self.arm("")

    def arm(self, step: str, nth: int = 1, *, kills: bool = False) -> None:
        self._step, self._left, self._kills = step, nth, kills

    async def before(self, step: str, name: str) -> None:
        if step != self._step:
            return
        self._left -= 1
        if self._left == 0:
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            error = OSError(errno.EIO, os.strerror(errno.EIO))
            kind = aiockpt.DeleteError if step == "delete" else aiockpt.WriteError
            raise kind(f"can't {step} {name}: {error}") from error


def open_run(folder: str, keep: Keep, **options: Any) -> tuple[aiockpt.SyncCheckpointManager, Faults, Faults]:
    """Open a run; return it with the faults of its saves and of its deletions."""
    saving, deleting = Faults(folder), Faults(folder)
    run = aiockpt.SyncCheckpointManager(folder, keep=keep.policy(), storage=saving, **options)
    run._retention._deleter._storages = Storages(deleting, deleting)
    run.__enter__()
    return run, saving, deleting


def save_and_be_killed(
    pipe: Connection, folder: str, keep: Keep, saves: list[tuple[int, Stored]], where: tuple[str, int]
) -> None:
    """Save steps, report each announcement through the pipe, and be killed during or right after them."""
    run, saving, deleting = open_run(folder, keep)
    (deleting if where[0] == "delete" else saving).arm(*where, kills=True)
    for step, stored in saves:
        pipe.send((step, stored, "begun"))
        run.save(step, state_of(stored.version), {} if stored.loss is None else {"loss": stored.loss})
        pipe.send((step, stored, "announced"))
        run._retention.finished().result()
        pipe.send((step, stored, "cleared"))
    os.kill(os.getpid(), signal.SIGKILL)
