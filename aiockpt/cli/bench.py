"""``aiockpt bench``: saves and loads a state with several settings, and prints the settings for this disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import typer

import aiockpt
from aiockpt.cli.app import CommandError
from aiockpt.cli.output import bar, console, print_json, print_table, shown, size_text, time_text
from aiockpt.core.machine import available_memory_bytes
from aiockpt.core.wording import plural
from aiockpt.storage.local.directories import LocalDirectories
from aiockpt.storage.local.temp_dir import new_ticket

MIB = 1 << 20
DEFAULT_THREADS = 4
_ENOUGH = 0.9  # of the best speed; what measurements of a busy machine differ by
_BUFFERED_GAIN = 1.25  # the least that the page cache has to gain, because it takes memory from other programs
_LEAST_BYTES = 16 * MIB
_SPARE = 4  # one part in so many of the free space, and of the free memory, is used


@dataclass(frozen=True, slots=True)
class Measured:
    """A save and a load with one setting."""

    direct_io: bool  # past the page cache
    io_threads: int
    nbytes: int
    staged_s: float
    written_s: float  # until the save was durable
    loaded_s: float


def bench(directory: str, *, size_bytes: int, as_json: bool = False) -> None:
    """Measure a directory's disk by saves of ``size_bytes`` at most, and print the settings to use. Blocks."""
    if size_bytes < _LEAST_BYTES:
        raise typer.BadParameter(f"{size_text(_LEAST_BYTES)} are the least to measure with", param_hint="--size")
    directory = LocalDirectories().resolve(directory)
    free, memory = shutil.disk_usage(directory).free, available_memory_bytes()
    nbytes = min(size_bytes, free // _SPARE, memory // _SPARE)
    if nbytes < _LEAST_BYTES:
        what = f"{directory} has {size_text(free)} left, and memory {size_text(memory)}"
        raise CommandError(f"{what}: too little to measure")
    count = max(1, nbytes // (32 * MIB))
    state = {f"layers.{n}.weight": torch.rand(nbytes // count // 4) for n in range(count)}
    found = [_measured(directory, state, *setting) for setting in product((True, False), (1, 2, 4, 8))]
    direct_io = best_direct_io(found)
    settings = {"io_threads": best_threads([m for m in found if m.direct_io == direct_io]), "direct_io": direct_io}
    if as_json:
        print_json({"directory": directory, "measured": [asdict(m) for m in found], "settings": settings})
    else:
        _print(directory, found, settings)


def _measured(directory: str, state: dict[str, torch.Tensor], direct_io: bool, io_threads: int) -> Measured:
    """Save and load a state as a training program does, when its memory is there already."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    # The name is that of what saves leave: if this process is killed, `aiockpt clean` removes it.
    path = os.path.join(directory, new_ticket())
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        ckpt = stack.enter_context(aiockpt.SyncCheckpointer(io_threads=io_threads, direct_io=direct_io))
        ckpt.prewarm(state)
        setting = f"{_kind(direct_io)}, {plural(io_threads, 'thread')}"
        with bar(f"saving, {setting}", nbytes) as shown_bar:
            handle = ckpt.submit(state, path)
            for event in handle.progress():
                shown_bar(event)
            result = handle.written.result()
        for entry in os.scandir(path):  # the load is to read the disk, not what the save has left in the page cache
            _drop(entry.path)
        with bar(f"loading, {setting}", nbytes) as shown_bar:
            begin = time.perf_counter()
            ckpt.load(path, state, progress=shown_bar)
            loaded_s = time.perf_counter() - begin
    return Measured(direct_io, io_threads, nbytes, result.staged_s, result.written_s, loaded_s)


def _drop(path: str) -> None:
    """Drop what the page cache has of a file that is synced, as far as the system allows it."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def best_direct_io(measured: Sequence[Measured]) -> bool:
    """Return whether direct I/O writes fast enough, compared with the page cache."""
    direct, buffered = (min(m.written_s for m in measured if m.direct_io is kind) for kind in (True, False))
    return direct <= buffered * _BUFFERED_GAIN


def best_threads(measured: Sequence[Measured]) -> int:
    """Return the number of threads to write with: the default if it is good enough, else the least."""
    least_s = min(m.written_s for m in measured)
    good = {m.io_threads for m in measured if m.written_s * _ENOUGH <= least_s}
    return DEFAULT_THREADS if DEFAULT_THREADS in good else min(good)


def _print(directory: str, found: Sequence[Measured], settings: dict[str, Any]) -> None:
    out = console()
    out.print(f"{shown(directory)}: saves and loads of {size_text(found[0].nbytes)}", style="bold")
    rows = [
        (
            _kind(m.direct_io),
            str(m.io_threads),
            time_text(m.staged_s),
            time_text(m.written_s),
            f"{size_text(m.nbytes / m.written_s)}/s",
            f"{size_text(m.nbytes / m.loaded_s)}/s",
        )
        for m in found
    ]
    print_table(("", ">io_threads", ">staged", ">durable", ">save", ">load"), rows)
    is_default = settings == {"io_threads": DEFAULT_THREADS, "direct_io": True}
    out.print("\nThe defaults suit this disk:" if is_default else "\nSettings for this disk:")
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    out.print(f"  aiockpt.AsyncCheckpointer({text})", style="bold")


def _kind(direct_io: bool) -> str:
    return "direct" if direct_io else "buffered"
