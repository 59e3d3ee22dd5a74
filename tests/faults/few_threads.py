"""A program that gets no further thread, from each start of one on: for one start, or for all until the call has ended.

Run as ``python -m tests.faults.few_threads USE FOLDER``; it prints a line for whatever goes wrong, and how many starts
there were.
"""

from __future__ import annotations

import _thread as raw_threads
import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.manager import mirror

STATE = {"x": torch.arange(5000.0), "step": 3}


class Limit:
    """Fails starts of threads in this process: from the nth on, or that one only."""

    def __init__(self) -> None:
        self.left: float = float("inf")
        self.is_once = False
        self.has_struck = False
        for module in (threading, raw_threads):
            for name in ("_start_new_thread", "start_new_thread", "_start_joinable_thread", "start_joinable_thread"):
                if hasattr(module, name):
                    setattr(module, name, self._limited(getattr(module, name)))

    def _limited(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1 or (self.left < 0 and not self.is_once):
                self.has_struck = True
                raise RuntimeError("can't start new thread")
            return start(*args, **kwargs)

        return limited


def save_and_load(folder: Path, writer: Any) -> None:
    with aiockpt.SyncCheckpointer(writer=writer) as ckpt:
        ckpt.save(STATE, folder / "c", overwrite=True)
        assert torch.equal(ckpt.load(folder / "c")["x"], STATE["x"])
        assert ckpt.verify(folder / "c").ok
        ckpt.delete(folder / "c")


def manage(folder: Path) -> None:
    options: dict[str, Any] = {"keep": aiockpt.KeepLatest(1), "mirror": folder / "mirror"}
    with aiockpt.SyncCheckpointManager(folder / "run", **options) as run:
        run.restore(dict(STATE))
        for step in (1, 2):
            run.save(step, STATE, overwrite=True)


def manage_with_asyncio(folder: Path) -> None:
    async def main() -> None:
        async with aiockpt.CheckpointManager(folder / "run", keep=aiockpt.KeepLatest(1)) as run:
            await run.restore(dict(STATE))
            for step in (1, 2):
                await (await run.save(step, STATE, overwrite=True))

    asyncio.run(main())


USES: dict[str, Callable[[Path], None]] = {
    "thread": lambda folder: save_and_load(folder, "thread"),
    "process": lambda folder: save_and_load(folder, "process"),
    "manager": manage,
    "asyncio": manage_with_asyncio,
}


def others() -> list[threading.Thread]:
    """Return all threads but this one, and those that Python does not know."""
    found = threading.enumerate()
    return [
        each for each in found if each is not threading.main_thread() and not isinstance(each, threading._DummyThread)
    ]


def starts(use: Callable[[Path], None], limit: Limit, nth: int, *, is_once: bool, folder: Path) -> bool:
    """Use the package without the nth start, then with all; return whether there are so many."""
    limit.left, limit.is_once, limit.has_struck = nth, is_once, False
    try:
        use(folder)
    except (aiockpt.AiockptError, ExceptionGroup) as exc:
        if isinstance(exc, ExceptionGroup) or "can't" not in str(exc):
            sys.stdout.write(f"{nth} {is_once}: {exc!r}\n")
    except BaseException as exc:
        sys.stdout.write(f"{nth} {is_once}: {exc!r}\n")
    limit.left = float("inf")
    for thread in others():  # what was left behind ends soon
        thread.join(10)
    if found := [thread.name for thread in others()]:
        sys.stdout.write(f"{nth} {is_once} left: {found}\n")
    try:
        use(folder)
    except BaseException as exc:
        sys.stdout.write(f"{nth} {is_once}, later: {exc!r}\n")
    return limit.has_struck


if __name__ == "__main__":
    mirror._FIRST_RETRY_S, mirror._LONGEST_RETRY_S, mirror._PATIENCE_S = 0.01, 0.02, 0.1  # no thread will come
    use, folder = USES[sys.argv[1]], Path(sys.argv[2])
    use(folder / "first")
    limit = Limit()
    for is_once in (True, False):
        nth = 0
        while starts(use, limit, nth, is_once=is_once, folder=folder / f"{nth}-{is_once}"):
            nth += 1
    sys.stdout.write(f"starts {nth}\n")
