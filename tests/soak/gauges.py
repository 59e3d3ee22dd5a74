"""The resources that a program holds, to be compared before and after a soak."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from aiockpt.saving.job import SaveJob
from aiockpt.snapshot import optimizer_hooks
from aiockpt.staging.pool import ChunkPool


def leased_chunks() -> int:
    """Return the number of leased chunks in all pools that are still referenced."""
    return sum(each.leased for each in gc.get_objects() if type(each) is ChunkPool)


@dataclass(frozen=True, slots=True)
class Gauge:
    """The resources held at one moment.

    Attributes:
        files: the number of open file descriptors.
        threads: the number of threads, those of other libraries included.
        own_threads: the names of the threads of checkpointers.
        children: the number of child processes.
        tasks: the number of tasks of the running loop.
        leases: the number of leased chunks of staging memory.
        captures: the number of states held for a save.
        saves: the number of saves that are still referenced.
        hidden: the paths of unfinished checkpoints below the directory.
        resident_bytes: the resident memory, after free memory was returned to the system.
    """

    files: int
    threads: int
    own_threads: tuple[str, ...]
    children: int
    tasks: int
    leases: int
    captures: int
    saves: int
    hidden: tuple[str, ...]
    resident_bytes: int

    @classmethod
    def read(cls, directory: Path) -> Gauge:
        """Return the resources of this process, after a garbage collection."""
        gc.collect()
        saves = sum(type(each) is SaveJob for each in gc.get_objects())
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        return cls(
            files=process.num_fds(),
            threads=process.num_threads(),
            own_threads=tuple(each.name for each in threading.enumerate() if each.name.startswith("aiockpt")),
            children=len(process.children()),
            tasks=len(asyncio.all_tasks()),
            leases=leased_chunks(),
            captures=len(optimizer_hooks._live),
            saves=saves,
            hidden=tuple(str(path) for path in directory.rglob(".*") if path.name.startswith(".")),
            resident_bytes=process.memory_info().rss,
        )

    def leaks_since(self, before: Gauge) -> list[str]:
        """Return a description of each resource held in addition; for memory see `growth_bytes`."""
        found = [
            f"{name}: {getattr(before, name)} -> {getattr(self, name)}"
            for name in ("files", "threads", "children", "tasks", "leases", "captures", "saves")
            if getattr(self, name) > getattr(before, name)
        ]
        found += [f"thread {name}" for name in self.own_threads]
        return found + [f"unfinished {path}" for path in self.hidden if ".aiockpt-" in path]


def growth_bytes(gauges: Sequence[Gauge]) -> float:
    """Return the growth of resident memory from the middle third of the gauges to the last third, by their medians.

    The first third is ignored, because thread pools, caches and arenas fill up in it.
    """
    values = [gauge.resident_bytes for gauge in gauges]
    third = len(values) // 3
    if not third:
        return 0.0
    return statistics.median(values[-third:]) - statistics.median(values[third : 2 * third])
