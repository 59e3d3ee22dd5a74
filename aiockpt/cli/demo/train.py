"""The training loop to copy. It runs as a separate process, and reports to its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import aiockpt
from aiockpt.cli.demo.config import RunConfig
from aiockpt.cli.demo.events import EventPipe, Held, Ready, Saved, Saving, Stepped
from aiockpt.cli.demo.model import Trainer


async def train(trainer: Trainer, directory: Path, *, steps: int, every: int, rng: bool, report: Report) -> None:
    """Train up to ``steps``, from the newest checkpoint in a directory if there is one, and save there on the way."""
    async with aiockpt.CheckpointManager(directory, save=aiockpt.EverySteps(every)) as run:
        state = trainer.state()
        if not rng:
            del state["rng"]  # what the target lacks is not loaded
        start = await run.restore(state)
        if start is not None:
            trainer.resume(state)
        report.ready(trainer, start)
        save = None
        while trainer.step < steps:
            loss = await asyncio.to_thread(trainer.forward_backward)  # the save goes on meanwhile
            if save is not None:
                with report.held(trainer.step):
                    await save.staged  # from here on the tensors may change
                save = None
            trainer.update(loss)
            report.stepped(trainer.step, loss)
            if run.due(trainer.step, last=trainer.step == steps):
                with report.held(trainer.step):
                    save = await run.save(trainer.step, trainer.state(), metrics={"loss": loss})
                report.saving(trainer.step, save)


def train_with_torch_save(trainer: Trainer, directory: Path, *, steps: int, every: int, report: Report) -> None:
    """Train from the start, and make checkpoints durable with ``torch.save`` at the same steps as `train`."""
    report.ready(trainer, None)
    while trainer.step < steps:
        loss = trainer.forward_backward()
        trainer.update(loss)
        report.stepped(trainer.step, loss)
        if trainer.step % every == 0 or trainer.step == steps:
            with report.held(trainer.step), (directory / f"step-{trainer.step}.pt").open("wb") as file:
                torch.save({"model": trainer.model.state_dict(), "optim": trainer.optim.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())


class Report:
    """Reports the progress of the loop to the parent process; ``tasks`` owns the tasks that follow saves."""

    def __init__(self, pipe: EventPipe, tasks: asyncio.TaskGroup) -> None:
        self._pipe = pipe
        self._tasks = tasks
        self._step_began = time.perf_counter()

    def ready(self, trainer: Trainer, start: aiockpt.Restored | None) -> None:
        """Report that training starts."""
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        self._pipe.send(Ready(trainer.step, parameters, None if start is None else Path(start.path).name))
        self._step_began = time.perf_counter()

    def stepped(self, step: int, loss: float) -> None:
        """Report a completed step."""
        now = time.perf_counter()
        self._pipe.send(Stepped(step, loss, now - self._step_began))
        self._step_began = now

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[None]:
        """Report how long the context took: the save after ``step`` steps blocks training for this time."""
        began = time.perf_counter()
        yield
        self._pipe.send(Held(step, time.perf_counter() - began))

    def saving(self, step: int, save: aiockpt.SaveHandle) -> None:
        """Report a started save, and its progress from a task."""
        self._pipe.send(Saving(step, "started"))
        self._tasks.create_task(self._follow(step, save))

    async def _follow(self, step: int, save: aiockpt.SaveHandle) -> None:
        async for event in save.progress():
            self._pipe.send(Saving(step, event.phase, event.staged_bytes, event.done_bytes, event.total_bytes))
        result = await save.written
        self._pipe.send(Saved(step, result.nbytes, result.staged_s, result.written_s))


async def main(config: RunConfig, pipe: EventPipe) -> None:
    """Train as configured, reproducibly."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(config.threads)
    trainer = Trainer(config.model, steps=config.steps, seed=config.seed, device=config.device)
    async with asyncio.TaskGroup() as tasks:
        report = Report(pipe, tasks)
        directory, steps, every = Path(config.directory), config.steps, config.every
        if config.torch_save:
            train_with_torch_save(trainer, directory, steps=steps, every=every, report=report)
        else:
            await train(trainer, directory, steps=steps, every=every, rng=config.rng, report=report)


if __name__ == "__main__":
    asyncio.run(main(RunConfig.from_json(sys.argv[1]), EventPipe()))
