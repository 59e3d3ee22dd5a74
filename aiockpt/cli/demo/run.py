"""The steps of the demo: die in the middle of a save, resume, and compare with an uninterrupted run."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

import aiockpt
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
from aiockpt.cli.demo.events import Event, History, Saving, decode
from aiockpt.cli.demo.model import Trainer
from aiockpt.cli.diff import differences
from aiockpt.core.wording import plural
from aiockpt.format.names import HIDDEN, METADATA_NAME
from aiockpt.reading.info import TensorInfo
from aiockpt.reading.reader import CheckpointReader
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
_READ_BYTES = 1 << 16
_SHOWN_BYTES = 1 << 14  # of what a child process has written to its standard error


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
            display.say(
                f"A small GPT learns from the sources of Python's standard library, on {config.device}: "
                f"{config.steps} steps, a checkpoint every {config.every}."
            )
            display.say(f"Checkpoints go to {root}, and are {'kept' if keep else 'removed at the end'}.")
            code = Demo(config, root, display).perform()
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

    def perform(self) -> int:
        """Run all parts and return the exit code."""
        try:
            history = self._die()
            self._resume(history)
            reference = self._never_die()
            if not self._compare(history, reference):
                return DIFFERENT
            self._measure(reference)
        except (ChildError, aiockpt.AiockptError) as exc:
            self._display.title("The demo could not be completed")
            self._display.say(str(exc), "red")
            return INCOMPLETE
        return IDENTICAL

    def _die(self) -> History:
        """Train until a save is half done, then kill the process."""
        config, display = self._interrupted, self._display
        display.title("1. Train, and die in the middle of a save")
        history = History()
        numbers = range(config.every, config.steps + 1, config.every)
        kill_from = numbers[len(numbers) // 2]
        while (step := self._train(config, history, kill_from=kill_from)) is not None:
            victim = Path(config.directory, checkpoint_name(step))
            if not victim.exists():  # it gets its name when it is committed
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
            described = f"{plural(len(files), 'file')}, {'' if METADATA_NAME in files else 'no '}{METADATA_NAME}"
            say(f"Left behind, and now removed: {name} ({described}).")

    def _resume(self, history: History) -> None:
        """Continue from the newest checkpoint to the last step."""
        self._display.title("2. Resume from the newest checkpoint")
        self._train(self._interrupted, history)
        if not self._interrupted.rng:
            self._display.say("The random-number states of the checkpoint were ignored, as asked for.", "yellow")

    def _never_die(self) -> History:
        """Repeat the same run without an interruption."""
        self._display.title("3. The same run, never interrupted")
        history = History()
        self._train(self._uninterrupted, history)
        return history

    def _train(self, config: RunConfig, history: History, *, kill_from: float = math.inf) -> int | None:
        """Run the training loop as a process; kill it within the first save from step ``kill_from`` on.

        Return the step of the interrupted save, or None if the process ended by itself.
        """
        victim: int | None = None

        def on_event(event: Event) -> bool:
            nonlocal victim
            # Only once a save is complete, so that the next part has a checkpoint to resume from.
            armed = victim is None and bool(history.saved)
            if armed and isinstance(event, Saving) and event.phase in HALF_DONE and event.step >= kill_from:
                victim = event.step if any(Path(config.directory).glob(f"{HIDDEN}*")) else None
            history.add(event)
            self._display.show(event)
            return victim is not None

        with self._display.run(config.steps):
            killed = run_child("aiockpt.cli.demo.train", [config.to_json()], on_event)
        return victim if killed else None

    def _compare(self, history: History, reference: History) -> bool:
        """Compare all losses, and the last checkpoints bit by bit; return whether they are identical."""
        self._display.title("4. Compare")
        losses = compare_losses(history.losses, dict(reference.losses))
        name = checkpoint_name(self._interrupted.steps)
        states = asyncio.run(
            compare_checkpoints(Path(self._interrupted.directory, name), Path(self._uninterrupted.directory, name))
        )
        for line, good in describe_comparison(len(history.losses), self._interrupted.steps, losses, states):
            self._display.say(line, "green" if good else "red")
        same = losses is None and not states.differences
        if same:
            self._display.say("The resumed run is identical to the one that was never interrupted.", "bold green")
        else:
            self._display.say("The resumed run differs from the one that was never interrupted.", "bold red")
        return same

    def _measure(self, reference: History) -> None:
        """Train once more with ``torch.save``, and show how long both loops waited for their saves."""
        self._display.title("5. What the checkpoints cost")
        self._display.say("The same run once more, with torch.save and fsync:")
        stock = History()
        with tempfile.TemporaryDirectory(dir=self._root) as directory:
            self._train(replace(self._uninterrupted, directory=directory, torch_save=True), stock)
        console = self._display.console
        for table in (saves_table(reference), loops_table({"aiockpt": reference, "torch.save + fsync": stock})):
            console.print()
            console.print(table)
        for line in PRICE:
            self._display.say(line)


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


# --- child processes: run to the end, or killed on the way ----------------------------------------------


class ChildError(Exception):
    """A child process failed, or hung."""


def run_child(
    module: str, arguments: Sequence[str], on_event: Callable[[Event], bool], *, timeout_s: float = 120.0
) -> bool:
    """Run a module as a process until it ends, and pass each of its events to ``on_event``. Blocks.

    If ``on_event`` returns True, the process is killed with SIGKILL; so it is if the caller is interrupted or anything
    fails. Return whether ``on_event`` had it killed; False if the process had already ended by then.

    Raises:
        ChildError: the process failed by itself, or sent nothing for ``timeout_s``; with its standard error.
    """
    with tempfile.TemporaryFile() as errors, _start(module, arguments, errors) as process:
        killed = False
        try:
            for line in _lines(process, timeout_s):
                event = decode(line)
                if event is not None and on_event(event) and not killed:
                    process.kill()
                    killed = True
            code = process.wait(timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise ChildError(f"{module} was silent for {timeout_s:g} s\n{_tail(errors)}") from None
        finally:
            process.kill()
        if code != 0 and not killed:
            raise ChildError(f"{module} ended with exit code {code}\n{_tail(errors)}")
        return code != 0


def _start(module: str, arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # CUDA's matrix products are reproducible only with a workspace of fixed size. A new session keeps Ctrl-C away
    # from the child: its parent ends it.
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        start_new_session=True,
    )


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[bytes]:
    """Yield what a process prints until it closes its standard output; raise TimeoutError if it is silent so long."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    while select.select([fd], [], [], timeout_s)[0]:
        data = os.read(fd, _READ_BYTES)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    raise TimeoutError


def _tail(errors: IO[bytes]) -> str:
    """Return the end of the standard error."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _SHOWN_BYTES))
    return errors.read().decode(errors="replace").rstrip()


# --- comparison of two runs, bit by bit ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two states."""

    tensors: int
    nbytes: int  # of the tensors
    digests: tuple[str, str]  # the SHA-256 of each state
    differences: tuple[str, ...]  # the keys that differ


def compare_losses(seen: Iterable[tuple[int, float]], reference: Mapping[int, float]) -> str | None:
    """Describe the first difference between the losses of a resumed run and a reference; None if there is none.

    A step may be in ``seen`` more than once.
    """
    by_step: dict[int, list[float]] = {}
    for step, loss in seen:
        by_step.setdefault(step, []).append(loss)
    for step in sorted(by_step.keys() | reference.keys()):
        losses = by_step.get(step, [])
        if not losses or any(loss != reference.get(step) for loss in losses):
            return f"step {step}: loss {losses} when interrupted and resumed, {reference.get(step)} when not"
    return None


async def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Compare two checkpoints: keys, types, shapes and every bit."""
    async with aiockpt.open(first) as a, aiockpt.open(second) as b:
        found = await differences(a, b)
        tensors = [info for info in a.values() if isinstance(info, TensorInfo)]
        return Comparison(
            tensors=len(tensors),
            nbytes=sum(info.nbytes for info in tensors),
            digests=(await _digest(a), await _digest(b)),
            differences=tuple(each.key for each in (*found.changed, *found.removed, *found.added)),
        )


async def _digest(reader: CheckpointReader) -> str:
    """Return the SHA-256 of the values of a checkpoint, with their keys, dtypes and shapes."""
    sha = hashlib.sha256()
    values = await reader.read_many(dict.fromkeys(reader))
    for key, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            sha.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
            sha.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            sha.update(f"{key} {value!r}\n".encode())
    return sha.hexdigest()


# --- directories --------------------------------------------------------------------------------------

MADE = ("interrupted", "uninterrupted")
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


def remove_leftovers(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Remove the hidden directories of unfinished saves; yield the name of each, and the names of its files."""
    for leftover in sorted(directory.glob(f"{HIDDEN}*")):
        files = sorted(file.name for file in leftover.iterdir())
        shutil.rmtree(leftover)
        yield leftover.name, files
