"""Deletion of steps by the retention policies, and the steps that are never deleted."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import re
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import Listing, LookBudget, Storage
from aiockpt.storage.local import commit, sink
from aiockpt.storage.local import storage as deletion
from aiockpt.testing import GatedStorage
from tests.manager.runs import empty, names, path_of, truncate
from tests.places import storage_of

STATE = {"x": torch.arange(10.0)}


def steps(folder: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(folder) if name.startswith("step-")]


class LookingStorage(WrapperStorage):
    """Counts the looks at each directory."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.looks: Counter[str] = Counter()

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        self.looks[path] += 1
        return super().look(path, budget)


def refuse(_: str) -> None:
    raise RuntimeError("refused")


def run_of(folder: Path, *keep: aiockpt.KeepPolicy, **options: Any) -> aiockpt.SyncCheckpointManager:
    return aiockpt.SyncCheckpointManager(folder, keep=list(keep), **options)


def test_steps_that_no_policy_keeps_are_deleted(anywhere: Path) -> None:
    with run_of(anywhere, aiockpt.KeepLatest(2), aiockpt.KeepEvery(4), aiockpt.KeepBest(1, "loss")) as run:
        for step in range(1, 11):
            run.save(step, STATE, {"loss": abs(step - 3)})
    assert steps(anywhere) == [3, 4, 8, 9, 10]


def test_steps_are_deleted_only_after_a_later_save(anywhere: Path) -> None:
    """Opening and restoring delete nothing, nor do saves that fail or are skipped."""
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        for step in (1, 2, 3):
            run.save(step, STATE)
    with run_of(anywhere, aiockpt.KeepLatest(1), on_busy="skip") as run:
        run.restore(dict(STATE))
        with pytest.raises(aiockpt.SaveError):
            run.save(4, STATE, pre_commit=refuse)
        storage = GatedStorage(storage_of(anywhere), ["commit"])
        first = run.checkpointer.submit(STATE, anywhere / "other", storage=storage)
        skipped = run.submit(5, STATE)
        assert skipped.skipped
        storage.open("commit")
        first.written.result()
        run._retention.finished().result()
        assert steps(anywhere) == [1, 2, 3]
        run.save(7, STATE)
    assert names(anywhere) == ["other", "step-00000007"]


def test_saves_that_are_written_at_once_look_at_the_run_once(anywhere: Path) -> None:
    """The first save is followed late: all others are written by then, and the last of them deletes for all."""
    storage, met = LookingStorage(storage_of(anywhere)), threading.Event()
    options = {"storage": storage, "on_written": lambda step, _: step == 1 and met.wait(60)}
    with run_of(anywhere, aiockpt.KeepLatest(1), **options) as run:
        for step in range(1, 6):
            run.save(step, STATE)
        before = storage.looks[str(anywhere)]
        met.set()
    assert storage.looks[str(anywhere)] == before + 1
    assert steps(anywhere) == [5]


def test_newest_step_stays_whatever_the_policy(anywhere: Path) -> None:
    with run_of(anywhere, aiockpt.KeepIf(lambda info: False)) as run:
        for step in (1, 2, 3):
            run.save(step, STATE)
    assert steps(anywhere) == [3]


def test_run_that_went_back_keeps_its_last_step(anywhere: Path) -> None:
    """Step 300 is later but belongs to an abandoned run, so the last step of this run must stay too."""
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        for step in (100, 300):
            run.save(step, STATE)
    with run_of(anywhere, aiockpt.KeepLatest(1)) as run:
        run.restore(dict(STATE), step=100, discard_later=False)
        with pytest.raises(aiockpt.SaveError):
            run.save(150, STATE, pre_commit=refuse)
        run._retention.finished().result()
        assert steps(anywhere) == [100, 300]
        run.save(160, STATE)
        run._retention.finished().result()
        assert steps(anywhere) == [160, 300]
        run.save(170, STATE)
    assert steps(anywhere) == [170, 300]


def test_pinned_and_open_steps_stay(anywhere: Path) -> None:
    with run_of(anywhere, aiockpt.KeepLatest(1)) as run:
        run.save(1, STATE)
        run.pin(1)
        run.save(2, STATE)
        with run.open(2):
            run.save(3, STATE)
            run._retention.finished().result()
            assert steps(anywhere) == [1, 2, 3]
        run.save(4, STATE)
        run._retention.finished().result()
        assert steps(anywhere) == [1, 4]
        run.unpin(1)
        run.save(5, STATE)
    assert steps(anywhere) == [5]


@pytest.mark.parametrize("frees", [True, False])
def test_save_on_a_full_disk_waits_once_for_the_deletions_that_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    """The disk has room for two steps, and the deletion of the first begins when the third has found it full."""
    state, allocate, met, tries = {"x": torch.zeros(1 << 20)}, sink.allocate, threading.Event(), list[int]()

    def reserve(fd: int, nbytes: int) -> None:
        if len(steps(tmp_path)) == 2:
            tries.append(nbytes)
            met.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, nbytes)

    monkeypatch.setattr(sink, "allocate", reserve)
    with run_of(tmp_path, aiockpt.KeepLatest(1), on_written=lambda step, _: step == 2 and met.wait(60)) as run:
        run.save(1, state)
        if not frees:
            run.pin(1)
        run.save(2, state)
        if frees:
            run.save(3, state)
        else:
            with pytest.raises(aiockpt.WriteError, match="No space left on device"):
                run.save(3, state)
    assert len(tries) == (1 if frees else 2)
    assert steps(tmp_path) == ([3] if frees else [1, 2])


class FullStorage(WrapperStorage):
    """Has no room for one checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__(LocalStorage())
        self._name = name

    async def before(self, step: str, name: str) -> None:
        if step == "begin" and name.endswith(self._name):
            raise aiockpt.WriteError(f"can't begin: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")


@pytest.mark.slow
def test_a_writer_process_says_that_it_does_not_wait_for_deletions(tmp_path: Path) -> None:
    options = {"writer": "process", "storage": FullStorage(path_of(tmp_path, 2).name)}
    with run_of(tmp_path, aiockpt.KeepLatest(1), **options) as run:
        run.save(1, STATE)
        with pytest.raises(aiockpt.WriteError, match="No space left on device") as failure:
            run.save(2, STATE)
    assert "have room for two steps more than are kept" in "".join(failure.value.__notes__)


def test_damaged_and_unfinished_steps_and_other_names_stay(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, STATE)
        (path_of(tmp_path, 1) / ".metadata").unlink()
        (path_of(tmp_path, 2) / "mine.txt").write_text("notes")
        path_of(tmp_path, 3).rename(tmp_path / "final")
    (tmp_path / "step-00000009").mkdir()
    with run_of(tmp_path, aiockpt.KeepLatest(1)) as run:
        run.save(4, STATE)
        run.save(5, STATE)
    assert names(tmp_path) == ["final", "step-00000001", "step-00000002", "step-00000005", "step-00000009"]


def test_failing_deletion_is_logged_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(tmp_path, aiockpt.KeepLatest(1)) as run:
        run.save(1, STATE)
        with monkeypatch.context() as patch:
            patch.setattr(deletion, "rename_noreplace", _denied)
            run.save(2, STATE)
            run._retention.finished().result()
        assert steps(tmp_path) == [1, 2]
        assert "step 1 is no longer kept, but stays until the next save" in caplog.text
        run.save(3, STATE)
    assert steps(tmp_path) == [3]


def _denied(*_: object) -> None:
    raise PermissionError(13, "denied")


def test_failing_predicate_deletes_nothing(anywhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run_of(anywhere, aiockpt.KeepIf(lambda info: info.metrics["loss"] < 1)) as run, caplog.at_level(logging.ERROR):
        for step in (1, 2, 3):
            run.save(step, STATE)
    assert steps(anywhere) == [1, 2, 3]
    assert "KeyError: 'loss'" in caplog.text


def test_nothing_is_deleted_if_the_written_step_is_gone(tmp_path: Path) -> None:
    """If the new step was moved away, as to an archive, the older ones stay."""
    with run_of(tmp_path, aiockpt.KeepLatest(1)) as run:
        run.save(1, STATE)
        run._retention.finished().result()
        run.save(2, STATE, post_commit=lambda path: os.rename(path, tmp_path / "archived"))
    assert names(tmp_path) == ["archived", "step-00000001"]


@pytest.mark.parametrize("keep", [None, aiockpt.KeepLatest(1)])
def test_a_step_that_is_written_and_not_whole_is_named(
    tmp_path: Path, keep: aiockpt.KeepPolicy | None, caplog: pytest.LogCaptureFixture
) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, keep=keep) as run:
        run.save(1, STATE)
        run.save(2, STATE, post_commit=lambda path: truncate(tmp_path, 2))
        run._retention.finished().result()
        (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert re.search(r"step 2 was written.*damaged.*distcp has \d+ bytes", record.getMessage())
    assert steps(tmp_path) == [1, 2]


def test_save_to_the_fallback_path_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    real = commit.rename_noreplace

    def fail_there(source: str, target: str) -> None:
        if os.path.dirname(target) == str(folder):
            raise PermissionError(13, "denied")
        real(source, target)

    with run_of(folder, aiockpt.KeepLatest(1), fallback_path=tmp_path / "spare", retries=0) as run:
        run.save(1, STATE)
        monkeypatch.setattr(commit, "rename_noreplace", fail_there)
        result = run.save(2, STATE)
        assert result.path == str(tmp_path / "spare" / "step-00000002")
    assert steps(folder) == [1]


def test_step_set_aside_by_a_restore_is_not_deleted(anywhere: Path) -> None:
    with run_of(anywhere, aiockpt.KeepLatest(1)) as run:
        run.save(1, STATE)
        run.pin(1)
        run.save(2, STATE)
        truncate(anywhere, 2)
        with pytest.warns(aiockpt.DamagedCheckpointWarning):
            run.restore(dict(STATE))
        run.unpin(1)
        run.save(3, STATE)
    assert names(anywhere) == ["step-00000002.damaged", "step-00000003"]


@pytest.mark.asyncio
async def test_close_waits_for_saves_and_deletions(anywhere: Path) -> None:
    async with aiockpt.CheckpointManager(anywhere, keep=[aiockpt.KeepLatest(1)], max_in_flight=4) as run:
        assert await run.restore(empty()) is None
        for step in range(1, 5):
            await run.save(step, STATE)
    assert steps(anywhere) == [4]


@pytest.mark.parametrize("drain_timeout", [math.inf, 1e300])
def test_close_may_wait_without_limit(anywhere: Path, drain_timeout: float) -> None:
    with run_of(anywhere, aiockpt.KeepLatest(1), drain_timeout=drain_timeout) as run:
        run.submit(1, STATE)
        run.submit(2, STATE)
    assert names(anywhere) == ["step-00000002"]


def test_error_in_the_program_does_not_stop_saves_and_deletions(anywhere: Path) -> None:
    with pytest.raises(KeyError), run_of(anywhere, aiockpt.KeepLatest(1)) as run:
        run.save(1, STATE)
        run.submit(2, STATE)
        raise KeyError("the program's")
    assert names(anywhere) == ["step-00000002"]


def test_unreadable_step_stays_and_the_others_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(path: Any, *args: Any, **options: Any) -> Any:
        if path == str(path_of(tmp_path, 1)):
            raise PermissionError(13, "denied", path)
        return real(path, *args, **options)

    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, STATE)
    monkeypatch.setattr(os, "open", denied)
    with run_of(tmp_path, aiockpt.KeepLatest(1)) as run:
        for step in (2, 3, 4):
            run.save(step, STATE)
    assert steps(tmp_path) == [1, 4]


def test_step_being_replaced_is_not_deleted(anywhere: Path) -> None:
    """The deletions after an earlier save run while a step that they would delete is overwritten."""
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        for step in (1, 2, 3):
            run.save(step, STATE)
    with run_of(anywhere, aiockpt.KeepLatest(1), max_in_flight=2) as run:
        gates: list[Future[None]] = [Future(), Future()]

        async def hold(path: str) -> None:
            await asyncio.wrap_future(gates[path.endswith("1")])

        first = run.submit(4, STATE, pre_commit=hold)
        deleted = run._retention.finished()
        replacing = run.submit(1, {"x": torch.ones(3)}, overwrite=True, pre_commit=hold)
        gates[0].set_result(None)
        first.written.result()
        deleted.result()
        assert steps(anywhere) == [1, 4]
        gates[1].set_result(None)
        replacing.written.result()
    assert steps(anywhere) == [1, 4]


def test_garbage_collected_manager_leaves_no_thread_and_no_lock(anywhere: Path) -> None:
    ckpt = aiockpt.SyncCheckpointer()
    run = aiockpt.SyncCheckpointManager(anywhere, checkpointer=ckpt)
    run.save(1, STATE)
    run._retention.finished().result()
    (thread,) = run._retention._thread._threads
    del run
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    ckpt.close()
    with aiockpt.SyncCheckpointManager(anywhere) as again:
        assert again.steps() == [1]
