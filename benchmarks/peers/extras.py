"""Peers that the extra `peers` installs: torchsnapshot and Orbax. The row of a missing peer says so."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Sample
from benchmarks.harness.states import State
from benchmarks.limits.machine import files_under, sync_files
from benchmarks.peers.checkpoints import Format
from benchmarks.peers.contenders import Saver


class TorchSnapshot(Saver):
    """``torchsnapshot.Snapshot.async_take``."""

    name, note = "torchsnapshot async_take + fsync", "no CRC, no fsync of its own: synced here"
    format: Format = "torchsnapshot"

    async def open(self, state: State) -> None:
        import torchsnapshot

        self._module: Any = torchsnapshot

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        items = {"state": self._module.StateDict(**state)}
        # It runs an event loop of its own, so it cannot be called in the caller's; the caller waits all the same.
        pending = await asyncio.to_thread(self._module.Snapshot.async_take, str(path), items)
        blocked = time.perf_counter() - started
        await asyncio.to_thread(pending.wait)
        await asyncio.to_thread(sync_files, files_under(path))
        return {"blocked_s": blocked, "staged_s": blocked, "durable_s": time.perf_counter() - started}


class Orbax(Saver):
    """``orbax.checkpoint.AsyncCheckpointer`` with NumPy views of the tensors."""

    note = "no fsync of its own: synced here"
    format: Format = "orbax"

    def __init__(self, *, ocdbt: bool) -> None:
        self.name = f"orbax AsyncCheckpointer{'' if ocdbt else ', no OCDBT'} + fsync"
        self._ocdbt = ocdbt

    async def open(self, state: State) -> None:
        import orbax.checkpoint

        self._module: Any = orbax.checkpoint
        self._checkpointer = self._module.AsyncCheckpointer(self._module.PyTreeCheckpointHandler(use_ocdbt=self._ocdbt))

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        tree = {name: tensor.numpy() for name, tensor in state.items()}
        self._checkpointer.save(_absolute(path), args=self._module.args.PyTreeSave(tree))
        blocked = time.perf_counter() - started
        await asyncio.to_thread(self._checkpointer.wait_until_finished)
        await asyncio.to_thread(sync_files, files_under(path))
        return {"blocked_s": blocked, "staged_s": blocked, "durable_s": time.perf_counter() - started}

    async def close(self) -> None:
        self._checkpointer.close()


def _absolute(path: Path) -> Path:
    return path.resolve()  # Orbax requires an absolute path


def more_savers() -> list[Saver]:
    """Return the contenders that save."""
    return [TorchSnapshot(), Orbax(ocdbt=True), Orbax(ocdbt=False)]
