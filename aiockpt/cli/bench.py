"""``aiockpt bench``: what a disk can do, by raw writes, reads and syncs, a save and a load; and the settings for it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
import typer

import aiockpt
from aiockpt.cli.app import CommandError
from aiockpt.cli.output import console, print_json, print_table, shown, size_text, time_text
from aiockpt.cli.progress import bar
from aiockpt.core.machine import BLOCK_BYTES, available_memory_bytes
from aiockpt.core.wording import plural
from aiockpt.storage.local.directories import LocalDirectories
from aiockpt.storage.local.temp_dir import make_hidden, new_ticket

MIB = 1 << 20
DEFAULTS: dict[str, Any] = {"io_threads": 4, "chunk_bytes": 16 * MIB, "direct_io": True}
_ENOUGH = 0.9  # of the best speed; what measurements of a busy machine differ by
_BUFFERED_GAIN = 1.25  # the least that the page cache has to gain, because it takes memory from other programs
_LEAST_BYTES = 16 * MIB
_SPARE = 4  # one part in so many of the free space, and of the free memory, is used


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to write, with a sync at the end, or to read: in each thread a file. Measured, it has bytes and time."""

    kind: str  # "write" or "read"
    direct: bool  # past the page cache
    threads: int
    chunk_bytes: int = DEFAULTS["chunk_bytes"]  # of each system call
    bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The speed."""
        return self.bytes / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'} {self.kind}"


def bench(directory: str, *, size_bytes: int, seconds: float, as_json: bool = False) -> None:
    """Measure a directory's disk, and print the settings to use; nothing is left there.

    Args:
        directory: an existing directory.
        size_bytes: the most bytes to write in one measurement; less if there is not enough space or memory.
        seconds: the longest time of one measurement.
        as_json: print JSON.
    """
    if size_bytes < _LEAST_BYTES:
        raise typer.BadParameter(f"{size_text(_LEAST_BYTES)} are the least to measure with", param_hint="--size")
    directory = LocalDirectories().resolve(directory)
    free, memory = shutil.disk_usage(directory).free, available_memory_bytes()
    nbytes = min(size_bytes, free // _SPARE, memory // _SPARE)
    if nbytes < _LEAST_BYTES:
        what = f"{directory} has {size_text(free)} left, and memory {size_text(memory)}"
        raise CommandError(f"{what}: too little to measure")
    # The names are those of what saves leave: if this process is killed, `aiockpt clean` removes them.
    folder, checkpoint = (os.path.join(directory, new_ticket()) for _ in range(2))
    with contextlib.ExitStack() as stack:
        for path in (folder, checkpoint):
            stack.callback(shutil.rmtree, path, ignore_errors=True)
        stack.callback(make_hidden(folder).release)
        found = {"directory": directory, **_measured(MeasuredDisk(folder), checkpoint, nbytes, seconds)}
    print_json(found) if as_json else _print(found)


def _measured(disk: MeasuredDisk, checkpoint: str, nbytes: int, seconds: float) -> dict[str, Any]:
    def each_of(settings: Iterable[Setting]) -> Iterator[Setting]:
        for each in settings:
            with bar(f"{each}, {plural(each.threads, 'thread')}, {size_text(each.chunk_bytes)}", nbytes) as shown_bar:
                found = disk.measure(each, nbytes, seconds, shown_bar.advance)
            if found is not None:
                yield found

    ways = product((True, False), (1, 2, 4, 8), ("write", "read"))
    raw = list(each_of(Setting(kind, direct, threads) for direct, threads, kind in ways))
    writes = [each for each in raw if each.kind == "write"]
    direct = best_direct_io(writes)
    threads = best([each for each in writes if each.direct == direct], "threads", DEFAULTS["io_threads"])
    chunks = list(each_of(Setting("write", direct, threads, size) for size in chunk_sizes(threads, nbytes)))
    chunk = best(chunks, "chunk_bytes", DEFAULTS["chunk_bytes"])
    raw += [each for each in chunks if each.chunk_bytes != DEFAULTS["chunk_bytes"]]
    syncs, settings = disk.sync_s(), {"io_threads": threads, "chunk_bytes": chunk, "direct_io": direct}
    disk.remove_files()
    return {
        "raw": [{**asdict(each), "bytes_per_s": each.bytes_per_s} for each in raw],
        "sync_s": {"median": statistics.median(syncs), "worst": max(syncs), "times": len(syncs)},
        **_save_and_load(checkpoint, nbytes, settings),
        "settings": settings,
    }


def _print(found: dict[str, Any]) -> None:
    out, save, load, settings = console(), found["save"], found["load"], found["settings"]
    out.print(shown(found["directory"]), style="bold")
    names = ("kind", "direct", "threads", "chunk_bytes", "bytes", "seconds")
    raw = [Setting(*(each[name] for name in names)) for each in found["raw"]]
    sizes = [(size_text(each.chunk_bytes), f"{size_text(each.bytes_per_s)}/s") for each in raw]
    table = [(str(each), str(each.threads), *texts) for each, texts in zip(raw, sizes, strict=True)]
    print_table(("", ">threads", ">chunk", ">speed"), table)
    if not any(each.direct for each in raw):
        out.print("This file system has no direct I/O.")
    middle, worst = (f"{found['sync_s'][name] * 1e3:.2f} ms" for name in ("median", "worst"))
    out.print(f"\nsync of 4 KiB: {middle} in the middle, {worst} at worst")
    size, written_s = size_text(save["bytes"]), save["written_s"]
    told = f"staged after {time_text(save['staged_s'])}, durable after {time_text(written_s)}"
    out.print(f"save of {size}: {told}, {size_text(save['bytes'] / written_s)}/s")
    out.print(f"load of {size}: {time_text(load['seconds'])}, {size_text(load['bytes'] / load['seconds'])}/s")
    out.print("\nThe defaults suit this disk:" if settings == DEFAULTS else "\nSettings for this disk:")
    shift = f"{settings['chunk_bytes'] >> 20} << 20"
    text = f"io_threads={settings['io_threads']}, chunk_bytes={shift}, direct_io={settings['direct_io']}"
    out.print(f"  aiockpt.AsyncCheckpointer({text})", style="bold")


def _save_and_load(path: str, nbytes: int, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Save and load a state as a training program does, when its memory is there already; return the figures."""
    count = max(1, nbytes // (32 * MIB))
    state = {f"layers.{n}.weight": torch.rand(nbytes // count // 4) for n in range(count)}
    nbytes = sum(each.nbytes for each in state.values())
    with aiockpt.SyncCheckpointer(**settings) as ckpt:
        ckpt.prewarm(state)
        with bar("saving", nbytes) as shown_bar:
            handle = ckpt.submit(state, path)
            for event in handle.progress():
                shown_bar(event)
            result = handle.written.result()
        for entry in os.scandir(path):  # the load is to read the disk, not what the save has left in the page cache
            _drop(entry.path)
        with bar("loading", nbytes) as shown_bar:
            begin = time.perf_counter()
            ckpt.load(path, state, progress=shown_bar)
            loaded_s = time.perf_counter() - begin
    save = {"bytes": nbytes, "staged_s": result.staged_s, "written_s": result.written_s}
    return {"save": save, "load": {"bytes": nbytes, "seconds": loaded_s}}


def best_direct_io(writes: Collection[Setting]) -> bool:
    """Return whether direct I/O writes fast enough, compared with the page cache."""
    direct, buffered = ([each.bytes_per_s for each in writes if each.direct is kind] for kind in (True, False))
    return bool(direct) and max(direct) * _BUFFERED_GAIN >= max(buffered, default=0.0)


def chunk_sizes(threads: int, nbytes: int) -> list[int]:
    """Return the bytes of a chunk to measure: the default always, as it is what others are compared with."""
    sizes = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    return [size for size in sizes if size == DEFAULTS["chunk_bytes"] or size * threads <= nbytes]


def best(writes: Collection[Setting], name: str, default: int) -> int:
    """Return the number of threads or of bytes to write with: the default if it is good enough, else the least."""
    fastest = max(each.bytes_per_s for each in writes)
    good: set[int] = {getattr(each, name) for each in writes if each.bytes_per_s >= _ENOUGH * fastest}
    return default if default in good else min(good)


class MeasuredDisk:
    """An empty directory to measure, with data that no file system can compress."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._data = mmap.mmap(-1, 64 * MIB)  # page-aligned, as direct I/O needs it
        self._data.write(os.urandom(64 * MIB))
        self._has_direct = hasattr(os, "O_DIRECT")
        self._until = 0.0

    def measure(
        self, setting: Setting, nbytes: int, most_s: float, note: Callable[[int], object] = lambda _: None
    ) -> Setting | None:
        """Write or read files for a time, or up to so many bytes; None where direct I/O is not supported. Blocks.

        Reads the files of the last write with as many threads. ``note`` is called with the bytes of each call.
        """
        if setting.direct and not self._has_direct:
            return None
        paths = [self._path(number) for number in range(setting.threads)]
        if setting.kind == "write":
            self.remove_files()
        else:
            for path in paths:
                _drop(path)
        begin = time.perf_counter()
        self._until = begin + most_s
        with ThreadPoolExecutor(setting.threads) as pool:
            try:
                moved = sum(pool.map(lambda path: self._move(path, setting, nbytes // setting.threads, note), paths))
            except OSError as exc:
                if not setting.direct or exc.errno != errno.EINVAL:
                    raise
                self._has_direct = False
                return None
            finally:
                self._until = 0.0  # after an interrupt the threads end with their current call
        return replace(setting, bytes=moved, seconds=time.perf_counter() - begin)

    def _move(self, path: str, setting: Setting, most: int, note: Callable[[int], object]) -> int:
        """Write or read a file, at most so many bytes, but one chunk at least; return how many."""
        writes, chunk = setting.kind == "write", setting.chunk_bytes
        flags = os.O_CLOEXEC | (os.O_WRONLY | os.O_CREAT | os.O_EXCL if writes else os.O_RDONLY)
        memory = memoryview(self._data if writes else mmap.mmap(-1, chunk))
        done, count, share = 0, 1, max(1, most // chunk) * chunk
        fd = os.open(path, flags | (os.O_DIRECT if setting.direct else 0), 0o644)
        try:
            while count and done < share and (not done or time.perf_counter() < self._until):
                piece = memory[done % len(memory) :][:chunk]
                count = os.write(fd, piece) if writes else os.preadv(fd, [piece], done)
                done += count
                note(count)
            if writes:
                os.fsync(fd)
        finally:
            os.close(fd)
        return done

    def sync_s(self) -> list[float]:
        """Return how long it takes to write and sync a block: 100 times, or for a second."""
        self.remove_files()
        times: list[float] = []
        fd = os.open(self._path(0), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while len(times) < 100 and sum(times) < 1.0:
                begin = time.perf_counter()
                os.pwrite(fd, memoryview(self._data)[:BLOCK_BYTES], len(times) * BLOCK_BYTES)
                os.fsync(fd)
                times.append(time.perf_counter() - begin)
        finally:
            os.close(fd)
        return times

    def remove_files(self) -> None:
        """Remove the files."""
        for name in os.listdir(self._directory):
            os.unlink(os.path.join(self._directory, name))

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"__0_{number}.distcp")  # `aiockpt clean` knows what has this name


def _drop(path: str) -> None:
    """Drop what the page cache has of a file that is synced, as far as the system allows it."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
