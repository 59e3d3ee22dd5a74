"""Saves and loads of a state on the device, end to end, with no training beside them."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.gpu.device import Device
from benchmarks.gpu.rounds import Bench, close_all, matching, memory_columns
from benchmarks.gpu.stage import WRITERS
from benchmarks.gpu.training import Training
from benchmarks.harness.measure import Runs, Sample
from benchmarks.harness.states import State, same_bits, size_of
from benchmarks.limits import machine, raw
from benchmarks.peers.beside import AiockptBeside
from benchmarks.peers.contenders import dcp_writer
from benchmarks.report.bars import Bar, by_name, by_prefix, compare, shortest
from benchmarks.report.report import Table, number, spread

ROUNDS = 2
SHARE = 0.9

_FILES = 4


class Whole:
    """A contender that saves a state, and loads it into another on the device."""

    name: str
    note: str = ""
    loads_tensors = True

    async def open(self, state: State) -> None:
        """Create what is kept between rounds."""

    @abstractmethod
    async def save(self, state: State, path: Path) -> None:
        """Save, and return when it is durable."""

    @abstractmethod
    async def load(self, target: State, path: Path) -> None:
        """Load into tensors on the device."""

    async def close(self) -> None:
        """Release what `open` created."""


class RawFiles(Whole):
    """The limit: the same number of bytes written and read past the page cache, without the device."""

    name, note, loads_tensors = f"raw O_DIRECT, {_FILES} threads", "host memory, no format", False

    def __init__(self) -> None:
        self._arena = raw.Arena(_FILES * raw.WRITE_BYTES)

    async def save(self, state: State, path: Path) -> None:
        raw.write_direct(path, self._arena, size_of(state), _FILES)

    async def load(self, target: State, path: Path) -> None:
        files = machine.files_under(path)
        raw.in_threads([lambda n=n, file=file: self._read(n, file) for n, file in enumerate(files)])

    def _read(self, index: int, file: Path) -> None:
        part = self._arena.view[index * raw.WRITE_BYTES :][: raw.WRITE_BYTES]
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            at = 0
            while count := os.preadv(fd, [part], at):
                at += count
        finally:
            os.close(fd)


class AiockptWhole(Whole):
    """This package."""

    def __init__(self, writer: str) -> None:
        self._saver = AiockptBeside(writer)
        self.name, self.note = self._saver.name, "CRC, checked by the load"

    async def open(self, state: State) -> None:
        await self._saver.open(state)

    async def save(self, state: State, path: Path) -> None:
        await self._saver.begin(state, path).handle

    async def load(self, target: State, path: Path) -> None:
        await self._saver.checkpointer.load(path, target)

    async def close(self) -> None:
        await self._saver.close()


class DcpWhole(Whole):
    """``dcp.save`` and ``dcp.load``."""

    def __init__(self, threads: int) -> None:
        self.name, self._threads = f"dcp.save, thread_count={threads}", threads
        self.note = "fsync; dcp.load"

    async def save(self, state: State, path: Path) -> None:
        dcp.save(state, storage_writer=dcp_writer(path, self._threads), no_dist=True)

    async def load(self, target: State, path: Path) -> None:
        dcp.load(target, checkpoint_id=path, no_dist=True)


class TorchWhole(Whole):
    """``torch.save`` and ``torch.load`` from a mapped file."""

    name, note = "torch.save + fsync", "torch.load, mapped, then copied"

    async def save(self, state: State, path: Path) -> None:
        torch.save(state, path)
        machine.sync_files([path])

    async def load(self, target: State, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, tensor in loaded.items():
            target[name].copy_(tensor)


async def measure(bench: Bench, training: Training, rounds: int, only: str | None) -> list[Runs]:
    """Save and load in rounds, from the disk; compare each loaded state with the saved one."""
    state = training.state
    candidates: list[Whole] = [RawFiles(), *map(AiockptWhole, WRITERS), DcpWhole(_FILES), TorchWhole(), DcpWhole(1)]
    selected = matching(candidates, only)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    async def run_once(whole: Whole, count: int) -> Sample:
        path = bench.directory / f"whole-{selected.index(whole)}-{count}"

        async def work() -> Sample:
            if count < 0:
                await whole.open(state)
                return {}
            return await save_and_load(whole, bench.device, state, target, path)

        try:
            return await bench.watched(f"whole, {whole.name}", work)
        finally:
            machine.remove(path)

    runs = await bench.rounds(selected, rounds, run_once, share=SHARE, what="saving and loading")
    await close_all(selected, runs)
    return runs


async def save_and_load(whole: Whole, device: Device, state: State, target: State, path: Path) -> Sample:
    """Save, drop the files from the page cache, load, and compare.

    Raises:
        ValueError: if the loaded state differs from the saved one.
    """
    device.synchronize()
    started = time.perf_counter()
    await whole.save(state, path)
    saved_s = time.perf_counter() - started
    machine.drop_from_cache(machine.files_under(path))
    for tensor in target.values():
        tensor.zero_()
    device.synchronize()
    started = time.perf_counter()
    await whole.load(target, path)
    device.synchronize()
    loaded_s = time.perf_counter() - started
    if whole.loads_tensors and not same_bits(target, state):
        raise ValueError("what was loaded differs from what was saved")
    return {"saved_s": saved_s, "loaded_s": loaded_s}


def table(runs: Sequence[Runs], nbytes: int, size: str) -> Table:
    """Return the table."""
    limits = {what: shortest(runs, "raw", what) for what in ("saved_s", "loaded_s")}
    columns = {
        "saved (min..max)": spread("saved_s"),
        "save GB/s": lambda run: number(nbytes / run.median("saved_s") / 1e9),
        "of limit": lambda run: number(limits["saved_s"] / run.median("saved_s")),
        "loaded (min..max)": spread("loaded_s"),
        "load GB/s": lambda run: number(nbytes / run.median("loaded_s") / 1e9),
        "load of limit": lambda run: number(limits["loaded_s"] / run.median("loaded_s")),
        **memory_columns(),
    }
    return Table(f"end to end: {size} saved from the device, and loaded to it from the disk", columns, runs)


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the limit and the peers."""
    found = []
    for name in (f"aiockpt, {writer}" for writer in WRITERS):
        ours = by_name(runs, name)
        for what, text in (("saved_s", "save"), ("loaded_s", "load")):
            found.append(compare(f"{text}, {name} : raw O_DIRECT, speed", by_prefix(runs, "raw"), ours, what))
            found.append(compare(f"{text}, {name} : best dcp, speed", by_prefix(runs, "dcp"), ours, what))
            found.append(compare(f"{text}, {name} : torch, speed", by_prefix(runs, "torch"), ours, what))
    return found
