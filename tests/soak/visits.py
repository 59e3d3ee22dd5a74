"""The disturbances in a soak: loads, deletions, and kills of writer processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import Chances, FaultyStorage
from tests.soak.ledger import Ledger, Save
from tests.soak.state import state_of

KEPT = 6


async def pause(chance: random.Random) -> None:
    """Sleep for a random time: some iterations of the loop, or some milliseconds."""
    for _ in range(chance.randrange(5)):
        await asyncio.sleep(0)
    if chance.random() < 0.5:
        await asyncio.sleep(0.02 * chance.random())


class Visits:
    """Random loads, verifications and deletions between saves, and kills of writer processes.

    Attributes:
        killed: True from the kill of a writer process until a later save is written.
        faulty: the storages with faults.
    """

    def __init__(self, ledger: Ledger, chance: random.Random) -> None:
        self.killed = False
        self._cut: list[Save] = []
        self.faulty: list[FaultyStorage] = []
        self._ledger = ledger
        self._chance = chance

    def storage(self, share: float, faults: dict[str, float]) -> FaultyStorage | None:
        """Return a storage with faults in this share of calls, else None."""
        if self._chance.random() >= share:
            return None
        self.faulty.append(FaultyStorage(LocalStorage(), chances=Chances(faults, seed=self._chance.randrange(1 << 30))))
        return self.faulty[-1]

    def note_written(self, save: Save) -> None:
        """Note that a writer process works again, if the save began after the kill."""
        if save.cut_off and save not in self._cut:
            self.killed = False

    async def disturb(self, ckpt: aiockpt.AsyncCheckpointer, options: dict[str, Any]) -> None:
        """Perform one disturbance or none at random, then delete old checkpoints."""
        chance = self._chance.random()
        if chance < 0.2:
            await self._load(ckpt)
        elif chance < 0.25:
            await self._verify(ckpt)
        elif chance < 0.3:
            await ckpt.ready()
        elif chance < 0.42 and options.get("writer") == "process":
            self._kill_the_writer()
        for path in self._ledger.free[:-KEPT]:
            await self._delete(ckpt, path)

    def _kill_the_writer(self) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended since, by an earlier kill
                command = " ".join(child.cmdline())
                if "aiockpt.writing.process" not in command:
                    continue
                os.kill(child.pid, signal.SIGKILL)
                self._ledger.count("writers killed")
                self.killed = True
                self._cut = list(self._ledger.in_flight)
                for save in self._cut:
                    save.may_fail = save.cut_off = True

    async def _load(self, ckpt: aiockpt.AsyncCheckpointer) -> None:
        """Load a checkpoint; at random into tensors, through a faulty storage, or with a cancellation."""
        ledger = self._ledger
        if not ledger.free:
            return
        path = self._chance.choice(ledger.free)
        ledger.busy.add(path)
        storage = self.storage(0.3, {"open": 0.1, "read": 0.2})
        target = state_of(ledger.announced[path] + 15) if self._chance.random() < 0.4 else None
        loading = asyncio.ensure_future(ckpt.load(path, target, storage=storage))
        if self._chance.random() < 0.2:
            await pause(self._chance)
            loading.cancel()
        try:
            ledger.compare(path, await loading)
        except asyncio.CancelledError:
            ledger.count("loads cancelled")
        except aiockpt.LoadError as exc:
            ledger.count("loads failed")
            if storage is None or not storage.struck:
                ledger.tally.lost.append(f"{path} can't be loaded: {exc}")
        finally:
            ledger.busy.discard(path)

    async def _verify(self, ckpt: aiockpt.AsyncCheckpointer) -> None:
        for path in self._ledger.free[:1]:
            self._ledger.busy.add(path)
            report = await ckpt.verify(path)
            self._ledger.busy.discard(path)
            self._ledger.count("verified")
            if not report.ok:
                self._ledger.tally.lost.append(f"{path}: {report}")

    async def _read_while_it_is_deleted(self, ckpt: aiockpt.AsyncCheckpointer, path: Path) -> None:
        """Check that an open reader can still read while the checkpoint is deleted."""
        expected = state_of(self._ledger.announced[path])["weights"]["w3"]
        async with ckpt.open(path) as reader:
            await ckpt.delete(path)
            read = await reader.read("weights.w3")
        self._ledger.count("read while deleted")
        if not torch.equal(read, expected):
            self._ledger.tally.lost.append(f"{path} was read with other values during its deletion")

    async def _delete(self, ckpt: aiockpt.AsyncCheckpointer, path: Path) -> None:
        """Delete a checkpoint; at random through a faulty storage, during a read, or with a cancellation."""
        ledger = self._ledger
        ledger.busy.add(path)
        storage = self.storage(0.2, {"delete": 0.5})
        if storage is None and self._chance.random() < 0.2:
            deleting = asyncio.ensure_future(self._read_while_it_is_deleted(ckpt, path))
        else:
            deleting = asyncio.ensure_future(ckpt.delete(path, storage=storage))
        if self._chance.random() < 0.1:
            await pause(self._chance)
            deleting.cancel()
        try:
            await deleting
        except asyncio.CancelledError:  # the deletion continues in its thread: its outcome is unknown
            ledger.count("deletions cancelled")
            ledger.doubtful[path] = (ledger.announced.pop(path), None)
            return
        except (aiockpt.DeleteError, aiockpt.WriteError) as exc:
            ledger.count("deletions failed")
            if storage is None or not storage.struck or not path.exists():
                ledger.tally.wrong.append(f"deleting {path}: {exc}")
        else:
            ledger.count("deletions")
            del ledger.announced[path]
            if path.exists():
                ledger.tally.wrong.append(f"{path} was deleted, but is there")
        ledger.busy.discard(path)
