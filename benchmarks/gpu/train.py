"""The pace of training while a checkpoint is saved, compared with the pace just before."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.gpu.rounds import Bench, close_all, matching, memory_columns
from benchmarks.gpu.stage import WRITERS
from benchmarks.gpu.training import Training
from benchmarks.harness.measure import Runs, Sample
from benchmarks.harness.states import size_of
from benchmarks.limits import machine
from benchmarks.measured.pace import Pace, compared, too_long
from benchmarks.measured.writers import NoSave, kept
from benchmarks.peers.beside import AiockptBeside, Beside, Saving, TorchCheckpointingBeside, peers
from benchmarks.report.bars import Bar, by_name, by_prefix
from benchmarks.report.report import Table, median_time, number, spread

ROUNDS = 3
SHARE = 0.6

_LOOK_AHEAD = 2
# The share of the available memory that the staging memory of all contenders may take together.
_SHARE_OF_MEMORY = 0.6


class Walk:
    """The steps of a training program that runs at most two steps ahead of the device.

    Args:
        training: the training program.
        saving: a save in progress; the first step waits until it allows the tensors to change.
    """

    def __init__(self, training: Training, saving: Saving | None = None) -> None:
        self._training, self._saving = training, saving
        self._marks: deque[Callable[[], object]] = deque()

    def step(self) -> None:
        """Run one step."""
        self._training.forward_backward()
        if self._saving is not None:
            self._saving.let_change()
            self._saving = None
        self._training.optimizer.step()
        self._marks.append(self._training.device.mark())
        if len(self._marks) > _LOOK_AHEAD:
            self._marks.popleft()()

    def until(self, over: Callable[[int, float], bool], started: float) -> Pace:
        """Run steps until ``over`` returns true; the time counts until the device is done."""
        steps, before = [], started
        while not steps or not over(len(steps), before - started):
            self.step()
            now = time.perf_counter()
            steps.append(now - before)
            before = now
        self._training.device.synchronize()
        return Pace(steps, time.perf_counter() - started)


def train_beside(training: Training, saver: Beside, path: Path, alone_s: float) -> Sample:
    """Measure the pace of training alone, then the pace from the call of a save until it is durable."""
    device = training.device
    device.synchronize()
    alone = Walk(training).until(lambda _, took_s: took_s >= alone_s, time.perf_counter())
    alone_bytes = device.most_held_bytes()
    device.forget_peak()
    started = time.perf_counter()
    saving = saver.begin(training.state, path)
    saved = Walk(training, saving).until(lambda _, took_s: saving.done() or too_long(took_s), started)
    sample = {**saving.finish(), **compared(alone, saved)}
    return {**sample, "steps": len(saved.steps_s), "device_bytes": max(0, device.most_held_bytes() - alone_bytes)}


async def measure(bench: Bench, training: Training, rounds: int, only: str | None, alone_s: float) -> list[Runs]:
    """Save in rounds beside training; split the contenders into groups whose staging memory fits."""
    candidates: list[Beside] = [NoSave(alone_s), *map(AiockptBeside, WRITERS), *installed(bench.device.type)]
    runs: list[Runs] = []
    groups = in_groups(matching(candidates, only), size_of(training.state))
    for index, group in enumerate(groups):
        share = SHARE / (len(groups) - index)
        runs += await _measure_group(bench, training, group, rounds, alone_s, share)
    return runs


def installed(device: str) -> list[Beside]:
    """Return the installed peers."""
    there = importlib.util.find_spec("torch_checkpointing") is not None
    return [peer for peer in peers(device) if there or not isinstance(peer, TorchCheckpointingBeside)]


def in_groups(savers: Sequence[Beside], nbytes: int) -> list[list[Beside]]:
    """Split a list so that the staging memory of each group fits."""
    fit = max(1, int(psutil.virtual_memory().available * _SHARE_OF_MEMORY / nbytes))
    return [list(savers[first : first + fit]) for first in range(0, len(savers), fit)]


async def _measure_group(
    bench: Bench, training: Training, savers: list[Beside], rounds: int, alone_s: float, share: float
) -> list[Runs]:
    async def save_once(saver: Beside, count: int) -> Sample:
        path = bench.directory / f"train-{savers.index(saver)}-{count}"

        async def work() -> Sample:
            if count < 0:
                await saver.open(training.state)
            return train_beside(training, saver, path, alone_s)

        try:
            return await bench.watched(f"train, {saver.name}", work)
        finally:
            machine.remove(path)

    runs = await bench.rounds(savers, rounds, save_once, share=share, what="training beside a save")
    await close_all(savers, runs)
    return runs


def table(runs: Sequence[Runs], nbytes: int, training: Training, size: str) -> Table:
    """Return the table."""
    columns = {
        "steps/s alone": lambda run: number(run.median("alone_per_s"), 1),
        "saving": lambda run: number(run.median("saving_per_s"), 1),
        "kept (min..max)": kept,
        "lost per save": median_time("lost_s"),
        "longest step": median_time("longest_s"),
        "call": median_time("blocked_s"),
        "durable (min..max)": lambda run: spread("durable_s")(run) if run.values("durable_s") else "-",
        "GB/s": lambda run: number(nbytes / run.median("durable_s") / 1e9),
        **memory_columns(),
    }
    return Table(f"training beside a save of {size}: {training.describe()}", columns, runs)


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    ours = [by_name(runs, f"aiockpt, {writer}") for writer in WRITERS]
    others = by_prefix(runs, "dcp", "torch_checkpointing", "no save")
    text = "training while saving : undisturbed"
    return [
        *(Bar(f"{text}, {run.name}", run.median("kept"), 0.97) for run in ours),
        *(Bar(f"{text}, {run.name}", run.median("kept")) for run in others),
    ]
