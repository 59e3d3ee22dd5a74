"""Saves on real file systems that are full, frozen, failing or read-only."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.faults.checks import assert_failed_rightly, names
from tests.faults.disks import BALLAST, ext4, fill, tmpfs
from tests.states import assert_same, large_state

OTHERS = (BALLAST, "lost+found")
OLD = {"old": torch.arange(17)}
SMALL = {"n": torch.arange(100)}
LARGE = {"w": torch.arange(300_000, dtype=torch.float32), "n": 1}  # one file with direct I/O and allocated space


def _step_of(error: BaseException, name: str) -> str:
    """Return the failed step and its file, from the message of an error."""
    what = "create|write|make the directory|make|publish"
    found = re.match(rf"can't ({what}) .*?/{re.escape(name)}(?:/(\S+?))?(?: at |: | \()", str(error))
    assert found, str(error)
    return f"{found[1]} {found[2] or ''}".strip()


def _fill_and_save(
    disk: Path, state: dict[str, Any], levels: Iterable[int], *, name: str = "c", overwrite: bool = False
) -> Counter[str]:
    """Save with each level of free space, and count the failed steps; check that no failure leaves anything."""
    seen: Counter[str] = Counter()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(OLD, disk / "old")
        if overwrite:
            ckpt.save(OLD, disk / name)
        before = names(disk, besides=OTHERS)
        for level in levels:
            fill(disk, level)
            try:
                ckpt.save(state, disk / name, overwrite=overwrite)
            except aiockpt.SaveError as exc:
                assert_failed_rightly(exc, {errno.ENOSPC})
                if str(exc).startswith("can't write"):
                    assert re.search(r"No space left on device.* are free in /", str(exc)), exc
                seen[_step_of(exc, name)] += 1
                assert names(disk, besides=OTHERS) == before
                if overwrite:
                    assert_same(OLD, ckpt.load(disk / name))
            else:
                seen["saved"] += 1
                assert_same(state, ckpt.load(disk / name))
                (disk / BALLAST).unlink()
                if overwrite:
                    ckpt.save(OLD, disk / name, overwrite=True)
                else:
                    shutil.rmtree(disk / name)
        (disk / BALLAST).unlink(missing_ok=True)
        ckpt.save(state, disk / name, overwrite=overwrite)
        assert_same(state, ckpt.load(disk / name))
        assert_same(OLD, ckpt.load(disk / "old"))
    return seen


# Whole blocks: almost none, and around the size of the data file plus the documents that are written last.
LEVELS = [block * 4096 for block in (0, 1, 2, 3, 5, 100, 290, *range(293, 301), 320)]


def test_a_full_tmpfs(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 4 << 20) as disk:
        seen = _fill_and_save(disk, LARGE, LEVELS)
    assert {"create __0_0.distcp", "write .aiockpt.json", "write .metadata", "saved"} <= set(seen)


def test_a_full_disk_with_direct_io(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 8 << 20, "-b", "4096") as disk:
        seen = _fill_and_save(disk, LARGE, LEVELS, overwrite=True)
    assert {"make the directory", "create __0_0.distcp", "write .aiockpt.json"} <= set(seen)


def test_no_room_for_the_final_name(tmp_path: Path) -> None:
    """The hidden name still fits into the directory's block; the longer final name does not."""
    with ext4(tmp_path / "disk", 4 << 20, "-b", "1024", "-N", "64") as disk:
        for number in range(3):
            (disk / (f"{number}" + "x" * 202)).touch()
        seen = _fill_and_save(disk, SMALL, [block << 10 for block in range(20)], name="y" * 250)
    assert {"make the directory", "write __0_0.distcp", "write .metadata", "publish", "saved"} <= set(seen)


def test_no_free_inode(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for inodes in range(2, 9):
        with tmpfs(tmp_path / f"disk{inodes}", 4 << 20, inodes=inodes) as disk, aiockpt.SyncCheckpointer() as ckpt:
            try:
                ckpt.save(SMALL, disk / "runs" / "c")
            except aiockpt.SaveError as exc:
                assert_failed_rightly(exc, {errno.ENOSPC})
                assert "create" not in str(exc) or str(exc).endswith("(no inodes are free in " + f"{disk / 'runs'})"), (
                    exc
                )
                seen[_step_of(exc, "c")] += 1
                assert not list(disk.rglob("*.*")) + list(disk.rglob("c"))
            else:
                seen["saved"] += 1
                assert_same(SMALL, ckpt.load(disk / "runs" / "c"))
    assert {"make the directory", "create __0_0.distcp", "create .aiockpt.json", "create .metadata", "saved"} <= set(
        seen
    )


def test_a_read_only_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 4 << 20) as disk, aiockpt.SyncCheckpointer() as ckpt:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(aiockpt.WriteError, match="Read-only file system") as caught:
            ckpt.save(SMALL, disk / "c")
        assert_failed_rightly(caught.value, {errno.EROFS})
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        ckpt.save(SMALL, disk / "c")
        assert_same(SMALL, ckpt.load(disk / "c"))


@pytest.mark.parametrize("step", ["write", "finish", "commit"])
def test_a_disk_that_fails_midway(step: str, tmp_path: Path) -> None:
    """An aborted journal makes the file system read-only, so that even the clean-up fails."""
    with ext4(tmp_path / "disk", 8 << 20) as disk, aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(OLD, disk / "c")
        storage = GatedStorage(LocalStorage(), [step])
        save = ckpt.submit(LARGE, disk / "c", overwrite=True, storage=storage)
        storage.reached[step].result(60)
        subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
        storage.open(step)
        with pytest.raises(aiockpt.SaveError, match=r"can't (write|make|publish|create)") as caught:
            save.written.result(60)
        cause = caught.value.__cause__
        assert isinstance(cause, OSError)
        assert cause.errno in (errno.EROFS, errno.EIO)
        assert any("can't remove the unfinished checkpoint" in note for note in caught.value.__notes__)
        assert_same(OLD, ckpt.load(disk / "c"))
        ckpt.save(LARGE, tmp_path / "elsewhere")
        assert_same(LARGE, ckpt.load(tmp_path / "elsewhere"))


_FREEZE, _THAW = 0xC0045877, 0xC0045878


@contextmanager
def _frozen(disk: Path) -> Iterator[None]:
    """Freeze a file system: every thread that changes it blocks uninterruptibly in the kernel."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, _THAW, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("step", ["begin", "write", "commit"])
def test_a_frozen_disk_blocks_saves_but_not_the_caller(step: str, tmp_path: Path) -> None:
    """After the thaw a cancelled save ends, and the others are written."""
    with ext4(tmp_path / "disk", 16 << 20) as disk, aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(OLD, disk / "old")
        storage = GatedStorage(LocalStorage(), [step])
        first = ckpt.submit({"first": 1, **large_state(2)}, disk / "first", storage=storage)
        storage.reached[step].result(60)
        with _frozen(disk):
            storage.open(step)
            first.staged.result(60)
            cancelled = ckpt.submit({"cancelled": 1, **large_state(2)}, disk / "cancelled")
            later = ckpt.submit({"later": 1, **large_state(2)}, disk / "later")
            later.staged.result(60)
            cancelled.staged.result(60)
            assert not first.written.done()
            cancelled.cancel()
            assert not later.written.done()
        first.written.result(60)
        later.written.result(60)
        with pytest.raises(aiockpt.SaveCancelledError):
            cancelled.written.result(60)
        assert names(disk, besides=OTHERS) == ["first", "later", "old"]
        assert_same({"first": 1, **large_state(2)}, ckpt.load(disk / "first"))
        assert_same({"later": 1, **large_state(2)}, ckpt.load(disk / "later"))


def test_run_goes_on_where_the_disk_has_room_for_one_step_more_than_it_keeps(tmp_path: Path) -> None:
    """Each save that finds the disk full waits for the deletion that the one before has left to be done."""
    state = {"w": torch.zeros(500_000)}
    with tmpfs(tmp_path / "disk", 5 << 20) as disk:
        with aiockpt.SyncCheckpointManager(disk / "run", keep=aiockpt.KeepLatest(1)) as run:
            for step in range(12):
                run.save(step, state)
        assert names(disk / "run") == ["step-00000011"]
