"""Random histories of runs with mirrors: what was mirrored survives the disk, and what was written the process.

Each history is made of a seed: saves, deletions, faults of the store at any step, managers that are closed before the
mirror has caught up, disks that are lost.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.manager import mirror as mirroring
from aiockpt.manager.scan import scan
from aiockpt.testing import Chances, FaultyStorage
from tests.places import ServerPath, storage_of

STEPS = ("begin", "resume", "create", "write", "finish", "commit", "delete")
KEEPS: tuple[Any, ...] = (
    None,
    aiockpt.KeepLatest(1),
    aiockpt.KeepLatest(2),
    aiockpt.KeepEvery(4),
    aiockpt.KeepBest(1, "loss"),
)
SIZE = 2000


class Away(FaultyStorage):
    """Fails at random, or always."""

    def __init__(self, inner: Any, root: str, seed: int) -> None:
        super().__init__(inner, chances=Chances(dict.fromkeys(STEPS, 0.05), seed=seed))
        self.root, self.is_away = root, False
        aiockpt.storage.register("away", lambda root, **_: self, replace=True)

    def resolve(self, path: str) -> str:
        return self.inner.resolve(path.replace("away://here", self.root, 1))

    def look(self, path: str, budget: Any = None) -> Any:
        if self.is_away:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.inner.look(path, budget)


def state_of(step: int, version: int) -> dict[str, Any]:
    return {"x": torch.full((SIZE,), float(version)), "step": step, "version": version}


class History:
    def __init__(self, seed: int, here: Path, there: Any) -> None:
        self.random, self.here, self.there = random.Random(seed), here, there
        self.away = Away(storage_of(there), str(there), seed)
        self.step = self.version = 0
        self.written: dict[int, int] = {}  # versions that were announced, by step
        self.mirrored: dict[int, int] = {}
        self.pending: list[tuple[int, int, aiockpt.SaveHandle]] = []
        self.keep, self.mirror_keep = self.random.choice(KEEPS), self.random.choice(KEEPS)
        self.mirror = aiockpt.Mirror("away://here", keep=self.mirror_keep, required=self.random.random() < 0.3)

    def open(self) -> aiockpt.SyncCheckpointManager:
        drain_s = self.random.choice((0.0, 0.05, 60.0))
        options: Any = {"keep": self.keep, "drain_timeout": drain_s, "max_in_flight": 2}
        return aiockpt.SyncCheckpointManager(self.here, mirror=self.mirror, **options)

    def run(self) -> None:
        """Run one manager: restore, save, be closed."""
        self.away.is_away = False
        with self.open() as run:
            self.restore(run)
            self.away.is_away = self.random.random() < 0.2
            for _ in range(self.random.randrange(1, 5)):
                self.step += self.random.choice((1, 1, 2))
                self.version += 1
                loss = float(self.random.randrange(5))
                handle = run.submit(self.step, state_of(self.step, self.version), {"loss": loss}, overwrite=True)
                self.pending.append((self.step, self.version, handle))
                handle.written.result(60)
                self.written[self.step] = self.version
                if self.random.random() < 0.4 and not self.away.is_away:
                    self.wait(handle)
                self.check()
        for step, version, handle in self.pending:
            if handle.mirrored.exception(60) is None:
                self.mirrored[step] = version
        self.pending.clear()
        if self.random.random() < 0.25:
            shutil.rmtree(self.here)
            self.written = dict(self.mirrored)
            self.step = max(self.mirrored, default=0)

    def wait(self, handle: aiockpt.SaveHandle) -> None:
        try:
            handle.mirrored.result(60)
        except aiockpt.SaveSkippedError:
            return

    def restore(self, run: aiockpt.SyncCheckpointManager) -> None:
        state = state_of(-1, -1)
        found = run.restore(state)
        newest = max(self.written, default=None)
        if newest is None:
            assert found is None or found.step in self.mirrored or not self.mirrored
        assert (found.step if found else -1) >= (-1 if newest is None else newest), (found, self.written, self.mirrored)
        if found is not None:
            assert state["step"] == found.step
            assert bool((state["x"] == state["version"]).all())
            if found.step in self.written:
                assert state["version"] >= self.written[found.step]
            self.step = found.step

    def check(self) -> None:
        """Check that the newest step that was announced is whole in its tier."""
        assert max(self.written) in {info.step for info in scan(self.here) if info.state == "complete"}
        if self.mirrored:
            steps = [info.step for info in scan(self.there) if info.state == "complete"]
            assert max(steps) >= max(self.mirrored)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 60))])
def test_what_was_announced_survives(
    seed: int, tmp_path: Path, anywhere: Path | ServerPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_FIRST_RETRY_S": 0.001, "_LONGEST_RETRY_S": 0.01, "_PATIENCE_S": 0.05}.items():
        monkeypatch.setattr(mirroring, name, value)
    history = History(seed, tmp_path / "here", anywhere / "there")
    for _ in range(8):
        history.run()
    history.away.is_away = False
    with aiockpt.SyncCheckpointManager(tmp_path / "here", mirror=os.fspath(anywhere / "there")) as run:
        history.restore(run)
        run.submit(10**6, state_of(10**6, 10**6)).mirrored.result(60)
        # What a manager has begun that was closed, and a later one leaves out, goes when it is old.
        run._mirror._checkpointer.clean(anywhere / "there", older_than_s=0.0)  # type: ignore[union-attr]
    assert not [name for name in os.listdir(tmp_path / "here") if name.startswith(".aiockpt-")]
