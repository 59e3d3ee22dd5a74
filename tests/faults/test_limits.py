"""Saves that reach a resource limit, or whose directory another process removes or moves."""

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
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.faults.checks import assert_failed_rightly, names
from tests.states import assert_same, large_state

OLD = {"old": torch.arange(17)}


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Lower a resource limit of the process during a with block."""
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
def test_a_limit_on_file_size_fails_the_save(most: int, direct_io: bool, overwrite: bool, tmp_path: Path) -> None:
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


def test_a_lack_of_staging_memory_fails_the_save(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(chunk_bytes=256 << 20, staging_bytes=512 << 20) as ckpt:
        # The first save starts all threads and leases the first chunk: now only the pool needs more memory.
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
    """Return the hidden directory of the only save."""
    found = [path for path in folder.iterdir() if path.name.startswith(".")]
    assert len(found) == 1
    return found[0]


def _remove_hidden(folder: Path) -> None:
    shutil.rmtree(_unfinished(folder))


def _remove_parent(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("step", ["create", "write", "finish", "commit"])
@pytest.mark.parametrize("remove", [_remove_hidden, _remove_parent])
def test_removing_a_directory_midway_fails_the_save(remove: Callable[[Path], None], step: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with aiockpt.SyncCheckpointer() as ckpt:
        storage = GatedStorage(LocalStorage(), [step])
        save = ckpt.submit(large_state(3), folder / "c", storage=storage)
        storage.reached[step].result(60)
        remove(folder)
        storage.open(step)
        with pytest.raises(aiockpt.SaveError, match=r"No such file|is no longer the directory") as caught:
            save.written.result(60)
        if step != "commit":  # the commit itself finds that the directory is gone, without an OSError
            assert_failed_rightly(caught.value, {errno.ENOENT})
        assert not folder.exists() or names(folder) == []
        ckpt.save(large_state(3), folder / "c")
        assert_same(large_state(3), ckpt.load(folder / "c"))
    assert names(folder) == ["c"]


def test_moving_the_parent_midway_fails_the_save(tmp_path: Path) -> None:
    """The save does not follow the move: its files stay hidden in the moved directory, and nothing is published."""
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
