"""``aiockpt demo``: a model trains, dies in the middle of a save, and resumes exactly. `train` is the loop to copy."""

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
from aiockpt.reading.info import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the model, and one run of the training loop."""

    layers: int = 4
    width: int = 256  # of the residual stream
    context: int = 128  # bytes per sequence
    batch: int = 4
    steps: int = 32
    every: int = 8  # steps between two checkpoints
    seed: int = 0  # of the weights, the dropout and the choice of text
    device: str = "cpu"


class Trainer:
    """A small GPT in training, which predicts the next byte, and everything that its next step depends on."""

    def __init__(self, config: Config) -> None:
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
            seed_generator(config.seed)
        width = config.width
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, config.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.tokens, positions = nn.Embedding(256, width), nn.Embedding(config.context, width)
        for embedding in (self.tokens, positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.config = config
        self.model = nn.ModuleDict({"tokens": self.tokens, "positions": positions, "blocks": blocks}).to(config.device)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        sources = sorted(Path(aiockpt.__file__).parent.rglob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8)
        self.choice = torch.Generator().manual_seed(config.seed)  # of windows of the text
        self.step = 0  # how many steps are done
        self.losses = torch.full((config.steps,), torch.nan, dtype=torch.float64)  # NaN for the steps to come

    def forward_backward(self) -> float:
        """Compute the gradients of the next batch and return the loss; weights and optimizer stay unchanged."""
        model, context = self.model, self.config.context
        starts = torch.randint(len(self.text) - context, (self.config.batch, 1), generator=self.choice)
        windows = self.text[starts + torch.arange(context + 1)].long().to(self.config.device)
        self.optim.zero_grad()
        x = self.tokens(windows[:, :-1]) + model["positions"].weight
        mask = nn.Transformer.generate_square_subsequent_mask(context, device=x.device)
        with sdpa_kernel(SDPBackend.MATH):  # the gradients of the fused kernels are not reproducible on every device
            found = functional.linear(model["blocks"](x, mask, is_causal=True), self.tokens.weight)
            loss = functional.cross_entropy(found.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def update(self, loss: float) -> None:
        """Update the weights, which ends the step."""
        self.optim.step()
        self.losses[self.step] = loss
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on: to save, or to load into."""
        rng = {"global": aiockpt.RngState(), "text": self.choice.get_state()}
        return {"model": self.model, "optim": self.optim, "step": self.step, "losses": self.losses, "rng": rng}


async def train(trainer: Trainer, directory: Path, watch: DemoDisplay) -> None:
    """Train from the newest checkpoint in a directory if there is one, and save there on the way."""
    config = trainer.config
    async with aiockpt.CheckpointManager(directory, save=aiockpt.EverySteps(config.every)) as run:
        state = trainer.state()
        if await run.restore(state) is not None:  # it fills all but the step, and the state of a generator of our own
            trainer.step = state["step"]
            trainer.choice.set_state(state["rng"]["text"])
        await run.checkpointer.prewarm(state)  # makes the first save as fast as later ones
        watch.begin(trainer)
        save = None
        while trainer.step < config.steps:
            loss = await asyncio.to_thread(trainer.forward_backward)  # the save goes on meanwhile
            if save is not None:
                await watch.hold(save.staged)  # from here on the tensors may change
                save = None
            trainer.update(loss)
            if run.due(trainer.step, last=trainer.step == config.steps):
                await watch.before_save(trainer)
                save = await watch.hold(run.save(trainer.step, trainer.state(), pre_commit=watch.publishing))
                watch.follow(trainer.step, loss, save)
        await asyncio.gather(*watch.saves)


class DemoDisplay:
    """Shows a run, and measures what it waits for.

    Args:
        beside: a directory in which each state is saved with ``torch.save`` too; None: it is not.
        kill_at: the step whose save ends this process with SIGKILL, just before it is published.
    """

    def __init__(self, *, beside: Path | None = None, kill_at: int | None = None) -> None:
        self._beside, self._kill_at = beside, kill_at
        self.saves: list[asyncio.Task[None]] = []
        self.rows: list[tuple[str, ...]] = []  # of each save, as they are shown
        self.ours_s, self.stock_s = [0.0], [0.0]  # in which each save has held the loop; the first is none

    def begin(self, trainer: Trainer) -> None:
        """Show that training starts."""
        millions = sum(each.numel() for each in trainer.model.parameters()) / 1e6
        origin = f"resumed from {_name_of(trainer.step)}" if trainer.step else "from step 0"
        _say(f"GPT of {millions:.1f} million parameters, {origin}")
        self.began = time.perf_counter()

    async def hold(self, waited: Any) -> Any:
        """Await something of the newest save, and add how long that holds the loop."""
        began = time.perf_counter()
        found = await waited
        self.ours_s[-1] += time.perf_counter() - began
        return found

    async def before_save(self, trainer: Trainer) -> None:
        """Note that a step with a save is done; save its state with ``torch.save``, if wanted."""
        self.seconds = time.perf_counter() - self.began
        if self._beside is None:
            return
        self.ours_s.append(0.0)
        await self.hold(asyncio.gather(*self.saves))  # neither way to save slows the other
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=self._beside, suffix=".pt") as file:
            torch.save({"model": trainer.model.state_dict(), "optim": trainer.optim.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        self.stock_s.append(time.perf_counter() - began)

    def publishing(self, path: str) -> None:
        """End this process, if this is the save to die in."""
        if self._kill_at is not None and path.endswith(_name_of(self._kill_at)):
            os.kill(os.getpid(), signal.SIGKILL)

    def follow(self, step: int, loss: float, save: aiockpt.SaveHandle) -> None:
        """Show a save, from a task."""
        _say(f"step {step}: loss {loss:.3f}, saving {_name_of(step)}")
        self.saves.append(asyncio.create_task(self._follow(_name_of(step), save)))

    async def _follow(self, name: str, save: aiockpt.SaveHandle) -> None:
        bar = aiockpt.progress.bar(save, file=sys.stdout)
        done = await save.written
        await asyncio.to_thread(bar.join)
        staged, written = time_text(done.staged_s), time_text(done.written_s)
        self.rows.append((name, size_text(done.nbytes), staged, written))
        with contextlib.suppress(BrokenPipeError):  # the loop prints too, and raises it
            _say(f"{name}: staged after {staged}, durable after {written}")

    def show_costs(self) -> None:
        """Print how long each save took, and how long training waited for all but the last, which ends it."""
        held = zip(self.rows, self.ours_s[1:], self.stock_s[1:], strict=True)
        rows = [(*row[:2], time_text(ours), *row[2:], time_text(stock)) for row, ours, stock in held]
        print_table(("checkpoint", ">size", ">holds training", ">staged", ">durable", ">torch.save + fsync"), rows)
        ours, stock = sum(self.ours_s[:-1]), sum(self.stock_s[:-1])
        _say(f"\nIn {self.seconds - ours - stock:.1f} s of computing, training waited {time_text(ours)} for aiockpt,")
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
    watch = DemoDisplay(beside=root)
    asyncio.run(train(Trainer(config), uninterrupted, watch))
    watch.show_costs()
    _say("\n2. The same run in another process, which dies in the middle of a save", "bold")
    numbers = range(config.every, config.steps + 1, config.every)
    name = _name_of(step := numbers[len(numbers) // 2])
    run_until_killed(config, interrupted, step)
    (left,) = interrupted.glob(f"{HIDDEN}*")
    _say(f"Killed (SIGKILL) while {name} was being saved.")
    _say(f"There is no {name}: a checkpoint gets its name when it is complete and durable, never before.")
    _say(f"Left behind, and removed by the next run: {left.name}.")
    _say("\n3. Resume from the newest checkpoint", "bold")
    asyncio.run(train(Trainer(config), interrupted, DemoDisplay()))
    _say("\n4. Compare", "bold")
    is_same = asyncio.run(compare(*(folder / _name_of(config.steps) for folder in (interrupted, uninterrupted))))
    return Code.FINE if is_same else Code.PROBLEMS


def _prepare() -> None:
    """Make training reproducible in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA's matrix products need a workspace of fixed size
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(max(1, min(cores() // 2, 8)))  # results depend on it; the saves get the other cores


def run_until_killed(config: Config, directory: Path, kill_at: int) -> None:
    """Train in a process that dies within the save of a step; raise CommandError if it ends otherwise."""
    command = [python_program(), "-m", "aiockpt.cli.demo", str(directory), str(kill_at), json.dumps(asdict(config))]
    # A new session keeps Ctrl-C away from the process: this one ends it.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            code = process.wait()
        finally:
            process.kill()
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
        sizes = [info.nbytes for info in a.values() if isinstance(info, TensorInfo)]
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


def _name_of(step: int) -> str:
    return f"step-{step:08d}"


if __name__ == "__main__":
    _, folder, number, facts = sys.argv
    _prepare()
    try:
        asyncio.run(train(Trainer(Config(**json.loads(facts))), Path(folder), DemoDisplay(kill_at=int(number))))
    except BrokenPipeError:
        sys.exit(int(Code.CLOSED_PIPE))
