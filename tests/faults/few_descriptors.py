"""A program with few file descriptors or without its standard streams; each case runs in its own forked process.

Run as ``python -m tests.faults.few_descriptors FOLDER LOOP WRITER``; it prints a line for each case that fails.
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


def _save_and_load(ckpt: aiockpt.SyncCheckpointer, path: Path) -> None:
    ckpt.save(STATE, path)
    assert torch.equal(ckpt.load(path)["x"], STATE["x"])


def save_with_few_left(left: int, folder: Path, writer: str) -> None:
    """Save and load with this many free descriptors, which works or raises; then with more, which works."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(taken.pop())
    ckpt = aiockpt.SyncCheckpointer(writer=writer)  # type: ignore[arg-type]
    error = None
    try:
        _save_and_load(ckpt, folder / "few")
    except aiockpt.AiockptError as exc:
        error = str(exc)
    assert left > 0 or error is not None
    assert error is None or "Too many open files" in error, error
    for fd in taken:
        os.close(fd)
    _save_and_load(ckpt, folder / "more")
    ckpt.close()


def save_without_streams(closed: Sequence[int], folder: Path, writer: str) -> None:
    """Save and load after closing some of the standard streams."""
    for fd in closed:
        os.close(fd)
    with aiockpt.SyncCheckpointer(writer=writer) as ckpt:  # type: ignore[arg-type]
        _save_and_load(ckpt, folder / "a")
        _save_and_load(ckpt, folder / "b")
    with aiockpt.SyncCheckpointer() as ckpt:
        _save_and_load(ckpt, folder / "c")


def run_forked(case: Callable[[], None], log: Path) -> str | None:
    """Run a case in a forked process; return None if it succeeded, else its exit code and traceback."""
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
    """Run all cases with a writer thread, and some with a writer process, which takes longer to start."""
    if loop == "asyncio":
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as if it was not installed
    assert aiockpt.SyncCheckpointer  # a lazy import: do it before the forks
    gc.freeze()  # else collections in the forked cases would write to, and so copy, the pages of all imported objects
    cases: dict[str, Callable[[Path], None]] = {}
    for left in range(21) if writer == "thread" else (0, 1, 2, 3, 5, 8, 13):
        cases[f"{left} left"] = lambda own, left=left: save_with_few_left(left, own, writer)  # type: ignore[misc]
    for count in range(1, 4) if writer == "thread" else (3,):
        for closed in itertools.combinations(range(3), count):
            cases[f"without {closed}"] = lambda own, closed=closed: save_without_streams(closed, own, writer)  # type: ignore[misc]
    for number, (name, case) in enumerate(cases.items()):
        own = folder / str(number)
        own.mkdir()
        wrong = run_forked(lambda case=case, own=own: case(own), folder / f"{number}.log")  # type: ignore[misc]
        if wrong is not None:
            sys.stdout.write(f"{name}: {wrong}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
