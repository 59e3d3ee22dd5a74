"""A program with few file descriptors, or without its standard streams; each case in a process that is forked for it.

Run as ``python -m tests.faults.few_descriptors FOLDER LOOP WRITER``; it prints what went wrong, case by case.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import aiockpt

STATE = {"x": torch.arange(5000.0), "step": 3}
_LIMIT = 96
_CASE_S = 120


def _saves_and_loads(ckpt: aiockpt.SyncCheckpointer, path: Path) -> None:
    ckpt.save(STATE, path)
    assert torch.equal(ckpt.load(path)["x"], STATE["x"])


def with_few_left(left: int, folder: Path, writer: str) -> None:
    """Begin with so few descriptors; each call works, or raises; later, when there are more, everything works."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(taken.pop())
    ckpt = aiockpt.SyncCheckpointer(writer=writer)  # type: ignore[arg-type]
    told = None
    try:
        _saves_and_loads(ckpt, folder / "few")
    except aiockpt.AiockptError as exc:
        told = str(exc)
    assert left > 0 or told is not None
    assert told is None or "Too many open files" in told, told
    for fd in taken:
        os.close(fd)
    _saves_and_loads(ckpt, folder / "more")
    ckpt.close()


def without_streams(closed: Sequence[int], folder: Path, writer: str) -> None:
    """Do all that a program does that has closed some of its standard streams."""
    for fd in closed:
        os.close(fd)
    with aiockpt.SyncCheckpointer(writer=writer) as ckpt:  # type: ignore[arg-type]
        _saves_and_loads(ckpt, folder / "a")
        _saves_and_loads(ckpt, folder / "b")
    with aiockpt.SyncCheckpointer() as ckpt:
        _saves_and_loads(ckpt, folder / "c")


def ended(case: Callable[[], None], log: Path) -> str | None:
    """Run a case in a forked process; say how it ended where it did not end well."""
    child = os.fork()
    if child == 0:
        signal.alarm(_CASE_S)
        try:
            case()
        except BaseException:
            log.write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"exit code {code}: {log.read_text() if log.exists() else ''}"


def main(folder: Path, loop: str, writer: str) -> None:
    """Run all cases; of those with a process to start, some."""
    if loop == "asyncio":
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as where it is not installed
    assert aiockpt.SyncCheckpointer  # which is imported at its first use
    gc.freeze()  # or collections in the cases would copy the pages of all that is imported
    cases: dict[str, Callable[[Path], None]] = {}
    for left in range(21) if writer == "thread" else (0, 1, 2, 3, 5, 8, 13):
        cases[f"{left} left"] = lambda own, left=left: with_few_left(left, own, writer)  # type: ignore[misc]
    for count in range(1, 4) if writer == "thread" else (3,):
        for closed in itertools.combinations(range(3), count):
            cases[f"without {closed}"] = lambda own, closed=closed: without_streams(closed, own, writer)  # type: ignore[misc]
    for number, (name, case) in enumerate(cases.items()):
        own = folder / str(number)
        own.mkdir()
        wrong = ended(lambda case=case, own=own: case(own), folder / f"{number}.log")  # type: ignore[misc]
        if wrong is not None:
            sys.stdout.write(f"{name}: {wrong}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
