"""The tracer records every call of all threads and processes in order, and can kill at it, refuse or shorten it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.lab.calls import FileCall
from tests.crash.lab.tracer import Action, Fail, Kill, Short, Trace, Tracer, TracerTimeoutError, why_not
from tests.crash.zygote import Zygote

BLOCK = 4096


def _run(
    child: Callable[[Path, Tracer], object],
    folder: Path,
    decide: Callable[[int, FileCall], Action | None] | None = None,
    deadline_s: float = 30.0,
) -> Trace:
    """Trace a function. Call it in a zygote."""
    tracer = Tracer(folder, with_data=True, deadline_s=deadline_s)
    return tracer.run(lambda: child(folder, tracer), decide)


def _at(name: str, action: Action, nth: int = 0) -> Callable[[int, FileCall], Action | None]:
    """Return a decision that applies an action to the nth call of this name."""
    seen = iter(range(1 << 30))
    return lambda number, call: action if call.name == name and next(seen) == nth else None


def _brief(trace: Trace, folder: Path) -> list[tuple[str, ...]]:
    below = f"{os.path.realpath(folder)}/"
    return [(call.name, *(path.removeprefix(below) for path in (call.path, call.to) if path)) for call in trace.calls]


# --- recording --------------------------------------------------------------------------------------------


def _every_kind(folder: Path, tracer: Tracer) -> None:
    os.chdir(folder)
    os.mkdir("sub")
    at = os.open("sub", os.O_RDONLY)
    fd = os.open("a", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=at)
    os.write(fd, b"hello")
    os.pwrite(fd, b"XY", 1)
    os.writev(fd, [b"abc", b"", b"defg"])
    os.pwritev(fd, [b"12", b"3"], 20)
    os.posix_fallocate(fd, 0, 64)
    os.ftruncate(fd, 9)
    os.fsync(fd)
    os.fdatasync(fd)
    os.fsync(at)
    tracer.mark("half")
    os.truncate("sub/a", 3)
    os.link("sub/a", "hard")
    os.symlink("sub/a", "soft")
    os.symlink("elsewhere", "b", dir_fd=at)
    os.rename("hard", "harder")
    os.rename("b", "c", src_dir_fd=at, dst_dir_fd=at)
    os.unlink("a", dir_fd=at)
    os.mkdir("gone", dir_fd=at)
    os.rmdir("gone", dir_fd=at)
    with open("/dev/null", "wb") as null:  # outside the directory: not recorded
        null.write(b"nothing")
    open("harder", "rb").close()  # reading is not recorded


def _every_kind_traced(folder: Path) -> None:
    trace = _run(_every_kind, folder)
    assert (trace.exit, trace.error) == (0, "")
    assert _brief(trace, folder) == [
        ("mkdir", "sub"),
        ("create", "sub/a"),
        *[("write", "sub/a")] * 4,
        ("allocate", "sub/a"),
        ("truncate", "sub/a"),
        ("sync", "sub/a"),
        ("sync", "sub/a"),
        ("sync", "sub"),
        ("mark", "/memfd:aiockpt-marks"),
        ("truncate", "sub/a"),
        ("link", "sub/a", "hard"),
        ("symlink", "soft", "sub/a"),
        ("symlink", "sub/b", "elsewhere"),
        ("rename", "hard", "harder"),
        ("rename", "sub/b", "sub/c"),
        ("unlink", "sub/a"),
        ("mkdir", "sub/gone"),
        ("rmdir", "sub/gone"),
    ]
    writes = [(call.offset, call.nbytes, call.result, call.data) for call in trace.calls if call.name == "write"]
    assert writes == [(0, 5, 5, b"hello"), (1, 2, 2, b"XY"), (5, 7, 7, b"abcdefg"), (20, 3, 3, b"123")]
    assert trace.marks == ["half"]
    of_file = {call.inode for call in trace.calls if call.path.endswith("sub/a") and call.inode}
    assert of_file == {(folder / "harder").stat().st_ino}
    assert trace.calls[0].inode == trace.calls[10].inode == (folder / "sub").stat().st_ino
    assert {call.process for call in trace.calls} == {trace.process}


def test_every_kind_of_call_is_recorded(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_every_kind_traced, tmp_path)


def _threads_and_processes(folder: Path, tracer: Tracer) -> None:
    def write(number: int) -> None:
        for part in range(20):
            (folder / f"{number}").open("ab").write(bytes([number, part]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    code = "import sys, threading; t = threading.Thread(target=lambda: open(sys.argv[1], 'w').write('x')); t.start()"
    subprocess.run([sys.executable, "-S", "-c", f"{code}; t.join()", folder / "python"], check=True)
    subprocess.run(["sh", "-c", 'echo y > "$0"', folder / "shell"], check=True)
    if os.fork() == 0:
        tracer.mark("forked")
        os._exit(7)
    os.wait()
    for thread in threads:
        thread.join()


def _threads_and_processes_traced(folder: Path) -> None:
    trace = _run(_threads_and_processes, folder)
    assert (trace.exit, trace.error) == (0, "")
    found = {str(number): bytearray() for number in range(4)}
    for call in trace.calls:
        name = os.path.basename(call.path)
        if call.name == "write" and name in found:
            assert call.offset == len(found[name])
            found[name] += call.data
    assert found == {str(n): b"".join(bytes([n, part]) for part in range(20)) for n in range(4)}
    assert len({call.thread for call in trace.calls if call.process == trace.process}) == 4
    assert sorted(trace.exits.values()) == [0, 0, 0, 7]
    assert trace.marks == ["forked"]
    others = {os.path.basename(call.path): call for call in trace.calls if call.process != trace.process}
    assert others.keys() == {"python", "shell", "memfd:aiockpt-marks"}
    assert others["python"].thread != others["python"].process  # made by a thread of another program


def test_threads_and_processes_are_followed(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_threads_and_processes_traced, tmp_path)


def _signals(folder: Path, tracer: Tracer) -> None:
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    signal.signal(signal.SIGALRM, lambda *_: got.append(2))
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    for number in range(50):
        (folder / f"{number}").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGUSR1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(3)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert got.count(1) == 50
    assert 2 in got


def _signals_traced(folder: Path) -> None:
    trace = _run(_signals, folder)
    assert (trace.exit, trace.error) == (0, "")
    assert len(trace.calls) == 100


def test_signals_are_delivered(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_signals_traced, tmp_path)


# --- actions ----------------------------------------------------------------------------------------------


def _three(folder: Path, tracer: Tracer) -> None:
    for number in range(3):
        (folder / f"{number}").write_bytes(b"abcdef")


def _killed(folder: Path) -> None:
    contents = lambda: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}  # noqa: E731
    for number, moment, left in (
        (0, "before", {}),
        (0, "after", {"0": b""}),
        (3, "before", {"0": b"abcdef", "1": b""}),
        (3, "after", {"0": b"abcdef", "1": b"abcdef"}),
    ):
        trace = _run(_three, folder, lambda n, _, at=number, when=moment: Kill(when) if n == at else None)
        assert trace.exit == -signal.SIGKILL
        assert contents() == left
        assert len(trace.calls) == number + (moment == "after")
        assert (trace.stopped is None) == (moment == "after")
        for path in folder.iterdir():
            path.unlink()
    _run(_three, folder, _at("write", Kill("after", nbytes=2), nth=1))
    assert contents() == {"0": b"abcdef", "1": b"ab"}


def test_a_process_is_killed_before_or_after_any_call(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_killed, tmp_path)


def _two_processes(folder: Path, tracer: Tracer) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end, or dies
        (folder / "child").touch()
        os._exit(0)
    os.close(reading)
    (folder / "parent").touch()
    os.close(writing)
    os.waitpid(child, 0)
    (folder / "end").touch()


def _parts_killed(folder: Path) -> None:
    for whom, name, left, exits in (
        ("first", "parent", {"parent", "child"}, [-9, 0]),
        ("caller", "child", {"parent", "child", "end"}, [-9, 0]),
        ("others", "parent", {"parent", "end"}, [-9, 0]),
        ("others", "child", {"parent", "child", "end"}, [-9, 0]),
        ("first", "child", {"parent", "child"}, [-9, 0]),
        ("all", "parent", {"parent"}, [-9, -9]),
    ):
        trace = _run(
            _two_processes, folder, lambda _, call, at=name, who=whom: Kill("after", who) if at in call.path else None
        )
        assert {path.name for path in folder.iterdir()} == left, whom
        assert sorted(trace.exits.values()) == exits, whom
        assert (trace.exit == -9) == (whom in ("first", "all")), whom
        for path in folder.iterdir():
            path.unlink()


def test_one_process_of_several_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    zygote.call(_parts_killed, tmp_path / "files")


def _forks_and_goes_on(folder: Path, tracer: Tracer) -> None:
    with contextlib.suppress(PermissionError):  # the children run only while their parent waits
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    reading, writing = os.pipe()
    for _ in range(5):
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            (folder / "child").touch()
            os._exit(0)
    (folder / "parent").touch()


def _just_started_killed(folder: Path) -> None:
    trace = _run(_forks_and_goes_on, folder, lambda _, call: Kill("after", "others") if "parent" in call.path else None)
    assert ([path.name for path in folder.iterdir()], sorted(trace.exits.values())) == (["parent"], [-9] * 5 + [0])


def test_processes_that_have_not_run_yet_are_killed(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    zygote.call(_just_started_killed, tmp_path / "files")


def _report_error(folder: Path, tracer: Tracer) -> None:
    try:
        _three(folder, tracer)
    except OSError as exc:
        tracer.mark(f"{exc.errno} {os.path.basename(exc.filename or '')}")


def _failed(folder: Path) -> None:
    trace = _run(_report_error, folder, _at("create", Fail(errno.EMFILE), nth=2))
    assert trace.marks == [f"{errno.EMFILE} 2"]
    assert trace.calls[4].result == -errno.EMFILE
    assert {path.name for path in folder.iterdir()} == {"0", "1"}
    trace = _run(_report_error, folder, _at("write", Fail(errno.ENOSPC)))
    assert trace.marks == [f"{errno.ENOSPC} "]
    trace = _run(_report_error, folder, _at("write", Fail(errno.EINTR)))  # Python itself retries after EINTR
    assert (trace.marks, [call.result for call in trace.calls if call.name == "write"]) == ([], [-errno.EINTR, 6, 6, 6])


def test_a_call_fails_with_any_error_number(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_failed, tmp_path)


def _writes(folder: Path, tracer: Tracer) -> None:
    fd = os.open(folder / "a", os.O_WRONLY | os.O_CREAT)
    for count in (os.write(fd, b"abcdef"), os.writev(fd, [b"", b"ghi", b"jkl"]), os.pwritev(fd, [b"mnopq", b"r"], 20)):
        tracer.mark(f"{count}")
    memory = mmap.mmap(-1, 4 * BLOCK)
    memory[:] = b"z" * len(memory)
    direct = os.open(folder / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        tracer.mark(f"{os.write(direct, memory)}")
    except OSError as exc:
        tracer.mark(f"{exc.errno}")


def _shortened(folder: Path) -> None:
    trace = _run(_writes, folder, lambda _, call: Short(2) if call.name == "write" and call.path[-1] == "a" else None)
    assert trace.error == ""
    assert trace.marks[:3] == ["2", "2", "2"]
    assert (folder / "a").read_bytes() == b"abgh" + bytes(16) + b"mn"
    for nbytes, answer in ((BLOCK, str(BLOCK)), (100, str(errno.EINVAL))):
        (folder / "direct").unlink()
        trace = _run(_writes, folder, _at("write", Short(nbytes), nth=3))
        assert trace.marks == ["6", "6", "6", answer]
        assert (folder / "direct").stat().st_size == (BLOCK if nbytes == BLOCK else 0)


def test_a_write_is_shortened(zygote: Zygote, tmp_path: Path) -> None:
    direct = tmp_path / "probe"
    try:
        os.close(os.open(direct, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        (tmp_path / "direct").touch()
    except OSError:
        pytest.skip("this file system has no direct I/O")
    zygote.call(_shortened, tmp_path)


# --- ends of processes ------------------------------------------------------------------------------------


def _hangs(folder: Path, tracer: Tracer) -> None:
    (folder / "a").write_bytes(b"")
    subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    signal.pause()


def _too_late(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TracerTimeoutError, match=r"within 0\.5 s.*\n.*name='create'"):
        _run(_hangs, folder, deadline_s=0.5)
    with pytest.raises(ZeroDivisionError):  # the decision itself fails
        _run(_hangs, folder, lambda *_: 1 / 0)
    with pytest.raises(ChildProcessError):  # no child is left, not even a zombie
        os.waitpid(-1, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_program_that_does_not_end_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_too_late, tmp_path)


def _raises(folder: Path, tracer: Tracer) -> None:
    raise RuntimeError("so it is" + "." * 100_000)


def _orphan(folder: Path, tracer: Tracer) -> None:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)  # returns when the parent has ended
        while os.getppid() == os.getpgid(0):
            time.sleep(0)
        (folder / "late").touch()
        os._exit(5)
    os._exit(0)


def _ends(folder: Path) -> None:
    trace = _run(_raises, folder)
    assert trace.exit == 1
    assert trace.error.endswith(".\n")
    trace = _run(_orphan, folder)  # the run lasts until all descendants have ended
    assert (trace.exit, sorted(trace.exits.values()), len(trace.calls)) == (0, [0, 5], 1)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, 0)


def test_exit_codes_and_the_error_are_reported(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_ends, tmp_path)


def _inside(folder: Path) -> None:
    trace = _run(lambda _, tracer: tracer.mark(why_not()), folder)  # a process has at most one tracer
    (reason,) = trace.marks
    assert reason.startswith("tracing is not permitted here: ")
    assert why_not() == ""


def test_why_not_reports_that_tracing_is_not_permitted(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(_inside, tmp_path)
