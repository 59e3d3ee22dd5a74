"""The steps of the demo: die in the middle of a save, resume, and compare with an uninterrupted run."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import torch

import aiockpt
from aiockpt.cli.demo.child import ChildError, run_child
from aiockpt.cli.demo.compare import Comparison, compare_checkpoints, compare_losses
from aiockpt.cli.demo.config import ModelConfig, RunConfig
from aiockpt.cli.demo.display import (
    MIB,
    Display,
    checkpoint_name,
    describe_progress,
    loops_table,
    open_display,
    saves_table,
)
from aiockpt.cli.demo.events import Event, History, Saving
from aiockpt.cli.demo.model import Trainer
from aiockpt.format.names import HIDDEN, METADATA_NAME
from aiockpt.storage.local.storage import absolute

IDENTICAL, DIFFERENT, INCOMPLETE, INTERRUPTED = 0, 1, 3, 130
"""Exit codes; the last is the one that shells report after Ctrl-C."""
PRICE = (
    "Kept: the share of the time of the steps in which training did not wait for a save.",
    "Computing is the time of the faster loop, for both. The last save, after which nothing trains, is left out.",
    "Steps beside a save share the cores with it, which is not counted.",
)
STEP_S = 0.2
"""The time of a step with which the demo takes a minute."""
HALF_DONE = ("staging", "staged", "writing")
"""The phases in which a save has started to copy, and nothing is published."""


def run_demo(config: RunConfig, directory: Path | None, *, keep: bool, scale: bool = False) -> int:
    """Run the demo on standard output and return its exit code. Blocks.

    ``scale`` chooses the size of a batch by the speed of this machine.

    Raises:
        ValueError: there is no such device, or the directory is not empty.
    """
    check_device(config.device)
    display = open_display()
    began = time.perf_counter()
    try:
        config = replace(config, model=scaled(config)) if scale else config
        with workspace(directory, keep=keep) as root:
            display.say(describe_run(config))
            display.say(f"Checkpoints go to {root}, and are {'kept' if keep else 'removed at the end'}.")
            code = anyio.run(Demo(config, root, display).perform)
    except KeyboardInterrupt:
        display.say("Interrupted.", "red")
        return INTERRUPTED
    display.console.print()
    display.say(f"All of this took {time.perf_counter() - began:.0f} s.")
    return code


def check_device(device: str) -> None:
    """Raise ValueError if there is no such device, or if the demo can't use it."""
    try:
        kind = torch.device(device)
    except RuntimeError as exc:
        raise ValueError(f"{device} is no device: use cpu, cuda or cuda:N") from exc
    if kind.type not in ("cpu", "cuda"):
        raise ValueError(f"the demo runs on cpu, cuda or cuda:N, not on {device}")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {device}; torch sees {torch.cuda.device_count()} CUDA devices")


def scaled(config: RunConfig) -> ModelConfig:
    """Return the model with as large a batch as takes `STEP_S` per step on this machine, and at most the default."""
    torch.set_num_threads(config.threads)
    small = replace(config.model, batch=1)
    trainer = Trainer(small, steps=3, seed=config.seed, device=config.device)
    for _ in range(3):  # the first two warm up
        began = time.perf_counter()
        trainer.update(trainer.forward_backward())
    fitting = int(STEP_S / (time.perf_counter() - began))
    return replace(small, batch=max(1, min(fitting, ModelConfig().batch)))


class Demo:
    """One run of the demo, in an empty directory ``root``."""

    def __init__(self, config: RunConfig, root: Path, display: Display) -> None:
        self._root = root
        self._interrupted = replace(config, directory=str(root / "interrupted"))
        self._uninterrupted = replace(config, directory=str(root / "uninterrupted"))
        self._display = display

    async def perform(self) -> int:
        """Run all parts and return the exit code."""
        try:
            history = await self._die()
            await self._resume(history)
            reference = await self._never_die()
            if not await self._compare(history, reference):
                return DIFFERENT
            await self._measure(reference)
        except (ChildError, aiockpt.AiockptError) as exc:
            self._display.title("The demo could not be completed")
            self._display.say(str(exc), "red")
            return INCOMPLETE
        return IDENTICAL

    async def _die(self) -> History:
        """Train until a save is half done, then kill the process."""
        config, display = self._interrupted, self._display
        display.title("1. Train, and die in the middle of a save")
        history = History()
        numbers = range(config.every, config.steps + 1, config.every)
        kill_from = numbers[len(numbers) // 2]
        while (step := await self._train(config, history, kill_from=kill_from)) is not None:
            victim = Path(config.directory, checkpoint_name(step))
            if not is_committed(victim):
                self._show_wreck(victim, history.saves[step])
                return history
            display.say(f"Killed, but {victim.name} had just been completed. Once more, at the next save.")
            kill_from = step + 1
        raise ChildError("Every save was complete before it could be interrupted: train a larger model, or for longer.")

    def _show_wreck(self, victim: Path, save: Saving) -> None:
        """Show and remove the hidden directory of a killed save."""
        say = self._display.say
        say(f"Killed (SIGKILL) while {victim.name} was being saved; the last news: {describe_progress(save)}.")
        say(f"There is no {victim.name}: a checkpoint gets its name when it is complete and durable, never before.")
        for name, files in remove_leftovers(victim.parent):
            count = "1 file" if len(files) == 1 else f"{len(files)} files"
            described = f"{count}, {'' if METADATA_NAME in files else 'no '}{METADATA_NAME}"
            say(f"Left behind, and now removed: {name} ({described}).")

    async def _resume(self, history: History) -> None:
        """Continue from the newest checkpoint to the last step."""
        self._display.title("2. Resume from the newest checkpoint")
        await self._train(self._interrupted, history)
        if not self._interrupted.rng:
            self._display.say("The random-number states of the checkpoint were ignored, as asked for.", "yellow")

    async def _never_die(self) -> History:
        """Repeat the same run without an interruption."""
        self._display.title("3. The same run, never interrupted")
        history = History()
        await self._train(self._uninterrupted, history)
        return history

    async def _train(self, config: RunConfig, history: History, *, kill_from: float = math.inf) -> int | None:
        """Run the training loop as a process; kill it within the first save from step ``kill_from`` on.

        Return the step of the interrupted save, or None if the process ended by itself.
        """
        victim: int | None = None

        def on_event(event: Event) -> bool:
            nonlocal victim
            # Only once a save is complete, so that the next part has a checkpoint to resume from.
            armed = victim is None and bool(history.saved)
            if armed and isinstance(event, Saving) and event.phase in HALF_DONE and event.step >= kill_from:
                victim = event.step if _has_begun(config.directory) else None
            history.add(event)
            self._display.show(event)
            return victim is not None

        with self._display.run(config.steps):
            killed = await run_child("aiockpt.cli.demo.train", [config.to_json()], on_event)
        return victim if killed else None

    async def _compare(self, history: History, reference: History) -> bool:
        """Compare all losses, and the last checkpoints bit by bit; return whether they are identical."""
        self._display.title("4. Compare")
        losses = compare_losses(history.losses, dict(reference.losses))
        name = checkpoint_name(self._interrupted.steps)
        states = await compare_checkpoints(
            Path(self._interrupted.directory, name), Path(self._uninterrupted.directory, name)
        )
        for line, good in describe_comparison(len(history.losses), self._interrupted.steps, losses, states):
            self._display.say(line, "green" if good else "red")
        same = losses is None and not states.differences
        if same:
            self._display.say("The resumed run is identical to the one that was never interrupted.", "bold green")
        else:
            self._display.say("The resumed run differs from the one that was never interrupted.", "bold red")
        return same

    async def _measure(self, reference: History) -> None:
        """Train once more with ``torch.save``, and show how long both loops waited for their saves."""
        self._display.title("5. What the checkpoints cost")
        self._display.say("The same run once more, with torch.save and fsync:")
        stock = History()
        with scratch(self._root / "measure") as directory:
            await self._train(replace(self._uninterrupted, directory=str(directory), torch_save=True), stock)
        console = self._display.console
        for table in (saves_table(reference), loops_table({"aiockpt": reference, "torch.save + fsync": stock})):
            console.print()
            console.print(table)
        for line in PRICE:
            self._display.say(line)


def is_committed(checkpoint: Path) -> bool:
    """Return whether a checkpoint has its final name."""
    return checkpoint.exists()


def describe_run(config: RunConfig) -> str:
    """Describe the run."""
    return (
        f"A small GPT learns from the sources of Python's standard library, on {config.device}: "
        f"{config.steps} steps, a checkpoint every {config.every}."
    )


def describe_comparison(done: int, steps: int, losses: str | None, states: Comparison) -> Iterator[tuple[str, bool]]:
    """Describe the comparison; yield each sentence with whether it is good news."""
    if losses is None:
        yield f"The losses of all {steps} steps are identical ({done - steps} of them were done twice).", True
    else:
        yield f"The losses differ, first at {losses}.", False
    if not states.differences:
        size = f"{states.nbytes / MIB:.0f} MiB"
        yield f"All {states.tensors} tensors of weights, optimizer and random numbers ({size}) are bit-identical:", True
    else:
        yield f"The final states differ in {len(states.differences)} keys, first in {states.differences[0]}:", False
    for name, sha256 in zip(("resumed      ", "uninterrupted"), states.digests, strict=True):
        yield f"  {name}  sha256 {sha256[:32]}", not states.differences


def _has_begun(directory: str | Path) -> bool:
    """Return whether a save has created its hidden directory."""
    return any(Path(directory).glob(f"{HIDDEN}*"))


# --- directories --------------------------------------------------------------------------------------

MADE = ("interrupted", "uninterrupted", "measure")
"""The directories that the demo creates."""


@contextmanager
def workspace(directory: Path | None, *, keep: bool) -> Iterator[Path]:
    """Create and yield an empty directory, a temporary one for None; remove its contents afterwards unless ``keep``.

    Raises:
        ValueError: the directory is not empty.
    """
    directory = None if directory is None else Path(absolute(directory))
    made = directory is None or not directory.exists()
    root = Path(tempfile.mkdtemp(prefix="aiockpt-demo-")) if directory is None else directory
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise ValueError(f"{root} is not empty; name a directory that is, or that doesn't exist yet")
    try:
        yield root
    finally:
        if not keep:
            for name in MADE:
                if (root / name).exists():
                    shutil.rmtree(root / name)
            if made and not any(root.iterdir()):  # the user may have put files there
                root.rmdir()


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Create a directory, and remove it with its contents afterwards."""
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def remove_leftovers(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Remove the hidden directories of unfinished saves; yield the name of each, and the names of its files."""
    for leftover in sorted(directory.glob(f"{HIDDEN}*")):
        files = sorted(file.name for file in leftover.iterdir())
        shutil.rmtree(leftover)
        yield leftover.name, files
