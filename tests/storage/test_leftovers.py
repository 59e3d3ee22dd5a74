"""Leftovers of killed processes are removed; a directory that a live process uses is not."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aiockpt.core.threads import Workers
from aiockpt.errors import CheckpointExistsError, DeleteError, WriteError
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.local import orphans, temp_dir
from aiockpt.storage.local.orphans import HostFacts, classify, clean
from aiockpt.storage.local.temp_dir import (
    REPLACED,
    Owner,
    _start_ticks,
    copy_ticket,
    hold,
    is_running,
    lock,
    make_hidden,
    new_ticket,
    read_ticket,
    shared_ticket,
    spelled,
    this_process,
)
from aiockpt.testing.conformance.suite import metadata_of

HERE = this_process()
pytestmark = pytest.mark.skipif(HERE is None, reason="this system doesn't tell processes apart")

ANCIENT = 1_000_000_000.0  # long before the boot of any machine that runs this
HOLD_AND_WAIT = """
import sys
from aiockpt.storage.local.temp_dir import hold

held = hold(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
SAVE_AND_WAIT = """
import sys, anyio
from aiockpt.storage import LocalStorage
from aiockpt.storage.local.temp_dir import spelled, write_new
from aiockpt.core.threads import Workers

async def main(path):
    workers = Workers(1, "w")
    transaction = await LocalStorage().begin(path, overwrite=True, workers=workers)
    sink = await transaction.create("__0_0.distcp", 4096)
    await sink.write(memoryview(bytes(4096)))
    write_new(f"{path.rpartition('/')[0]}/{transaction.ticket}-{spelled('part-0')}", b"sidecar", fsync=False)
    print(transaction.ticket, flush=True)
    sys.stdin.read()

anyio.run(main, sys.argv[1])
"""


@pytest.fixture(scope="module")
def dead() -> Owner:
    """A process of this kernel and PID namespace that has exited."""
    with subprocess.Popen(["true"]) as process:
        owner = replace(HERE, pid=process.pid, start=HERE.start + 1)
    assert not is_running(owner)
    return owner


@pytest.fixture(scope="module")
def living():
    """A running process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield replace(HERE, pid=process.pid, start=_start_ticks(process.pid))
        process.kill()


def started(code: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def name_of(owner: Owner | str, number: int = 1, suffix: str = "") -> str:
    return f".aiockpt-{owner}.{number:016x}{suffix}"


def leave(path: Path, *, changed_s: float | None = None, names: tuple[str, ...] = ("__0_0.distcp",)) -> Path:
    """Create the leftovers of a killed save."""
    path.mkdir()
    for name in names:
        (path / name).write_bytes(os.urandom(100))
    if changed_s is not None:
        for each in (*path.iterdir(), path):
            os.utime(each, (changed_s, changed_s))
    return path


async def save(storage: LocalStorage, path: Path, workers: Workers, data: bytes = metadata_of("new")) -> None:
    transaction = await storage.begin(str(path), overwrite=True, workers=workers)
    sink = await transaction.create(".metadata", len(data))
    await sink.write(memoryview(data))
    await sink.finish()
    await transaction.commit()


# --- names --------------------------------------------------------------------------------------------


def test_name_contains_its_owner(tmp_path: Path) -> None:
    ticket = new_ticket()
    (tmp_path / f"{ticket}-part-123456-swept").touch()
    found = read_ticket(f"{ticket}-part-123456")
    assert (found.base, found.suffix, found.owner) == (ticket, "-part-123456", HERE)
    assert read_ticket(ticket).suffix == ""
    assert ticket != new_ticket()
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *(new_ticket() for _ in range(20)),
        copy_ticket("0123456789abcdef", 12),
        shared_ticket("step-3"),
        spelled(f"{new_ticket()}-part-3"),
    ],
    ids=itertools.count(),
)
def test_a_program_that_looks_for_the_largest_number_finds_none(name: str) -> None:
    assert re.search(r"\d", name) is None
    assert not re.search("step|iter|epoch|checkpoint", name.removeprefix(".aiockpt-"))
    assert read_ticket(name) is not None


def test_numbers_may_be_written_in_digits(living: Owner) -> None:
    """As earlier versions did."""
    name = name_of(living, 0x123456789ABCDEF0, "-part-12")
    assert read_ticket(name).owner == read_ticket(spelled(name)).owner == living


@pytest.mark.asyncio
async def test_unfinished_ones_one_level_up(dead, workers, tmp_path: Path) -> None:
    """Where every entry counts as a checkpoint there is none that is not finished, and what is left is removed."""
    runs, left = tmp_path / "runs", leave(tmp_path / name_of(dead))
    storage = LocalStorage().above()
    transaction = await storage.begin(str(runs / "c"), overwrite=True, workers=workers)
    assert os.listdir(runs) == []
    assert not left.exists()
    assert (tmp_path / "runs" / transaction.ticket / "..").resolve() == tmp_path
    joined = await LocalStorage().join(str(runs / "c"), transaction.ticket, workers=workers)
    sink = await joined.create(".metadata", 1)
    await sink.write(memoryview(b"x"))
    await sink.finish()
    await joined.commit()
    await joined.release()
    (runs / "c").mkdir()  # by another program, which must not be replaced, while another one is
    (runs / "c" / "thesis.tex").touch()
    with pytest.raises(CheckpointExistsError):
        await transaction.commit()
    await transaction.abort()
    assert os.listdir(tmp_path) == ["runs"]
    await save(storage, runs / "d", workers)
    await save(storage, runs / "d", workers)  # beside it, as it is replaced
    assert sorted(os.listdir(runs)) == ["c", "d"]
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize("ticket", ["../..", "..", "../c", "a/.b", "../../.aiockpt-x", "/.aiockpt-x", ""])
@pytest.mark.asyncio
async def test_a_ticket_leads_no_further(ticket: str, workers, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="is no ticket"):
        await LocalStorage().join(str(tmp_path / "runs" / "c"), ticket, workers=workers)


def test_child_process_is_an_owner_of_its_own() -> None:
    code = "from aiockpt.storage.local.temp_dir import this_process; print(this_process())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        there = process.communicate()[0].strip()
    owner = read_ticket(f".aiockpt-{there}.0123456789abcdef").owner
    assert (owner.boot, owner.space) == (HERE.boot, HERE.space)
    assert owner.pid == process.pid
    assert owner.start > HERE.start


@pytest.mark.parametrize(
    ("number", "space", "known"),
    [
        ("0123456789abcdef0123456789abcdef", temp_dir._FIRST_SPACE, True),
        ("0123456789abcdef0123456789abcdef", "pid:[4026532201]", False),
        ("", temp_dir._FIRST_SPACE, False),
        ("uninitialized", temp_dir._FIRST_SPACE, False),
        (None, temp_dir._FIRST_SPACE, False),
    ],
)
def test_machine_is_known_by_its_id_outside_containers_only(
    number: str | None, space: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers on different machines may share a machine id and a host name."""

    def contents(_path: str) -> str:
        if number is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return number

    monkeypatch.setattr(temp_dir, "read_text", contents)
    monkeypatch.setattr(temp_dir.os, "readlink", lambda _path: space)
    names = {temp_dir._hash(temp_dir._machine()) for _ in range(3)}
    assert len(names) == (1 if known else 3)


@pytest.mark.parametrize(
    "name",
    [
        "c",
        ".c",
        ".git",
        ".aiockpt",
        ".aiockpt-",
        ".aiockpt.json",
        "aiockpt-x.12.0123456789abcdef",
        ".c.aiockpt-x.12.0123456789abcdef",
        ".aiockpt-x.12.0123",
        ".aiockpt-x.12.0123456789abcdefcdef",
        ".aiockpt-dcpx",
    ],
)
def test_foreign_names_are_no_tickets(name: str) -> None:
    assert read_ticket(name) is None


@pytest.mark.parametrize(
    "name", [".aiockpt-x.12.0123456789abcdef", ".aiockpt-dcp", ".aiockpt-dcp-3", shared_ticket("step-3")]
)
def test_names_without_an_owner(name: str) -> None:
    assert read_ticket(name).owner is None


# --- classification -----------------------------------------------------------------------------------

NOW, BOOTED = 1_000_000.0, 900_000.0
OTHER_SPACE, OTHER_BOOT, OTHER_HOST = {"space": "a" * 10}, {"boot": "b" * 10}, {"machine": "c" * 10}


@pytest.mark.parametrize(
    ("changes", "changed_s", "older_than_s", "verdict"),
    [
        ({}, NOW, None, "dead"),
        (OTHER_SPACE, 0.0, None, "unknown"),
        (OTHER_SPACE, NOW - 9, 10.0, "unknown"),
        (OTHER_SPACE, NOW - 11, 10.0, "old"),
        (OTHER_SPACE, NOW + 1000, 10.0, "unknown"),
        (OTHER_SPACE | OTHER_HOST, 0.0, None, "unknown"),
        (OTHER_SPACE | OTHER_BOOT, BOOTED - 1, None, "rebooted"),
        (OTHER_SPACE | OTHER_BOOT, BOOTED + 1, None, "unknown"),
        (OTHER_SPACE | OTHER_BOOT, BOOTED + 1, 99_000.0, "old"),
        (OTHER_SPACE | OTHER_BOOT | OTHER_HOST, 0.0, None, "unknown"),
        (OTHER_SPACE | OTHER_BOOT | OTHER_HOST, NOW - 99, 100.0, "unknown"),
        (OTHER_SPACE | OTHER_BOOT | OTHER_HOST, NOW - 101, 100.0, "old"),
        (None, 0.0, None, "unknown"),
        (None, NOW - 101, 100.0, "old"),
    ],
)
def test_classify(changes: dict[str, str] | None, changed_s: float, older_than_s: float | None, verdict: str) -> None:
    owner = None if changes is None else replace(HERE, **changes)
    assert classify(owner, changed_s, HostFacts(HERE, NOW, BOOTED, older_than_s)) == verdict


def test_process_without_identity_classifies_by_age_alone() -> None:
    assert classify(HERE, 0.0, HostFacts(None, NOW, BOOTED)) == "unknown"
    assert classify(HERE, 0.0, HostFacts(None, NOW, None, 10.0)) == "old"


def test_recently_booted_machine_does_not_trust_its_clock() -> None:
    """The clock may have been wrong until a moment ago."""
    owner = replace(HERE, boot="b" * 10, space="a" * 10)
    assert classify(owner, NOW - 30, HostFacts(HERE, NOW, NOW - 10)) == "unknown"


# --- removal ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_next_save_removes_leftovers_of_dead_processes(dead, living, workers, tmp_path: Path) -> None:
    gone = [
        leave(tmp_path / name_of(dead, 1)),
        leave(tmp_path / name_of(dead, 2, "-swept"), names=()),
        leave(tmp_path / name_of(replace(living, start=living.start - 1), 3)),  # the PID was reused
        leave(
            tmp_path / name_of(replace(HERE, boot="b" * 10, space="a" * 10), 5), changed_s=ANCIENT
        ),  # before a reboot
        leave(tmp_path / name_of(dead, 6), names=("model.safetensors", ".aiockpt.json")),
        leave(tmp_path / name_of(dead, 7), names=(".metadata", "__0_0.distcp")),  # a replaced checkpoint
    ]
    gone.append(leave(tmp_path / name_of(dead, 8), names=("__0_0.distcp", ".nfs0000000000c0ffee00000001")))
    (leave(tmp_path / name_of(dead, 10), names=()) / "probe").mkdir()
    gone.append(tmp_path / name_of(dead, 10))
    for sidecar in (name_of(dead, 1, "-part-0"), name_of(dead, 9, "-part-12")):
        (tmp_path / sidecar).write_text("sidecar")
        gone.append(tmp_path / sidecar)
    stay = [
        leave(tmp_path / name_of(living, 1)),
        leave(tmp_path / name_of(HERE, 2)),
        leave(tmp_path / name_of(replace(HERE, space="a" * 10), 3), changed_s=ANCIENT),  # a container may be using it
        leave(tmp_path / name_of(replace(HERE, boot="b" * 10, space="a" * 10), 4)),  # maybe another machine
        leave(tmp_path / name_of(replace(HERE, machine="c" * 10, boot="b" * 10, space="a" * 10), 5), changed_s=ANCIENT),
        leave(tmp_path / ".aiockpt-x.12.0123456789abcdef", changed_s=ANCIENT),
        leave(tmp_path / ".hidden"),
        leave(tmp_path / "step 7"),
    ]
    (tmp_path / name_of(living, 1, "-part-0")).write_text("sidecar")
    stay.append(tmp_path / name_of(living, 1, "-part-0"))
    await save(LocalStorage(), tmp_path / "c", workers)
    assert sorted(tmp_path.iterdir()) == sorted([*stay, tmp_path / "c"])
    assert [path for path in gone if path.exists()] == []
    for path in stay:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.asyncio
async def test_directory_is_scanned_again_only_for_a_reason(dead, workers, tmp_path: Path) -> None:
    storage = LocalStorage()
    await save(storage, tmp_path / "a", workers)
    left = leave(tmp_path / name_of(dead))
    await save(storage, tmp_path / "b", workers)
    assert left.exists()
    transaction = await storage.begin(str(tmp_path / "failed"), overwrite=False, workers=workers)
    await transaction.abort()
    await save(storage, tmp_path / "c", workers)
    assert not left.exists()
    used = leave(tmp_path / name_of(dead))
    held = hold(str(used))
    storage = LocalStorage()
    await save(storage, tmp_path / "d", workers)
    assert used.exists()
    held.release()
    await save(storage, tmp_path / "e", workers)
    assert not used.exists()


@pytest.mark.asyncio
async def test_leftovers_of_a_killed_process(workers, tmp_path: Path) -> None:
    """The files of a real process stay while it runs; after its death, the next save removes them."""
    with started(SAVE_AND_WAIT, tmp_path / "c") as process:
        hidden = tmp_path / process.stdout.readline().strip()
        await save(LocalStorage(), tmp_path / "a", workers)
        assert (hidden / "__0_0.distcp").stat().st_size == 4096
        left = [hidden, hidden.with_name(spelled(hidden.name + "-part-0"))]
        assert all(path.exists() for path in left)
        process.kill()
    storage = LocalStorage()
    await save(storage, tmp_path / "b", workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.asyncio
async def test_directory_locked_by_another_process_stays(dead, workers, tmp_path: Path) -> None:
    """A writer process continues the save of its dead trainer, so it holds a lock on the trainer's directory."""
    hidden = leave(tmp_path / name_of(dead))
    sidecar = tmp_path / name_of(dead, 1, "-part-0")
    sidecar.write_text("sidecar")
    storage = LocalStorage()
    with started(HOLD_AND_WAIT, hidden) as process:
        process.stdout.readline()
        await save(storage, tmp_path / "a", workers)
        assert clean(str(tmp_path), fsync=True, older_than_s=0.0) == ([], True)
        assert hidden.exists()
        assert sidecar.exists()
        process.kill()
    await save(storage, tmp_path / "b", workers)  # scanned again, because a locked leftover was found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.asyncio
async def test_each_participant_holds_the_lock(workers, tmp_path: Path) -> None:
    storage, path = LocalStorage(), tmp_path / "c"

    def is_free(where: Path) -> bool:
        fd = os.open(where, os.O_RDONLY)
        try:
            return lock(fd, fcntl.LOCK_EX) == "held"
        finally:
            os.close(fd)

    begun = await storage.begin(str(path), overwrite=False, workers=workers)
    hidden = tmp_path / begun.ticket
    joined = await storage.join(str(path), begun.ticket, workers=workers)
    adopted = await storage.take_over(str(path), begun.ticket, overwrite=False, workers=workers, stamp=begun.stamp)
    free = [is_free(hidden)]
    for part in (begun, joined, adopted):
        await part.release()
        await part.release()
        free.append(is_free(hidden))
    assert free == [False, False, False, True]
    assert joined.stamp == adopted.stamp == begun.stamp
    joined = await storage.join(str(path), begun.ticket, workers=workers)
    await joined.commit()
    assert not is_free(hidden)
    await adopted.commit()
    assert not is_free(path)
    await joined.abort()
    assert is_free(path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_does_not_release_the_lock(tmp_path: Path) -> None:
    held = hold(str(tmp_path))
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    fd = os.open(tmp_path, os.O_RDONLY)
    assert lock(fd, fcntl.LOCK_EX) == "refused"
    held.release()
    held.release()
    assert lock(fd, fcntl.LOCK_EX) == "held"
    os.close(fd)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_release_also_releases_the_lock_of_forked_children(tmp_path: Path) -> None:
    """Children share the open file description, hence the flock, and may outlive the parent."""
    held = hold(str(tmp_path))
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(mine, 1)
        os._exit(0)
    held.release()
    fd = os.open(tmp_path, os.O_RDONLY)
    free = lock(fd, fcntl.LOCK_EX)
    for each in (fd, mine, theirs):
        os.close(each)
    os.waitpid(child, 0)
    assert free == "held"


@pytest.mark.asyncio
async def test_join_during_removal_fails(workers, tmp_path: Path) -> None:
    hidden = leave(tmp_path / name_of(HERE))
    fd = os.open(hidden, os.O_RDONLY)
    assert lock(fd, fcntl.LOCK_EX) == "held"
    with pytest.raises(WriteError, match="can't be seen"):
        await LocalStorage().join(str(tmp_path / "c"), hidden.name, workers=workers)
    os.close(fd)
    shutil.rmtree(hidden)


def test_replaced_directory_is_removed_after_a_sync_of_its_parent(
    dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [leave(tmp_path / name_of(dead, number), names=(".metadata", "__0_0.distcp")) for number in (1, 2)]
    calls: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        calls.append(f"sync {os.readlink(f'/proc/self/fd/{fd}') == str(tmp_path)}")
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        real_sync(fd)

    def rename(source: str, target: str, **where: int) -> None:
        calls.append(f"rename to {target.rpartition('-')[2]}")
        real_rename(source, target, **where)

    monkeypatch.setattr(orphans.os, "fsync", sync)
    monkeypatch.setattr(orphans.os, "rename", rename)
    removed, _ = clean(str(tmp_path), fsync=True)
    assert calls == ["sync True", "sync True", "rename to swept"]
    assert removed == [str(left[1])]
    assert f"can't remove what a killed process has left, {left[0]}: [Errno 5]" in caplog.text
    assert sorted(os.listdir(left[0])) == [".metadata", "__0_0.distcp"]
    assert clean(str(tmp_path), fsync=False) == ([str(left[0])], False)
    assert calls[3:] == ["rename to swept"]


def test_replaced_file_is_removed_after_a_sync_of_its_parent(dead, tmp_path: Path, monkeypatch) -> None:
    left = tmp_path / name_of(dead, 1, REPLACED)
    left.write_bytes(b"old")
    calls: list[str] = []
    real = os.unlink
    monkeypatch.setattr(orphans.os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(orphans.os, "unlink", lambda name, **where: (calls.append(name), real(name, **where)))
    assert clean(str(tmp_path), fsync=True) == ([str(left)], False)
    assert calls == [str(tmp_path), left.name]


def test_without_flock_leftovers_are_judged_by_time(dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, kind: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    hold(str(tmp_path)).release()
    stays = leave(tmp_path / name_of(dead, 1))
    rebooted = leave(tmp_path / name_of(replace(HERE, boot="b" * 10, space="a" * 10), 2), changed_s=ANCIENT)
    sidecar = tmp_path / name_of(dead, 1, "-part-0")
    sidecar.write_text("sidecar")
    assert clean(str(tmp_path), fsync=True) == ([str(rebooted)], False)
    assert sorted(tmp_path.iterdir()) == [stays, sidecar]
    old = leave(tmp_path / name_of(dead, 3), changed_s=orphans.time.time() - 5000)
    assert clean(str(tmp_path), fsync=True, older_than_s=4000.0) == ([str(old)], False)
    assert sorted(tmp_path.iterdir()) == [stays, sidecar]
    shutil.rmtree(stays)
    sidecar.unlink()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.ENOLCK])
def test_file_system_without_flock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(fd: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    caplog.set_level(logging.INFO, "aiockpt")
    monkeypatch.setattr(fcntl, "flock", unsupported)
    held = hold(str(tmp_path))
    assert lock(held.fd, fcntl.LOCK_EX) == "unsupported"
    held.release()
    assert ("the file system gives no lock" in caplog.text) == (number == errno.ENOLCK)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINTR])
def test_flock_is_retried(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = fcntl.flock, iter([OSError(number, os.strerror(number))] * 3)

    def flock(fd: int, kind: int) -> None:
        for failure in failures:
            raise failure
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    held = hold(str(tmp_path))
    fd = os.open(tmp_path, os.O_RDONLY)
    assert lock(fd, fcntl.LOCK_EX) == "refused"
    os.close(fd)
    held.release()


@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR])
def test_failing_flock_raises(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing lock must not pass for a file system without locks: other processes may hold locks there."""

    def fail(fd: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        hold(str(tmp_path))


def between_making_and_locking(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run an action right before the first shared lock of a directory."""
    real, actions = fcntl.flock, iter([action])

    def flock(fd: int, kind: int) -> None:
        if kind & fcntl.LOCK_SH:
            for each in actions:
                each()
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.asyncio
async def test_directory_of_a_writer_process_for_a_dead_trainer_stays(
    dead, workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name's owner is the dead trainer, and `clean` runs before the writer process has locked the directory."""
    looks: list[tuple[list[str], list[str]]] = []
    hidden = tmp_path / name_of(dead)
    between_making_and_locking(
        monkeypatch, lambda: looks.append((os.listdir(tmp_path), clean(str(tmp_path), fsync=True)[0]))
    )
    storage, path = LocalStorage(), str(tmp_path / "c")
    transaction = await storage.begin(path, overwrite=False, workers=workers, ticket=hidden.name)
    ((made, removed),) = looks
    assert removed == []
    assert [read_ticket(name).owner for name in made] == [HERE]
    assert os.listdir(tmp_path) == [hidden.name]
    assert clean(str(tmp_path), fsync=True) == ([], True)
    with pytest.raises(WriteError, match="File exists"):
        await storage.begin(path, overwrite=False, workers=workers, ticket=hidden.name)
    assert os.listdir(tmp_path) == [hidden.name]
    found = hidden.stat()
    assert transaction.stamp == f"{found.st_dev}:{found.st_ino}"
    await transaction.abort()


@pytest.mark.parametrize("done", [False, True])
def test_rename_of_a_new_directory_reports_an_error(
    done: bool, dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / name_of(dead))
    real = temp_dir.rename_noreplace

    def rename(source: str, target: str) -> None:
        if done:
            real(source, target)
        raise InterruptedError(errno.EINTR, "Interrupted system call")

    monkeypatch.setattr(temp_dir, "rename_noreplace", rename)
    if done:
        held = make_hidden(path)
        assert os.listdir(tmp_path) == [os.path.basename(path)]
        held.release()
        os.rmdir(path)
    else:
        with pytest.raises(InterruptedError, match=r"Interrupted system call: '.*aiockpt-"):
            make_hidden(path)
        assert os.listdir(tmp_path) == []


@pytest.mark.asyncio
async def test_begin_takes_another_name_if_clean_has_locked_the_first(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def take() -> None:
        (made,) = tmp_path.iterdir()
        taken.append(os.open(made, os.O_RDONLY))
        assert lock(taken[0], fcntl.LOCK_EX) == "held"

    between_making_and_locking(monkeypatch, take)
    transaction = await LocalStorage().begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    assert os.listdir(tmp_path) == [transaction.ticket]
    assert os.fstat(taken[0]).st_ino != int(transaction.stamp.partition(":")[2])
    os.close(taken[0])
    await transaction.abort()


def test_leftover_of_an_unknown_owner_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner, in another container, may be about to lock it."""
    left = leave(tmp_path / name_of(replace(HERE, space="a" * 10)))
    kinds: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda _fd, kind: kinds.append(kind))
    assert clean(str(tmp_path), fsync=True) == ([], False)
    assert kinds == []
    assert clean(str(tmp_path), fsync=True, older_than_s=-1.0) == ([str(left)], False)
    assert kinds == [fcntl.LOCK_EX | fcntl.LOCK_NB]


def test_concurrent_cleans(dead, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = {str(leave(tmp_path / name_of(dead, number))) for number in range(60)}
    removed: list[list[str]] = []
    start = threading.Barrier(3)

    def run() -> None:
        start.wait()
        removed.append(clean(str(tmp_path), fsync=False)[0])

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path for each in removed for path in each} == left
    assert list(tmp_path.iterdir()) == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_leftover_removed_by_another_process_meanwhile(
    dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = leave(tmp_path / name_of(dead))
    sidecar = tmp_path / name_of(dead, 1, "-part-0")
    sidecar.write_text("sidecar")
    real = os.rename

    def rename(source: str, target: str, **where: int) -> None:
        shutil.rmtree(left)
        real(source, target, **where)

    monkeypatch.setattr(orphans.os, "rename", rename)
    assert clean(str(tmp_path), fsync=True) == ([str(sidecar)], False)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# --- files that are never removed ---------------------------------------------------------------------


def test_planted_names_are_left_alone(dead, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files that another program has created under, or moved to, the name of a leftover are not removed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "__0_0.distcp").write_text("mine")
    link = tmp_path / name_of(dead, 1)  # a symlink that a save had replaced looks the same
    link.symlink_to(precious)
    (tmp_path / name_of(dead, 2, "-part-0")).symlink_to(precious / "__0_0.distcp")
    os.mkfifo(tmp_path / name_of(dead, 3))
    inside = leave(tmp_path / name_of(dead, 4), names=())
    (inside / "__1_0.distcp").symlink_to(precious / "__0_0.distcp")
    (inside / "__2_0.distcp").symlink_to(precious)
    os.link(precious / "__0_0.distcp", inside / "__3_0.distcp")
    moved = leave(tmp_path / name_of(dead, 5), names=("thesis.tex",))
    mixed = leave(tmp_path / name_of(dead, 6), names=(".metadata", "__0_0.distcp", "thesis.tex"))
    (mixed / "step-1").mkdir()
    replaced = leave(tmp_path / name_of(dead, 7), names=())
    leave(replaced / "single", names=(".metadata", "thesis.tex"))
    assert clean(str(tmp_path), fsync=True, older_than_s=0.0) == ([str(link), str(inside)], False)
    assert (precious / "__0_0.distcp").read_text() == "mine"
    assert (moved / "thesis.tex").exists()
    assert sorted(os.listdir(mixed)) == [".metadata", "__0_0.distcp", "step-1", "thesis.tex"]
    assert (replaced / "single" / "thesis.tex").exists()
    assert "it holds other things than a checkpoint (thesis.tex)" in caplog.text
    assert "it holds other things than a checkpoint (step-1/, thesis.tex)" in caplog.text
    assert "it holds other things than a checkpoint (single/thesis.tex)" in caplog.text
    for path in sorted(tmp_path.glob(".*")):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give files away")
def test_leftovers_of_other_users_are_left_alone(dead, tmp_path: Path) -> None:
    left = leave(tmp_path / name_of(dead), changed_s=ANCIENT)
    sidecar = tmp_path / name_of(dead, 2, "-part-0")
    sidecar.touch()
    os.chown(left, 12345, -1)
    os.chown(sidecar, 12345, -1)
    assert clean(str(tmp_path), fsync=True, older_than_s=0.0) == ([], False)
    os.chown(left, 0, -1)
    assert clean(str(tmp_path), fsync=True) == ([str(left)], False)
    sidecar.unlink()


def test_directory_swapped_in_during_the_sweep_is_put_back(
    dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer process that cannot make its commit durable exchanges the two names again."""
    old = leave(tmp_path / name_of(dead), names=(".metadata",))
    new = leave(tmp_path / "new", names=(".metadata", "__0_0.distcp"))
    real = os.rename

    def rename(source: str, target: str, **where: int) -> None:
        if not (tmp_path / "old").exists():
            real(old, tmp_path / "old")
            real(new, old)
        real(source, target, **where)

    monkeypatch.setattr(orphans.os, "rename", rename)
    assert clean(str(tmp_path), fsync=True) == ([], True)
    assert sorted(os.listdir(old)) == [".metadata", "__0_0.distcp"]
    assert os.listdir(tmp_path / "old") == [".metadata"]
    shutil.rmtree(old)


# --- on demand ----------------------------------------------------------------------------------------


def test_leftovers_of_unknown_owners_are_removed_by_age(living, tmp_path: Path) -> None:
    other = replace(HERE, machine="c" * 10, boot="b" * 10, space="a" * 10)
    changed_s = orphans.time.time() - 5000
    gone = [
        leave(tmp_path / name_of(other, 1), changed_s=changed_s),
        leave(tmp_path / ".aiockpt-x.12.0123456789abcdef", changed_s=changed_s),
        tmp_path / ".aiockpt-x.13.0123456789abcdef",
    ]
    gone[2].write_text("a file")
    os.utime(gone[2], (changed_s, changed_s))
    stay = [
        leave(tmp_path / name_of(other, 2)),
        leave(tmp_path / name_of(other, 3), changed_s=changed_s),
        leave(tmp_path / name_of(living, 4), changed_s=changed_s),
        leave(tmp_path / name_of(other, 5), changed_s=changed_s),
    ]
    os.utime(stay[1] / "__0_0.distcp")  # recently written to
    held = hold(str(stay[3]))
    assert clean(str(tmp_path), fsync=True, older_than_s=5100.0)[0] == []
    assert clean(str(tmp_path), fsync=True, older_than_s=4000.0) == (sorted(map(str, gone)), True)
    assert sorted(tmp_path.iterdir()) == sorted(stay)
    held.release()
    for path in stay:
        shutil.rmtree(path)


@pytest.mark.asyncio
async def test_storage_cleans_on_demand(dead, workers, tmp_path: Path) -> None:
    storage = WrapperStorage(LocalStorage())
    left = leave(tmp_path / name_of(dead))
    assert await storage.clean(str(tmp_path), workers=workers) == [str(left)]
    assert await storage.clean(str(tmp_path), workers=workers) == []
    assert await storage.clean(str(tmp_path / "not" / "there"), workers=workers) == []
    (tmp_path / "file").touch()
    with pytest.raises(DeleteError, match="can't look for what killed processes have left") as caught:
        await storage.clean(str(tmp_path / "file"), workers=workers)
    assert isinstance(caught.value.__cause__, NotADirectoryError)


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_failed_removal_is_retried_by_the_next_save(
    workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage()
    transaction = await storage.begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    real, refusals = os.rmdir, 2

    def refuse(path: str, *args, **kwargs) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(WriteError, match=r"can't remove the unfinished checkpoint .*the next save beside it tries"):
        await transaction.abort()
    await save(storage, tmp_path / "a", workers)
    assert (tmp_path / transaction.ticket).exists()
    assert "can't remove the unfinished checkpoint" in caplog.text
    await save(storage, tmp_path / "b", workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.asyncio
async def test_leftovers_that_cannot_be_removed_do_not_fail_a_save(
    dead, workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = leave(tmp_path / name_of(dead))

    def refuse(path: str, *args, **kwargs) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        await save(LocalStorage(), tmp_path / "a", workers)
    assert f"can't remove what a killed process has left, {left}: [Errno 13]" in caplog.text
    assert (tmp_path / (left.name + "-swept")).exists()
    await save(LocalStorage(), tmp_path / "b", workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]

    def unreadable(*_args) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(orphans.os, "listdir", unreadable)
        await save(LocalStorage(), tmp_path / "c", workers)
    assert f"can't look for what killed processes have left in {tmp_path}" in caplog.text
