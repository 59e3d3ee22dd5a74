"""Cancellation of saves, and of coroutines that wait for them, at random moments; see `tests.cancellation`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.cancellation.moments import CHUNK, state_of
from tests.cancellation.ways import WAYS, Wait
from tests.states import assert_same
from tests.writing.gates import WAIT_S

_CANCEL = "handle.cancel"
_SHAPES: list[dict[str, Any]] = [
    {"staging_bytes": CHUNK},
    {"staging_bytes": 5 * CHUNK},
    {"staging_bytes": 64 * CHUNK},
    {"staging_bytes": 5 * CHUNK, "writer": "process"},
]
"""Staging pools of one chunk, of a few chunks that a save streams through, and with room for the whole state."""


@dataclass(slots=True)
class Counts:
    """The number of tries, and their outcomes.

    Attributes:
        cells: the distinct combinations of a save's phase, the way of cancelling, and the writer.
        saves: saves that were started.
        cancels: calls of ``handle.cancel()``.
        called_off: saves that were cancelled in time, and left nothing.
        left: waiters that were cancelled.
        written: saves that were written, and loaded back bit for bit.
        lost: saves that were neither written nor cancelled, or that differ from the state.
        wrong: failed checks, one line for each.
        seconds: the duration.
    """

    cells: set[tuple[str, str, str]] = field(default_factory=set)
    saves: int = 0
    cancels: int = 0
    called_off: int = 0
    left: int = 0
    written: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class _Trial:
    """One of the saves in flight."""

    save: aiockpt.SaveHandle
    state: dict[str, torch.Tensor]
    old: dict[str, torch.Tensor] | None
    asked: list[aiockpt.Completion[bool]] = field(default_factory=list)


def run_cancels(*, full: bool, folder: Path | None = None, seconds: float = 120.0, seed: int = 0) -> Counts:
    """Cancel saves and their waiters at random moments; a part of `python -m benchmarks crash`.

    Args:
        full: repeat until the time is over; else run a hundred rounds, which take some seconds.
        folder: the directory for checkpoints; None: /dev/shm if it exists.
        seconds: the time limit with ``full``.
        seed: the seed of the random choices; the moments still differ from run to run.
    """
    counts, rng, begin = Counts(), random.Random(seed), time.monotonic()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=folder or (memory if memory.is_dir() else None)) as own:
        number = 0
        while time.monotonic() - begin < seconds if full else number < 10:
            options = {"chunk_bytes": CHUNK, "io_threads": 2, **_SHAPES[number % len(_SHAPES)]}
            asyncio.run(_with_one(options, Path(own), rng, counts))
            number += 1
    counts.seconds = time.monotonic() - begin
    return counts


async def _with_one(options: dict[str, Any], folder: Path, rng: random.Random, counts: Counts) -> None:
    """Run ten rounds with one checkpointer; before each, a save has to succeed."""
    async with aiockpt.AsyncCheckpointer(**options) as ckpt:
        await ckpt.save(state_of(0), folder / "first")  # the first save takes longer than later ones
        for _ in range(10):
            begin = time.monotonic()
            await ckpt.save(state_of(0), folder / "first", overwrite=True)
            await _round(ckpt, folder, rng, counts, time.monotonic() - begin, options.get("writer", "thread"))
        shutil.rmtree(folder / "first")


async def _round(
    ckpt: aiockpt.AsyncCheckpointer, folder: Path, rng: random.Random, counts: Counts, usual_s: float, writer: str
) -> None:
    """Disturb up to three saves in flight, and check all that they leave."""
    published: list[str] = []
    trials = []
    for number in range(rng.randint(1, 3)):
        path, old = folder / f"c{number}", None
        if rng.random() < 0.5:
            old = state_of(rng.randint(1, 999), tensors=1)
            await ckpt.save(old, path)
        trials.append((path, old, state_of(rng.randint(1000, 9999), tensors=rng.randint(1, 6))))
    running = [
        _Trial(ckpt.save(state, path, overwrite=old is not None, post_commit=published.append), state, old)
        for path, old, state in trials
    ]
    counts.saves += len(running)
    await asyncio.gather(*(_disturb(trial, rng, counts, usual_s, writer) for trial in running))
    for trial in running:
        await _judge(ckpt, trial, counts)
    names = [trial.save.path for trial in running if trial.save.path in published]
    if published != names:
        counts.wrong.append(f"published as {published}, not as {names}")
    counts.wrong += [f"{name} was left" for name in _names(folder) - {"c0", "c1", "c2", "first"}]
    for path, _, _ in trials:
        shutil.rmtree(path, ignore_errors=True)


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


async def _disturb(trial: _Trial, rng: random.Random, counts: Counts, within_s: float, writer: str) -> None:
    """Cancel a save, or a coroutine that waits for it, a few times."""
    for _ in range(rng.randint(1, 3)):
        await asyncio.sleep(rng.choice([0, rng.uniform(0, within_s)]))
        way = _CANCEL if rng.random() < 0.3 else rng.choice(list(WAYS))
        phase = trial.save._last.phase if trial.save._last else "captured"
        counts.cells.add((phase, way, writer))
        if way == _CANCEL:
            counts.cancels += 1
            trial.asked.append(trial.save.cancel())
        elif not trial.save.written.done():
            counts.left += await _leave(way, partial(_wait, trial.save), trial.save)


async def _wait(save: aiockpt.SaveHandle) -> None:
    with contextlib.suppress(aiockpt.SaveCancelledError):
        await save


async def _leave(way: str, wait: Wait, save: aiockpt.SaveHandle) -> bool:
    """Cancel a waiter in the given way; return False if the save was over before."""
    try:
        await WAYS[way](wait)
    except (AssertionError, pytest.fail.Exception):
        if not save.written.done():
            raise
        return False
    return True


async def _judge(ckpt: aiockpt.AsyncCheckpointer, trial: _Trial, counts: Counts) -> None:
    """Check the end of a save: either all of it is there, or it was cancelled and left nothing."""
    path = Path(trial.save.path)
    try:
        await asyncio.wait_for(trial.save.written.settled(), WAIT_S)
        error = trial.save.written.exception()
        answers = {await answer for answer in trial.asked}
        if answers - {isinstance(error, aiockpt.SaveCancelledError)}:
            counts.wrong.append(f"{path.name}: cancel() said {answers}, and it ended with {error!r}")
        if error is None:
            assert_same(trial.state, await ckpt.load(path))
            counts.written += 1
            return
        if not (trial.asked and isinstance(error, aiockpt.SaveCancelledError)):
            raise error
        if trial.old is None and path.name in _names(path.parent):
            raise AssertionError("something was left")
        if trial.old is not None:
            assert_same(trial.old, await ckpt.load(path))
        counts.called_off += 1
    except (AssertionError, OSError, TimeoutError, aiockpt.AiockptError) as exc:
        counts.lost += 1
        counts.wrong.append(f"{path.name}: {type(exc).__name__}: {exc}")


if __name__ == "__main__":
    import sys

    found = run_cancels(full="--full" in sys.argv)
    print(f"{len(found.cells)} cells, {found.saves} saves, {found.cancels} cancels, {found.left} waiters cancelled")
    print(f"{found.called_off} called off, {found.written} written, {found.lost} lost, {found.seconds:.0f} s")
    print(*found.wrong, sep="\n")
