"""``aiockpt bench``: what a disk can do, by raw writes, reads and syncs, a save and a load; and the settings for it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

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
DEFAULT_THREADS = 4
DEFAULT_CHUNK_BYTES = 16 * MIB

_ENOUGH = 0.9  # of the best speed; what measurements of a busy machine differ by
_BUFFERED_GAIN = 1.25  # the least that the page cache has to gain, because it takes memory from other programs
_THREADS = (1, 2, 4, 8)
_CHUNKS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_LEAST_BYTES = 16 * MIB
_ARENA_BYTES = 64 * MIB
_TENSOR_BYTES = 32 * MIB
_SPARE = 4  # one part in so many of the free space, and of the free memory, is used
_MOST_SYNCS = 100
_MOST_SYNC_S = 1.0

Kind = Literal["write", "read"]
_KINDS: tuple[Kind, ...] = ("write", "read")


@dataclass(frozen=True, slots=True)
class Advice:
    """Options of a checkpointer."""

    io_threads: int = DEFAULT_THREADS
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    direct_io: bool = True

    def __str__(self) -> str:
        return f"io_threads={self.io_threads}, chunk_bytes={self.chunk_bytes >> 20} << 20, direct_io={self.direct_io}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to write or read, and its figures once it is measured.

    Attributes:
        kind: "write" (with the sync at the end) or "read".
        direct: past the page cache.
        threads: how many threads, each with a file of its own.
        chunk_bytes: the bytes of each system call.
        bytes: how many were moved.
        seconds: how long that took.
    """

    kind: Kind
    direct: bool
    threads: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'} {self.kind}, {plural(self.threads, 'thread')}"

    @property
    def bytes_per_s(self) -> float:
        """The speed."""
        return self.bytes / max(self.seconds, 1e-9)


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
    directory = LocalDirectories().resolve(directory)
    free, memory = shutil.disk_usage(directory).free, available_memory_bytes()
    nbytes = min(size_bytes, free // _SPARE, memory // _SPARE)
    if nbytes < _LEAST_BYTES:
        raise CommandError(
            f"{directory} has {size_text(free)} left, and memory {size_text(memory)}: too little to measure"
        )
    # The names are those of what saves leave: if this process is killed, `aiockpt clean` removes them.
    folder, checkpoint = (os.path.join(directory, new_ticket()) for _ in range(2))
    with contextlib.ExitStack() as stack:
        for path in (folder, checkpoint):
            stack.callback(shutil.rmtree, path, ignore_errors=True)
        stack.callback(make_hidden(folder).release)
        disk = MeasuredDisk(folder)

        def measured(settings: Iterable[Setting]) -> Iterator[Setting]:
            for setting in settings:
                with bar(f"{setting}, {size_text(setting.chunk_bytes)}", nbytes) as shown_bar:
                    each = disk.measure(setting, nbytes, seconds, shown_bar.advance)
                if each is not None:
                    yield each

        ways = itertools.product((True, False), _THREADS, _KINDS)
        raw = list(measured(Setting(kind, direct, threads) for direct, threads, kind in ways))
        writes = [each for each in raw if each.kind == "write"]
        direct = best_direct_io(writes)
        threads = best([each for each in writes if each.direct == direct], "threads", DEFAULT_THREADS)
        chunks = list(measured(Setting("write", direct, threads, size) for size in chunk_sizes(threads, nbytes)))
        raw += [each for each in chunks if each.chunk_bytes != DEFAULT_CHUNK_BYTES]
        advice = Advice(threads, best(chunks, "chunk_bytes", DEFAULT_CHUNK_BYTES), direct)
        syncs = disk.sync_s()
        disk.remove_files()
        document = {
            "directory": directory,
            "raw": [{**asdict(each), "bytes_per_s": each.bytes_per_s} for each in raw],
            "sync_s": {"median": statistics.median(syncs), "worst": max(syncs), "times": len(syncs)},
            **_save_and_load(checkpoint, nbytes, advice),
            "settings": asdict(advice),
        }
    if as_json:
        print_json(document)
    else:
        _print(document, advice)


def _save_and_load(path: str, nbytes: int, advice: Advice) -> dict[str, dict[str, float]]:
    """Save and load a state as a training program does, when its memory is there already; return the figures."""
    count = max(1, nbytes // _TENSOR_BYTES)
    state = {f"layers.{n}.weight": torch.rand(nbytes // count // 4) for n in range(count)}
    with aiockpt.SyncCheckpointer(**asdict(advice)) as ckpt:
        ckpt.prewarm(state)
        with bar("saving", nbytes) as shown_bar:
            handle = ckpt.submit(state, path)
            for event in handle.progress():
                shown_bar(event)
            result = handle.written.result()
        # The load is to read the disk, not what the save has left in the page cache.
        for entry in os.scandir(path):
            drop(entry.path)
        with bar("loading", nbytes) as shown_bar:
            begin = time.perf_counter()
            ckpt.load(path, state, progress=shown_bar)
            loaded_s = time.perf_counter() - begin
    nbytes = sum(each.nbytes for each in state.values())
    return {
        "save": {"bytes": nbytes, "staged_s": result.staged_s, "written_s": result.written_s},
        "load": {"bytes": nbytes, "seconds": loaded_s},
    }


def _print(document: Mapping[str, Any], advice: Advice) -> None:
    out = console()
    out.print(shown(document["directory"]), style="bold")
    rows = [
        (
            f"{'direct' if each['direct'] else 'buffered'} {each['kind']}",
            str(each["threads"]),
            size_text(each["chunk_bytes"]),
            f"{size_text(each['bytes_per_s'])}/s",
        )
        for each in document["raw"]
    ]
    print_table(("", ">threads", ">chunk", ">speed"), rows)
    if not any(each["direct"] for each in document["raw"]):
        out.print("This file system has no direct I/O.")
    middle, worst = (f"{document['sync_s'][name] * 1e3:.2f} ms" for name in ("median", "worst"))
    out.print(f"\nsync of 4 KiB: {middle} in the middle, {worst} at worst")
    save, load = document["save"], document["load"]
    size = size_text(save["bytes"])
    out.print(
        f"save of {size}: staged after {time_text(save['staged_s'])}, durable after "
        f"{time_text(save['written_s'])}, {size_text(save['bytes'] / save['written_s'])}/s"
    )
    out.print(f"load of {size}: {time_text(load['seconds'])}, {size_text(load['bytes'] / load['seconds'])}/s")
    out.print("\nThe defaults suit this disk:" if advice == Advice() else "\nSettings for this disk:")
    out.print(f"  aiockpt.AsyncCheckpointer({advice})", style="bold")


# --- the settings that suit a disk ------------------------------------------------------------------------


def best_direct_io(writes: Collection[Setting]) -> bool:
    """Return whether direct I/O writes fast enough, compared with the page cache."""
    direct = [each.bytes_per_s for each in writes if each.direct]
    buffered = [each.bytes_per_s for each in writes if not each.direct]
    return bool(direct) and max(direct) * _BUFFERED_GAIN >= max(buffered, default=0.0)


def chunk_sizes(threads: int, nbytes: int) -> list[int]:
    """Return the bytes of a chunk to measure: the default always, as it is what others are compared with."""
    return [chunk for chunk in _CHUNKS if chunk == DEFAULT_CHUNK_BYTES or chunk * threads <= nbytes]


def best(writes: Collection[Setting], name: Literal["threads", "chunk_bytes"], default: int) -> int:
    """Return the number of threads or of bytes to write with: the default if it is good enough, else the least."""
    fastest = max(each.bytes_per_s for each in writes)
    good = {getattr(each, name) for each in writes if each.bytes_per_s >= _ENOUGH * fastest}
    return default if default in good else min(good)


# --- raw I/O in threads ---------------------------------------------------------------------------------


class MeasuredDisk:
    """A directory to measure, with data that no file system can compress.

    Args:
        directory: an empty directory, in which files are made.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._data = mmap.mmap(-1, _ARENA_BYTES)  # page-aligned, as direct I/O needs it
        self._data.write(os.urandom(_ARENA_BYTES))
        self._has_direct = hasattr(os, "O_DIRECT")

    def measure(
        self, setting: Setting, nbytes: int, most_s: float, note: Callable[[int], object] = lambda _: None
    ) -> Setting | None:
        """Write or read files for a time, or up to so many bytes; None where direct I/O is not supported. Blocks.

        Reads the files of the last write with as many threads. ``note`` is called with the bytes of each call.
        """
        if setting.direct and not self._has_direct:
            return None
        writes = setting.kind == "write"
        flags = (os.O_WRONLY | os.O_CREAT | os.O_EXCL if writes else os.O_RDONLY) | os.O_CLOEXEC
        flags |= os.O_DIRECT if setting.direct else 0
        share = max(1, nbytes // setting.threads // setting.chunk_bytes) * setting.chunk_bytes
        paths = [self._path(number) for number in range(setting.threads)]
        stop = threading.Event()

        def move(path: str) -> int:
            memory = memoryview(self._data if writes else mmap.mmap(-1, setting.chunk_bytes))
            done, count = 0, 1
            fd = os.open(path, flags, 0o644)
            try:
                while count and done < share and (not done or time.perf_counter() < until) and not stop.is_set():
                    at = done % len(memory)
                    piece = memory[at : at + setting.chunk_bytes]
                    count = os.write(fd, piece) if writes else os.preadv(fd, [piece], done)
                    done += count
                    note(count)
                if writes and not stop.is_set():
                    os.fsync(fd)
            finally:
                os.close(fd)
            return done

        if writes:
            self.remove_files()
        for path in () if writes else paths:
            drop(path)
        begin = time.perf_counter()
        until = begin + most_s
        with ThreadPoolExecutor(setting.threads) as pool:
            try:
                moved = sum(pool.map(move, paths))
            except OSError as exc:
                if not setting.direct or exc.errno != errno.EINVAL:
                    raise
                self._has_direct = False
                return None
            finally:
                stop.set()  # after an interrupt they end with their current call
        return replace(setting, bytes=moved, seconds=time.perf_counter() - begin)

    def sync_s(self) -> list[float]:
        """Return how long it takes to write and sync a block, many times."""
        self.remove_files()
        times: list[float] = []
        fd = os.open(self._path(0), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while len(times) < _MOST_SYNCS and sum(times) < _MOST_SYNC_S:
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


def drop(path: str) -> None:
    """Drop what the page cache has of a file that is synced, as far as the system allows it."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
