"""The lag of the caller's loop during a save."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.measure import Lag, Runs, Sample, close, interleave, lateness
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, size_of, transformer_state
from benchmarks.limits import machine, raw
from benchmarks.peers.contenders import Aiockpt, Saver
from benchmarks.report.bars import Bar
from benchmarks.report.report import Report, Table, duration, median_time

OPTIONS = ("gib", "tensors", "rounds", "only")
ROUNDS = 5

_POOL = "thread pool, raw writes"
_FILES = 4


class Idle(Saver):
    """An idle loop, for a second."""

    name = "idle loop"

    async def save(self, state: State, path: Path) -> Sample:
        await asyncio.sleep(1)
        return {"durable_s": 1.0}


class PoolSave(Saver):
    """The simplest asynchronous save: one ``run_in_executor`` for each 16 MiB, written past the page cache."""

    def __init__(self, arena: raw.Arena, *, copies: bool) -> None:
        self.name = "thread pool, copies and raw writes" if copies else _POOL
        self.note = "no CRC" if copies else "no copy, no CRC"
        self._arena = arena
        self._scratch = [raw.Arena(raw.WRITE_BYTES) for _ in range(_FILES)] if copies else []

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        await asyncio.to_thread(path.mkdir)
        with ThreadPoolExecutor(_FILES) as pool:
            ranges = raw.shares(size_of(state), _FILES)
            await asyncio.gather(*(self._write_file(pool, path, n, b - a) for n, (a, b) in enumerate(ranges)))
        return {"durable_s": time.perf_counter() - started}

    async def _write_file(self, pool: ThreadPoolExecutor, path: Path, number: int, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        fd = await loop.run_in_executor(pool, raw.create_direct, path / f"{number}.raw")
        try:
            for begin in range(0, nbytes, raw.WRITE_BYTES):
                length = min(raw.WRITE_BYTES, nbytes - begin)
                await loop.run_in_executor(pool, self._write_chunk, fd, number, begin, length)
            await loop.run_in_executor(pool, os.fsync, fd)
        finally:
            os.close(fd)

    def _write_chunk(self, fd: int, number: int, begin: int, length: int) -> None:
        begin %= len(self._arena.view) - length + 1
        begin -= begin % raw.BLOCK_BYTES
        if self._scratch:
            ctypes.memmove(self._scratch[number].address, self._arena.address + begin, length)
            os.write(fd, self._scratch[number].view[:length])
        else:
            os.write(fd, self._arena.view[begin : begin + length])


async def measure(
    savers: Sequence[Saver], state: State, directory: Path, rounds: int
) -> tuple[list[Runs], Mapping[str, Sample]]:
    """Save in rounds, and measure the lag of the loop.

    Returns:
        All runs, and for each contender's name the lag over all of its rounds.
    """
    late_s: dict[str, list[float]] = defaultdict(list)

    async def save_once(saver: Saver, number: int) -> Sample:
        if number < 0:
            await saver.open(state)
        path = directory / f"{savers.index(saver)}-{number}"
        machine.settle()
        try:
            async with Lag() as lag:
                sample = await saver.save(state, path)
        finally:
            machine.remove(path)
        if number >= 0:
            late_s[saver.name] += lag.late_s
        return {**sample, **lag.sample()}

    runs = await interleave(savers, rounds, save_once)
    for saver, run in zip(savers, runs, strict=True):
        await close(saver, run)
    return runs, {name: lateness(late) for name, late in late_s.items()}


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    arena = raw.Arena(min(size_of(state), 512 << 20))
    rounds = options.rounds or ROUNDS
    candidates = [Idle(), PoolSave(arena, copies=False), PoolSave(arena, copies=True), Aiockpt()]
    runs, lags = await measure(chosen(candidates, options.only), state, directory, rounds)
    columns = {
        "durable": median_time("durable_s"),
        "lag p50": lambda run: duration(lags[run.name]["lag_p50_s"]),
        "lag p99": lambda run: duration(lags[run.name]["lag_p99_s"]),
        "longest lag": lambda run: duration(lags[run.name]["stall_s"]),
        "longest, median round": median_time("stall_s"),
    }
    title = f"lag: a 1 ms ticker beside a save of {size_of(state) / 2**30:.2f} GiB, all of {rounds} rounds"
    return Report("lag", vars(options), machine.facts(directory), [Table(title, columns, runs, "stall_s")], bars(lags))


def bars(lags: Mapping[str, Sample]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    nothing: Sample = {"lag_p99_s": float("nan"), "stall_s": float("nan")}
    ours, pool = (lags.get(name, nothing) for name in ("aiockpt", _POOL))
    return [
        Bar("aiockpt : thread pool with raw writes, p99 lag", ours["lag_p99_s"] / pool["lag_p99_s"], 1, at_most=True),
        Bar("aiockpt: longest lag", ours["stall_s"] * 1e3, 20, at_most=True, unit="ms"),
    ]
