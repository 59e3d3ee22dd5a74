"""Shows a run of the training loop, and measures what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import aiockpt
from aiockpt.cli.output import console
from aiockpt.format.names import HIDDEN

if TYPE_CHECKING:
    from aiockpt.cli.demo.model import Trainer

OURS, TORCH_SAVE = "aiockpt", "torch.save + fsync"
"""The waits of an event loop."""
_HALF_DONE = ("staging", "staged", "writing")
"""The phases in which a save has started to copy, and nothing is published."""


def say(text: str = "", style: str = "") -> None:
    """Print a sentence, wrapped at words on a terminal."""
    console().print(text, style=style)


def name_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


class Watch:
    """Shows and measures one run.

    Args:
        beside: a directory in which each state is saved with ``torch.save`` too, for comparison; None: it is not.
        kill_from: from this step on, the first save that is half done ends this process with SIGKILL.

    Attributes:
        waits_s: how long each save held the loop, for each way of saving and each step.
        results: the results of the saves, by their steps.
        seconds: from the beginning to the end of the last step.
    """

    def __init__(self, *, beside: Path | None = None, kill_from: int | None = None) -> None:
        self._beside = beside
        self._kill_from = kill_from
        self._loss = 0.0
        self._saves: list[asyncio.Task[None]] = []
        self._began = 0.0
        self.seconds = 0.0
        self.waits_s: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.results: dict[int, aiockpt.SaveResult] = {}

    def begin(self, trainer: Trainer) -> None:
        """Show that training starts."""
        millions = sum(each.numel() for each in trainer.model.parameters()) / 1e6
        origin = f"resumed from {name_of(trainer.step)}" if trainer.step else "from step 0"
        say(f"GPT of {millions:.1f} million parameters, {origin}")
        self._began = time.perf_counter()

    def stepped(self, loss: float) -> None:
        """Note that a step is completed."""
        self.seconds, self._loss = time.perf_counter() - self._began, loss

    @contextlib.contextmanager
    def held(self, step: int, what: str) -> Iterator[None]:
        """Measure how long the context takes, in which the save after ``step`` steps holds the loop."""
        began = time.perf_counter()
        yield
        self.waits_s[what][step] += time.perf_counter() - began

    async def before_save(self, trainer: Trainer) -> None:
        """Save the same state with ``torch.save``, if wanted, and measure how long this takes."""
        if self._beside is None:
            return
        with self.held(trainer.step, OURS):  # the next save would wait for it as well
            await self.end()  # neither way to save slows the other
        with tempfile.NamedTemporaryFile(dir=self._beside, suffix=".pt") as file, self.held(trainer.step, TORCH_SAVE):
            torch.save({"model": trainer.model.state_dict(), "optim": trainer.optim.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def follow(self, step: int, save: aiockpt.SaveHandle) -> None:
        """Show a save, from a task."""
        say(f"step {step}: loss {self._loss:.3f}, saving {name_of(step)}")
        self._saves.append(asyncio.create_task(self._follow(step, save)))

    async def _follow(self, step: int, save: aiockpt.SaveHandle) -> None:
        bar = aiockpt.progress.bar(save, file=sys.stdout)
        async for event in save.progress():
            is_due = self._kill_from is not None and self._kill_from <= step and bool(self.results)
            if is_due and event.phase in _HALF_DONE and any(Path(save.path).parent.glob(f"{HIDDEN}*/*")):
                os.kill(os.getpid(), signal.SIGKILL)
        result = self.results[step] = await save.written
        await asyncio.to_thread(bar.join)
        text = f"staged after {result.staged_s * 1e3:.0f} ms, durable after {result.written_s * 1e3:.0f} ms"
        with contextlib.suppress(BrokenPipeError):  # the loop prints too, and raises it
            say(f"{name_of(step)}: {text}")

    async def end(self) -> None:
        """Wait until all saves are shown."""
        await asyncio.gather(*self._saves)
