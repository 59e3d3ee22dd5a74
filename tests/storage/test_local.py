"""Files: direct I/O and its refusals, durability, and what a transaction leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from aiockpt.errors import CheckpointExistsError, CommitError, WriteError
from aiockpt.staging.pool import Mapping
from aiockpt.storage import local, publish, syscalls
from aiockpt.storage.local import LocalStorage
from aiockpt.threads import Workers

pytestmark = pytest.mark.asyncio


@pytest.fixture
def workers():
    group = Workers(2, "aiockpt-test")
    yield group
    group.close()


@pytest.fixture
def data() -> Mapping:
    memory = Mapping(3 << 20)
    memory.view[:] = bytes(range(256)) * (3 << 12)
    return memory


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
async def test_a_file_has_its_announced_size(direct_io: bool, nbytes: int, workers, data, tmp_path: Path) -> None:
    await _write(LocalStorage(direct_io=direct_io), tmp_path / "a" / "b" / "c", data.view, nbytes, workers)
    assert (tmp_path / "a" / "b" / "c" / "f").read_bytes() == bytes(data.view[:nbytes])
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["c"]


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("nbytes", [0, 5, 4096, (2 << 20) + 4096 + 17, 3 << 20])
async def test_a_file_without_an_announced_size(direct_io: bool, nbytes: int, workers, data, tmp_path: Path) -> None:
    storage = LocalStorage(direct_io=direct_io)
    transaction = await storage.begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    sink = await transaction.create("f", None)
    for start in range(0, nbytes, 1 << 20):
        await sink.write(data.view[start : min(start + (1 << 20), nbytes)])
    await sink.finish()
    await transaction.commit()
    assert (tmp_path / "c" / "f").read_bytes() == bytes(data.view[:nbytes])


async def test_direct_io_is_used_where_it_can_be(workers, data, tmp_path: Path) -> None:
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
            os.close(real(path, flags & ~os.O_DIRECT, *args, **kwargs))  # the file is created all the same
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(local.os, "open", refuse)
    await _write(LocalStorage(), tmp_path / "c", data.view, (2 << 20) + 7, workers)
    assert (tmp_path / "c" / "f").read_bytes() == bytes(data.view[: (2 << 20) + 7])


@pytest.mark.parametrize("nth", [1, 2])
async def test_direct_io_refused_at_a_write(nth: int, workers, data, tmp_path: Path) -> None:
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    sink = await transaction.create("f", (2 << 20) + 7)
    for number in range(3):
        start = number << 20
        end = min(start + (1 << 20), (2 << 20) + 4096)
        # A buffer that is not aligned makes the kernel say EINVAL.
        view = memoryview(bytearray(end - start + 1))[1:] if number + 1 == nth else data.view[start:end]
        view[:] = data.view[start:end]
        await sink.write(view)
    assert not sink._direct
    await sink.finish()
    await transaction.commit()
    assert (tmp_path / "c" / "f").read_bytes() == bytes(data.view[: (2 << 20) + 7])


async def test_short_writes_and_other_errors(workers, data, tmp_path: Path) -> None:
    class Short:
        """A file that writes a little at a time, then fails."""

        def __init__(self, inner, limit: int) -> None:
            self.inner, self.left, self.fileno, self.close = inner, limit, inner.fileno, inner.close
            self.truncate = inner.truncate

        async def write(self, view):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "Input/output error")
            return await self.inner.write(view[: max(1, len(view) // 3)])

    for limit, fine in ((1000, True), (5, False)):
        transaction = await LocalStorage().begin(str(tmp_path / str(limit)), overwrite=False, workers=workers)
        sink = await transaction.create("f", 2 << 20)
        sink._file = Short(sink._file, limit)
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


async def test_everything_is_synced_in_order(workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_sync, real_rename = os.fsync, publish.rename_noreplace

    def name_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}").replace(str(tmp_path), "")

    def sync(fd: int) -> None:
        calls.append("sync " + name_of(fd).partition(".aiockpt-")[0] + ("/f" if name_of(fd).endswith("/f") else ""))
        real_sync(fd)

    def rename(source: str, target: str) -> None:
        calls.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(local.os, "fsync", sync)
    monkeypatch.setattr(publish, "rename_noreplace", rename)
    await _write(LocalStorage(), tmp_path / "a" / "c", data.view, 5000, workers)
    made = ["sync ", "sync /a/.c/f", "sync /a/.c", "rename", "sync /a"]
    assert calls == [f"sync {tmp_path.parent}", *made]
    calls.clear()
    await _write(LocalStorage(fsync=False), tmp_path / "b" / "c", data.view, 5000, workers)
    assert calls == ["rename"]


async def test_a_commit_that_can_not_be_made_durable_is_taken_back(
    workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = publish.sync_directory, 1

    def fail(path: str) -> None:
        nonlocal times
        if path == str(tmp_path) and times:
            times -= 1
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(publish, "sync_directory", fail)
    with pytest.raises(CommitError, match="can't publish"):
        await _write(LocalStorage(), tmp_path / "c", data.view, 5000, workers)
    assert list(tmp_path.iterdir()) == []
    times = 2
    with pytest.raises(CommitError, match="was taken back, which can't be made durable either") as caught:
        await _write(LocalStorage(), tmp_path / "c", data.view, 5000, workers)
    assert isinstance(caught.value.__cause__, OSError)
    (hidden,) = tmp_path.iterdir()  # after a loss of power it may be under its name: whole
    assert (hidden / "f").read_bytes() == bytes(data.view[:5000])
    publish.remove(str(hidden))


async def test_a_file_system_without_exchange(workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_args) -> None:
        raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(publish, "rename_exchange", unsupported)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_text("old")
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=True, workers=workers)
    with pytest.raises(CommitError, match="can't replace a checkpoint atomically"):
        await transaction.commit()
    await transaction.abort()
    assert (tmp_path / "c" / ".metadata").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


async def test_renaming_without_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_args) -> None:
        raise syscalls.UnsupportedError(errno.ENOSYS, "not here")

    monkeypatch.setattr(syscalls, "_call", unsupported)
    (tmp_path / "a").mkdir()
    syscalls.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "b"))
    (tmp_path / "c").mkdir()
    with pytest.raises(FileExistsError):
        syscalls.rename_noreplace(str(tmp_path / "b"), str(tmp_path / "c"))
    assert (tmp_path / "b").is_dir()


async def test_new_files_obey_the_umask(workers, data, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        await _write(LocalStorage(), tmp_path / "c", data.view, 2 << 20, workers)
    finally:
        os.umask(before)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "c" / "f").stat().st_mode & 0o777 == 0o640


async def test_a_path_taken_meanwhile(workers, tmp_path: Path) -> None:
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


async def test_a_checkpoint_that_is_one_file(workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_sync, real_rename = os.fsync, publish.rename_noreplace

    def sync(fd: int) -> None:
        where = os.readlink(f"/proc/self/fd/{fd}").replace(str(tmp_path), "")
        calls.append("sync " + re.sub(r"\.aiockpt-[^/]*", "", where))
        real_sync(fd)

    def rename(source: str, target: str) -> None:
        calls.append("rename")
        real_rename(source, target)

    path = tmp_path / "a" / "m.safetensors"
    monkeypatch.setattr(local.os, "fsync", sync)
    monkeypatch.setattr(publish, "rename_noreplace", rename)
    await _write_single(LocalStorage(), path, data.view, workers, overwrite=False)
    assert path.read_bytes() == bytes(data.view[:5000])
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]
    made = ["sync ", "sync /a/.m.safetensors/m.safetensors", "rename", "sync /a"]
    assert calls == [f"sync {tmp_path.parent}", *made]
    with pytest.raises(CheckpointExistsError, match="exists already"):
        await _write_single(LocalStorage(), path, data.view, workers, overwrite=False)
    await _write_single(LocalStorage(), path, data.view[4096:], workers, overwrite=True)
    assert path.read_bytes() == bytes(data.view[4096 : 4096 + 5000])
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("before", ["nothing", "a file", "a directory"])
async def test_a_file_that_can_not_be_made_durable_is_taken_back(
    before: str, workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    if before == "a file":
        path.write_text("old")
    elif before == "a directory":
        path.mkdir()
        (path / ".metadata").write_text("old")

    real, times = publish.sync_directory, 1

    def fail(path: str) -> None:
        nonlocal times
        if path == str(tmp_path) and times:
            times -= 1
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(publish, "sync_directory", fail)
    with pytest.raises(CommitError, match=r"can't publish .*m\.safetensors: .*Input/output error"):
        await _write_single(LocalStorage(), path, data.view, workers, overwrite=True)
    if before == "nothing":
        assert list(tmp_path.iterdir()) == []
    else:
        assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
        assert (path if before == "a file" else path / ".metadata").read_text() == "old"


async def test_a_file_is_replaced_without_exchange(
    workers, data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_args) -> None:
        raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(publish, "rename_exchange", unsupported)
    path = tmp_path / "m.safetensors"
    path.write_text("old")
    await _write_single(LocalStorage(), path, data.view, workers, overwrite=True)
    assert path.read_bytes() == bytes(data.view[:5000])
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]

    real = publish.sync_directory

    def fail(path: str) -> None:
        if path == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(publish, "sync_directory", fail)
    with pytest.raises(CommitError, match="was replaced but can't be made durable"):
        await _write_single(LocalStorage(), path, data.view[4096:], workers, overwrite=True)
    assert path.read_bytes() == bytes(data.view[4096 : 4096 + 5000])
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("names", [["x.txt"], [".aiockpt.json"], ["a.safetensors", "config.json"], [".hidden"]])
async def test_other_directories_are_not_overwritten(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in names:
        (tmp_path / "c" / name).write_text("mine")
    with pytest.raises(CheckpointExistsError, match="holds other things than a checkpoint"):
        LocalStorage().check(str(tmp_path / "c"), overwrite=True)


@pytest.mark.parametrize("names", [[], [".metadata", "x"], ["model.safetensors"], ["a.safetensors", ".aiockpt.json"]])
async def test_checkpoints_and_empty_directories_may_be_overwritten(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in names:
        (tmp_path / "c" / name).write_text("old")
    LocalStorage().check(str(tmp_path / "c"), overwrite=True)
