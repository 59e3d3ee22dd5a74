"""What a program holds of the system's things, to be compared before and after a soak."""

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
    """Count the chunks of staging memory that are out, of all pools that anybody refers to."""
    return sum(each.leased for each in gc.get_objects() if type(each) is ChunkPool)


@dataclass(frozen=True, slots=True)
class Gauge:
    """What is held at one moment.

    Attributes:
        files: open file descriptors.
        threads: threads of the process, those of other libraries included.
        own_threads: names of threads that belong to checkpointers.
        children: child processes.
        tasks: tasks of the running loop.
        leases: chunks of staging memory that are out.
        captures: states that are held for a save.
        saves: saves that somebody still refers to.
        hidden: unfinished checkpoints below the directory.
        resident_bytes: of memory, when what is free has been given back to the system.
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
        """Look at this process, after collecting what is garbage."""
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
        """Say what is held that was not held before; memory apart, see `growth_bytes`."""
        found = [
            f"{name}: {getattr(before, name)} -> {getattr(self, name)}"
            for name in ("files", "threads", "children", "tasks", "leases", "captures", "saves")
            if getattr(self, name) > getattr(before, name)
        ]
        found += [f"thread {name}" for name in self.own_threads]
        return found + [f"unfinished {path}" for path in self.hidden if ".aiockpt-" in path]


def growth_bytes(gauges: Sequence[Gauge]) -> float:
    """Give by how much resident memory grows: from the middle third of moments to the last, each by its median.

    The first third is left out: pools of threads, caches and arenas fill then.
    """
    values = [gauge.resident_bytes for gauge in gauges]
    third = len(values) // 3
    if not third:
        return 0.0
    return statistics.median(values[-third:]) - statistics.median(values[third : 2 * third])
