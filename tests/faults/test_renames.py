"""Renames on network file systems can return an error and still take effect: the save checks whether they did."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage import syscalls
from aiockpt.storage.local import commit, temp_dir
from aiockpt.storage.local.retries import NotSyncedError
from tests.faults.checks import names, os_error
from tests.states import assert_same

OLD = {"old": torch.arange(17)}
NEW = {"new": torch.arange(40_000)}
FILES = {"c": "dcp", "c.safetensors": "safetensors"}
RETRIES = aiockpt.Retries(attempts=3, first_s=0.001)


class Server:
    """A server whose first ``times`` renames return an error; with ``does`` they take effect nevertheless."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, does: bool, times: int = 1) -> None:
        self.answers = 0
        self._number = number
        self._does = does
        self._times = times
        for name in ("rename_noreplace", "rename_exchange"):
            monkeypatch.setattr(commit, name, self._instead_of(getattr(commit, name)))

    def _instead_of(self, real: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def rename(source: str, target: str) -> None:
            fails = self.answers < self._times
            if self._does or not fails:
                real(source, target)
            if fails:
                self.answers += 1
                raise os_error(self._number)

        return rename


def _saved(folder: Path, name: str, *, overwrite: bool, retries: aiockpt.Retries | None) -> None:
    with aiockpt.SyncCheckpointer(retries=retries) as ckpt:
        ckpt.save(NEW, folder / name, format=FILES[name], overwrite=overwrite)


@pytest.fixture(params=sorted(FILES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["first", "overwrite"])
def overwrite(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> bool:
    if request.param:
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(OLD, tmp_path / name, format=FILES[name])
    return request.param


def _holds(folder: Path, name: str, state: dict | None) -> None:
    assert names(folder) == ([] if state is None else [name])
    if state is not None:
        with aiockpt.SyncCheckpointer() as ckpt:
            assert_same(state, ckpt.load(folder / name))


@pytest.mark.slow
@pytest.mark.parametrize("retries", [None, RETRIES], ids=["no-retries", "retries"])
@pytest.mark.parametrize(
    "number", [errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EEXIST, errno.ENOENT], ids=errno.errorcode.get
)
def test_a_rename_that_took_effect_succeeds_in_spite_of_its_error(
    number: int, retries: aiockpt.Retries | None, name: str, overwrite: bool, tmp_path: Path, monkeypatch
) -> None:
    server = Server(monkeypatch, number, does=True)
    _saved(tmp_path, name, overwrite=overwrite, retries=retries)
    assert server.answers == 1
    _holds(tmp_path, name, NEW)


def test_a_rename_without_effect_is_retried(name: str, overwrite: bool, tmp_path: Path, monkeypatch) -> None:
    server = Server(monkeypatch, errno.ESTALE, does=False, times=2)
    _saved(tmp_path, name, overwrite=overwrite, retries=RETRIES)
    assert server.answers == 2
    _holds(tmp_path, name, NEW)


def test_a_rename_that_never_takes_effect_fails_the_save(
    name: str, overwrite: bool, tmp_path: Path, monkeypatch
) -> None:
    server = Server(monkeypatch, errno.EBUSY, does=False, times=99)
    with pytest.raises(aiockpt.CommitError, match=r"can't publish .*busy") as caught:
        _saved(tmp_path, name, overwrite=overwrite, retries=RETRIES)
    assert server.answers == 3 * (1 if "." in name else 2)  # a directory's is tried again without the hold
    assert isinstance(caught.value.__cause__, OSError)
    assert any(note.startswith("tried 3 times in ") for note in caught.value.__cause__.__notes__)
    monkeypatch.undo()
    _holds(tmp_path, name, OLD if overwrite else None)


def test_a_permanent_error_is_not_retried(name: str, tmp_path: Path, monkeypatch) -> None:
    server = Server(monkeypatch, errno.EIO, does=False, times=99)
    with pytest.raises(aiockpt.CommitError, match="Input/output error"):
        _saved(tmp_path, name, overwrite=False, retries=RETRIES)
    assert server.answers == 1
    _holds(tmp_path, name, None)


def test_a_checkpoint_of_another_process_is_not_taken_for_the_own_one(name: str, tmp_path: Path, monkeypatch) -> None:
    """After an ambiguous error, a checkpoint under the final name counts only if it is this save's own."""
    real = commit.rename_noreplace

    def rename(source: str, target: str) -> None:
        if not Path(target).exists():
            with aiockpt.SyncCheckpointer() as other:
                monkeypatch.setattr(commit, "rename_noreplace", real)
                other.save(OLD, target, format=FILES[name])
            raise os_error(errno.ESTALE)
        real(source, target)

    monkeypatch.setattr(commit, "rename_noreplace", rename)
    with pytest.raises(aiockpt.CheckpointExistsError, match="has appeared during the save"):
        _saved(tmp_path, name, overwrite=False, retries=RETRIES)
    _holds(tmp_path, name, OLD)


def test_an_fsync_is_never_repeated(name: str, overwrite: bool, tmp_path: Path, monkeypatch) -> None:
    """After a failed fsync Linux may mark dirty pages clean, so that a second one would succeed with data lost."""
    real, seen = os.fsync, []

    def fsync(fd: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(seen) == nth:
            raise os_error(errno.EAGAIN)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    nth = 0
    _saved(tmp_path, name, overwrite=overwrite, retries=RETRIES)
    total = len(seen)
    monkeypatch.undo()
    assert total >= 2
    for nth in range(1, total + 1):
        seen.clear()
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(OLD, tmp_path / name, format=FILES[name], overwrite=True)
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(aiockpt.SaveError, match="Resource temporarily unavailable") as caught:
            _saved(tmp_path, name, overwrite=True, retries=RETRIES)
        monkeypatch.undo()
        assert isinstance(caught.value.__cause__, NotSyncedError)
        assert seen[nth:] in ([], [str(tmp_path)])  # the undone rename is synced before anything is removed
        _holds(tmp_path, name, OLD)


def _no_open_directory_moves(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let renames of directories that are open in this process fail, as over 9P; return the list of those that did."""
    refused: list[str] = []

    def check(path: str | bytes, folder: int | None = None) -> None:
        found = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        if Path(os.fsdecode(path)).is_absolute():
            path = os.path.realpath(os.fsdecode(path))
        else:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
        if os.path.isdir(path) and any(link.is_symlink() and os.readlink(link) == path for link in found):
            refused.append(path)
            raise os_error(number)

    def call(name: str, *args: object) -> None:
        if name == "renameat2":
            check(args[1])
            if args[4].value == syscalls._EXCHANGE:
                check(args[3])
        return real_call(name, *args)

    def rename(source: str, target: str, **folders: int) -> None:
        check(source, folders.get("src_dir_fd"))
        real_rename(source, target, **folders)

    real_call, real_rename = syscalls._call, os.rename
    monkeypatch.setattr(syscalls, "_call", call)
    monkeypatch.setattr(os, "rename", rename)
    return refused


@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY, errno.EPERM], ids=errno.errorcode.get)
def test_a_directory_that_can_not_be_renamed_while_it_is_open_is_let_go_of(
    number: int, name: str, overwrite: bool, tmp_path: Path, monkeypatch
) -> None:
    refused = _no_open_directory_moves(monkeypatch, number)
    _saved(tmp_path, name, overwrite=overwrite, retries=None)
    assert len(refused) == (0 if "." in name else 1)
    _holds(tmp_path, name, NEW)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.delete(tmp_path / name)
    _holds(tmp_path, name, None)


def test_a_hold_that_was_let_go_of_in_vain_is_taken_again(tmp_path: Path, monkeypatch) -> None:
    hidden, held = temp_dir.make_new(str(tmp_path))
    publication = commit.Publication(hidden, str(tmp_path / "c"), "", False, True, held.identity, held=held)
    Server(monkeypatch, errno.EACCES, does=False, times=99)
    with pytest.raises(aiockpt.CommitError, match="Permission denied"):
        publication.attempt()
    assert held.release.alive
    with syscalls.open_directory(hidden) as other:
        assert temp_dir.lock(other, fcntl.LOCK_EX) == "refused"
    held.release()
    os.rmdir(hidden)


def test_what_a_killed_process_has_left_is_removed_where_open_directories_can_not_be_renamed(
    tmp_path: Path, monkeypatch
) -> None:
    refused = _no_open_directory_moves(monkeypatch, errno.EACCES)
    gone = replace(temp_dir.this_process(), pid=4_194_304, start=1)  # a PID that no process has
    dead = f".aiockpt-{gone}.{'b' * 16}"
    temp_dir.make_hidden(str(tmp_path / dead)).release()
    assert len(refused) == 1
    _saved(tmp_path, "c", overwrite=False, retries=None)
    assert len(refused) == 3
    _holds(tmp_path, "c", NEW)


def test_sync_directory_raises_if_the_directory_can_not_be_opened() -> None:
    with pytest.raises(FileNotFoundError):
        commit.sync_directory("/nowhere")
