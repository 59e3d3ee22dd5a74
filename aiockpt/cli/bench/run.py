"""The steps of ``aiockpt bench``: raw writes and reads, syncs, and then a save and a load as a program makes them."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer

import aiockpt
from aiockpt.cli.app import CommandError
from aiockpt.cli.bench.disk import Disk, Measured, Setting, drop, uninterrupted
from aiockpt.cli.output import console, duration_text, print_json, print_table, rate_text, shown, size_text
from aiockpt.cli.progress import bar
from aiockpt.core.machine import available_memory_bytes
from aiockpt.storage.local.temp_dir import make_hidden, new_ticket

MIB = 1 << 20
DEFAULT_THREADS = 4
DEFAULT_CHUNK_BYTES = 16 << 20

_ENOUGH = 0.9  # of the best speed; what measurements of a busy machine differ by
_BUFFERED_GAIN = 1.25  # the least that the page cache has to gain, because it takes memory from other programs
_THREADS = (1, 2, 4, 8)
_CHUNKS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_LEAST_BYTES = 16 * MIB
_TENSOR_BYTES = 32 * MIB
_SPARE = 4  # one part in so many of the free space, and of the free memory, is used


@dataclass(frozen=True, slots=True)
class Advice:
    """Options of a checkpointer."""

    io_threads: int = DEFAULT_THREADS
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    direct_io: bool = True

    def __str__(self) -> str:
        return f"io_threads={self.io_threads}, chunk_bytes={self.chunk_bytes >> 20} << 20, direct_io={self.direct_io}"


@dataclass(frozen=True, slots=True)
class Saved:
    """A save and a load of the engine."""

    nbytes: int
    staged_s: float
    written_s: float
    loaded_s: float


def bench(directory: str, *, size_bytes: int, seconds: float, as_json: bool = False) -> None:
    """Measure a directory's disk, and print the settings to use; nothing is left there.

    Args:
        directory: an existing directory.
        size_bytes: the most bytes to write in one measurement; less if there is not enough space or memory.
        seconds: the longest time of one measurement.
        as_json: print JSON.

    Raises:
        typer.BadParameter: the size is too small.
        CommandError: there is not enough space or memory.
        OSError: the directory can't be written.
    """
    if size_bytes < _LEAST_BYTES:
        raise typer.BadParameter(f"{size_text(_LEAST_BYTES)} are the least to measure with", param_hint="--size")
    directory = os.path.abspath(os.path.expanduser(directory))
    nbytes = _affordable(directory, size_bytes)
    with _workspace(directory) as (folder, checkpoint):
        disk = Disk(folder)
        try:
            measured = _measure_threads(disk, nbytes, seconds)
            writes = [each for each in measured if each.setting.kind == "write"]
            direct = best_direct_io(writes)
            threads = best_threads([each for each in writes if each.setting.direct == direct])
            chunks = _measure_chunks(disk, nbytes, seconds, direct=direct, threads=threads)
            disk.remove_files()
            syncs = disk.sync_s()
            disk.remove_files()
        finally:
            disk.close()
        advice = Advice(threads, best_chunk(chunks), direct)
        saved = _save_and_load(checkpoint, nbytes, advice)
    measured += [each for each in chunks if each.setting.chunk_bytes != DEFAULT_CHUNK_BYTES]
    if as_json:
        print_json(_document(directory, measured, syncs, saved, advice))
    else:
        _print(directory, measured, syncs, saved, advice)


def _affordable(directory: str, nbytes: int) -> int:
    free = shutil.disk_usage(directory).free
    memory = available_memory_bytes()
    most = min(nbytes, free // _SPARE, memory // _SPARE)
    if most < _LEAST_BYTES:
        raise CommandError(
            f"{directory} has {size_text(free)} left, and memory {size_text(memory)}: too little to measure"
        )
    return most


@contextlib.contextmanager
def _workspace(directory: str) -> Iterator[tuple[str, str]]:
    """Make a temporary directory, and yield it and a path for a checkpoint beside it; both are removed at the end.

    Their names are those of what saves leave: if this process is killed, ``aiockpt clean`` removes them.
    """
    folder, checkpoint = (os.path.join(directory, new_ticket()) for _ in range(2))
    with uninterrupted():
        held = make_hidden(folder)
    try:
        yield folder, checkpoint
    finally:
        with uninterrupted():
            held.release()
            shutil.rmtree(folder)
            shutil.rmtree(checkpoint, ignore_errors=True)


# --- measuring ------------------------------------------------------------------------------------------


def _measure_threads(disk: Disk, nbytes: int, seconds: float) -> list[Measured]:
    measured: list[Measured] = []
    for direct in (True, False):
        for threads in _THREADS:
            written = _measure(disk, Setting("write", direct, threads, DEFAULT_CHUNK_BYTES), nbytes, seconds)
            if written is None:
                break
            read = _measure(disk, Setting("read", direct, threads, DEFAULT_CHUNK_BYTES), written.nbytes, seconds)
            measured += [written] if read is None else [written, read]
    return measured


def _measure_chunks(disk: Disk, nbytes: int, seconds: float, *, direct: bool, threads: int) -> list[Measured]:
    settings = [Setting("write", direct, threads, chunk) for chunk in _CHUNKS if chunk * threads <= nbytes]
    found = [_measure(disk, setting, nbytes, seconds) for setting in settings]
    return [each for each in found if each is not None]


def _measure(disk: Disk, setting: Setting, nbytes: int, seconds: float) -> Measured | None:
    with bar(f"{setting}, {size_text(setting.chunk_bytes)}", nbytes) as shown_bar:
        return disk.measure(setting, nbytes, seconds, shown_bar.advance)


def _save_and_load(path: str, nbytes: int, advice: Advice) -> Saved:
    """Save and load a state as a training program does, when its memory is there already."""
    count = max(1, nbytes // _TENSOR_BYTES)
    state = {f"layers.{n}.weight": torch.rand(nbytes // count // 4) for n in range(count)}
    with aiockpt.SyncCheckpointer(
        io_threads=advice.io_threads, chunk_bytes=advice.chunk_bytes, direct_io=advice.direct_io
    ) as ckpt:
        with bar("saving", nbytes) as shown_bar:
            for _ in range(2):  # the first one also allocates the staging memory
                begin = time.perf_counter()
                handle = ckpt.submit(state, path, overwrite=True)
                handle.staged.result()
                staged_s = time.perf_counter() - begin
                handle.written.result()
                written_s = time.perf_counter() - begin
                shown_bar.advance(nbytes // 2)
        # The load is to read the disk, not what the saves have left in the page cache.
        for entry in os.scandir(path):
            drop(entry.path)
        with bar("loading", nbytes) as shown_bar:
            begin = time.perf_counter()
            ckpt.load(path, state, progress=shown_bar)
            loaded_s = time.perf_counter() - begin
    return Saved(sum(each.nbytes for each in state.values()), staged_s, written_s, loaded_s)


# --- the settings that suit a disk ------------------------------------------------------------------------


def best_direct_io(writes: Collection[Measured]) -> bool:
    """Return whether direct I/O writes fast enough, compared with the page cache."""
    direct = [each.bytes_per_s for each in writes if each.setting.direct]
    buffered = [each.bytes_per_s for each in writes if not each.setting.direct]
    return bool(direct) and max(direct) * _BUFFERED_GAIN >= max(buffered, default=0.0)


def best_threads(writes: Collection[Measured]) -> int:
    """Return how many threads to write with: the default if it is good enough, else the fewest that are."""
    return _best(writes, lambda setting: setting.threads, DEFAULT_THREADS)


def best_chunk(writes: Collection[Measured]) -> int:
    """Return how many bytes to write at a time: the default if it is good enough, else the fewest that are."""
    return _best(writes, lambda setting: setting.chunk_bytes, DEFAULT_CHUNK_BYTES)


def _best(measured: Collection[Measured], value_of: Callable[[Setting], int], default: int) -> int:
    best = max(each.bytes_per_s for each in measured)
    good = {value_of(each.setting) for each in measured if each.bytes_per_s >= _ENOUGH * best}
    return default if default in good else min(good)


# --- output ---------------------------------------------------------------------------------------------


def _print(directory: str, measured: list[Measured], syncs: list[float], saved: Saved, advice: Advice) -> None:
    out = console()
    out.print(f"{shown(directory)}", style="bold")
    rows = [
        (
            f"{'direct' if each.setting.direct else 'buffered'} {each.setting.kind}",
            str(each.setting.threads),
            size_text(each.setting.chunk_bytes),
            rate_text(each.bytes_per_s),
        )
        for each in measured
    ]
    print_table(("", ">threads", ">chunk", ">speed"), rows)
    if not any(each.setting.direct for each in measured):
        out.print("This file system has no direct I/O.")
    out.print(f"\nsync of 4 KiB: {_ms(statistics.median(syncs))} in the middle, {_ms(max(syncs))} at worst")
    size = size_text(saved.nbytes)
    out.print(
        f"save of {size}: staged after {duration_text(saved.staged_s)}, durable after "
        f"{duration_text(saved.written_s)}, {rate_text(saved.nbytes / saved.written_s)}"
    )
    out.print(f"load of {size}: {duration_text(saved.loaded_s)}, {rate_text(saved.nbytes / saved.loaded_s)}")
    out.print("\nThe defaults suit this disk:" if advice == Advice() else "\nSettings for this disk:")
    out.print(f"  aiockpt.AsyncCheckpointer({advice})", style="bold")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _document(
    directory: str, measured: list[Measured], syncs: list[float], saved: Saved, advice: Advice
) -> dict[str, Any]:
    return {
        "directory": directory,
        "raw": [
            {**asdict(each.setting), "bytes": each.nbytes, "seconds": each.seconds, "bytes_per_s": each.bytes_per_s}
            for each in measured
        ],
        "sync_s": {"median": statistics.median(syncs), "worst": max(syncs), "times": len(syncs)},
        "save": {"bytes": saved.nbytes, "staged_s": saved.staged_s, "written_s": saved.written_s},
        "load": {"bytes": saved.nbytes, "seconds": saved.loaded_s},
        "settings": asdict(advice),
    }
