"""Overwriting without an exchange of names: two renames, and the recovery after an interruption."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.errors import CheckpointExistsError, CheckpointNotFoundError, CommitError, DeleteError
from aiockpt.storage import syscalls
from aiockpt.storage.local import commit, replacing
from aiockpt.storage.local.orphans import clean
from aiockpt.storage.local.temp_dir import RECORD, REPLACED, Owner, this_process

OLD, NEW = {"x": torch.zeros(1000)}, {"x": torch.ones(1000)}
HERE = this_process()
pytestmark = pytest.mark.skipif(HERE is None, reason="this system doesn't identify processes")


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that support no flags of renameat2. In the crash matrix, the kernel itself refuses them."""

    def unsupported(*_args: object) -> None:
        raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(syscalls, "_call", unsupported)


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer(process_group=None, retries=None) as checkpointer:
        yield checkpointer


@pytest.fixture(scope="module")
def dead() -> Owner:
    with subprocess.Popen(["true"]) as process:
        return replace(HERE, pid=process.pid, start=HERE.start + 1)


def value_at(ckpt: aiockpt.SyncCheckpointer, path: Path) -> float:
    return ckpt.load(path)["x"][0].item()


def interrupted(ckpt: aiockpt.SyncCheckpointer, folder: Path, owner: Owner) -> Path:
    """Create the leftovers of a process killed between the two renames; return the final path, which does not exist."""
    hidden = folder / f".aiockpt-{owner}.{7:016x}"
    ckpt.save(OLD, folder / "c")
    ckpt.save(NEW, folder / "new")
    (folder / "c").rename(f"{hidden}{REPLACED}")
    (folder / "new").rename(hidden)
    Path(f"{hidden}{RECORD}").write_text("c")
    return folder / "c"


def test_checkpoint_is_replaced(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    ckpt.save(OLD, path)
    ckpt.save(NEW, path, overwrite=True)
    assert value_at(ckpt, path) == 1
    ckpt.save(OLD, path, overwrite=True, format="safetensors")
    assert value_at(ckpt, path) == 0
    assert os.listdir(tmp_path) == ["c"]


def test_symlink_is_replaced_but_not_its_target(ckpt, tmp_path: Path) -> None:
    ckpt.save(OLD, tmp_path / "step-1")
    (tmp_path / "last").symlink_to("step-1")
    ckpt.save(NEW, tmp_path / "last", overwrite=True)
    assert (value_at(ckpt, tmp_path / "step-1"), value_at(ckpt, tmp_path / "last")) == (0, 1)
    assert sorted(os.listdir(tmp_path)) == ["last", "step-1"]


def test_file_and_directory_replace_each_other(ckpt, tmp_path: Path) -> None:
    torch.save(OLD, tmp_path / "m")
    ckpt.save(NEW, tmp_path / "m", overwrite=True)
    assert value_at(ckpt, tmp_path / "m") == 1
    (tmp_path / "m").rename(tmp_path / "m.safetensors")
    ckpt.save(OLD, tmp_path / "m.safetensors", overwrite=True)
    assert value_at(ckpt, tmp_path / "m.safetensors") == 0
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_file_system_is_probed_once_before_any_write(ckpt, tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []
    real = replacing._exchanges

    def exchanges(first: str, second: str) -> bool:
        asked.extend(os.listdir(os.path.dirname(first)))
        return real(first, second)

    monkeypatch.setattr(replacing, "_exchanges", exchanges)
    ckpt.save(OLD, tmp_path / "c")
    assert asked == []
    for _ in range(3):
        ckpt.save(NEW, tmp_path / "c", overwrite=True)
    assert asked == ["probe-1"]


def test_nothing_is_written_if_directories_cannot_be_renamed(ckpt, tmp_path: Path, monkeypatch) -> None:
    def refuse(_source: str, _target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    ckpt.save(OLD, tmp_path / "c")
    monkeypatch.setattr(replacing, "rename_noreplace", refuse)
    with pytest.raises(aiockpt.WriteError, match=r"can't make the directory for .*Operation not permitted"):
        ckpt.save(NEW, tmp_path / "c", overwrite=True)
    assert os.listdir(tmp_path) == ["c"]


# --- failures -----------------------------------------------------------------------------------------


def _failing(real: Callable[..., object], number: int, times: int = 1) -> Callable[..., object]:
    calls = 0

    def call(*args: object) -> object:
        nonlocal calls
        calls += 1
        if number <= calls < number + times:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    return call


@pytest.mark.parametrize("number", [1, 2])
def test_failing_rename_changes_nothing(number: int, ckpt, tmp_path: Path, monkeypatch) -> None:
    ckpt.save(OLD, tmp_path / "c")
    ckpt.save(OLD, tmp_path / "asked")
    ckpt.save(OLD, tmp_path / "asked", overwrite=True)
    monkeypatch.setattr(replacing, "rename_noreplace", _failing(replacing.rename_noreplace, number))
    with pytest.raises(CommitError, match=r"can't publish .*Input/output error"):
        ckpt.save(NEW, tmp_path / "c", overwrite=True)
    assert value_at(ckpt, tmp_path / "c") == 0
    assert sorted(os.listdir(tmp_path)) == ["asked", "c"]


def test_empty_directory_created_between_the_renames_is_replaced(ckpt, tmp_path: Path, monkeypatch) -> None:
    ckpt.save(OLD, tmp_path / "c")
    real, made = replacing.rename_noreplace, []

    def rename(source: str, target: str) -> None:
        real(source, target)
        if source == str(tmp_path / "c"):
            (tmp_path / "c").mkdir()
            made.append(source)

    monkeypatch.setattr(replacing, "rename_noreplace", rename)
    ckpt.save(NEW, tmp_path / "c", overwrite=True)
    assert made
    assert value_at(ckpt, tmp_path / "c") == 1
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_failing_sync_changes_nothing(number: int, ckpt, tmp_path: Path, monkeypatch) -> None:
    """The parent directory is synced after the record is written, between the renames, and after them."""
    ckpt.save(OLD, tmp_path / "c")
    real, calls = commit.sync_fd, 0

    def sync(fd: int) -> None:
        nonlocal calls
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path):
            calls += 1
            if calls == number:
                raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(commit, "sync_fd", sync)
    with pytest.raises(CommitError, match=r"can't publish .*Input/output error"):
        ckpt.save(NEW, tmp_path / "c", overwrite=True)
    assert value_at(ckpt, tmp_path / "c") == 0
    assert os.listdir(tmp_path) == ["c"]


def test_readers_find_a_replacement_that_cannot_be_undone(ckpt, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "c"
    ckpt.save(OLD, path)
    ckpt.save(OLD, path, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(replacing, "rename_noreplace", _failing(replacing.rename_noreplace, 2, times=2))
        with pytest.raises(CommitError, match="Loading it finds what is in"):
            ckpt.save(NEW, path, overwrite=True)
    assert not path.exists()
    assert value_at(ckpt, path) == 1
    ckpt.delete(path)
    with pytest.raises(CheckpointNotFoundError):
        ckpt.load(path)
    assert os.listdir(tmp_path) == []


def test_checkpoint_created_between_the_renames_is_replaced(ckpt, tmp_path: Path, monkeypatch) -> None:
    """As one is that was there before, or that is exchanged."""
    path = tmp_path / "c"
    ckpt.save(OLD, path)
    ckpt.save({"x": torch.full((9,), 5.0)}, tmp_path / "other")
    real = replacing._take_name

    def late(*args: object) -> None:
        if (tmp_path / "other").exists():
            (tmp_path / "other").rename(path)
        real(*args)

    monkeypatch.setattr(replacing, "_take_name", late)
    ckpt.save(NEW, path, overwrite=True)
    assert value_at(ckpt, path) == 1
    assert os.listdir(tmp_path) == ["c"]


def test_foreign_directory_created_between_the_renames_stays(ckpt, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "c"
    ckpt.save(OLD, path)
    real = replacing._take_name

    def late(*args: object) -> None:
        path.mkdir()
        (path / "mine").touch()
        real(*args)

    with monkeypatch.context() as patch, pytest.raises(CommitError, match="can't be given its name back"):
        patch.setattr(replacing, "_take_name", late)
        ckpt.save(NEW, path, overwrite=True)
    assert os.listdir(path) == ["mine"]
    shutil.rmtree(path)
    assert value_at(ckpt, path) == 1
    ckpt.delete(path)
    assert os.listdir(tmp_path) == []


# --- after a kill -------------------------------------------------------------------------------------


def test_reading_finds_the_new_checkpoint_and_changes_nothing(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    before = sorted(os.listdir(tmp_path))
    assert value_at(ckpt, path) == 1
    assert ckpt.verify(path).ok
    with ckpt.open(path) as reader:
        assert "x" in reader
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(CheckpointNotFoundError):
        ckpt.load(tmp_path / "other")
    clean(str(tmp_path), fsync=True)


def test_record_is_removed_after_the_name_is_durable(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    hidden = f"{tmp_path}/.aiockpt-{dead}.{7:016x}"
    seen: list[list[bool]] = []

    def sync() -> None:
        seen.append([os.path.lexists(each) for each in (path, hidden + REPLACED, hidden + RECORD)])

    assert replacing.complete(hidden, str(path), sync)
    assert seen == [[True, True, True]]
    path.rename(hidden)
    replacing._put_back(hidden + REPLACED, str(path), hidden, sync, None)
    assert seen == [[True, True, True], [True, False, True]]
    assert value_at(ckpt, path) == 0
    assert sorted(os.listdir(tmp_path)) == [os.path.basename(hidden), "c"]
    clean(str(tmp_path), fsync=False)


def test_next_save_in_the_directory_completes_the_replacement(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    with aiockpt.SyncCheckpointer(process_group=None) as other:
        other.save(OLD, tmp_path / "next")
    assert value_at(ckpt, path) == 1
    assert sorted(os.listdir(tmp_path)) == ["c", "next"]


def test_save_without_overwrite_to_the_interrupted_path_is_refused(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    with (
        aiockpt.SyncCheckpointer(process_group=None) as other,
        pytest.raises(CheckpointExistsError, match="exists already"),
    ):
        other.save(OLD, path)
    assert value_at(ckpt, path) == 1
    assert os.listdir(tmp_path) == ["c"]


def test_delete_removes_old_and_new(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    ckpt.delete(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("lost", ["new", "old", "record"])
def test_one_part_is_missing(lost: str, ckpt, dead, tmp_path: Path) -> None:
    """The old checkpoint counts until the new one is complete. A new one without its hidden name was published."""
    path = interrupted(ckpt, tmp_path, dead)
    hidden = tmp_path / f".aiockpt-{dead}.{7:016x}"
    if lost == "new":
        (hidden / ".metadata").unlink()
        assert value_at(ckpt, path) == 0
    else:
        gone = Path(f"{hidden}{REPLACED if lost == 'old' else RECORD}")
        gone.rename(path) if lost == "old" else None
        if lost == "record":
            hidden.rename(path)
    assert value_at(ckpt, path) == (1 if lost == "record" else 0)
    clean(str(tmp_path), fsync=True)
    assert value_at(ckpt, path) == (1 if lost == "record" else 0)
    assert os.listdir(tmp_path) == ["c"]


def test_empty_directory_at_the_path_is_ignored(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    path.mkdir()
    clean(str(tmp_path), fsync=True)
    assert value_at(ckpt, path) == 1
    assert os.listdir(tmp_path) == ["c"]


def test_foreign_directory_at_the_path_blocks_completion(ckpt, dead, tmp_path: Path, caplog) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    path.mkdir()
    (path / "mine").touch()
    before = sorted(os.listdir(tmp_path))
    with caplog.at_level(logging.WARNING, "aiockpt"):
        assert clean(str(tmp_path), fsync=True)[0] == []
    assert "is no checkpoint, so what belongs there stays" in caplog.text
    assert sorted(os.listdir(tmp_path)) == before
    (path / "mine").unlink()
    clean(str(tmp_path), fsync=True)
    assert os.listdir(tmp_path) == ["c"]


def test_newer_checkpoint_at_the_path_stays(ckpt, dead, tmp_path: Path) -> None:
    path = interrupted(ckpt, tmp_path, dead)
    ckpt.save({"x": torch.full((9,), 5.0)}, path)
    clean(str(tmp_path), fsync=True)
    assert value_at(ckpt, path) == 5
    assert os.listdir(tmp_path) == ["c"]


def test_completion_while_the_owner_may_be_alive(ckpt, tmp_path: Path) -> None:
    """Not while the owner runs on this host. For an owner elsewhere, whose state is unknown, only after some time."""
    path = interrupted(ckpt, tmp_path, HERE)
    clean(str(tmp_path), fsync=True)
    assert not path.exists()
    assert value_at(ckpt, path) == 1
    ckpt.delete(path)
    path = interrupted(ckpt, tmp_path, replace(HERE, space="b" * 10))
    clean(str(tmp_path), fsync=True)
    assert not path.exists()
    (record,) = tmp_path.glob(f"*{RECORD}")
    os.utime(record, (1.0, 1.0))
    clean(str(tmp_path), fsync=True)
    assert value_at(ckpt, path) == 1
    ckpt.clean(tmp_path, older_than_s=0)


@pytest.mark.parametrize("name", ["", ".", "..", "../c", "a/b"])
def test_record_cannot_name_another_directory(name: str, ckpt, dead, tmp_path: Path, caplog) -> None:
    (tmp_path / "in").mkdir()
    path = interrupted(ckpt, tmp_path / "in", dead)
    (record,) = path.parent.glob(f"*{RECORD}")
    record.write_text(name)
    with pytest.raises(CheckpointNotFoundError):
        ckpt.load(path)
    with caplog.at_level(logging.WARNING, "aiockpt"):
        clean(str(path.parent), fsync=True)
    assert "it is no record of a replacement" in caplog.text
    assert len(list(path.parent.iterdir())) == 3
    record.write_text("c")
    clean(str(path.parent), fsync=True)


# --- overlayfs ----------------------------------------------------------------------------------------


@pytest.fixture
def overlay(ckpt, tmp_path: Path) -> Iterator[Path]:
    """An overlay mount, as in containers, with a checkpoint in its lower layer."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    ckpt.save(OLD, tmp_path / "lower" / "c")
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work,redirect_dir=off"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / "merged")]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no overlay file system can be mounted here")
    yield tmp_path / "merged"
    subprocess.run(["umount", str(tmp_path / "merged")], check=True)


def test_checkpoint_in_a_lower_layer(overlay: Path, ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointExistsError, match=r"in a lower layer of an overlay.*in a volume.*rm -r"):
            ckpt.save(NEW, overlay / "c", overwrite=True)
        with pytest.raises(DeleteError, match=r"in a lower layer of an overlay.*rm -r"):
            ckpt.delete(overlay / "c")
        monkeypatch.undo()  # the second time with renameat2
    assert value_at(ckpt, overlay / "c") == 0
    assert os.listdir(overlay) == ["c"]
    subprocess.run(["rm", "-r", str(overlay / "c")], check=True)
    for state in (OLD, NEW):
        ckpt.save(state, overlay / "c", overwrite=True)
    assert value_at(ckpt, overlay / "c") == 1
    ckpt.delete(overlay / "c")
    assert os.listdir(overlay) == []
