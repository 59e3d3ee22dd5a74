"""The training loop to copy. It runs in the demo's process, and in one of its own that dies within a save."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import torch

import aiockpt
from aiockpt.cli.app import Code
from aiockpt.cli.demo.model import Config, Trainer
from aiockpt.cli.demo.watch import OURS, Watch
from aiockpt.core.machine import cores


async def train(trainer: Trainer, directory: Path, watch: Watch) -> None:
    """Train from the newest checkpoint in a directory if there is one, and save there on the way."""
    config = trainer.config
    async with aiockpt.CheckpointManager(directory, save=aiockpt.EverySteps(config.every)) as run:
        state = trainer.state()
        if not config.rng:
            del state["rng"]  # what the target lacks is not loaded
        if await run.restore(state) is not None:
            trainer.resume(state)
        await run.checkpointer.prewarm(state)  # makes the first save as fast as later ones
        watch.begin(trainer)
        save = None
        while trainer.step < config.steps:
            loss = await asyncio.to_thread(trainer.forward_backward)  # the save goes on meanwhile
            if save is not None:
                with watch.held(trainer.step, OURS):
                    await save.staged  # from here on the tensors may change
                save = None
            trainer.update(loss)
            watch.stepped(loss)
            if run.due(trainer.step, last=trainer.step == config.steps):
                await watch.before_save(trainer)
                with watch.held(trainer.step, OURS):
                    save = await run.save(trainer.step, trainer.state(), metrics={"loss": loss})
                watch.follow(trainer.step, save)
        await watch.end()


def prepare() -> None:
    """Make training reproducible in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA's matrix products need a workspace of fixed size
    torch.use_deterministic_algorithms(True)
    # Results depend on the number of threads. The saves get the other cores; and threads that share a core with another
    # program wait for each other most of the time.
    torch.set_num_threads(max(1, min(cores() // 2, 8)))


if __name__ == "__main__":
    _, directory, kill_from, facts = sys.argv
    prepare()
    config = Config(**json.loads(facts))
    try:
        asyncio.run(train(Trainer(config), Path(directory), Watch(kill_from=int(kill_from))))
    except BrokenPipeError:
        sys.exit(int(Code.CLOSED_PIPE))
