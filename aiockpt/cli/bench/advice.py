"""The settings that suit a disk, from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from aiockpt.cli.bench.disk import Measured, Setting

DEFAULT_THREADS = 4
DEFAULT_CHUNK_BYTES = 16 << 20

_ENOUGH = 0.9  # of the best speed; what measurements of a busy machine differ by
_BUFFERED_GAIN = 1.25  # the least that the page cache has to gain, because it takes memory from other programs


@dataclass(frozen=True, slots=True)
class Advice:
    """Options of a checkpointer."""

    io_threads: int = DEFAULT_THREADS
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    direct_io: bool = True

    def __str__(self) -> str:
        return f"io_threads={self.io_threads}, chunk_bytes={self.chunk_bytes >> 20} << 20, direct_io={self.direct_io}"


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
