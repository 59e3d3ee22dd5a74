"""How an engine works, and what it can know of the machine."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from aiockpt.planning.layout import BLOCK_BYTES

DEFAULT_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine works; see `aiockpt.AsyncCheckpointer` for the meaning of each."""

    staging_bytes: int | None = None
    chunk_bytes: int | None = None
    io_threads: int | None = None
    drain_timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name, least in (("staging_bytes", BLOCK_BYTES), ("chunk_bytes", BLOCK_BYTES), ("io_threads", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must not be negative, not {self.drain_timeout!r}")

    @property
    def chunk(self) -> int:
        """The chunk size: a whole number of blocks, not more than all staging memory."""
        chunk = self.chunk_bytes or DEFAULT_CHUNK_BYTES
        if self.staging_bytes is not None:
            chunk = min(chunk, self.staging_bytes)
        return max(BLOCK_BYTES, chunk // BLOCK_BYTES * BLOCK_BYTES)


def available_memory_bytes() -> int:
    """Give the memory that can be had without swapping, of the machine and of the control group."""
    available = 1 << 40
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, max(0, limit - used))
    return available


def cores() -> int:
    """Give the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
