"""The machine's limits: the same bytes moved by system calls and memmove alone, in threads."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from isal.isal_zlib import crc32

from benchmarks.harness.states import State, size_of, split

BLOCK_BYTES = 4096
WRITE_BYTES = 16 << 20
CHECKED_BYTES = 1 << 20  # read and checked at a time, small enough for the processor's cache
FIRST_FILE = "0.raw"


class Arena:
    """Page-aligned memory: touched and random, or fresh; in huge pages if the kernel has them.

    Attributes:
        view: the bytes.
        address: the address of the first byte.
    """

    def __init__(self, nbytes: int, *, touched: bool = True, huge: bool = True) -> None:
        nbytes = whole_blocks(nbytes)
        # Private, as the memory of tensors is: shared memory, Python's default, gets other pages at other costs.
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if touched:
            torch.frombuffer(self._memory, dtype=torch.int32).random_()


def whole_blocks(nbytes: int) -> int:
    """Round up to whole blocks, which O_DIRECT requires."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def shares(nbytes: int, threads: int) -> list[tuple[int, int]]:
    """Split a length into one range of whole blocks for each thread."""
    step = whole_blocks(-(-nbytes // threads))
    total = whole_blocks(nbytes)
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def in_threads(jobs: Sequence[Callable[[], object]]) -> None:
    """Run every job in a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


def write_direct(directory: Path, arena: Arena, nbytes: int, threads: int, buffers: Sequence[Arena] = ()) -> None:
    """Write ``nbytes`` past the page cache and sync them: one file for each thread, from the arena as a ring.

    With ``buffers``, one for each thread, each piece is copied first and its CRC computed, as in a save.
    """
    directory.mkdir()
    in_threads(
        [
            lambda start=start, stop=stop, buffer=buffer: _write_file(
                directory / f"{start}.raw", arena, start, stop, buffer
            )
            for (start, stop), buffer in itertools.zip_longest(shares(nbytes, threads), buffers)
        ]
    )


def create_direct(path: Path) -> int:
    """Create a file for O_DIRECT writes; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)


def _write_file(path: Path, arena: Arena, start: int, stop: int, buffer: Arena | None) -> None:
    fd, view = create_direct(path), arena.view
    try:
        while start < stop:
            at = start % len(view)
            piece = view[at : at + min(WRITE_BYTES, stop - start, len(view) - at)]
            if buffer is not None:
                ctypes.memmove(buffer.address, arena.address + at, len(piece))
                piece = buffer.view[: len(piece)]
                for begin in range(0, len(piece), CHECKED_BYTES):
                    crc32(piece[begin : begin + CHECKED_BYTES])
            start += os.write(fd, piece)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_into(path: Path, arena: Arena, threads: int, *, direct: bool, crc: bool = False) -> None:
    """Read a file into memory, one range in each thread; if ``crc``, compute the CRC of each piece."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        nbytes = os.fstat(fd).st_size
        in_threads(
            [
                lambda start=start, stop=stop: _read_range(fd, arena.view, start, min(stop, nbytes), crc=crc)
                for start, stop in shares(nbytes, threads)
            ]
        )
    finally:
        os.close(fd)


def _read_range(fd: int, view: memoryview, start: int, stop: int, *, crc: bool) -> None:
    step = CHECKED_BYTES if crc else WRITE_BYTES
    while start < stop:
        count = os.preadv(fd, [view[start : min(start + step, stop)]], start)
        if count == 0:
            raise EOFError(f"the file ends at {start}")
        if crc:
            crc32(view[start : start + count])
        start += count


def read_runs(path: Path, arena: Arena, runs: Sequence[tuple[int, int]], threads: int) -> None:
    """Read runs of bytes, given by offset and length, each with a read call of its own.

    The reads use O_DIRECT if all runs are aligned; else the page cache without readahead.
    """
    direct = not any(number % BLOCK_BYTES for run in runs for number in run)
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        step = -(-len(runs) // threads)
        begins = [0, *itertools.accumulate(length for _, length in runs)]
        in_threads(
            [
                lambda first=first: _read_each(fd, arena.view[begins[first] :], runs[first : first + step])
                for first in range(0, len(runs), step)
            ]
        )
    finally:
        os.close(fd)


def _read_each(fd: int, view: memoryview, runs: Sequence[tuple[int, int]]) -> None:
    at = 0
    for offset, length in runs:
        done = 0
        while done < length:
            count = os.preadv(fd, [view[at + done : at + min(length, done + WRITE_BYTES)]], offset + done)
            if count == 0:
                raise EOFError(f"the file ends at {offset + done}")
            done += count
        at += length


def copy_state(state: State, arena: Arena, threads: int) -> None:
    """Copy all tensors into the arena with memmove."""
    jobs = []
    begin = 0
    for part in split(state, threads):
        jobs.append(lambda part=part, begin=begin: _copy_tensors(part, arena.address + begin))
        begin += size_of(part)
    in_threads(jobs)


def _copy_tensors(state: State, address: int) -> None:
    for tensor in state.values():
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        address += tensor.nbytes
