"""The time for which a save that has just begun holds the optimizer's step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import aiockpt
from benchmarks.gpu.rounds import Bench, matching
from benchmarks.gpu.stage import WRITERS
from benchmarks.gpu.training import Training
from benchmarks.harness.measure import Runs, Sample, close
from benchmarks.limits import machine
from benchmarks.peers.beside import LIMIT_S, AiockptBeside
from benchmarks.report.bars import Bar, by_name
from benchmarks.report.report import Table, duration, median_time

ROUNDS = 5
SHARE = 0.2

_AHEAD = ", host ahead"
_NOTHING = "no save"


class Hold:
    """A way to keep the optimizer from changing tensors that are not copied yet.

    Args:
        training: the training program.
        saver: the contender that saves.
        ahead: whether the program calls the optimizer's step while the device still computes the gradients; else it
            reads the loss first, which waits for the gradients.
    """

    name: str
    note: str = ""
    saves = True

    def __init__(self, training: Training, saver: AiockptBeside, *, ahead: bool) -> None:
        self.training, self.saver, self.ahead = training, saver, ahead
        self.name += ", process" * saver.name.endswith("process") + ahead * _AHEAD

    async def wait(self, handle: aiockpt.SaveHandle) -> None:
        """Wait until the step may be called."""

    async def once(self, path: Path) -> Sample:
        """Save, compute gradients and step; then cancel the save.

        Returns:
            ``until_step_s``: from the wait before the step until the step returns; ``whole_s``: from the save until the
            device is done; ``refused``: 1 if the save was refused with TornSnapshotError, else 0.
        """
        training, device = self.training, self.training.device
        device.synchronize()
        started = time.perf_counter()
        handle = self.saver.begin(training.state, path).handle if self.saves else None
        loss = training.forward_backward()
        if not self.ahead:
            loss.item()
        wanted = time.perf_counter()
        if handle is not None:
            await self.wait(handle)
        training.optimizer.step()
        stepped = time.perf_counter()
        device.synchronize()
        whole_s = time.perf_counter() - started
        refused = handle is not None and await self._call_off(handle, path)
        return {"until_step_s": stepped - wanted, "whole_s": whole_s, "refused": float(refused)}

    @staticmethod
    async def _call_off(handle: aiockpt.SaveHandle, path: Path) -> bool:
        try:
            await handle.staged
            if not await handle.cancel():
                machine.remove(path)
        except aiockpt.TornSnapshotError:
            return True
        return False


class NoSave(Hold):
    """The step without a save."""

    name, saves = _NOTHING, False


class Await(Hold):
    """``await save.staged``."""

    name, note = "await", "await save.staged"

    async def wait(self, handle: aiockpt.SaveHandle) -> None:
        await handle.staged


class Fence(Hold):
    """``save.fence()``: the device waits, not the program."""

    name, note = "fence", "save.fence()"

    async def wait(self, handle: aiockpt.SaveHandle) -> None:
        handle.fence(LIMIT_S)


class Guard(Hold):
    """``ckpt.guard(optimizer)``: the step itself waits."""

    name, note = "guard", "ckpt.guard(optimizer)"

    async def once(self, path: Path) -> Sample:
        with self.saver.checkpointer.guard(self.training.optimizer):
            return await super().once(path)


class Neither(Hold):
    """No wait: a change before the copy is detected, and the save is refused."""

    name, note = "neither", "nothing waits"


def holds(training: Training, savers: Sequence[AiockptBeside]) -> list[Hold]:
    """Return every way, in a program that waits for the gradients and in one that runs ahead."""
    thread, process = savers
    made: list[Hold] = []
    for ahead in (False, True):
        made += [kind(training, thread, ahead=ahead) for kind in (NoSave, Await, Fence, Guard, Neither)]
        made += [Fence(training, process, ahead=ahead)]
    return made


async def measure(bench: Bench, training: Training, rounds: int, only: str | None) -> list[Runs]:
    """Save and step in rounds."""
    savers = [AiockptBeside(writer) for writer in WRITERS]
    ways = matching(holds(training, savers), only)
    opened: list[AiockptBeside] = []

    async def hold_once(way: Hold, count: int) -> Sample:
        if way.saves and way.saver not in opened:
            await way.saver.open(training.state)
            opened.append(way.saver)
        return await way.once(bench.directory / f"hold-{ways.index(way)}-{count}")

    runs = await bench.rounds(ways, rounds, hold_once, share=SHARE, what="holding the step")
    for saver in opened:
        await close(saver, next(run for way, run in zip(ways, runs, strict=True) if way.saver is saver))
    return runs


def held_s(runs: Sequence[Runs], run: Runs) -> float:
    """Return the difference of the median times until the step returned, with and without a save."""
    nothing = by_name(runs, _NOTHING + _AHEAD * run.name.endswith(_AHEAD))
    longer_s = run.median("until_step_s") - nothing.median("until_step_s")
    return longer_s if math.isnan(longer_s) else max(0.0, longer_s)


def table(runs: Sequence[Runs], size: str) -> Table:
    """Return the table."""
    columns = {
        "step held": lambda run: duration(held_s(runs, run)),
        "until it returned (min..max)": lambda run: _milliseconds(run, "until_step_s"),
        "save to the step's end": median_time("whole_s"),
        "refused": lambda run: f"{sum(run.values('refused')):.0f} of {len(run.samples)}",
    }
    return Table(f"holding the step: a save of {size}, gradients, then the step", columns, runs)


def _milliseconds(run: Runs, what: str) -> str:
    least, most = (f(run.values(what)) * 1e3 for f in (min, max))
    return f"{run.median(what) * 1e3:.2f} ms ({least:.2f}..{most:.2f})"


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    found = []
    for name in ("fence", "fence, process", "guard", "await"):
        for ahead in (False, True):
            way = by_name(runs, name + _AHEAD * ahead)
            bound = None if name == "await" else 2
            found.append(Bar(f"step held, {way.name}", held_s(runs, way) * 1e3, bound, at_most=True, unit="ms"))
    return found
