"""The speed of staging from the device, compared with a plain copy into pinned memory."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import StagingOptions

import aiockpt
from benchmarks.gpu.device import Device, PinnedArena
from benchmarks.gpu.rounds import Bench, close_all, matching, memory_columns
from benchmarks.harness.measure import Runs, Sample
from benchmarks.harness.states import State, size_of
from benchmarks.limits import machine
from benchmarks.peers.beside import LIMIT_S, AiockptBeside
from benchmarks.peers.contenders import kept_stager
from benchmarks.report.bars import Bar, by_name, by_prefix, compare
from benchmarks.report.report import Table, duration, number, spread

ROUNDS = 5
SHARE = 0.15

_PLAIN = "plain pinned copy"
WRITERS = ("thread", "process")


class Stage:
    """A contender that copies a state to the host."""

    name: str
    note: str = ""

    async def open(self, state: State) -> None:
        """Create what is kept between rounds."""

    @abstractmethod
    async def stage(self, state: State, path: Path) -> Sample:
        """Copy the state once, and return the time as ``staged_s``."""

    async def close(self) -> None:
        """Release what `open` created."""


class PlainCopy(Stage):
    """The limit: every tensor copied into pinned memory, in a stream of its own."""

    name, note = _PLAIN, "one stream, one copy for each tensor"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arena: PinnedArena | None = None

    async def open(self, state: State) -> None:
        self._arena = PinnedArena(self._device, size_of(state))
        self._stream = self._device.stream()
        self._pairs, at = [], 0
        for tensor in state.values():
            place = self._arena.tensor[at : at + tensor.nbytes]
            self._pairs.append((place, tensor.detach().reshape(-1).view(torch.uint8)))
            at += tensor.nbytes

    async def stage(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        with torch.cuda.stream(self._stream) if self._device.is_gpu else contextlib.nullcontext():
            for place, source in self._pairs:
                place.copy_(source, non_blocking=True)
            self._device.mark()()
        return {"staged_s": time.perf_counter() - started}

    async def close(self) -> None:
        if self._arena is not None:
            self._pairs.clear()
            self._arena.close()


class AiockptStage(Stage):
    """This package; the save is cancelled when its tensors are staged."""

    def __init__(self, writer: str) -> None:
        self._saver = AiockptBeside(writer)
        self.name, self.note = self._saver.name, "with CRC and framing"

    async def open(self, state: State) -> None:
        await self._saver.open(state)

    async def stage(self, state: State, path: Path) -> Sample:
        handle = self._saver.begin(state, path).handle
        await handle.staged
        if not await handle.cancel():
            machine.remove(path)  # it was written before the cancel
        return {"staged_s": await staged_s(handle)}

    async def close(self) -> None:
        await self._saver.close()


async def staged_s(handle: aiockpt.SaveHandle) -> float:
    """Return the time at which a save was staged, as the thread that staged recorded it."""
    return min([event.elapsed_s async for event in handle.progress() if event.phase == "staged"])


class DcpStage(Stage):
    """The stager of ``dcp.async_save``, with pinned memory."""

    name, note = "dcp DefaultStager, pinned", "memory kept"

    def __init__(self, device: Device) -> None:
        self._options = StagingOptions(
            use_pinned_memory=device.is_gpu,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=device.is_gpu,
        )

    async def open(self, state: State) -> None:
        self._stager = kept_stager(self._options)

    async def stage(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        self._stager.stage(state).result(LIMIT_S)
        return {"staged_s": time.perf_counter() - started}

    async def close(self) -> None:
        if hasattr(self, "_stager"):
            self._stager.close()


async def measure(bench: Bench, state: State, rounds: int, only: str | None) -> list[Runs]:
    """Stage in rounds."""
    stages = matching([PlainCopy(bench.device), *map(AiockptStage, WRITERS), DcpStage(bench.device)], only)

    async def stage_once(stage: Stage, count: int) -> Sample:
        async def work() -> Sample:
            if count < 0:
                await stage.open(state)
            bench.device.synchronize()
            return await stage.stage(state, bench.directory / f"stage-{stages.index(stage)}-{count}")

        return await bench.watched(f"stage, {stage.name}", work)

    runs = await bench.rounds(stages, rounds, stage_once, share=SHARE, what="staging")
    await close_all(stages, runs)
    return runs


def table(runs: Sequence[Runs], nbytes: int, size: str) -> Table:
    """Return the table."""
    plain_s = by_name(runs, _PLAIN).median("staged_s")
    columns = {
        "staged (min..max)": spread("staged_s"),
        "GB/s": lambda run: number(nbytes / run.median("staged_s") / 1e9, 1),
        "of plain copy": lambda run: number(plain_s / run.median("staged_s")),
        "first": lambda run: duration(run.first["staged_s"]),
        **memory_columns(),
    }
    return Table(f"staging: {size} from the device", columns, runs)


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    plain = by_prefix(runs, _PLAIN)
    return [
        compare(f"staging, {name} : {_PLAIN}, speed", plain, by_name(runs, name), "staged_s", 0.9)
        for name in (f"aiockpt, {writer}" for writer in WRITERS)
    ]
