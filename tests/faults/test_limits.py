"""Limits of the process that are met midway, and what others take away from under a save."""

from __future__ import annotations

import contextlib
import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.faults.checks import assert_failed_rightly, names
from tests.states import assert_same, large_state

OLD = {"old": torch.arange(17)}


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Give the process less, for the time of a with block."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize(
    ("most", "direct_io", "overwrite"),
    [(0, True, False), (700, False, True), (1 << 20, True, True), (1 << 20, False, False)],
)
def test_files_may_not_be_so_large(most: int, direct_io: bool, overwrite: bool, tmp_path: Path) -> None:
    path, kept = tmp_path / "c", []
    with aiockpt.SyncCheckpointer(direct_io=direct_io) as ckpt:
        if overwrite:
            ckpt.save(OLD, path)
            kept = ["c"]
        with limited(resource.RLIMIT_FSIZE, most), pytest.raises(aiockpt.WriteError, match="File too large") as caught:
            ckpt.save(large_state(12), path, overwrite=overwrite)
        assert_failed_rightly(caught.value, {errno.EFBIG})
        assert names(tmp_path) == kept
        if overwrite:
            assert_same(OLD, ckpt.load(path))
        ckpt.save(large_state(12), path, overwrite=overwrite)
        assert_same(large_state(12), ckpt.load(path))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def test_no_memory_to_stage_in(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(chunk_bytes=256 << 20, staging_bytes=512 << 20) as ckpt:
        # All threads are there, so that nothing but the pool wants memory; its first chunk is taken and in use.
        gate = GatedStorage(LocalStorage(), ["write"])
        first = ckpt.submit(large_state(2), tmp_path / "first", storage=gate)
        gate.reached["write"].result(60)
        with limited(resource.RLIMIT_AS, _address_space_bytes() + (128 << 20)):
            second = ckpt.submit(large_state(2), tmp_path / "second")
            with pytest.raises(aiockpt.SaveError, match="Cannot allocate memory") as caught:
                second.written.result(60)
        with pytest.raises(aiockpt.SaveError, match="Cannot allocate memory"):
            second.staged.result(60)
        assert isinstance(caught.value.__cause__, OSError | MemoryError)
        gate.open("write")
        first.written.result(60)
        ckpt.save(large_state(2), tmp_path / "third")
        for name in ("first", "third"):
            assert_same(large_state(2), ckpt.load(tmp_path / name))
    assert names(tmp_path) == ["first", "third"]


def _unfinished(folder: Path) -> Path:
    """Give the hidden directory of the one save."""
    found = [path for path in folder.iterdir() if path.name.startswith(".")]
    assert len(found) == 1
    return found[0]


def _remove_hidden(folder: Path) -> None:
    shutil.rmtree(_unfinished(folder))


def _remove_parent(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("step", ["create", "write", "finish", "commit"])
@pytest.mark.parametrize("remove", [_remove_hidden, _remove_parent])
def test_a_directory_is_removed_midway(remove: Callable[[Path], None], step: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with aiockpt.SyncCheckpointer() as ckpt:
        storage = GatedStorage(LocalStorage(), [step])
        save = ckpt.submit(large_state(3), folder / "c", storage=storage)
        storage.reached[step].result(60)
        remove(folder)
        storage.open(step)
        with pytest.raises(aiockpt.SaveError, match=r"No such file|is no longer the directory") as caught:
            save.written.result(60)
        if step != "commit":  # where it is looked for, and missed
            assert_failed_rightly(caught.value, {errno.ENOENT})
        assert not folder.exists() or names(folder) == []
        ckpt.save(large_state(3), folder / "c")
        assert_same(large_state(3), ckpt.load(folder / "c"))
    assert names(folder) == ["c"]


def test_the_parent_is_moved_midway(tmp_path: Path) -> None:
    """It is not followed: what was written is found under the new name, hidden, and nothing is published."""
    with aiockpt.SyncCheckpointer() as ckpt:
        storage = GatedStorage(LocalStorage(), ["commit"])
        save = ckpt.submit(large_state(3), tmp_path / "runs" / "c", storage=storage)
        storage.reached["commit"].result(60)
        (tmp_path / "runs").rename(tmp_path / "moved")
        storage.open("commit")
        with pytest.raises(aiockpt.CommitError, match="is no longer the directory"):
            save.written.result(60)
        assert names(tmp_path) == ["moved"]
        shutil.rmtree(_unfinished(tmp_path / "moved"))
        ckpt.save(large_state(3), tmp_path / "runs" / "c")
        assert_same(large_state(3), ckpt.load(tmp_path / "runs" / "c"))
