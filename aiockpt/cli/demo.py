"""``aiockpt demo``: a model trains, dies in the middle of a save, and resumes exactly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import aiockpt
from aiockpt.cli.app import Code, CommandError
from aiockpt.cli.diff import differences
from aiockpt.cli.output import console, print_table, size_text, time_text
from aiockpt.core.machine import cores, python_program
from aiockpt.core.wording import plural
from aiockpt.format.names import HIDDEN
from aiockpt.manager.scan import DEFAULT_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the model, and one run of the training loop."""

    layers: int = 4
    width: int = 256  # of the residual stream
    context: int = 128  # bytes per sequence
    steps: int = 32
    every: int = 8  # steps between two checkpoints
    device: str = "cpu"


class Trainer:
    """A small GPT in training, which predicts the next byte of the sources of aiockpt."""

    def __init__(self, config: Config) -> None:
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):  # the state has those of all
            seed_generator(0)
        self.config, width = config, config.width
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, config.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(config.context, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.model = nn.ModuleList([self.tokens, self.positions, self.blocks]).to(config.device)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.mask = nn.Transformer.generate_square_subsequent_mask(config.context, device=torch.device(config.device))
        sources = sorted(Path(aiockpt.__file__).parent.rglob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8)
        self.step = 0  # how many steps are done
        self.losses = torch.full((config.steps,), torch.nan, dtype=torch.float64)  # NaN for the steps to come

    def forward_backward(self) -> float:
        """Compute the gradients of the next batch and return the loss; weights and optimizer stay unchanged."""
        window = torch.arange(self.config.context + 1)
        text = self.text[torch.randint(len(self.text) - len(window), (4, 1)) + window].long().to(self.config.device)
        self.optim.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # the gradients of the fused kernels are not reproducible on every device
            found = self.blocks(self.tokens(text[:, :-1]) + self.positions.weight, self.mask, is_causal=True)
            scores = functional.linear(found, self.tokens.weight)
            loss = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def update(self, loss: float) -> None:
        """Update the weights, which ends the step."""
        self.optim.step()
        self.losses[self.step] = loss
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on: to save, or to load into."""
        return {"model": self.model, "optim": self.optim, "losses": self.losses, "rng": aiockpt.RngState()}


async def train(config: Config, directory: Path, *, beside: bool = False, kill_at: int = 0) -> None:
    """Train from the newest checkpoint in a directory if there is one, and save there on the way.

    ``beside``: save each state with ``torch.save`` too, and show the costs. ``kill_at``: die in the save of this step.
    """
    trainer, save = Trainer(config), None
    state, saves = trainer.state(), list[asyncio.Task[aiockpt.SaveResult]]()
    ours_s, stock_s = list[float](), list[float]()  # for which each save has held training
    async with aiockpt.CheckpointManager(directory, save=aiockpt.EverySteps(config.every)) as run:
        if (restored := await run.restore(state)) is not None:
            trainer.step = restored.step
        await run.checkpointer.prewarm(state)  # makes the first save as fast as later ones
        origin = "from step 0" if restored is None else f"resumed from {DEFAULT_NAMES.name_of(restored.step)}"
        _say(f"GPT of {trainer.parameters / 1e6:.1f} million parameters, {origin}")
        began = time.perf_counter()
        while trainer.step < config.steps:
            loss = await asyncio.to_thread(trainer.forward_backward)  # the save goes on meanwhile
            if save is not None:
                ours_s[-1] += await _held(save.staged)  # from here on the tensors may change
                save = None
            trainer.update(loss)
            if not run.due(trainer.step, last=trainer.step == config.steps):
                continue
            seconds = time.perf_counter() - began
            ours_s.append(0.0)
            if beside:
                ours_s[-1] += await _held(asyncio.gather(*saves))  # neither way to save slows the other
                stock_s.append(_save_by_torch(trainer, directory.parent))
            called = time.perf_counter()
            save = await run.save(trainer.step, state, pre_commit=_die if trainer.step == kill_at else None)
            ours_s[-1] += time.perf_counter() - called
            _say(f"step {trainer.step}: loss {loss:.3f}, saving {DEFAULT_NAMES.name_of(trainer.step)}")
            saves.append(asyncio.create_task(_follow(save)))
        results = await asyncio.gather(*saves)
    if beside:
        show_costs(results, ours_s, stock_s, seconds)


def _save_by_torch(trainer: Trainer, folder: Path) -> float:
    """Save with ``torch.save``, durably, and return how long that took."""
    began = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        torch.save({"model": trainer.model.state_dict(), "optim": trainer.optim.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


async def _held(waited: Awaitable[object]) -> float:
    """Wait, and return for how long."""
    began = time.perf_counter()
    await waited
    return time.perf_counter() - began


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _follow(save: aiockpt.SaveHandle) -> aiockpt.SaveResult:
    """Show a save until it is durable."""
    bar = aiockpt.progress.bar(save, file=sys.stdout)
    done = await save.written
    await asyncio.to_thread(bar.join)
    staged, written, name = time_text(done.staged_s), time_text(done.written_s), os.path.basename(done.path)
    with contextlib.suppress(BrokenPipeError):  # the loop prints too, and raises it
        _say(f"{name}: staged after {staged}, durable after {written}")
    return done


def show_costs(saves: list[aiockpt.SaveResult], ours_s: list[float], stock_s: list[float], seconds: float) -> None:
    """Print how long each save took, and how long training waited for all but the last, which ends it."""
    rows = []
    for done, ours, stock in zip(saves, ours_s, stock_s, strict=True):
        times = map(time_text, (ours, done.staged_s, done.written_s, stock))
        rows.append((os.path.basename(done.path), size_text(done.nbytes), *times))
    print_table(("checkpoint", ">size", ">holds training", ">staged", ">durable", ">torch.save + fsync"), rows)
    ours, stock = sum(ours_s[:-1]), sum(stock_s[:-1])
    _say(f"\nIn {seconds - ours - stock:.1f} s of computing, training waited {time_text(ours)} for aiockpt,")
    _say(f"and {time_text(stock)} for torch.save + fsync of the same states.")


# --- the steps of the demo ----------------------------------------------------------------------------


def run_demo(config: Config, directory: Path | None) -> Code:
    """Run the demo, in a temporary directory if none is given, and return its exit code. Blocks."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here: use cpu")
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="aiockpt-demo-", ignore_cleanup_errors=True) as temporary:
            return _run(config, Path(temporary), "removed at the end")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise typer.BadParameter(f"{directory} is not empty; name a directory that is, or that doesn't exist yet")
    return _run(config, directory.absolute(), "kept")


def _run(config: Config, root: Path, fate: str) -> Code:
    _prepare()
    uninterrupted, interrupted = root / "uninterrupted", root / "interrupted"
    plan = f"{config.steps} steps, a checkpoint every {config.every}"
    _say(f"A small GPT learns from the sources of aiockpt, on {config.device}: {plan}.")
    _say(f"Checkpoints go to {root}, and are {fate}.")
    _say("\n1. Save beside training, and the same states with torch.save", "bold")
    asyncio.run(train(config, uninterrupted, beside=True))
    _say("\n2. The same run in another process, which dies in the middle of a save", "bold")
    numbers = range(config.every, config.steps + 1, config.every)
    name = DEFAULT_NAMES.name_of(step := numbers[len(numbers) // 2])
    run_until_killed(config, interrupted, step)
    (left,) = interrupted.glob(f"{HIDDEN}*")
    _say(f"Killed (SIGKILL) while {name} was being saved.")
    _say(f"There is no {name}: a checkpoint gets its name when it is complete and durable, never before.")
    _say(f"Left behind, and removed by the next run: {left.name}.")
    _say("\n3. Resume from the newest checkpoint", "bold")
    asyncio.run(train(config, interrupted))
    _say("\n4. Compare", "bold")
    is_same = asyncio.run(
        compare(*(folder / DEFAULT_NAMES.name_of(config.steps) for folder in (interrupted, uninterrupted)))
    )
    return Code.FINE if is_same else Code.PROBLEMS


def _prepare() -> None:
    """Make training reproducible in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA's matrix products need a workspace of fixed size
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(max(1, min(cores() // 2, 8)))  # results depend on it; the saves get the other cores


def run_until_killed(config: Config, directory: Path, kill_at: int) -> None:
    """Train in a process that dies within the save of a step; raise CommandError if it ends otherwise."""
    command = [python_program(), "-m", "aiockpt.cli.demo", str(directory), str(kill_at), json.dumps(asdict(config))]
    try:  # a new session keeps Ctrl-C away from the process: `run` ends it
        code = subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False).returncode
    finally:
        if console().is_terminal:  # the process has hidden the cursor, and has not ended the line of its last bar
            console().show_cursor()
            _say()
    if code == Code.CLOSED_PIPE:
        raise BrokenPipeError
    if code != -signal.SIGKILL:
        raise CommandError(f"the demo could not be completed: the training process ended with exit code {code}")


async def compare(resumed: Path, uninterrupted: Path) -> bool:
    """Compare two checkpoints bit by bit, print the result, and return whether they are identical."""
    async with aiockpt.open(resumed) as a, aiockpt.open(uninterrupted) as b:
        found = await differences(a, b)
        sizes = [info.nbytes for info in a.values() if isinstance(info, aiockpt.TensorInfo)]
    if found:
        keys = [info.key for info in (*found.changed, *found.removed, *found.added)]
        _say(f"The resumed run differs in {plural(len(keys), 'key')}, first in {keys[0]}.", "bold red")
    else:
        what = f"All {len(sizes)} tensors of weights, optimizer, losses and random numbers ({size_text(sum(sizes))})"
        _say(f"{what} are bit-identical.", "green")
        _say("The resumed run is identical to the one that was never interrupted.", "bold green")
    return not found


def _say(text: str = "", style: str = "") -> None:
    console().print(text, style=style)


if __name__ == "__main__":
    _, folder, number, facts = sys.argv
    _prepare()
    try:
        asyncio.run(train(Config(**json.loads(facts)), Path(folder), kill_at=int(number)))
    except BrokenPipeError:
        sys.exit(int(Code.CLOSED_PIPE))
