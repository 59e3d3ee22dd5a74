"""How an engine works, and what it can know of the machine."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from aiockpt.planning.layout import BLOCK_BYTES

if TYPE_CHECKING:
    from aiockpt.staging.pacing import StagingWindow

DEFAULT_CHUNK_BYTES = 16 << 20


OnBusy = Literal["wait", "skip", "supersede", "error"]
OnFailure = Literal["raise", "warn"]

_IONICE = {"realtime": 1, "best-effort": 2, "idle": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWriter:
    """A process of its own that computes CRCs, writes and commits; for ``writer=``.

    It shares staging memory with the trainer, and outlives it: what was staged becomes a checkpoint even if the
    trainer is killed.

    Attributes:
        nice: how far it steps back when others want the processor, 0 to 19; see nice(1).
        ionice: "idle", or "best-effort" or "realtime" with a level of 0 to 7, as in ``("best-effort", 7)``; see
            ionice(1). None: as the trainer.
        agreement_timeout: of several ranks, when a trainer has died: how long, in seconds, the writers wait for each
            other while nothing goes on, before they remove the unfinished checkpoint.
    """

    nice: int = 0
    ionice: Literal["idle"] | tuple[Literal["best-effort", "realtime"], int] | None = None
    agreement_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.agreement_timeout > 0:
            raise ValueError(f"agreement_timeout must be positive, not {self.agreement_timeout!r}")
        if not isinstance(self.nice, int) or not 0 <= self.nice <= 19:
            raise ValueError(f"nice is {self.nice!r}; it must be 0 to 19")
        numbers = self.ionice_numbers
        if numbers is not None and not 0 <= numbers[1] <= 7:
            raise ValueError(f"ionice is {self.ionice!r}; its level must be 0 to 7")

    @property
    def ionice_numbers(self) -> tuple[int, int] | None:
        """The class and level, as the kernel counts them."""
        if self.ionice is None:
            return None
        try:
            name, level = (self.ionice, 0) if isinstance(self.ionice, str) else self.ionice
            return _IONICE[name], int(level)
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"ionice is {self.ionice!r}; it must be 'idle', ('best-effort', level) or ('realtime', level)"
            ) from None


def check_writer(writer: object) -> ProcessWriter | None:
    """Give the process that is to write; None for threads.

    Raises:
        ValueError: it is neither.
    """
    if writer == "thread":
        return None
    if writer == "process":
        return ProcessWriter()
    if isinstance(writer, ProcessWriter):
        return writer
    raise ValueError(f"writer is {writer!r}; it must be 'thread', 'process' or an aiockpt.ProcessWriter")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine works; see `aiockpt.AsyncCheckpointer` for the meaning of each."""

    staging_bytes: int | None = None
    chunk_bytes: int | None = None
    io_threads: int | None = None
    drain_timeout: float = 1800.0
    staging_window: StagingWindow | None = None
    writer: ProcessWriter | None = None
    on_busy: OnBusy = "wait"
    max_in_flight: int = 1
    on_failure: OnFailure = "raise"
    save_timeout: float | None = None

    def __post_init__(self) -> None:
        least_of = {"staging_bytes": BLOCK_BYTES, "chunk_bytes": BLOCK_BYTES, "io_threads": 1, "max_in_flight": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must not be negative, not {self.drain_timeout!r}")
        for name, known in (("on_busy", get_args(OnBusy)), ("on_failure", get_args(OnFailure))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(repr, known))}")
        if self.save_timeout is not None and not self.save_timeout > 0:
            raise ValueError(f"save_timeout must be positive, not {self.save_timeout!r}")

    @property
    def writing_threads(self) -> int:
        """How many threads write, and into how many files."""
        return self.io_threads or 4

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
