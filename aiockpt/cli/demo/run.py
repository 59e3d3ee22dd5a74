"""The steps of the demo: save beside training, die in the middle of a save, resume, and compare."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import typer

import aiockpt
from aiockpt.cli.app import Code, CommandError
from aiockpt.cli.demo.model import Config, Trainer
from aiockpt.cli.demo.train import prepare, train
from aiockpt.cli.demo.watch import OURS, TORCH_SAVE, Watch, name_of, say
from aiockpt.cli.diff import differences
from aiockpt.cli.output import console, print_table, size_text, time_text
from aiockpt.core.wording import plural
from aiockpt.format.names import HIDDEN, METADATA_NAME
from aiockpt.reading.info import TensorInfo
from aiockpt.storage.local.directories import absolute

_WIDTHS = (384, 256, 128)
_STEP_S = 0.25
"""The time of a step with which the demo takes a minute at most."""
_NEVER_KILLED = "every save was complete before it could be interrupted: train for more steps"
_PRICE = (
    "Kept: the share of the time in which training did not wait for a save. Both ways save the same states.",
    "The last save, after which nothing trains, is left out. Steps beside a save share the cores with it: not counted.",
)


def run_demo(config: Config, directory: Path | None, *, keep: bool, scale: bool) -> Code:
    """Run the demo on standard output and return its exit code. Blocks.

    Args:
        config: the model, and the run.
        directory: where the checkpoints go; None: a temporary directory.
        keep: leave them there.
        scale: choose the width of the model and the size of a batch by the speed of this machine.

    Raises:
        typer.BadParameter: there is no such device, or the directory is not empty.
        CommandError: the process that was to be killed has failed, or ended before.
        AiockptError: a save or a load has failed.
    """
    check_device(config.device)
    began = time.perf_counter()
    with workspace(directory, keep=keep) as root:
        prepare()
        config = scaled(config) if scale else config
        say(
            f"A small GPT learns from the sources of aiockpt, on {config.device}: {config.steps} steps, a checkpoint "
            f"every {config.every}."
        )
        say(f"Checkpoints go to {root}, and are {'kept' if keep else 'removed at the end'}.")
        uninterrupted, interrupted = (root / name for name in MADE)
        _title("1. Save beside training, and the same states with torch.save")
        watch = _train(config, uninterrupted, root)
        show_costs(watch, config)
        _title("2. The same run in another process, which dies in the middle of a save")
        _die(config, interrupted)
        _title("3. Resume from the newest checkpoint")
        _train(config, interrupted)
        if not config.rng:
            say("The random-number states of the checkpoint were ignored, as asked for.", "yellow")
        _title("4. Compare")
        is_same = asyncio.run(compare(*(folder / name_of(config.steps) for folder in (interrupted, uninterrupted))))
    say(f"\nAll of this took {time.perf_counter() - began:.0f} s.")
    return Code.FINE if is_same else Code.PROBLEMS


def check_device(device: str) -> None:
    """Raise typer.BadParameter if there is no such device, or if the demo can't use it."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(f"{device} is no device: use cpu, cuda or cuda:N") from None
    if kind.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"the demo runs on cpu, cuda or cuda:N, not on {device}")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"there is no device {device}; torch sees {torch.cuda.device_count()} CUDA devices")


def scaled(config: Config) -> Config:
    """Return the widest model, with the largest batch, of which a step takes `_STEP_S` on this machine."""
    for width in _WIDTHS:
        small = replace(config, width=width, batch=1)
        trainer = Trainer(small)
        for _ in range(3):  # the first two warm up
            began = time.perf_counter()
            trainer.update(trainer.forward_backward())
        fitting = int(_STEP_S / (time.perf_counter() - began))
        if fitting:
            break
    return replace(small, batch=max(1, min(fitting, config.batch)))


def _title(text: str) -> None:
    say(f"\n{text}", "bold")


def _train(config: Config, directory: Path, beside: Path | None = None) -> Watch:
    """Run the training loop in this process."""
    watch = Watch(beside=beside)
    asyncio.run(train(Trainer(config), directory, watch))
    return watch


def show_costs(watch: Watch, config: Config) -> None:
    """Print how long each save took, and which share of the time training went on."""
    ours, stock = watch.waits_s[OURS], watch.waits_s[TORCH_SAVE]
    rows = [
        (
            name_of(step),
            size_text(each.nbytes),
            *map(time_text, (ours[step], each.staged_s, each.written_s, stock[step])),
        )
        for step, each in watch.results.items()
    ]
    print_table(("checkpoint", ">size", ">holds training", ">staged", ">durable", f">{TORCH_SAVE}"), rows)
    waiting_s = {
        what: sum(waited for step, waited in waits.items() if step < config.steps)
        for what, waits in watch.waits_s.items()
    }
    computing_s = watch.seconds - sum(waiting_s.values())
    rows = [
        (what, time_text(waiting_s[what]), f"{computing_s / (computing_s + waiting_s[what]):.1%}")
        for what in (OURS, TORCH_SAVE)
    ]
    say(f"\n{computing_s:.1f} s of computing, and for the saves:")
    print_table(("", ">waiting", ">kept"), rows)
    for line in _PRICE:
        say(line)


def _die(config: Config, directory: Path) -> None:
    """Train in a process until a save is half done, which kills it; show what it has left."""
    numbers = range(config.every, config.steps + 1, config.every)
    kill_from = numbers[len(numbers) // 2]
    while kill_from <= config.steps:
        run_until_killed(config, directory, kill_from)
        done = max(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))
        victim = name_of(min(done + config.every, config.steps))
        for left in directory.glob(f"{HIDDEN}*"):
            files = [file.name for file in left.iterdir()]
            say(f"Killed (SIGKILL) while {victim} was being saved.")
            say(f"There is no {victim}: a checkpoint gets its name when it is complete and durable, never before.")
            described = f"{plural(len(files), 'file')}, {'' if METADATA_NAME in files else 'no '}{METADATA_NAME}"
            say(f"Left behind, and removed by the next run: {left.name} ({described}).")
            return
        say(f"Killed, but {name_of(done)} had just been completed. Once more, at the next save.")
        kill_from = done + 1
    raise CommandError(_NEVER_KILLED)


def run_until_killed(config: Config, directory: Path, kill_from: int) -> None:
    """Train in a process that dies within the first save from a step on; raise CommandError if it ends otherwise."""
    arguments = (str(directory), str(kill_from), json.dumps(asdict(config)))
    # A new session keeps Ctrl-C away from the process: this one ends it.
    process = subprocess.Popen(
        [sys.executable, "-m", "aiockpt.cli.demo.train", *arguments], stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        if console().is_terminal:  # the process has hidden the cursor, and has not ended the line of its last bar
            console().show_cursor()
            say()
    if code == Code.CLOSED_PIPE:
        raise BrokenPipeError
    if code == 0:
        raise CommandError(_NEVER_KILLED)
    if code != -signal.SIGKILL:
        raise CommandError(f"the demo could not be completed: the training process ended with exit code {code}")


async def compare(resumed: Path, uninterrupted: Path) -> bool:
    """Compare two checkpoints bit by bit, print the result, and return whether they are identical."""
    async with aiockpt.open(resumed) as a, aiockpt.open(uninterrupted) as b:
        found = await differences(a, b)
        losses, reference = [(await reader.read("losses")).tolist() for reader in (a, b)]
        tensors = [info for info in a.values() if isinstance(info, TensorInfo)]
    if losses != reference:
        step = next(number for number, both in enumerate(zip(losses, reference, strict=True)) if both[0] != both[1])
        say(f"The losses differ, first at step {step + 1}: {losses[step]} and {reference[step]}.", "red")
    if found:
        keys = [info.key for info in (*found.changed, *found.removed, *found.added)]
        say(f"The final states differ in {plural(len(keys), 'key')}, first in {keys[0]}.", "red")
        say("The resumed run differs from the one that was never interrupted.", "bold red")
    else:
        size = size_text(sum(info.nbytes for info in tensors))
        say(f"The losses of all {len(losses)} steps are identical.", "green")
        say(f"All {len(tensors)} tensors of weights, optimizer and random numbers ({size}) are bit-identical.", "green")
        say("The resumed run is identical to the one that was never interrupted.", "bold green")
    return not found


# --- directories --------------------------------------------------------------------------------------

MADE = ("interrupted", "uninterrupted")
"""The directories that the demo creates."""


@contextmanager
def workspace(directory: Path | None, *, keep: bool) -> Iterator[Path]:
    """Create and yield an empty directory, a temporary one for None; remove its contents afterwards unless ``keep``.

    Raises:
        typer.BadParameter: the directory is not empty.
    """
    root = Path(tempfile.mkdtemp(prefix="aiockpt-demo-") if directory is None else absolute(directory))
    made = directory is None or not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise typer.BadParameter(f"{root} is not empty; name a directory that is, or that doesn't exist yet")
    try:
        yield root
    finally:
        if not keep:
            for name in MADE:
                shutil.rmtree(root / name, ignore_errors=True)
            if made and not any(root.iterdir()):  # the user may have put files there
                root.rmdir()
