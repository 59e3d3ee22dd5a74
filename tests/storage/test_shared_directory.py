"""Directories that other users may write to: their files are not used, followed, replaced or removed. Hostile files."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.errors import CommitError, CorruptCheckpointError, UnsafeCheckpointError, WriteError
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.local import commit, temp_dir, transaction
from aiockpt.storage.local.orphans import clean
from aiockpt.storage.local.source import open_source
from aiockpt.storage.local.temp_dir import make_hidden, new_ticket, read_sidecar, spelled, sweep, write_new
from aiockpt.storage.syscalls import rename_exchange
from aiockpt.testing.conformance.suite import metadata_of

NOBODY = 65534


async def _write(transaction, data: bytes, name: str = ".metadata") -> None:
    sink = await transaction.create(name, len(data))
    await sink.write(memoryview(data))
    await sink.finish()


def checkpoint(path: Path, data: bytes) -> Path:
    path.mkdir()
    (path / ".metadata").write_bytes(metadata_of(data.decode()))
    return path


# --- hidden directories -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_taken_names_are_not_used(workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    numbers = iter(["1" * 16, "1" * 16, "2" * 16])
    monkeypatch.setattr(temp_dir.secrets, "token_hex", lambda _: next(numbers))
    taken = tmp_path / LocalStorage().new_ticket(str(path))
    taken.mkdir()
    transaction = await LocalStorage().begin(str(path), overwrite=False, workers=workers)
    assert transaction.ticket.endswith(spelled("." + "2" * 16))
    await _write(transaction, b"new")
    await transaction.commit()
    assert list(taken.iterdir()) == []
    with pytest.raises(WriteError, match=r"can't make the directory for .*File exists"):
        await LocalStorage().begin(str(tmp_path / "d"), overwrite=False, workers=workers, ticket=taken.name)
    taken.rmdir()
    taken.symlink_to(tmp_path)
    with pytest.raises(WriteError, match="File exists"):
        await LocalStorage().begin(str(tmp_path / "d"), overwrite=False, workers=workers, ticket=taken.name)
    taken.unlink()


def test_names_are_unpredictable() -> None:
    randoms = {new_ticket().translate(temp_dir._READ).rpartition(".")[2] for _ in range(2000)}
    assert len(randoms) == 2000
    bits = [sum(int(random, 16) >> bit & 1 for random in randoms) for bit in range(64)]
    assert all(700 < count < 1300 for count in bits)  # each of the 64 bits differs


@pytest.mark.asyncio
@pytest.mark.parametrize("overwrite", [False, True])
async def test_directory_swapped_in_under_the_hidden_name_is_not_published(
    overwrite: bool, workers, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    if overwrite:
        checkpoint(path, b"old")
    transaction = await LocalStorage().begin(str(path), overwrite=overwrite, workers=workers)
    await _write(transaction, b"mine")
    hidden = tmp_path / transaction.ticket
    hidden.rename(tmp_path / "stolen")
    checkpoint(hidden, b"theirs")
    with pytest.raises(CommitError, match="is no longer the directory that it was written to"):
        await transaction.commit()
    with pytest.raises(WriteError, match="another process has put another directory in its place"):
        await transaction.abort()
    assert (path / ".metadata").read_bytes() == metadata_of("old") if overwrite else not path.exists()
    assert (hidden / ".metadata").read_bytes() == metadata_of("theirs")
    shutil.rmtree(hidden)


@pytest.mark.asyncio
async def test_symlink_under_the_hidden_name_is_not_followed(workers, tmp_path: Path) -> None:
    precious = checkpoint(tmp_path / "precious", b"precious")
    for single in (False, True):
        name = "m.safetensors" if single else "c"
        transaction = await LocalStorage().begin(str(tmp_path / name), overwrite=False, workers=workers)
        hidden = tmp_path / transaction.ticket
        hidden.rmdir()
        hidden.symlink_to(precious)
        await _write(transaction, b"theirs", "" if single else "__0_0.distcp")
        with pytest.raises(CommitError, match="is no longer the directory"):
            await transaction.commit()
        with pytest.raises(WriteError, match="another process has put another directory"):
            await transaction.abort()
        assert (precious / ".metadata").read_bytes() == metadata_of("precious")
        with pytest.raises(WriteError, match="can't look at"):
            await LocalStorage().join(str(tmp_path / name), hidden.name, workers=workers)
        hidden.unlink()


@pytest.mark.asyncio
async def test_directory_swapped_in_for_the_replaced_checkpoint_is_not_removed(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path / "c", b"old")
    transaction = await LocalStorage().begin(str(path), overwrite=True, workers=workers)
    await _write(transaction, b"new")
    hidden = tmp_path / transaction.ticket
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        if (path / ".metadata").read_bytes() == b"new":
            hidden.rename(tmp_path / "old")
            checkpoint(hidden, b"somebody's")

    monkeypatch.setattr(commit.os, "fsync", sync)
    await transaction.commit()
    assert (tmp_path / "old" / ".metadata").read_bytes() == metadata_of("old")
    assert (path / ".metadata").read_bytes() == b"new"
    assert (hidden / ".metadata").read_bytes() == metadata_of("somebody's")
    assert "what it replaced could not be removed" in caplog.text
    shutil.rmtree(hidden)


@pytest.mark.asyncio
async def test_planted_files_are_not_used(workers, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    hidden = tmp_path / transaction.ticket
    plants: list[Callable[[Path], object]] = [
        lambda file: file.symlink_to(tmp_path / "target"),
        lambda file: file.symlink_to(tmp_path / "new"),
        lambda file: file.hardlink_to(tmp_path / "target"),
        lambda file: os.mkfifo(file),
    ]
    for number, plant in enumerate(plants):
        plant(hidden / f"__{number}_0.distcp")
        with pytest.raises(WriteError, match="File exists"):
            await transaction.create(f"__{number}_0.distcp", 2 << 20)
        plant(tmp_path / spelled(f"{hidden.name}-part-{number}"))
        with pytest.raises(FileExistsError):
            write_new(str(tmp_path / spelled(f"{hidden.name}-part-{number}")), b"data", fsync=False)
        (tmp_path / spelled(f"{hidden.name}-part-{number}")).unlink()
    await transaction.abort()
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["target"]


def test_sidecars_are_regular_files_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = str(tmp_path / "sidecar")
    assert read_sidecar(sidecar) is None
    write_new(sidecar, b"data", fsync=False)
    assert read_sidecar(sidecar) == b"data"
    os.symlink(sidecar, tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        read_sidecar(str(tmp_path / "link"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_sidecar(str(tmp_path / "pipe"))
    with pytest.raises(OSError, match="no regular file"):
        read_sidecar(str(tmp_path))
    os.truncate(sidecar, 1 << 40)
    monkeypatch.setattr(temp_dir, "_SIDECAR_BYTES", 1 << 16)
    with pytest.raises(OSError, match="it has more than 65536 bytes"):
        read_sidecar(sidecar)


# --- modes and other users ----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("umask", "mode"), [(0, 0o775), (0o002, 0o775), (0o022, 0o755), (0o077, 0o700)])
async def test_modes_follow_the_umask_but_are_never_world_writable(
    umask: int, mode: int, workers, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
        hidden = tmp_path / transaction.ticket
        sidecar = hidden.with_name(spelled(hidden.name + "-part-0"))
        write_new(str(sidecar), b"data", fsync=False)
        assert stat.S_IMODE(hidden.stat().st_mode) == mode
        assert stat.S_IMODE(sidecar.stat().st_mode) == mode & 0o666
        sidecar.unlink()
        await _write(transaction, b"new")
        await transaction.commit()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "c" / ".metadata").stat().st_mode) == mode & 0o664


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")


def as_another(action: Callable[[], object]) -> str:
    """Run an action as another user, in a forked process; return "done" or the name of its exception."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "done"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
        except BaseException as exc:
            answer = type(exc).__name__
        os.write(theirs, answer.encode())
        os._exit(0)
    os.close(theirs)
    answer = os.read(mine, 1000).decode()
    os.close(mine)
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def sticky(tmp_path: Path):
    """A directory with the sticky bit, such as /tmp, that another user can reach."""
    above = tmp_path
    while not above.stat().st_mode & 0o001:
        above.chmod(above.stat().st_mode | 0o111)
        above = above.parent
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


@needs_root
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.asyncio
async def test_another_user_in_a_shared_directory(workers, sticky: Path) -> None:
    assert as_another(lambda: (sticky / "theirs").mkdir()) == "done"
    transaction = await LocalStorage().begin(str(sticky / "c"), overwrite=False, workers=workers)
    hidden = sticky / transaction.ticket
    await _write(transaction, b"mine")
    assert as_another(lambda: hidden.rename(sticky / "stolen")) == "PermissionError"
    assert as_another(lambda: (hidden / "__1_0.distcp").write_text("theirs")) == "PermissionError"
    assert as_another(lambda: (hidden / ".metadata").write_text("theirs")) == "PermissionError"
    assert as_another(lambda: (hidden / ".metadata").unlink()) == "PermissionError"
    assert as_another(lambda: (sticky / "c").mkdir()) == "done"
    with pytest.raises(aiockpt.CheckpointExistsError, match="has appeared during the save"):
        await transaction.commit()
    await transaction.abort()
    assert sorted(os.listdir(sticky)) == ["c", "theirs"]


@needs_root
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_leftovers_planted_by_another_user_are_not_removed(sticky: Path) -> None:
    """Neither the other user's files nor the targets of that user's symlinks are removed."""
    precious = checkpoint(sticky / "precious", b"precious")
    gone = replace(temp_dir.this_process(), pid=4_194_304, start=1)  # a PID that no process has
    names = [f".aiockpt-{gone}.{number:016x}" for number in range(3)]

    def plant() -> None:
        (sticky / names[0]).mkdir()
        (sticky / names[0] / "__0_0.distcp").symlink_to(precious / ".metadata")
        (sticky / names[1]).symlink_to(precious)
        (sticky / (names[2] + "-part-0")).touch()

    assert as_another(plant) == "done"
    before = sorted(os.listdir(sticky))
    assert clean(str(sticky), fsync=True, older_than_s=0.0) == ([], False)
    assert sorted(os.listdir(sticky)) == before
    assert (precious / ".metadata").read_bytes() == metadata_of("precious")
    for name in before:
        path = sticky / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@needs_root
def test_new_directory_swapped_by_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / new_ticket()
    real = os.mkdir

    def mkdir(path: str, mode: int = 0o777, **where: int) -> None:
        real(path, mode, **where)
        if path == str(hidden):
            os.chown(path, NOBODY, -1)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(PermissionError, match="another user has put a directory in its place"):
        make_hidden(str(hidden))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "mkdir", real)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)  # a mount that maps all files to one user
    make_hidden(str(hidden)).release()
    assert list(hidden.iterdir()) == []
    hidden.rmdir()


def test_failing_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is removed and the descriptor of its lock is closed."""
    hidden = tmp_path / new_ticket()
    real = os.mkdir
    fds: list[int] = []

    def mkdir(path: str, mode: int = 0o777, **where: int) -> None:
        if path == "probe":
            fds.append(where["dir_fd"])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, mode, **where)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(OSError, match="No space left") as caught:
        make_hidden(str(hidden))
    with pytest.raises(OSError, match="Bad file descriptor"):  # closed although the traceback still refers to it
        os.fstat(fds[0])
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "between"])
def test_directory_swapped_in_for_an_unfinished_checkpoint_is_not_swept(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / new_ticket()
    held = make_hidden(str(hidden))
    held.release()
    checkpoint(tmp_path / "theirs", b"theirs")
    real = os.rename

    def swap() -> None:
        real(hidden, tmp_path / "mine")
        real(tmp_path / "theirs", hidden)

    def rename(source: str, target: str) -> None:
        assert moment == "between", "the directory must not be renamed"
        swap()
        real(source, target)

    if moment == "before":
        swap()
    monkeypatch.setattr(temp_dir.os, "rename", rename)
    sweep(str(hidden), held.identity)
    assert (hidden / ".metadata").read_bytes() == metadata_of("theirs")
    assert sorted(os.listdir(tmp_path)) == sorted([hidden.name, "mine"])
    monkeypatch.setattr(temp_dir.os, "rename", real)
    shutil.rmtree(hidden)
    (tmp_path / "mine").rename(hidden)
    sweep(str(hidden), held.identity)
    sweep(str(hidden), held.identity)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_participant_sweeps_only_the_directory_it_joined(workers, tmp_path: Path) -> None:
    storage, path = LocalStorage(), str(tmp_path / "c")
    begun = await storage.begin(path, overwrite=False, workers=workers)
    joined = await storage.join(path, begun.ticket, workers=workers)
    hidden = tmp_path / begun.ticket
    hidden.rename(tmp_path / "mine")
    checkpoint(hidden, b"theirs")
    await joined.discard_all()
    assert (hidden / ".metadata").read_bytes() == metadata_of("theirs")
    shutil.rmtree(hidden)
    (tmp_path / "mine").rename(hidden)
    await begun.abort()


@pytest.mark.parametrize("end", ["abort", "discard_all"])
@pytest.mark.asyncio
async def test_participant_closes_its_files_and_releases_the_lock(end: str, workers, tmp_path: Path) -> None:
    storage, path = WrapperStorage(LocalStorage()), str(tmp_path / "c")
    opened = len(os.listdir("/proc/self/fd"))
    begun = await storage.begin(path, overwrite=False, workers=workers)
    joined = await storage.join(path, begun.ticket, workers=workers)
    sink = await joined.create("__1_0.distcp", 5000)
    await sink.write(memoryview(bytes(5000)))
    await begun.release()
    assert len(os.listdir("/proc/self/fd")) > opened
    await getattr(joined, end)()
    assert len(os.listdir("/proc/self/fd")) == opened
    await begun.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_commit_of_a_dead_writer_is_made_durable(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage, opened = checkpoint(tmp_path / "c", b"old"), LocalStorage(), len(os.listdir("/proc/self/fd"))
    begun = await storage.begin(str(path), overwrite=True, workers=workers)
    await _write(begun, b"new")
    rename_exchange(str(tmp_path / begun.ticket), str(path))
    await begun.release()
    (tmp_path / f"{begun.ticket}{temp_dir.RECORD}").write_text("c")
    adopted = await storage.take_over(str(path), begun.ticket, overwrite=True, workers=workers, stamp=begun.stamp)
    assert await adopted.status() == "published"
    synced: list[str] = []
    monkeypatch.setattr(transaction, "sync_directory", synced.append)
    await adopted.finalize()
    assert synced == [str(tmp_path)]
    assert len(os.listdir("/proc/self/fd")) == opened
    assert (path / ".metadata").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["c"]


# --- hostile files in a checkpoint --------------------------------------------------------------------

STATE = {"x": torch.arange(300_000.0), "y": torch.tensor([3, 4])}


def replaced_by(kind: str, file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            directory = os.getcwd()
            os.chdir(file.parent)  # the path of a socket may have 107 bytes at most
            try:
                end.bind(file.name)
            finally:
                os.chdir(directory)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe beside":
        os.mkfifo(file.parent / "pipe")
        file.symlink_to("pipe")
    elif kind == "link out":
        (file.parent.parent / "outside").write_bytes(content)
        file.symlink_to(file.parent.parent / "outside")
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 1 << 43)


KINDS = ["pipe", "directory", "socket", "device", "pipe beside", "link out", "loop", "sparse"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("saved")
    with aiockpt.SyncCheckpointer(io_threads=1) as ckpt:
        ckpt.save(STATE, home / "dcp")
        ckpt.save(STATE, home / "safetensors", format="safetensors")
        ckpt.save(STATE, home / "plain")
        (home / "plain" / ".aiockpt.json").unlink()
    return home


FILES = [
    ("dcp", ".metadata"),
    ("dcp", ".aiockpt.json"),
    ("dcp", "*.distcp"),
    ("plain", "*.distcp"),
    ("plain", ".metadata"),
    ("safetensors", "*.safetensors"),
]
CASES = [(*file, kind) for file in FILES for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name", "kind"), CASES)
def test_irregular_files_are_refused(form: str, name: str, kind: str, saved: Path, tmp_path: Path) -> None:
    """Above all, opening a FIFO must not wait for a process that writes to it."""
    path = tmp_path / "c"
    shutil.copytree(saved / form, path)
    (file,) = path.glob(name)
    replaced_by(kind, file)
    error: aiockpt.LoadError | None = None
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            found = ckpt.load(path)
        except aiockpt.LoadError as exc:
            error = exc
    if error is None:  # the load did not need the file
        assert name == ".aiockpt.json" or (form, name, kind) == ("dcp", ".metadata", "link out")
        assert torch.equal(found["x"], STATE["x"])
    elif kind == "link out":
        assert isinstance(error, UnsafeCheckpointError)
        assert "which is outside of its directory" in str(error)
    else:
        assert isinstance(error, CorruptCheckpointError | aiockpt.CheckpointNotFoundError), repr(error)
        assert str(path) in str(error)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop"])
def test_path_of_an_irregular_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.touch()
    replaced_by(kind, path)
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.LoadError, match="/c"):
        ckpt.load(path)


def test_symlink_to_a_checkpoint_is_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved / "dcp")
    with aiockpt.SyncCheckpointer() as ckpt:
        found = ckpt.load(tmp_path / "latest")
    assert torch.equal(found["x"], STATE["x"])


def test_devices_are_not_opened(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a device may have effects, such as rewinding a tape."""
    path = tmp_path / "c"
    shutil.copytree(saved / "plain", path)
    (file,) = path.glob("*.distcp")
    replaced_by("device", file)
    opened: list[str] = []
    real = os.open

    def note(name: str, flags: int, *args, **kwargs) -> int:
        opened.append(str(name))
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", note)
    source = open_source(str(path), direct_io=True)
    with pytest.raises(CorruptCheckpointError, match="is no regular file"):
        source.read(file.name, 0, memoryview(bytearray(1)))
    source.close()
    assert ".metadata" in opened
    assert file.name not in opened


def test_file_that_becomes_a_fifo_during_open(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    shutil.copytree(saved / "plain", path)
    (file,) = path.glob("*.distcp")
    real = os.open

    def swap(name: str, flags: int, *args, **kwargs) -> int:
        if name == file.name and file.is_file():
            replaced_by("pipe", file)
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swap)
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(CorruptCheckpointError, match="is no regular file"):
        ckpt.load(path)
    assert stat.S_ISFIFO(file.stat().st_mode)


def forget(file: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_file_replaced_between_its_two_opens(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptors for direct and buffered reads must refer to the same file."""
    path = tmp_path / "c"
    shutil.copytree(saved / "plain", path)
    (file,) = path.glob("*.distcp")
    real = os.open

    def swap(name: str, flags: int, *args, **kwargs) -> int:
        if name == file.name and flags & os.O_DIRECT:
            size = file.stat().st_size
            file.rename(path / "first")
            file.write_bytes(bytes(size))
            forget(path / "first")
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swap)
    with aiockpt.SyncCheckpointer() as ckpt:
        found = ckpt.load(path, verify=False)
    assert torch.equal(found["x"], STATE["x"])
    assert (path / "first").exists()
