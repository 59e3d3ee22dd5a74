"""A soak: many saves of a changing state, with faults, cancellations, loads and deletions in between."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.snapshot import optimizer_hooks
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import Storage
from aiockpt.testing import HangingStorage
from tests.soak.gauges import Gauge, leased_chunks
from tests.soak.ledger import Ledger, Save
from tests.soak.state import fill, state_of
from tests.soak.visits import Visits, pause

CHUNK = 64 << 10
FAULTS = {"begin": 0.04, "create": 0.03, "write": 0.01, "finish": 0.02, "commit": 0.05}

# The options of the checkpointer in each round: everything that changes the course of a save. "hangs": some saves hang
# in the file system. "hasty": the checkpointer is closed without waiting for the saves in flight.
ROUNDS: list[dict[str, Any]] = [
    {},
    {"writer": "process"},
    {"on_busy": "supersede", "max_in_flight": 2},
    {"on_busy": "skip", "validate": "hash"},
    {"writer": "process", "on_busy": "supersede"},
    {"on_busy": "error", "io_threads": 1},
    {"on_failure": "warn", "fallback_path": True, "staging_bytes": 64 * CHUNK},
    {"save_timeout": 60.0, "direct_io": False, "staging_bytes": None},
    {"save_timeout": 0.5, "hangs": True},
    {"drain_timeout": 0.05, "hasty": True},
]

# The actions of the program after submitting a save, with their weights.
ACTS = {
    "go on when staged": 40,
    "fence": 8,
    "go on when written": 10,
    "cancel": 14,
    "tear": 10,
    "cancel a waiter": 9,
    "wait with a timeout": 9,
}


class Soak:
    """A program that saves, loads and deletes at random, with disturbances.

    Args:
        directory: the directory to save in.
        seed: the seed of the random choices; a run is not reproducible, because timing also decides.

    Attributes:
        tally: the results.
    """

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self._directory = directory
        self._chance = random.Random(seed)
        self._ledger = Ledger()
        self._visits = Visits(self._ledger, self._chance)
        self.tally = self._ledger.tally
        self._live = state_of(0)
        self._number = 0
        self._handles: list[aiockpt.SaveHandle] = []
        self._hanging: list[HangingStorage] = []
        self._hangs = self._hasty = False

    async def run(
        self, saves: int, *, per_round: int, seconds: float, warm_up: int, until_time_is_over: bool = False
    ) -> None:
        """Run rounds of saves, then check that every announced checkpoint is there.

        Args:
            saves: the number of saves after which no round begins.
            per_round: the number of saves with one checkpointer.
            seconds: the time after which no round begins.
            warm_up: the number of rounds before resources are compared; they run even if the time is over.
            until_time_is_over: begin rounds until both limits are reached, instead of either.
        """
        until = time.monotonic() + seconds
        rounds, tally = 0, self.tally
        left = any if until_time_is_over else all
        while rounds < warm_up or left((tally.counts["saves"] < saves, time.monotonic() < until)):
            await self._round(dict(ROUNDS[rounds % len(ROUNDS)]), per_round)
            rounds += 1
            tally.gauges.append(Gauge.read(self._directory))
            if rounds > warm_up:
                leaks = tally.gauges[-1].leaks_since(tally.gauges[warm_up - 1])
                tally.leaks += [f"round {rounds}: {leak}" for leak in leaks]
        tally.counts["rounds"] = rounds
        await self._ledger.check_all(self._directory)

    async def _round(self, options: dict[str, Any], saves: int) -> None:
        if options.pop("fallback_path", False):
            options["fallback_path"] = self._directory / "fallback"
        self._hangs, self._hasty = options.pop("hangs", False), options.pop("hasty", False)
        options = {"chunk_bytes": CHUNK, "staging_bytes": 4 * CHUNK, "fsync": self._chance.random() < 0.2, **options}
        self._visits.killed = False
        async with asyncio.TaskGroup() as watchers:
            try:
                async with aiockpt.AsyncCheckpointer(**options) as ckpt:
                    await self._run_saves(ckpt, watchers, saves, options)
            except aiockpt.SaveCancelledError:  # saves in flight at a hasty close
                if not self._hasty:
                    raise
        self._check_released(ckpt)
        self.tally.counts["faults"] += sum(storage.struck.total() for storage in self._visits.faulty)
        self._visits.faulty.clear()

    def _check_released(self, ckpt: aiockpt.AsyncCheckpointer) -> None:
        """Check that a closed checkpointer holds no resources, even while its handles exist."""
        statistics, leased = ckpt.statistics(), leased_chunks()
        if statistics.in_flight or statistics.abandoned or statistics.quarantined_bytes or leased:
            self.tally.leaks.append(f"a closed checkpointer has {leased} leased chunks, and reports {statistics}")
        if len(optimizer_hooks._live):
            self.tally.leaks.append(
                f"{len(optimizer_hooks._live)} of {len(self._handles)} saves still hold their state"
            )
        self._handles.clear()

    async def _run_saves(
        self, ckpt: aiockpt.AsyncCheckpointer, watchers: asyncio.TaskGroup, saves: int, options: dict[str, Any]
    ) -> None:
        try:
            for _ in range(saves):
                await self._save(ckpt, watchers, options)
                await self._visits.disturb(ckpt, options)
        finally:
            if self._hasty:
                for save in self._ledger.in_flight:
                    save.cancelled = True
            for storage in self._hanging:
                storage.recover()
            self._hanging.clear()
            self._ledger.held.clear()

    def _storage(self, save: Save, options: dict[str, Any]) -> Storage | None:
        """Return the storage of a save: the default one, one with faults, or one that hangs."""
        if options.get("writer") == "process":
            return None
        if self._hangs and self._chance.random() < 0.25:
            step = self._chance.choice(["begin", "create", "write", "finish", "commit"])
            self._hanging.append(HangingStorage(LocalStorage(), step))
            save.may_appear = step == "commit"
            return self._hanging[-1]
        storage = self._visits.storage(0.4, FAULTS)
        save.may_fail |= storage is not None
        return storage

    async def _save(
        self, ckpt: aiockpt.AsyncCheckpointer, watchers: asyncio.TaskGroup, options: dict[str, Any]
    ) -> None:
        self._number += 1
        save = self._next()
        save.cut_off = self._visits.killed
        save.may_fail = save.cut_off or self._hangs  # saves queued behind a hanging one may time out
        storage = self._storage(save, options)
        state = fill(self._live, self._number)
        try:
            handle = ckpt.save(state, save.path, overwrite=save.replaces is not None, storage=storage)
        except aiockpt.CheckpointerBusyError:
            self._ledger.count("refused as busy")
            await ckpt.ready()
            return
        self._ledger.count("saves")
        self._ledger.busy.add(save.path)
        self._handles.append(handle)
        self._ledger.in_flight.append(save)
        watchers.create_task(self._watch(handle, save))
        act = self._chance.choices(list(ACTS), list(ACTS.values()))[0]
        if act == "tear":
            await self._tear(save, by_surprise=options.get("validate") == "hash")
        else:
            await self._act(act, ckpt, handle, save)
        await _wait_quietly(handle.staged)

    def _next(self) -> Save:
        free = self._ledger.free
        if free and self._chance.random() < 0.15:
            path = self._chance.choice(free)
            return Save(path, self._number, self._ledger.announced[path])
        return Save(self._directory / f"step-{self._number}", self._number, None)

    async def _act(self, act: str, ckpt: aiockpt.AsyncCheckpointer, handle: aiockpt.SaveHandle, save: Save) -> None:
        """Perform one of the actions during a save."""
        if act == "fence":
            with contextlib.suppress(aiockpt.SaveError):
                await asyncio.to_thread(ckpt.fence)
        elif act == "go on when written":
            await _wait_quietly(handle.written)
        elif act == "cancel":
            await self._cancel(handle, save)
        elif act == "cancel a waiter":
            waiting = asyncio.ensure_future(_wait_quietly(handle.written))
            await pause(self._chance)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            self._ledger.count("waits cancelled")
        elif act == "wait with a timeout":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002 * self._chance.random()):
                    await _wait_quietly(handle.written)
            self._ledger.count("waits cancelled")

    async def _tear(self, save: Save, *, by_surprise: bool) -> None:
        save.torn = True
        await pause(self._chance)
        victim = self._live["weights"]["w2"]
        if by_surprise:
            victim.data.mul_(3)
        else:
            # Bump the version first, as the optimizer hooks do. An operator itself bumps it only when it ends, so a
            # copy made while it runs would not be detected.
            torch.autograd.graph.increment_version(victim)
            victim.mul_(3)

    async def _cancel(self, handle: aiockpt.SaveHandle, save: Save) -> None:
        if self._chance.random() < 0.5:
            await _wait_quietly(handle.staged)
        await pause(self._chance)
        save.cancelled = True
        called_off = await handle.cancel()
        self._ledger.count("cancelled in time" if called_off else "cancelled too late")
        if called_off and save.replaces is None and save.path.exists():
            self.tally.wrong.append(f"{save.path} was cancelled, but is there")

    async def _watch(self, handle: aiockpt.SaveHandle, save: Save) -> None:
        """Wait for the end of a save, and record its outcome."""
        try:
            result = await handle.written
        except aiockpt.AiockptError as exc:
            self._ledger.judge(exc, save)
        else:
            self._visits.note_written(save)
            self._ledger.enter(save, result)
        finally:
            self._ledger.busy.discard(save.path)
            self._ledger.in_flight.remove(save)


async def _wait_quietly(what: Awaitable[Any]) -> None:
    """Wait, and ignore a failure of the save: `Soak._watch` records it."""
    with contextlib.suppress(aiockpt.SaveError):
        await what
