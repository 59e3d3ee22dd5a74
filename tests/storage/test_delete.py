"""Deleting: the name goes first and durably, then the files; anything but a checkpoint is refused."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import aiockpt
from aiockpt.errors import CheckpointNotFoundError, DeleteError
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import Storage
from aiockpt.storage.local import commit
from aiockpt.storage.local import storage as deleting
from aiockpt.storage.local.orphans import clean
from aiockpt.storage.local.storage import delete
from aiockpt.storage.local.temp_dir import Hold, new_ticket
from aiockpt.testing import FaultyStorage, GatedStorage
from aiockpt.testing.conformance.suite import metadata_of


def checkpoint(path: Path, data: bytes = b"tensors") -> Path:
    path.mkdir()
    (path / ".metadata").write_bytes(metadata_of(data.decode()))
    (path / "__0_0.distcp").write_bytes(data)
    return path


def hidden_beside(path: Path) -> str:
    return str(path.parent / new_ticket())


# --- through a checkpointer ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_checkpoint_is_deleted_once_a_later_save_is_written(tmp_path: Path) -> None:
    state = {"x": torch.arange(70_000.0)}
    gate = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        for name in ("1", "2"):
            await ckpt.save(state, tmp_path / name)
        save = ckpt.save(state, tmp_path / "3", storage=gate)
        deleted = ckpt.delete(tmp_path / "1", after=save)
        ckpt.delete(tmp_path / "2", after=save)  # closing waits for it
        await gate.reached["commit"]
        assert (tmp_path / "1").exists()
        assert not deleted.done()
        gate.open("commit")
        await deleted
        assert not (tmp_path / "1").exists()
    assert os.listdir(tmp_path) == ["3"]


@pytest.mark.asyncio
async def test_nothing_is_deleted_after_a_save_that_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = FaultyStorage(LocalStorage(), "write", OSError(errno.ENOSPC, "full"))
    state = {"x": torch.arange(70_000.0)}
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "1")
        save = ckpt.save(state, tmp_path / "2", storage=broken)
        with pytest.raises(DeleteError, match=r"/1 is not deleted, as the save of .*/2 has failed: .*full") as caught:
            await ckpt.delete(tmp_path / "1", after=save)
        with pytest.raises(aiockpt.WriteError) as failed:
            await save
        assert caught.value.__cause__ is failed.value
        assert await ckpt.verify(tmp_path / "1")
    assert f"{tmp_path / '1'} stays: {tmp_path / '1'} is not deleted" in caplog.text


@pytest.mark.asyncio
async def test_what_can_not_wait_for_the_save_is_refused(tmp_path: Path) -> None:
    state = {"x": torch.arange(70_000.0)}
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "1")

        async def hook(path: str) -> None:
            await ckpt.delete(tmp_path / "1", after=save)

        save = ckpt.save(state, tmp_path / "2", post_commit=hook)
        result = await save.written
        assert "can't wait" in str(result.post_commit_error) or "hook" in str(result.post_commit_error)
        assert isinstance(result.post_commit_error, aiockpt.SaveError)
        with pytest.raises(TypeError, match="after must be the handle of a save, not 'x'"):
            await ckpt.delete(tmp_path / "1", after="x")
        with pytest.raises(DeleteError, match="is what the save writes after which it is to be deleted"):
            await ckpt.delete(tmp_path / "2", after=save)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_later_deletion_does_not_block(tmp_path: Path) -> None:
    state = {"x": torch.arange(70_000.0)}
    gate = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "1")
        save = ckpt.submit(state, tmp_path / "2", storage=gate)
        ckpt.delete(tmp_path / "1", after=save)
        gate.reached["commit"].result(60)
        assert (tmp_path / "1").exists()
        gate.open("commit")
    assert os.listdir(tmp_path) == ["2"]


@pytest.mark.asyncio
async def test_delete_checkpoints_of_all_formats(tmp_path: Path) -> None:
    state = {"x": torch.arange(70_000.0), "y": torch.tensor([3, 4])}
    async with aiockpt.AsyncCheckpointer() as ckpt:
        for name, kind in (("a", "dcp"), ("b", "safetensors"), ("c.safetensors", "safetensors"), ("d", "dcp")):
            await ckpt.save(state, tmp_path / name, format=kind)
        for name in ("a", "b", "c.safetensors"):
            await ckpt.delete(tmp_path / name)
            assert not (tmp_path / name).exists()
            with pytest.raises(CheckpointNotFoundError, match=f"there is no checkpoint at .*/{name} to delete"):
                await ckpt.delete(tmp_path / name)
        assert os.listdir(tmp_path) == ["d"]
        assert torch.equal((await ckpt.load(tmp_path / "d"))["x"], state["x"])
        await ckpt.save({"x": torch.ones(3)}, tmp_path / "a")
        assert torch.equal((await ckpt.load(tmp_path / "a"))["x"], torch.ones(3))
    with pytest.raises(aiockpt.CheckpointerClosedError):
        await ckpt.delete(tmp_path / "a")


def test_sync_delete_and_clean(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(3)}, tmp_path / "a")
        ckpt.delete(tmp_path / "a")
        left = tmp_path / ".aiockpt-x.12.0123456789abcdef"
        left.mkdir()
        os.utime(left, (1.0, 1.0))
        assert ckpt.clean(tmp_path) == []
        assert ckpt.clean(tmp_path, older_than_s=3600) == [str(left)]
        with pytest.raises(ValueError, match="older_than_s must not be negative"):
            ckpt.clean(tmp_path, older_than_s=-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_async_clean(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        (tmp_path / ".aiockpt-x.12.0123456789abcdef-swept").mkdir()
        os.utime(tmp_path / ".aiockpt-x.12.0123456789abcdef-swept", (1.0, 1.0))
        assert await ckpt.clean(tmp_path) == []
        assert await ckpt.clean(tmp_path, older_than_s=3600) == [str(tmp_path / ".aiockpt-x.12.0123456789abcdef-swept")]


@pytest.mark.asyncio
async def test_delete_during_a_save_to_the_path_is_refused(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"x": torch.zeros(3)}, tmp_path / "a")
        save = ckpt.save({"x": torch.ones(3)}, tmp_path / "a", overwrite=True, storage=storage)
        await storage.reached["commit"]
        try:
            with pytest.raises(DeleteError, match=r"a save to .*/a is in flight"):
                await ckpt.delete(tmp_path / "a")
        finally:
            storage.open("commit")
        await save.written
        assert torch.equal((await ckpt.load(tmp_path / "a"))["x"], torch.ones(3))
        await ckpt.delete(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_open_reader_survives_delete(tmp_path: Path) -> None:
    state = {"x": torch.arange(70_000.0)}
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "a")
        async with ckpt.open(tmp_path / "a") as reader:
            await ckpt.delete(tmp_path / "a")
            assert torch.equal(await reader.read("x"), state["x"])


@pytest.mark.asyncio
async def test_failing_and_unsupported_delete(workers, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    faulty = FaultyStorage(LocalStorage(), "delete", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(aiockpt.AiockptError, match="Input/output error"):
        await faulty.delete(str(tmp_path / "a"), workers=workers)
    assert (tmp_path / "a" / ".metadata").exists()
    await faulty.delete(str(tmp_path / "a"), workers=workers)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DeleteError, match="this storage can't delete checkpoints"):
        await Storage.delete(faulty, "a", workers=workers)
    assert await Storage.clean(faulty, "a", workers=workers) == []


# --- paths that are no checkpoints --------------------------------------------------------------------


def test_paths_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "real")
    (tmp_path / "link.safetensors").symlink_to("real/__0_0.distcp")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file.safetensors").write_text("mine")
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    (tmp_path / "link").symlink_to("work")
    os.mkfifo(tmp_path / "pipe.safetensors")
    before = sorted(tmp_path.rglob("*"))
    for name in sorted(set(os.listdir(tmp_path)) - {"real"}):
        with pytest.raises(DeleteError, match=f"/{name} is .*; nothing was deleted"):
            delete(str(tmp_path / name), hidden_beside(tmp_path / name), True)
    assert sorted(tmp_path.rglob("*")) == before


# --- durability and failures --------------------------------------------------------------------------


def test_name_is_removed_durably_before_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "a")
    calls: list[str] = []
    real_sync, real_rename, real_remove = os.fsync, deleting.rename_noreplace, deleting.remove_own

    def sync(fd: int) -> None:
        calls.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real_sync(fd)

    def rename(source: str, target: str) -> None:
        calls.append(f"rename {os.path.relpath(source, tmp_path)}")
        real_rename(source, target)

    def remove(hidden: str, own: tuple[int, int] | None) -> None:
        calls.append("remove")
        assert sorted(os.listdir(hidden)) == [".metadata", "__0_0.distcp"]
        assert own == commit.identity(hidden)
        real_remove(hidden, own)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(deleting, "rename_noreplace", rename)
    monkeypatch.setattr(deleting, "remove_own", remove)
    delete(str(path), hidden_beside(path), True)
    assert calls == ["rename a", "sync .", "remove"]
    calls.clear()
    delete(str(checkpoint(path)), hidden_beside(path), False)
    assert calls == ["rename a", "remove"]
    single = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"x": torch.ones(3)}, single)
    calls.clear()
    monkeypatch.setattr(deleting, "remove_own", real_remove)
    delete(str(single), hidden_beside(single), True)
    assert calls == ["rename m.safetensors", "sync ."]
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_stays_if_its_removal_cannot_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "a", b"these")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DeleteError, match=r"can't delete .*/a: .*Input/output error") as caught:
        delete(str(path), hidden_beside(path), True)
    assert isinstance(caught.value.__cause__, OSError)
    assert (path / "__0_0.distcp").read_bytes() == b"these"
    assert os.listdir(tmp_path) == ["a"]
    real = deleting.rename_noreplace

    def once(source: str, target: str) -> None:
        if source != str(path):
            raise OSError(errno.EROFS, "Read-only file system")
        real(source, target)

    hidden = hidden_beside(path)
    monkeypatch.setattr(deleting, "rename_noreplace", once)
    with pytest.raises(DeleteError, match=r"nor be given its name back \(.*Read-only.*\): it is in .*aiockpt-"):
        delete(str(path), hidden, True)
    shutil.rmtree(hidden)


def _swapping(path: Path, other: Path, monkeypatch: pytest.MonkeyPatch, *, back: bool) -> None:
    """Put another directory in place of the checkpoint right before `delete` renames it."""
    real = deleting.rename_noreplace

    def rename(source: str, target: str) -> None:
        if other.exists():
            path.rename(path.with_name("moved"))
            other.rename(path)
        elif not back:
            raise OSError(errno.EROFS, "Read-only file system")
        real(source, target)

    monkeypatch.setattr(deleting, "rename_noreplace", rename)


def test_directory_swapped_in_before_the_rename_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = checkpoint(tmp_path / "a", b"these"), tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    _swapping(path, other, monkeypatch, back=True)
    with pytest.raises(DeleteError, match=r"/a was replaced by something else while it was .*nothing was deleted"):
        delete(str(path), hidden_beside(path), True)
    assert (path / "thesis.tex").read_text() == "mine"
    assert (tmp_path / "moved" / "__0_0.distcp").read_bytes() == b"these"
    assert sorted(os.listdir(tmp_path)) == ["a", "moved"]


def test_directory_swapped_in_before_the_lock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, real = checkpoint(tmp_path / "a", b"these"), tmp_path / "other", deleting.hold
    other.mkdir()
    (other / "thesis.tex").write_text("mine")

    def hold(where: str) -> Hold:
        path.rename(path.with_name("moved"))
        other.rename(path)
        return real(where)

    monkeypatch.setattr(deleting, "hold", hold)
    with pytest.raises(DeleteError, match=r"/a is a directory that holds other .*\(thesis.tex\); nothing was deleted"):
        delete(str(path), hidden_beside(path), True)
    assert (path / "thesis.tex").read_text() == "mine"


def test_directory_swapped_in_that_cannot_be_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = checkpoint(tmp_path / "a", b"these"), tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    _swapping(path, other, monkeypatch, back=False)
    hidden = hidden_beside(path)
    with pytest.raises(DeleteError, match=r"can't be given its name back \(.*Read-only.*\): it is in .*aiockpt-"):
        delete(str(path), hidden, True)
    assert Path(hidden, "thesis.tex").read_text() == "mine"
    shutil.rmtree(hidden)


@pytest.mark.parametrize("number", [errno.EINTR, errno.ENOENT], ids=errno.errorcode.get)
def test_rename_that_succeeds_but_reports_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = checkpoint(tmp_path / "a"), deleting.rename_noreplace

    def rename(source: str, target: str) -> None:
        real(source, target)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(deleting, "rename_noreplace", rename)
    delete(str(path), hidden_beside(path), True)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_removed_keep_their_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "a")
    hidden = hidden_beside(path)
    real, noted = os.unlink, []

    def refuse(where: str, *args, **kwargs) -> None:
        if where == ".metadata":  # removed last
            raise PermissionError(errno.EACCES, "Permission denied", where)
        real(where, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(DeleteError, match=f"/a is deleted, but its files can't be removed from {hidden}"):
            delete(str(path), hidden, True, lambda *rest: noted.append(rest))
    assert noted == [(hidden, commit.identity(hidden))]
    assert not path.exists()
    assert clean(str(tmp_path), fsync=True, older_than_s=0.0) == ([], False), "its owner, this process, is alive"
    assert os.listdir(hidden) == [".metadata"]
    shutil.rmtree(hidden)


def test_delete_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "a")

    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", source)

    monkeypatch.setattr(deleting, "rename_noreplace", refuse)
    with pytest.raises(DeleteError, match=r"can't delete .*/a: .*Permission denied") as caught:
        delete(str(path), hidden_beside(path), True)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert (path / ".metadata").exists()


@pytest.mark.asyncio
async def test_checkpoint_deleted_while_a_save_replaces_it(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "a")
    real = commit.rename_exchange

    def exchange(one: str, other: str) -> None:
        if path.exists():
            delete(str(path), hidden_beside(path), True)
        real(one, other)

    monkeypatch.setattr(commit, "rename_exchange", exchange)
    transaction = await LocalStorage().begin(str(path), overwrite=True, workers=workers)
    sink = await transaction.create(".metadata", 3)
    await sink.write(memoryview(b"new"))
    await sink.finish()
    await transaction.commit()
    assert (path / ".metadata").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]
