"""A save beside a training loop that holds its event loop 95% of the time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.measure import Runs, Sample, close, interleave
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, size_of, transformer_state
from benchmarks.limits import machine
from benchmarks.peers import checkpoints
from benchmarks.peers.contenders import Aiockpt, DcpAsyncSave, Saver
from benchmarks.report.bars import Bar, by_name, compare
from benchmarks.report.report import Report, Table, median_time, spread

OPTIONS = ("gib", "tensors", "rounds", "only", "hold")
ROUNDS = 5

HELD_S = 0.0475
FREE_S = 0.0025

Hold = Callable[[float], None]
Training = Callable[[], AbstractAsyncContextManager[None]]


def hold_by_torch(seconds: float) -> None:
    """Multiply matrices in one thread, with the GIL released."""
    until = time.perf_counter() + seconds
    matrix = torch.ones(384, 384)
    while time.perf_counter() < until:
        torch.mm(matrix, matrix)


def hold_by_python(seconds: float) -> None:
    """Run plain Python, which holds the GIL."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


HOLDS: dict[str, Hold] = {"sleep": time.sleep, "torch": hold_by_torch, "python": hold_by_python}


@contextlib.asynccontextmanager
async def free_loop() -> AsyncIterator[None]:
    """Leave the loop free."""
    yield


@contextlib.asynccontextmanager
async def held_loop(hold: Hold) -> AsyncIterator[None]:
    """Train in the loop: hold it for each step, and release it for a moment between steps."""

    async def train() -> None:
        while True:
            hold(HELD_S)
            await asyncio.sleep(FREE_S)

    training = asyncio.create_task(train())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        training.cancel()


@contextlib.asynccontextmanager
async def busy_thread(hold: Hold) -> AsyncIterator[None]:
    """Do the same work in a thread: it needs the same cores, but leaves the loop free."""
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            hold(HELD_S)
            time.sleep(FREE_S)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        await asyncio.to_thread(thread.join)


@dataclass(frozen=True, slots=True)
class Case:
    """One saver, with one kind of training beside it."""

    name: str
    saver: Saver
    training: Training
    note: str = ""


def cases(savers: Sequence[Saver], holds: Sequence[str]) -> list[Case]:
    """Return each saver with each kind of training."""
    crossed = [Case(f"{saver.name}: free loop", saver, free_loop) for saver in savers]
    for kind in holds:
        hold = HOLDS[kind]
        for saver in savers:
            crossed.append(Case(f"{saver.name}: held by {kind}", saver, lambda hold=hold: held_loop(hold)))
            if kind != "sleep":
                name = f"{saver.name}: {kind} in a thread"
                crossed.append(Case(name, saver, lambda hold=hold: busy_thread(hold), "loop free, same work"))
    return crossed


async def measure(selected: Sequence[Case], state: State, directory: Path, rounds: int) -> list[Runs]:
    """Save in rounds, with training beside each save."""
    opened: list[Saver] = []

    async def save_once(case: Case, number: int) -> Sample:
        if case.saver not in opened:
            await case.saver.open(state)
            opened.append(case.saver)
        path = directory / f"{selected.index(case)}-{number}"
        machine.settle()
        try:
            async with case.training():
                sample = await case.saver.save(state, path)
            if case.saver.format is not None:
                checkpoints.check(case.saver.format, path, state)
            return sample
        finally:
            machine.remove(path)

    runs = await interleave(selected, rounds, save_once)
    for saver in opened:
        await close(saver, next(run for case, run in zip(selected, runs, strict=True) if case.saver is saver))
    return runs


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    torch.set_num_threads(1)
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    holds = [options.hold] if options.hold else ["sleep", "torch"]
    rounds = options.rounds or ROUNDS
    selected = chosen(cases([Aiockpt(), DcpAsyncSave("async")], holds), options.only)
    runs = await measure(selected, state, directory, rounds)
    columns = {
        "durable (min..max)": spread("written_s"),
        "seen by the caller": median_time("durable_s"),
        "staged, seen": median_time("staged_s"),
        "caller blocked": median_time("blocked_s"),
    }
    share = HELD_S / (HELD_S + FREE_S)
    title = f"blocked-loop: {size_of(state) / 2**30:.2f} GiB, loop held {share:.0%}, medians of {rounds} rounds"
    return Report(
        "blocked-loop",
        vars(options),
        machine.facts(directory),
        [Table(title, columns, runs, "written_s")],
        bars(runs, holds),
        ["durable: by the clock of who writes; seen: when the caller's loop came to know"],
    )


def bars(runs: Sequence[Runs], holds: Sequence[str]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    free = by_name(runs, "aiockpt: free loop")
    found = []
    for kind in holds:
        held, beside = by_name(runs, f"aiockpt: held by {kind}"), by_name(runs, f"aiockpt: {kind} in a thread")
        what = f"aiockpt: loop held by {kind} :"
        found.append(compare(f"{what} free loop, time to durable", [held], free, "written_s", 1.2, at_most=True))
        if beside.samples:
            found.append(compare(f"{what} the same work in a thread, time to durable", [held], beside, "written_s"))
    return found
