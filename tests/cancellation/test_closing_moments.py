"""Closing is cancelled at each of its suspensions, again and again, while the program's executor is full."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.commands import succeed

KINDS: dict[str, dict[str, Any]] = {
    "checkpointer": {},
    "manager": {},
    "mirror": {"mirror": True},
    "process": {"writer": "process"},
}


class _Canceller:
    """Cancels a task at its Nth suspension and those behind it; ``is_over`` once it has as many."""

    def __init__(self, first: int, times: int) -> None:
        self._left, self._times, self.is_over = first, times, False

    async def run(self, work: Any) -> None:
        """Await what may be cancelled, in a task of its own."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)  # the task runs until its next suspension
            waits = task._fut_waiter  # type: ignore[attr-defined]
            if self._left > 0:
                self._left -= 1
            elif self._times > 0:
                self._times -= 1
                self.is_over = True
                task.cancel()
                continue
            if waits is not None:
                await asyncio.wait([waits])
        await asyncio.gather(task, return_exceptions=True)


async def _close(kind: str, way: str, folder: Path, canceller: _Canceller) -> None:
    loop, full = asyncio.get_running_loop(), threading.Event()
    executor = ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    blocked = loop.run_in_executor(None, full.wait)
    try:
        options = dict(KINDS[kind])
        if options.pop("mirror", False):
            options["mirror"] = folder / "mirror"
        made: Any
        if kind == "checkpointer":
            made = aiockpt.AsyncCheckpointer()
            await made.save({"x": torch.ones(3)}, folder / "c")
        else:
            made = aiockpt.CheckpointManager(folder / "run", **options)
            await (await made.save(1, {"x": torch.ones(3)}))

        async def leave() -> None:
            async with made:
                pass

        await canceller.run(made.aclose() if way == "aclose" else leave())
    finally:
        full.set()
        await blocked
        executor.shutdown()


def _check(kind: str, way: str, times: int, folder: Path, most: int) -> int:
    """Cancel at each suspension, until there are no more; return at how many."""
    for moment in itertools.count():
        canceller = _Canceller(moment, times)
        place = folder / f"{moment}-{times}"
        place.mkdir()
        asyncio.run(_close(kind, way, place, canceller))
        for thread in threading.enumerate():  # closing may go on behind, for a moment
            if thread.name.startswith("aiockpt"):
                thread.join(30)
        assert not [each.name for each in threading.enumerate() if each.name.startswith("aiockpt")]
        assert kind == "checkpointer" or json.loads(succeed("ls", place / "run", "--json"))["owner"] is None
        shutil.rmtree(place / "mirror", ignore_errors=True)  # a copy that was interrupted is gone on with later
        if not canceller.is_over or moment >= most:
            return moment
    raise AssertionError("unreachable")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_closing_that_is_cancelled_twice(kind: str, tmp_path: Path) -> None:
    assert _check(kind, "aclose", 2, tmp_path, 3) > 0


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 6])
@pytest.mark.parametrize("way", ["aclose", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_closing_that_is_cancelled(kind: str, way: str, times: int, tmp_path: Path) -> None:
    assert _check(kind, way, times, tmp_path, 1000) > 0


def test_the_program_s_executor_is_not_used() -> None:
    """What the command line does is excepted: there, the program is ours."""
    package = Path(aiockpt.__file__).parent
    files = [file for file in package.rglob("*.py") if "cli" not in file.relative_to(package).parts]
    words = ("asyncio.to_thread(", "run_in_executor(None")
    assert [file.name for file in files if any(word in file.read_text() for word in words)] == []
