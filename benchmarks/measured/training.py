"""A training loop with checkpoints by each contender, compared with the same loop without checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

import aiockpt
from aiockpt.cli.demo import Config, Trainer
from benchmarks.harness.measure import Lag, Runs, Sample, close, interleave, quantile
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, size_of
from benchmarks.limits import machine
from benchmarks.peers import checkpoints
from benchmarks.peers.beside import AiockptBeside, Beside, PeerSaving, Saving, peers
from benchmarks.peers.contenders import Saver, torch_save
from benchmarks.report.bars import Bar, by_name, by_prefix, compare
from benchmarks.report.report import Report, Table, duration, median_time, number

OPTIONS = ("gib", "steps", "every", "rounds", "only")
DEFAULTS = {"gib": 0.25}
ROUNDS = 3

_WIDTH = 512
_NO_SAVE = "no checkpoints"
_OURS = ("aiockpt, thread", "aiockpt, process", "aiockpt, guard")


class NoSave(Beside):
    """The training loop without saves."""

    name, note = _NO_SAVE, "how fast the loop is by itself"

    def begin(self, state: State, path: Path) -> Saving:
        raise TypeError("nothing is saved here")


class GuardedAiockpt(AiockptBeside):
    """This package with `guard`, so that the optimizer's step waits instead of the loop."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__("thread")
        self.name = "aiockpt, guard"
        self._optimizer = optimizer
        self._guards = contextlib.ExitStack()

    async def open(self, state: State) -> None:
        await super().open(state)
        self._guards.enter_context(self.checkpointer.guard(self._optimizer))

    async def close(self) -> None:
        self._guards.close()
        await super().close()


class BlockingBeside(Beside):
    """A peer whose save blocks the loop."""

    def __init__(self, saver: Saver) -> None:
        self.name, self.note = saver.name, "blocks"
        self._saver = saver

    def begin(self, state: State, path: Path) -> Saving:
        began = time.perf_counter()
        sample = asyncio.run(self._saver.save(state, path))  # the training thread has no event loop
        written: Future[None] = Future()
        saving = PeerSaving(began, sample["blocked_s"], lambda: None, written)
        written.set_result(None)
        return saving


def trainer_of(nbytes: int) -> Trainer:
    """Return a trainer whose weights and optimizer state have about ``nbytes``."""
    block_bytes = 12 * _WIDTH * _WIDTH * 4 * 3  # weights, and two moments of each
    trainer = Trainer(Config(layers=max(1, nbytes // block_bytes), width=_WIDTH, context=64, steps=1_000_000))
    trainer.update(trainer.forward_backward())  # the first step creates the optimizer's state
    return trainer


def state_of(trainer: Trainer) -> State:
    """Return all tensors of the training state by name; their memory stays the same from step to step."""
    state = {f"model.{name}": parameter.detach() for name, parameter in trainer.model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        state |= {f"optim.{key}.{name}": value for key, value in trainer.optim.state[parameter].items()}
    return state


def train(trainer: Trainer, state: State, saver: Beside, directory: Path, steps: int, every: int) -> Sample:
    """Train for ``steps`` steps, with a save after every ``every``; return the times of the steps. Blocks."""
    took: list[float] = []
    saving: Saving | None = None
    guarded = isinstance(saver, GuardedAiockpt)
    for number_ in range(1, steps + 1):
        began = time.perf_counter()
        loss = trainer.forward_backward()
        if saving is not None and not guarded:
            saving.let_change()
        trainer.update(loss)
        if number_ % every == 0 and not isinstance(saver, NoSave):
            if saving is not None:
                saving.finish()  # one save at a time, as peers require
            saving = saver.begin(state, directory / f"step-{number_}")
        took.append(time.perf_counter() - began)
    if saving is not None:
        saving.finish()
    return {
        "train_s": sum(took),
        "step_p50_s": quantile(took, 0.5),
        "step_p99_s": quantile(took, 0.99),
        "step_max_s": max(took),
    }


def check(path: Path, state: State) -> None:
    """Load the last checkpoint; raise RuntimeError if it differs from the state."""
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        loaded = ckpt.load(path)
    different = sorted(set(loaded) ^ set(state))
    different += [name for name in state if name in loaded and not torch.equal(loaded[name], state[name])]
    if different:
        raise RuntimeError(f"{path} does not hold what was saved: {different}")


async def measure(savers: Sequence[Beside], options: Namespace, trainer: Trainer, directory: Path) -> list[Runs]:
    """Measure all contenders in the same training loop, in a thread beside an asyncio loop."""
    state = state_of(trainer)
    steps = options.steps - options.steps % options.every or options.every

    async def train_once(saver: Beside, round_: int) -> Sample:
        path = directory / f"{savers.index(saver)}-{round_}"
        path.mkdir()
        machine.settle()
        try:
            if round_ < 0:
                await saver.open(state)
            async with Lag() as lag:
                sample = await asyncio.to_thread(train, trainer, state, saver, path, steps, options.every)
            if "torch_checkpointing" in saver.name:  # a format of its own
                await asyncio.to_thread(checkpoints.check, "torch_checkpointing", path / f"step-{steps}", state)
            elif not isinstance(saver, NoSave):
                await asyncio.to_thread(check, path / f"step-{steps}", state)
        finally:
            machine.remove(path)
        return {**sample, **lag.sample()}

    runs = await interleave(savers, options.rounds or ROUNDS, train_once)
    for saver, run in zip(savers, runs, strict=True):
        await close(saver, run)
    return runs


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    trainer = trainer_of(int(options.gib * 2**30))
    savers: list[Beside] = [
        NoSave(),
        AiockptBeside("thread"),
        AiockptBeside("process"),
        GuardedAiockpt(trainer.optim),
        *peers(),
        BlockingBeside(torch_save()),
    ]
    runs = await measure(chosen(savers, options.only), options, trainer, directory)
    alone_s = by_name(runs, _NO_SAVE).median("train_s")
    columns = {
        "kept": lambda run: number(alone_s / run.median("train_s")),
        "step, median": median_time("step_p50_s"),
        "p99": median_time("step_p99_s"),
        "longest": lambda run: duration(run.most("step_max_s")),
        "p99 lag of a loop beside": median_time("lag_p99_s"),
        "longest lag": median_time("stall_s"),
    }
    nbytes = size_of(state_of(trainer))
    title = (
        f"training: {options.steps} steps, a save of {nbytes / 2**20:.0f} MiB after every {options.every}, "
        f"medians of {options.rounds or ROUNDS} rounds"
    )
    remarks = [
        "kept: the share of the steps per second without checkpoints; the wait for the save before counts",
        "every round's last checkpoint was loaded and compared",
    ]
    facts = machine.facts(directory)
    return Report("training", vars(options), facts, [Table(title, columns, runs, "train_s")], bars(runs), remarks)


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    alone, blocking = by_prefix(runs, _NO_SAVE), by_prefix(runs, "torch.save")
    beside, guard = by_prefix(runs, "dcp.async_save", "torch_checkpointing"), by_name(runs, "aiockpt, guard")
    return [
        *(
            compare(f"{name} : best asynchronous peer, steps per second", beside, by_name(runs, name), "train_s", 1)
            for name in _OURS
        ),
        compare("aiockpt, guard : best asynchronous peer, longest step", beside, guard, "step_max_s", 1),
        compare("aiockpt, guard : torch.save, steps per second", blocking, guard, "train_s", 1),
        *(
            compare(f"{name} : no checkpoints, steps per second", alone, by_name(runs, name), "train_s")
            for name in _OURS
        ),
    ]
