"""Raw I/O in threads: sequential writes and reads of one file for each thread, and syncs. Blocks."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

from aiockpt.core.wording import plural

Kind = Literal["write", "read"]

_ARENA_BYTES = 64 << 20
_SYNC_BYTES = 4096
_MOST_SYNCS = 100
_MOST_SYNC_S = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to write or read, which is measured.

    Attributes:
        kind: "write" (with the sync at the end) or "read".
        direct: past the page cache.
        threads: how many threads, each with a file of its own.
        chunk_bytes: the bytes of each system call.
    """

    kind: Kind
    direct: bool
    threads: int
    chunk_bytes: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'} {self.kind}, {plural(self.threads, 'thread')}"


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures that a setting has reached."""

    setting: Setting
    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The speed."""
        return self.nbytes / max(self.seconds, 1e-9)


class Disk:
    """A directory to measure, with data that no file system can compress.

    Args:
        directory: an empty directory, in which files are made.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._arena = mmap.mmap(-1, _ARENA_BYTES)  # page-aligned, as direct I/O needs it
        self._arena.write(os.urandom(_ARENA_BYTES))
        self._stop = threading.Event()

    def close(self) -> None:
        """Free the data."""
        self._arena.close()

    def measure(
        self, setting: Setting, nbytes: int, most_s: float, note: Callable[[int], object] = lambda _: None
    ) -> Measured | None:
        """Write or read files for a time, or up to so many bytes; None where direct I/O is not supported.

        Reads the files of the last write with as many threads. ``note`` is called with the bytes of each call.
        """
        share = max(1, nbytes // setting.threads // setting.chunk_bytes) * setting.chunk_bytes
        until = time.perf_counter() + most_s

        def run(number: int) -> int:
            done = 0
            move = self._write if setting.kind == "write" else self._read
            for count in move(self._file(number), setting, share, until):
                done += count
                note(count)
            return done

        for number in range(setting.threads if setting.kind == "read" else 0):
            drop(self._file(number))
        pool = ThreadPoolExecutor(setting.threads)  # an interrupted join of a thread can't be repeated
        begin = time.perf_counter()
        try:
            with uninterrupted():
                running = [pool.submit(run, number) for number in range(setting.threads)]
            wait(running)
            seconds = time.perf_counter() - begin
        finally:
            with uninterrupted():
                self._stop.set()  # after an interrupt they end with their current call
                pool.shutdown()
                self._stop.clear()
        try:
            return Measured(setting, sum(each.result() for each in running), seconds)
        except OSError as exc:
            if setting.direct and exc.errno == errno.EINVAL:
                return None
            raise

    def sync_s(self) -> list[float]:
        """Return how long it takes to write and sync a block, many times."""
        times: list[float] = []
        fd = os.open(self._file(0), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while len(times) < _MOST_SYNCS and sum(times) < _MOST_SYNC_S:
                begin = time.perf_counter()
                os.pwrite(fd, memoryview(self._arena)[:_SYNC_BYTES], len(times) * _SYNC_BYTES)
                os.fsync(fd)
                times.append(time.perf_counter() - begin)
        finally:
            os.close(fd)
        return times

    def remove_files(self) -> None:
        """Remove the files."""
        for name in os.listdir(self._directory):
            os.unlink(os.path.join(self._directory, name))

    def _file(self, number: int) -> str:
        return os.path.join(self._directory, f"__0_{number}.distcp")  # `aiockpt clean` knows what has this name

    def _write(self, path: str, setting: Setting, nbytes: int, until: float) -> Iterator[int]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (_direct_flag() if setting.direct else 0)
        fd = os.open(path, flags, 0o644)
        try:
            done = 0
            while done < nbytes and (not done or time.perf_counter() < until) and not self._stop.is_set():
                at = done % _ARENA_BYTES
                with memoryview(self._arena) as view:
                    count = os.write(fd, view[at : at + min(setting.chunk_bytes, _ARENA_BYTES - at)])
                done += count
                yield count
            if not self._stop.is_set():
                os.fsync(fd)
        finally:
            os.close(fd)

    def _read(self, path: str, setting: Setting, nbytes: int, until: float) -> Iterator[int]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_direct_flag() if setting.direct else 0))
        try:
            with mmap.mmap(-1, setting.chunk_bytes) as buffer, memoryview(buffer) as view:
                done = 0
                while done < nbytes and (not done or time.perf_counter() < until) and not self._stop.is_set():
                    count = os.preadv(fd, [view], done)
                    if not count:
                        return
                    done += count
                    yield count
        finally:
            os.close(fd)


def drop(path: str) -> None:
    """Drop what the page cache has of a file that is synced, as far as the system allows it."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _direct_flag() -> int:
    flag: int | None = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EINVAL, "this system has no direct I/O")
    return flag


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # interrupts come to the main thread alone
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
