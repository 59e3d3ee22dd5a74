"""One owner per run: real processes, running and dead, and owners on other hosts."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage.local import directories, temp_dir
from aiockpt.storage.local import lease as owner
from aiockpt.storage.local.lease import LOCK_NAME, LockFacts, is_finishing, owner_of, shares_locks, take
from aiockpt.storage.syscalls import open_directory
from tests.interruption import Interruption
from tests.manager.runs import empty, names, path_of, state_of

HOLD = """
import os, sys, aiockpt
with aiockpt.SyncCheckpointManager(sys.argv[1]) as run:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path, python: list[str]) -> Any:
    """A process that owns the run; its `owner` is the process ID of the program."""
    process: Any = subprocess.Popen(
        [*python, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.owner = int(process.stdout.readline())
    yield process
    process.communicate()


def test_second_owner_is_refused_and_told_the_first(tmp_path: Path, held: Any) -> None:
    before = time.time()
    with pytest.raises(aiockpt.RunLockedError) as caught, aiockpt.SyncCheckpointManager(tmp_path):
        pass
    assert (caught.value.host, caught.value.pid) == (socket.gethostname(), held.owner)
    assert before - 60 < caught.value.since < time.time()
    assert f"process {held.owner} on host {socket.gethostname()}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    run = aiockpt.SyncCheckpointManager(tmp_path)
    for use in (lambda: run.restore(empty()), lambda: run.save(1, state_of(1))):
        with pytest.raises(aiockpt.RunLockedError):
            use()
    run.close()
    with aiockpt.SyncCheckpointManager(tmp_path, read_only=True) as reader:  # readers need no lock
        assert reader.restore(empty()) is None
        assert reader.infos() == ()
    assert names(tmp_path) == [LOCK_NAME]
    facts = owner_of(str(tmp_path))
    assert facts is not None
    assert facts.pid == held.owner
    held.communicate()
    assert names(tmp_path) == []
    assert owner_of(str(tmp_path)) is None


@pytest.mark.parametrize("locks", [True, False], ids=["flock", "no flock"])
def test_lock_of_a_killed_owner_is_taken_over(
    tmp_path: Path, held: Any, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(held.owner, signal.SIGKILL)
    held.wait()
    assert names(tmp_path) == [LOCK_NAME]
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _unsupported)
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, state_of(1))
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert names(tmp_path) == [path_of(tmp_path, 1).name]


def _unsupported(fd: int, kind: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_without_flock_a_running_owner_is_known_by_its_lock_file(
    tmp_path: Path, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", _unsupported)
    with pytest.raises(aiockpt.RunLockedError) as caught:
        take(str(tmp_path))
    assert caught.value.pid == held.owner


def test_two_managers_of_one_process(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as first:
        with pytest.raises(aiockpt.RunLockedError), aiockpt.SyncCheckpointManager(tmp_path):
            pass
        first.save(1, state_of(1))
    with aiockpt.SyncCheckpointManager(tmp_path) as second:
        assert second.steps() == [1]


def test_call_interrupted_after_locking_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> bool:
        raise KeyboardInterrupt

    run = aiockpt.SyncCheckpointManager(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(directories, "is_finishing", interrupt)
        run.restore(empty())
    assert run.restore(empty()) is None
    run.close()
    assert names(tmp_path) == []


def test_close_in_a_forked_child_does_not_close_the_parents_run(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, state_of(1))
        child = multiprocessing.get_context("fork").Process(target=run.close)
        child.start()
        child.join(60)
        try:
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join()
        assert names(tmp_path) == [LOCK_NAME, path_of(tmp_path, 1).name]
        run.save(2, state_of(2))


def test_forked_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom aiockpt.storage.local.lease import take\nheld = take(sys.argv[1])\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n    os.write(w, b'1'); sys.stdin.read(); os._exit(0)\n"
        "os.read(r, 1); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE) as process:
        assert os.waitpid(process.pid, 0)[1] == signal.SIGKILL  # the child is still running
        process.returncode = -9
        taken = take(str(tmp_path))
        taken.release()


FACTS = LockFacts("elsewhere", 77, 1000.0, ".aiockpt-" + "b" * 10 + "c" * 10 + "d" * 10 + ".77.5." + "0" * 16)


def write(folder: Path, facts: LockFacts | str) -> None:
    text = facts if isinstance(facts, str) else json.dumps(asdict(facts))
    (folder / LOCK_NAME).write_text(text)


@pytest.mark.parametrize(
    ("locks", "shared", "is_taken"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_owner_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, shared: bool, is_taken: bool
) -> None:
    """A free lock proves the owner's death only if the file system shares locks between hosts."""
    write(tmp_path, FACTS)
    monkeypatch.setattr(owner, "shares_locks", lambda path: shared)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _unsupported)
    if is_taken:
        take(str(tmp_path)).release()
        return
    with pytest.raises(aiockpt.RunLockedError, match="if it does not, remove") as caught:
        take(str(tmp_path))
    assert (caught.value.host, caught.value.pid, caught.value.since) == ("elsewhere", 77, 1000.0)
    os.unlink(tmp_path / LOCK_NAME)
    taken = take(str(tmp_path))
    taken.release()
    assert names(tmp_path) == []


def test_liveness_of_an_owner() -> None:
    here = temp_dir.this_process()
    assert here is not None
    assert temp_dir.liveness(here, here) == "alive"
    assert temp_dir.liveness(replace(here, boot="b" * 10, space="b" * 10), here) == "dead"
    assert temp_dir.liveness(replace(here, machine="b" * 10, boot="b" * 10, space="b" * 10), here) == "unknown"
    assert temp_dir.liveness(replace(here, start=here.start - 1), here) == "dead"
    assert temp_dir.liveness(None, here) == "unknown"


TIMELESS = '{"host": "h", "pid": 1, "since": 1e300, "ticket": "x"}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}', TIMELESS])
def test_invalid_lock_file(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, text)
    assert owner_of(str(tmp_path)) is None
    take(str(tmp_path)).release()
    write(tmp_path, text)
    monkeypatch.setattr(fcntl, "flock", _unsupported)
    if text:
        with pytest.raises(aiockpt.RunLockedError, match="taking it now"):
            take(str(tmp_path))
    else:
        take(str(tmp_path)).release()


def test_lock_file_replaced_during_locking_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "")
    real = owner.lock
    replaced = []

    def lock(fd: int, kind: int) -> Any:
        if not replaced:
            replaced.append(os.unlink(tmp_path / LOCK_NAME))
        return real(fd, kind)

    monkeypatch.setattr(owner, "lock", lock)
    taken = take(str(tmp_path))
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    taken.release()
    taken.release()
    assert names(tmp_path) == []


def test_symlink_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(tmp_path / "other")
    with pytest.raises(aiockpt.AiockptError, match="can't be locked"), aiockpt.SyncCheckpointManager(tmp_path / "run"):
        pass
    assert (tmp_path / "other").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.parametrize("state", ["free", "dead", "empty"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("locks", [True, False], ids=["flock", "no flock"])
def test_one_of_two_that_take_a_run_at_once_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, links: bool, state: str
) -> None:
    """A second taker runs before each system call of the first one."""
    here = temp_dir.this_process()
    assert here is not None
    dead = f".aiockpt-{replace(here, start=here.start - 1)}.{'0' * 16}"
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _unsupported)
    if not links:
        monkeypatch.setattr(os, "link", _unlinked)
    monkeypatch.setattr(owner, "_PAUSE_S", 0.0)

    def attempt() -> None:
        try:
            taken.append(take(str(tmp_path)))
        except aiockpt.RunLockedError as exc:
            refused.append(exc)

    for number in range(1000):
        if state != "free":
            write(tmp_path, replace(FACTS, ticket=dead, pid=here.pid) if state == "dead" else "")
        taken: list[Any] = []
        refused: list[aiockpt.RunLockedError] = []
        with monkeypatch.context() as patch:
            interruption = Interruption(patch, number, attempt)
            attempt()
        if not interruption.is_over:
            break
        assert (len(taken), len(refused)) == (1, 1), number
        assert owner_of(str(tmp_path)) == taken[0].facts
        taken[0].release()
        assert names(tmp_path) == []
    assert number > 5
    taken[0].release()


def _unlinked(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_lock_file_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it seen without its flock."""
    seen = []

    def look() -> None:
        if not os.path.lexists(tmp_path / LOCK_NAME):
            return
        with open(tmp_path / LOCK_NAME, "rb") as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(owner.read_facts(file.fileno()))

    for number in range(1000):
        with monkeypatch.context() as patch:
            interruption = Interruption(patch, number, look)
            taken = take(str(tmp_path))
        if not interruption.is_over:
            break
        assert not seen or seen.pop() == taken.facts
        taken.release()
    taken.release()
    assert number > 5


ORPHANED = """
import ctypes, os, signal, sys
from aiockpt.storage.local.lease import take
held = take(sys.argv[1])
child = ctypes.PyDLL(None).fork()  # as of C code, so that no hook of Python closes the lock's descriptor
if child == 0:
    signal.pause()
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


def test_refusal_names_the_child_that_holds_the_lock_of_its_dead_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_PAUSE_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", ORPHANED, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert process.wait() == -signal.SIGKILL
            with pytest.raises(aiockpt.RunLockedError) as caught:
                take(str(tmp_path))
        finally:
            os.kill(child, signal.SIGKILL)
    text = str(caught.value)
    assert f"process {process.pid} on host {socket.gethostname()}" in text
    assert "is dead" in text
    assert f"its lock is still held by process {child} (" in text
    assert "end that program first" not in text
    assert caught.value.pid == process.pid


def test_refusal_where_nothing_names_the_holder_of_a_dead_owners_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_PAUSE_S", 0.0)
    monkeypatch.setattr(owner, "_PROC", str(tmp_path / "none"))
    here = temp_dir.this_process()
    assert here is not None
    write(tmp_path, replace(FACTS, ticket=f".aiockpt-{replace(here, start=here.start - 1)}.{'0' * 16}"))
    with (tmp_path / LOCK_NAME).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(aiockpt.RunLockedError, match="still held by another process, probably a child of it"):
            take(str(tmp_path))


@pytest.mark.parametrize("gone", ["the file", "the directory", "the directory, with a file in its place"])
def test_lost_lock_is_noticed_before_the_next_save(tmp_path: Path, gone: str) -> None:
    folder = tmp_path / "run"
    with aiockpt.SyncCheckpointManager(folder) as run:
        run.save(1, state_of(1))
        if gone == "the file":
            os.unlink(folder / LOCK_NAME)
        else:
            folder.rename(tmp_path / "moved")
            if "a file" in gone:
                folder.write_text("")
        with pytest.raises(aiockpt.RunLockedError, match="was removed") as caught:
            run.save(2, state_of(2))
        assert str(folder / LOCK_NAME) in str(caught.value)
        assert "make a new one" in str(caught.value)
        assert not path_of(folder, 2).exists()
        if gone != "the file":
            assert folder.exists() == ("a file" in gone)


def test_lost_lock_that_another_manager_has_taken(tmp_path: Path) -> None:
    run = aiockpt.SyncCheckpointManager(tmp_path)
    run.save(1, state_of(1))
    os.unlink(tmp_path / LOCK_NAME)
    taken = take(str(tmp_path))
    with pytest.raises(aiockpt.RunLockedError, match="being written by") as caught:
        run.save(2, state_of(2))
    assert (caught.value.pid, caught.value.since) == (os.getpid(), taken.facts.since)
    run.close()
    assert owner_of(str(tmp_path)) == taken.facts  # closing leaves the other's lock
    taken.release()


def test_lock_that_cannot_be_looked_at_is_no_lost_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(LOCK_NAME):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *args, **kwargs)

    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, state_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            run.save(2, state_of(2))
        assert "can't be looked at" in caplog.text
        assert run.steps() == [1, 2]


MOUNTS = """\
22 27 0:21 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:22 / /nfs rw,relatime - nfs4 server:/a rw,vers=4.2
24 22 0:23 / /nfs/far rw - nfs server:/b rw,local_lock=all
25 22 0:24 / /old rw - nfs server:/c rw,nolock,vers=3
26 22 0:25 / /lustre rw,flock - lustre a@tcp:/b rw,flock
27 22 0:26 / /lustre2 rw - lustre a@tcp:/b rw,localflock
28 22 0:27 / /with\\040space rw - fuse.sshfs far rw
29 22 0:28 / /covered rw - nfs4 server:/d rw
30 22 0:29 / /covered rw - fuse.x y rw
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/me/run", True),
        ("/nfs/run", True),
        ("/nfsx", True),
        ("/nfs/far/run", False),
        ("/old/run", False),
        ("/lustre/run", True),
        ("/lustre2/run", False),
        ("/with space/run", False),
        ("/covered/run", False),
    ],
)
def test_file_systems_that_share_locks(tmp_path: Path, path: str, shared: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert shares_locks(path, str(mounts)) is shared


def test_without_mountinfo_locks_are_not_shared(tmp_path: Path) -> None:
    assert not shares_locks("/x", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("")
    assert not shares_locks("/x", str(tmp_path / "empty"))


KILLED = """
import os, signal, sys, psutil, torch, aiockpt
run = aiockpt.SyncCheckpointManager(sys.argv[1], writer=aiockpt.ProcessWriter())
run.save(1, {"x": torch.ones(1_000_000)})
(writer,) = psutil.Process().children()
save = run.submit(2, {"x": torch.full((30_000_000,), 2.0)})
while not any(".aiockpt-" in file.path for file in writer.open_files()):
    pass
writer.suspend()
save.staged.result()
print(writer.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.kills
def test_checkpoint_finished_by_the_writer_process_of_a_killed_trainer_is_restored(
    tmp_path: Path, python: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([*python, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        writer = int(trainer.stdout.readline())
        assert trainer.wait() == -signal.SIGKILL
        asked = []

        def resuming(directory: str) -> bool:
            """Resume the writer process once the manager has seen that it must wait."""
            asked.append(is_finishing(directory))
            if asked == [True]:
                os.kill(writer, signal.SIGCONT)
            return asked[-1]

        monkeypatch.setattr(directories, "is_finishing", resuming)
        state = {"x": torch.zeros(30_000_000)}
        with aiockpt.SyncCheckpointManager(tmp_path) as run:
            start = run.restore(state)
    assert (asked[0], asked[-1]) == (True, False)
    assert start is not None
    assert (start.step, state["x"].unique().tolist()) == (2, [2.0])
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_only_locked_directories_of_dead_owners_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / temp_dir.new_ticket()).mkdir()
    here = temp_dir.this_process()
    assert here is not None
    dead = tmp_path / f".aiockpt-{replace(here, start=here.start - 1)}.{'0' * 16}"
    dead.mkdir()
    assert not is_finishing(str(tmp_path))
    with open_directory(str(dead)) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert is_finishing(str(tmp_path))
    assert not is_finishing(str(tmp_path))
    for each in tmp_path.iterdir():
        each.rmdir()
