"""Local files: direct I/O and its fallbacks, durability, and the leftovers of a transaction."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import re
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt import Retries
from aiockpt.core.threads import Workers
from aiockpt.errors import CheckpointExistsError, CommitError, WriteError
from aiockpt.staging.pool import MappedMemory
from aiockpt.storage import LocalStorage, syscalls
from aiockpt.storage.local import beside, commit, sink
from aiockpt.storage.local import storage as local
from aiockpt.storage.local.belonging import remove
from aiockpt.testing.conformance.suite import metadata_of

pytestmark = pytest.mark.asyncio


OLD = b"\2\0\0\0\0\0\0\0{}"  # an empty safetensors file


@pytest.fixture
def data() -> MappedMemory:
    memory = MappedMemory(3 << 20)
    memory.view[:] = bytes(range(256)) * (3 << 12)
    return memory


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


async def _write(
    storage: LocalStorage, path: Path, data: memoryview, nbytes: int, workers: Workers, step: int = 1 << 20
):
    transaction = await storage.begin(str(path), overwrite=False, workers=workers)
    try:
        sink = await transaction.create("f", nbytes)
        for start in range(0, nbytes, step):
            await sink.write(data[start : min(start + step, -(-nbytes // 4096) * 4096)])
        await sink.finish()
        assert not path.exists()
        await transaction.commit()
    except BaseException:
        await transaction.abort()
        raise
    return sink


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, (1 << 20) + 1, (3 << 20) - 5, 3 << 20])
async def test_file_of_announced_size(direct_io: bool, nbytes: int, workers, data, tmp_path: Path) -> None:
    await _write(LocalStorage(direct_io=direct_io), tmp_path / "a" / "b" / "c", data.view, nbytes, workers)
    assert (tmp_path / "a" / "b" / "c" / "f").read_bytes() == bytes(data.view[:nbytes])
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["c"]


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("nbytes", [0, 5, 4096, (2 << 20) + 4096 + 17, 3 << 20])
async def test_file_of_unknown_size(direct_io: bool, nbytes: int, workers, data, tmp_path: Path) -> None:
    storage = LocalStorage(direct_io=direct_io)
    transaction = await storage.begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    sink = await transaction.create("f", None)
    for start in range(0, nbytes, 1 << 20):
        await sink.write(data.view[start : min(start + (1 << 20), nbytes)])
    await sink.finish()
    await transaction.commit()
    assert (tmp_path / "c" / "f").read_bytes() == bytes(data.view[:nbytes])


async def test_direct_io_is_used_if_supported(workers, data, tmp_path: Path) -> None:
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    sink = await transaction.create("f", 2 << 20)
    flags = fcntl.fcntl(sink._file.fileno(), fcntl.F_GETFL)
    if not sink._direct:
        await transaction.abort()
        pytest.skip("the file system of the temporary directory has no direct I/O")
    assert flags & os.O_DIRECT
    await sink.write(data.view[: 1 << 20])
    assert sink._direct
    await transaction.abort()
    assert list(tmp_path.iterdir()) == []


async def test_direct_io_refused_at_open(workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            os.close(
                real(path, flags & ~os.O_DIRECT, *args, **kwargs)
            )  # the kernel creates the file before it refuses the flag
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(local.os, "open", refuse)
    await _write(LocalStorage(), tmp_path / "c", data.view, (2 << 20) + 7, workers)
    assert (tmp_path / "c" / "f").read_bytes() == bytes(data.view[: (2 << 20) + 7])


@pytest.mark.parametrize("nth", [1, 2])
async def test_direct_io_refused_at_write(nth: int, workers, data, tmp_path: Path) -> None:
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    sink = await transaction.create("f", (2 << 20) + 7)
    for number in range(3):
        start = number << 20
        end = min(start + (1 << 20), (2 << 20) + 4096)
        # For an unaligned buffer, the kernel returns EINVAL.
        view = memoryview(bytearray(end - start + 1))[1:] if number + 1 == nth else data.view[start:end]
        view[:] = data.view[start:end]
        await sink.write(view)
    assert not sink._direct
    await sink.finish()
    await transaction.commit()
    assert (tmp_path / "c" / "f").read_bytes() == bytes(data.view[: (2 << 20) + 7])


async def test_short_writes_and_other_errors(workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.pwrite, 0

    def short(fd: int, view: memoryview, offset: int) -> int:
        """Write a part of the bytes, and fail at last."""
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, view[: max(1, len(view) // 3)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    for limit, fine in ((1000, True), (5, False)):
        transaction = await LocalStorage().begin(str(tmp_path / str(limit)), overwrite=False, workers=workers)
        sink = await transaction.create("f", 2 << 20)
        left = limit
        if fine:
            await sink.write(data.view[: 2 << 20])
            await sink.finish()
            await transaction.commit()
            assert (tmp_path / str(limit) / "f").read_bytes() == bytes(data.view[: 2 << 20])
        else:
            with pytest.raises(WriteError, match=r"can't write .*/5/f at offset \d+: .*Input/output error") as caught:
                await sink.write(data.view[: 2 << 20])
            assert isinstance(caught.value.__cause__, OSError)
            await transaction.abort()
    assert [p.name for p in tmp_path.iterdir()] == ["1000"]


async def test_order_of_syncs_and_rename(workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_sync, real_rename = os.fsync, commit.rename_noreplace

    def name_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}").replace(str(tmp_path), "")

    def sync(fd: int) -> None:
        calls.append("sync " + name_of(fd).partition(".aiockpt-")[0] + ("/f" if name_of(fd).endswith("/f") else ""))
        real_sync(fd)

    def rename(source: str, target: str) -> None:
        calls.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(local.os, "fsync", sync)
    monkeypatch.setattr(commit, "rename_noreplace", rename)
    await _write(LocalStorage(), tmp_path / "a" / "c", data.view, 5000, workers)
    made = ["sync ", "sync /a//f", "sync /a/", "rename", "sync /a"]
    assert calls == [f"sync {tmp_path.parent}", *made]
    calls.clear()
    await _write(LocalStorage(fsync=False), tmp_path / "b" / "c", data.view, 5000, workers)
    assert calls == ["rename"]


def _fail_to_sync(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    real = commit.sync_fd

    def fail(fd: int) -> None:
        nonlocal times
        if _path_of(fd) == str(folder) and times:
            times -= 1
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(commit, "sync_fd", fail)


async def test_commit_that_cannot_be_made_durable_is_undone(
    workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_to_sync(tmp_path, monkeypatch)
    with pytest.raises(CommitError, match="can't publish"):
        await _write(LocalStorage(), tmp_path / "c", data.view, 5000, workers)
    assert list(tmp_path.iterdir()) == []
    _fail_to_sync(tmp_path, monkeypatch, times=2)
    with pytest.raises(CommitError, match="was taken back, which can't be made durable either") as caught:
        await _write(LocalStorage(), tmp_path / "c", data.view, 5000, workers)
    assert isinstance(caught.value.__cause__, OSError)
    (hidden,) = tmp_path.iterdir()  # after a power loss it may be under its final name, so it must be complete
    assert (hidden / "f").read_bytes() == bytes(data.view[:5000])
    remove(str(hidden), also=["f"])


async def test_rename_noreplace_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_args) -> None:
        raise syscalls.UnsupportedError(errno.ENOSYS, "not here")

    monkeypatch.setattr(syscalls, "_call", unsupported)
    (tmp_path / "a").mkdir()
    syscalls.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "b"))
    (tmp_path / "c").mkdir()
    with pytest.raises(FileExistsError):
        syscalls.rename_noreplace(str(tmp_path / "b"), str(tmp_path / "c"))
    assert (tmp_path / "b").is_dir()


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that support no flags of renameat2."""

    def unsupported(*_args) -> None:
        raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(syscalls, "_call", unsupported)


async def test_interrupted_rename_is_reported_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exchange would undo the first. A second fallocate does no harm."""
    calls: list[str] = []

    class Interrupted:
        def __getattr__(self, name: str):
            def function(*_args) -> int:
                calls.append(name)
                syscalls.ctypes.set_errno(errno.EINTR)
                return -1 if len(calls) == 1 else 0

            return function

    monkeypatch.setattr(syscalls, "libc", Interrupted)
    for rename in (syscalls.rename_exchange, syscalls.rename_noreplace):
        with pytest.raises(InterruptedError):
            rename("a", "b")
        assert calls == ["renameat2"]
        calls.clear()
    syscalls.allocate(0, 4096)
    assert calls == ["fallocate", "fallocate"]


@pytest.mark.parametrize("undone", [False, True])
async def test_failing_unlink_after_a_link(
    undone: bool, workers, data, tmp_path: Path, old_kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is published all the same; if that cannot be made durable, both names are removed."""
    path, real_unlink, real_sync = tmp_path / "m.safetensors", os.unlink, commit.sync_fd
    refusals = []

    def unlink(name, *args, **kwargs) -> None:
        if not refusals:
            refusals.append(name)
            raise OSError(errno.EBUSY, "Device or resource busy")
        real_unlink(name, *args, **kwargs)

    def sync(fd: int) -> None:
        if undone and path.exists():
            raise OSError(errno.EIO, "Input/output error")
        real_sync(fd)

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(commit, "sync_fd", sync)
    if undone:
        with pytest.raises(CommitError, match="Input/output error"):
            await _write_single(LocalStorage(), path, data.view, workers, overwrite=False)
        assert list(tmp_path.iterdir()) == []
    else:
        await _write_single(LocalStorage(), path, data.view, workers, overwrite=False)
        assert path.read_bytes() == bytes(data.view[:5000])
        assert list(tmp_path.iterdir()) == [path]
    assert len(refusals) == 1


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK], ids=errno.errorcode.get)
async def test_file_system_without_hard_links(
    number: int, workers, data, tmp_path: Path, old_kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_args, **_kwargs) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "m.safetensors"
    await _write_single(LocalStorage(), path, data.view[256:], workers, overwrite=False)
    assert path.read_bytes() == bytes(data.view[256:5256])
    (tmp_path / "other").write_text("other")
    with pytest.raises(FileExistsError):
        syscalls.rename_noreplace(str(tmp_path / "other"), str(path))
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "other"]


async def test_commit_without_a_free_descriptor_changes_nothing(
    workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is opened before the rename, so a save that cannot sync the parent changes nothing."""
    real, renamed = os.open, []

    def full(path, flags, *args, **kwargs):
        if path == str(tmp_path) and any(tmp_path.glob(".aiockpt-*/f")):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(commit, "rename_noreplace", lambda *names: renamed.append(names))
    with pytest.raises(CommitError, match="Too many open files"):
        await _write(LocalStorage(retries=None), tmp_path / "c", data.view, 5000, workers)
    assert renamed == []
    assert list(tmp_path.iterdir()) == []


async def test_removal_of_a_replaced_checkpoint_is_retried(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage = tmp_path / "c", LocalStorage()

    async def save(word: str) -> None:
        transaction = await storage.begin(str(path), overwrite=True, workers=workers)
        await transaction.commit({".metadata": metadata_of(word)})

    def busy(where: str, **_kwargs) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", where)

    for _ in range(2):
        await save("first")  # the second save probes the file system, with directories
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        await save("second")
    (hidden,) = tmp_path.glob(".aiockpt-*")
    assert list(hidden.iterdir()) == []
    await save("third")
    assert (path / ".metadata").read_bytes() == metadata_of("third")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["own work", "another checkpoint"])
async def test_directory_swapped_in_before_the_exchange_is_checked(
    kind: str, workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, real = tmp_path / "c", tmp_path / "other", commit.rename_exchange
    for folder, name in ((path, ".metadata"), (other, "thesis.tex" if kind == "own work" else ".metadata")):
        folder.mkdir()
        (folder / name).write_bytes(metadata_of(folder.name) if name == ".metadata" else b"other")

    def exchange(one: str, two: str) -> None:
        if other.exists():
            path.rename(tmp_path / "moved")
            other.rename(path)
        real(one, two)

    monkeypatch.setattr(commit, "rename_exchange", exchange)
    transaction = await LocalStorage().begin(str(path), overwrite=True, workers=workers)
    if kind == "own work":
        with pytest.raises(CheckpointExistsError, match=r"changed during the save, .*\(thesis.tex\); it was left as"):
            await transaction.commit()
        await transaction.abort()
        assert (path / "thesis.tex").read_text() == "other"
    else:
        await transaction.commit()
        assert list(path.iterdir()) == []
        assert list(tmp_path.glob(".aiockpt-*")) == []  # as if it had come before the check: it was replaced
    assert (tmp_path / "moved" / ".metadata").read_bytes() == metadata_of("c")
    assert sorted(os.listdir(tmp_path)) == ["c", "moved"]


async def test_rename_that_succeeds_but_reports_an_error_is_made_durable(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_rename, real_sync = commit.rename_noreplace, commit.sync_fd
    calls: list[str] = []

    def rename(source: str, target: str) -> None:
        real_rename(source, target)
        calls.append("rename")
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    def sync(fd: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        real_sync(fd)

    monkeypatch.setattr(commit, "rename_noreplace", rename)
    monkeypatch.setattr(commit, "sync_fd", sync)
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    await transaction.commit()
    assert calls[-2:] == ["rename", str(tmp_path)]
    assert os.listdir(tmp_path) == ["c"]


async def test_directory_that_is_no_checkpoint_is_never_moved(workers, tmp_path: Path, monkeypatch) -> None:
    path, moved = tmp_path / "c", []
    monkeypatch.setattr(commit, "rename_exchange", lambda *names: moved.append(names))
    monkeypatch.setattr(commit, "replace_in_steps", lambda *names: moved.append(names))
    transaction = await LocalStorage().begin(str(path), overwrite=True, workers=workers)
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"\(thesis.tex\); overwrite=True replaces a"):
        await transaction.commit()
    await transaction.abort()
    assert not moved
    assert (path / "thesis.tex").read_text() == "mine"


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="there is no sysfs")
async def test_only_parents_of_created_directories_are_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(commit, "sync_directory", synced.append)
    commit.make_parents("/sys/checkpoint", True)  # a mount point
    assert synced == []
    commit.make_parents("/sys/kernel/checkpoint", True)
    assert synced == ["/sys"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
async def test_failing_sync_of_parents(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored for directories that existed, unless the disk reports EIO; created ones must be durable."""

    def refuse(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(commit, "sync_fd", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            commit.make_parents(str(tmp_path / "c"), True)
    else:
        commit.make_parents(str(tmp_path / "c"), True)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        commit.make_parents(str(tmp_path / "new" / "c"), True)


async def test_new_files_follow_the_umask(workers, data, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        await _write(LocalStorage(), tmp_path / "c", data.view, 2 << 20, workers)
    finally:
        os.umask(before)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "c" / "f").stat().st_mode & 0o777 == 0o640


async def test_path_taken_during_the_save(workers, tmp_path: Path) -> None:
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    (tmp_path / "c").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="has appeared"):
        await transaction.commit()
    await transaction.abort()
    assert (tmp_path / "c").read_text() == "mine"


async def _write_single(storage: LocalStorage, path: Path, data: memoryview, workers: Workers, *, overwrite: bool):
    transaction = await storage.begin(str(path), overwrite=overwrite, workers=workers)
    try:
        sink = await transaction.create("", 5000)
        await sink.write(data[:8192])
        await sink.finish()
        await transaction.commit()
    except BaseException:
        await transaction.abort()
        raise


def _unpublished(tmp_path: Path) -> tuple[str, str, dict[str, str]]:
    """Return the hidden directory of a checkpoint, a directory with other files, and the final names."""
    for name in ("hidden", "target"):
        (tmp_path / name).mkdir()
    for name in ("0", "1", ".metadata"):
        (tmp_path / "hidden" / name).write_text(name)
    (tmp_path / "target" / "notes").write_text("mine")
    return str(tmp_path / "hidden"), str(tmp_path / "target"), {"0": "__0_0.distcp", "1": "__0_1.distcp"}


async def test_files_beside_others_are_synced_before_the_metadata_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append((os.path.basename(_path_of(fd)), sorted(os.listdir(tmp_path / "target"))))
        real(fd)

    hidden, target, names = _unpublished(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    beside.publish(hidden, target, names, ".metadata")
    data = ["__0_0.distcp", "__0_1.distcp", "notes"]
    assert seen == [("hidden", ["notes"]), ("target", data), ("target", [".metadata", *data])]
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("nth", [2, 3])
async def test_files_beside_others_are_taken_back_if_they_can_not_be_made_durable(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)
    real = os.fsync

    def fsync(fd: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.EIO, "the disk failed")
        real(fd)

    hidden, target, names = _unpublished(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CommitError, match="the disk failed"):
        beside.publish(hidden, target, names, ".metadata")
    assert os.listdir(target) == ["notes"]


async def test_the_directory_of_an_adapter_is_taken_back_if_it_can_not_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if _path_of(fd) == str(tmp_path):
            monkeypatch.setattr(os, "fsync", real)
            raise OSError(errno.EIO, "the disk failed")
        real(fd)

    hidden, _, names = _unpublished(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CommitError, match="the disk failed"):
        beside.publish(hidden, str(tmp_path / "new"), names, ".metadata")
    assert sorted(os.listdir(tmp_path)) == ["hidden", "target"]


async def test_single_file_checkpoint(workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_sync, real_rename = os.fsync, commit.rename_noreplace

    def sync(fd: int) -> None:
        where = os.readlink(f"/proc/self/fd/{fd}").replace(str(tmp_path), "")
        calls.append("sync " + re.sub(r"\.aiockpt-[^/]*", "", where))
        real_sync(fd)

    def rename(source: str, target: str) -> None:
        calls.append("rename")
        real_rename(source, target)

    path = tmp_path / "a" / "m.safetensors"
    monkeypatch.setattr(local.os, "fsync", sync)
    monkeypatch.setattr(commit, "rename_noreplace", rename)
    await _write_single(LocalStorage(), path, data.view, workers, overwrite=False)
    assert path.read_bytes() == bytes(data.view[:5000])
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]
    made = ["sync ", "sync /a//single", "rename", "sync /a"]
    assert calls == [f"sync {tmp_path.parent}", *made]
    with pytest.raises(CheckpointExistsError, match="exists already"):
        await _write_single(LocalStorage(), path, data.view, workers, overwrite=False)
    path.write_bytes(OLD)
    await _write_single(LocalStorage(), path, data.view[4096:], workers, overwrite=True)
    assert path.read_bytes() == bytes(data.view[4096 : 4096 + 5000])
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("before", ["nothing", "a file", "a directory"])
async def test_single_file_commit_that_cannot_be_made_durable_is_undone(
    before: str, workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    if before == "a file":
        path.write_bytes(OLD)
    elif before == "a directory":
        path.mkdir()
        (path / ".metadata").write_bytes(metadata_of("old"))

    _fail_to_sync(tmp_path, monkeypatch)
    with pytest.raises(CommitError, match=r"can't publish .*m\.safetensors: .*Input/output error"):
        await _write_single(LocalStorage(), path, data.view, workers, overwrite=True)
    if before == "nothing":
        assert list(tmp_path.iterdir()) == []
    else:
        assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
        assert path.read_bytes() == OLD if before == "a file" else os.listdir(path) == [".metadata"]


async def test_single_file_is_replaced_without_exchange(
    workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_args) -> None:
        raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(commit, "rename_exchange", unsupported)
    path = tmp_path / "m.safetensors"
    path.write_bytes(OLD)
    await _write_single(LocalStorage(), path, data.view, workers, overwrite=True)
    assert path.read_bytes() == bytes(data.view[:5000])
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]

    real = commit.sync_fd

    def fail(fd: int) -> None:
        if _path_of(fd) == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(commit, "sync_fd", fail)
    path.write_bytes(OLD)
    with pytest.raises(CommitError, match="was replaced but can't be made durable"):
        await _write_single(LocalStorage(), path, data.view[4096:], workers, overwrite=True)
    assert path.read_bytes() == bytes(data.view[4096 : 4096 + 5000])
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize(
    "names",
    [["x.txt"], [".aiockpt.json"], ["a.safetensors", "config.json"], [".hidden"], [".metadata", "x"], [".metadata"]],
)
async def test_directories_with_foreign_files_are_not_overwritten(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in names:
        (tmp_path / "c" / name).write_text("mine")
    with pytest.raises(CheckpointExistsError, match="holds other things than a checkpoint"):
        LocalStorage().check(str(tmp_path / "c"), overwrite=True)


async def test_empty_directories_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    LocalStorage().check(str(tmp_path / "c"), overwrite=True)


@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
async def test_participants_write_their_parts_of_one_file(
    direct_io: bool, data: MappedMemory, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts may meet inside a block, at offsets of any alignment. Some are written with direct I/O."""
    storage, draw = LocalStorage(direct_io=direct_io), random.Random(3)
    cuts = sorted({0, 7 << 20, 1 << 20, (3 << 20) + 4096, *(draw.randrange(1 << 20) for _ in range(30))})
    spans = list(itertools.pairwise(cuts))
    expected = bytearray(7 << 20)
    real, flags = os.pwrite, []

    def noted(fd: int, view: memoryview, offset: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return real(fd, view, offset)

    synced: list[str] = []

    def sync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_sync(fd)

    real_sync = sink.sync_fd
    monkeypatch.setattr(sink, "sync_fd", sync)
    monkeypatch.setattr(os, "pwrite", noted)
    begun = await storage.begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    await begun.reserve("model.safetensors", len(expected))
    others = [await storage.join(str(tmp_path / "c"), begun.ticket, workers=workers) for _ in range(2)]
    assert await others[0].sizes() == {"model.safetensors": len(expected)}
    sinks = [await each.open_part("model.safetensors") for each in (begun, *others)]
    for number, (start, stop) in enumerate(spans):
        is_aligned = (
            stop - start > 1 << 20 or number % 2
        )  # the offset in memory is congruent to the one in the file, modulo 4096
        at = start % 4096 if is_aligned else number
        nbytes = min(stop - start, len(data.view) - at)
        half = nbytes // 2
        runs = [(start + half, at + half, nbytes - half), (start, at, half)]
        await sinks[number % 3].write(data.view, runs)
        expected[start : start + nbytes] = data.view[at : at + nbytes]
    for each in sinks:
        await each.finish()
    assert synced == ["model.safetensors"] * 3  # each participant syncs, because each has written
    for other in others:
        await other.commit()
        await other.release()
    await begun.commit()
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == expected
    assert any(flags) == direct_io


# --- small files --------------------------------------------------------------------------------------


SMALL = {"b": b"first", "a": bytearray(b"second"), ".metadata": b"last" * 1000}


async def _write_small(storage: LocalStorage, path: Path, workers: Workers) -> None:
    transaction = await storage.begin(str(path), overwrite=False, workers=workers)
    try:
        await transaction.write_files(SMALL)
        await transaction.commit()
    except BaseException:
        await transaction.abort()
        raise


async def test_small_files_are_durable_in_order(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_sync, real_rename = os.fsync, commit.rename_noreplace

    def sync(fd: int) -> None:
        if os.path.isfile(_path_of(fd)):
            steps.append(f"{os.path.basename(_path_of(fd))}: {os.fstat(fd).st_size}")
        real_sync(fd)

    def rename(source: str, target: str) -> None:
        steps.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(commit, "rename_noreplace", rename)
    await _write_small(LocalStorage(), tmp_path / "c", workers)
    assert steps == ["b: 5", "a: 6", ".metadata: 4000", "rename"]
    assert {each.name: each.read_bytes() for each in (tmp_path / "c").iterdir()} == SMALL
    steps.clear()
    await _write_small(LocalStorage(fsync=False), tmp_path / "d", workers)
    assert steps == ["rename"]


async def test_a_small_file_is_never_written_through_a_link(workers: Workers, tmp_path: Path) -> None:
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    (tmp_path / "other").write_text("mine")
    (tmp_path / transaction.ticket / "a").symlink_to(tmp_path / "other")
    with pytest.raises(WriteError, match=r"can't create .*/c/a: .*exists"):
        await transaction.write_files(SMALL)
    assert (tmp_path / "other").read_text() == "mine"
    await transaction.abort()
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("call", ["open", "write"])
async def test_small_files_are_written_again_after_a_passing_error(
    call: str, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = itertools.count(), getattr(os, call)
    transaction = await LocalStorage(retries=Retries(first_s=0)).begin(
        str(tmp_path / "c"), overwrite=False, workers=workers
    )

    def fail_second(*args: object) -> object:
        if next(calls) == 1:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sink.os, call, fail_second)
        await transaction.write_files(SMALL)
    await transaction.commit()
    assert {each.name: each.read_bytes() for each in (tmp_path / "c").iterdir()} == SMALL


async def test_a_small_file_that_may_have_been_created_is_not_created_again(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = await LocalStorage(retries=Retries(first_s=0)).begin(
        str(tmp_path / "c"), overwrite=False, workers=workers
    )
    real = os.open

    def create(path: str, flags: int, mode: int = 0o777) -> int:
        os.close(real(path, flags, mode))
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch, pytest.raises(WriteError, match=r"can't create .*/c/b: .*timed out"):
        patch.setattr(sink.os, "open", create)
        await transaction.write_files(SMALL)
    await transaction.abort()
    assert not list(tmp_path.iterdir())


async def test_a_failed_fsync_of_a_small_file_is_final(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    transaction = await LocalStorage(retries=Retries(first_s=0)).begin(
        str(tmp_path / "c"), overwrite=False, workers=workers
    )

    def sync(fd: int) -> None:
        synced.append(fd)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch, pytest.raises(WriteError, match=r"can't make durable .*/c/b: .*timed out"):
        patch.setattr(os, "fsync", sync)
        await transaction.write_files(SMALL)
    assert len(synced) == 1
    await transaction.abort()
    assert not list(tmp_path.iterdir())


async def test_a_look_above_a_path_counts_for_one_save(workers, tmp_path: Path) -> None:
    storage, path = LocalStorage(), tmp_path / "runs" / "step"
    storage.check(str(path), overwrite=False)
    await (await storage.begin(str(path), overwrite=False, workers=workers)).abort()
    aiockpt.save({"a": torch.ones(2)}, tmp_path / "new")
    for each in (tmp_path / "new").iterdir():
        each.rename(tmp_path / "runs" / each.name)
    with pytest.raises(CheckpointExistsError, match=rf"in the directory of a checkpoint, {tmp_path}/runs,"):
        await storage.begin(str(path), overwrite=False, workers=workers)
