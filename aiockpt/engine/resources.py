"""What an engine works with: threads, staging memory, what copies to and from devices, and the writer process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiockpt.core.machine import available_memory_bytes, cores
from aiockpt.core.threads import Duty, Origin, Workers
from aiockpt.engine.pool_sizer import PoolSizer
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.planner import Planner
from aiockpt.reading.executor import LoadTools
from aiockpt.saving.pipeline import SaveTools
from aiockpt.staging.cpu import CpuStager
from aiockpt.staging.cuda import AcceleratorStager
from aiockpt.staging.host_cache import HostCache
from aiockpt.staging.pool import ChunkPool, SharedMemory
from aiockpt.staging.scatter import AcceleratorPlacer
from aiockpt.writing.process.supervisor import WriterHost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import CheckpointerOptions
    from aiockpt.saving.collective_leader import CollectiveResources
    from aiockpt.staging.base import Stager

# The threads that compute give way to the caller's. Not those that copy, for which training may be waiting.
_NICE = 10


class EngineResources:
    """Made by the engine's loop, and for it.

    Args:
        options: how large, and how many.
        world: gives the other ranks, where there are any.
        unwanted: tells that staging memory is not to be made ahead just now.
        origin: the engine.
        shared: the memory that a writer process is to share; see `shared_memory`.

    Attributes:
        io_workers: the threads that write.
        copy_workers: the threads that copy, and plan.
        writer: the process that writes, if there is one.
        pool: the staging memory.
        growth: makes it.
        stagers: what copies from each device.
        placers: what copies to each device.
        saves: what is lent to each save.
        loads: what is lent to each load.
    """

    def __init__(
        self,
        options: CheckpointerOptions,
        transforms: Sequence[Transform],
        world: Callable[[], CollectiveResources | None],
        unwanted: Callable[[], bool],
        *,
        origin: Origin,
        shared: SharedMemory | None = None,
    ) -> None:
        self._options = options
        count = options.writing_threads
        saving, loading = Duty(origin, "saves", "a thread that saves"), Duty(origin, "loads", "a thread that loads")
        self.copy_workers = Workers(max(2, min(4, cores())), "aiockpt-copy", duty=saving)
        self.io_workers = Workers(count, "aiockpt-io", duty=saving)
        self._seal_workers = Workers(min(count, max(2, cores())), "aiockpt-seal", nice=_NICE, duty=saving)
        # Twice as many as write, for each also checks and places what it has read, while the disk waits.
        self._load_workers = Workers(2 * count, "aiockpt-load", duty=loading)
        self.stagers: dict[torch.device, Stager] = {}
        self.placers: dict[torch.device, AcceleratorPlacer] = {}
        is_bounded = options.staging_bytes is not None
        capacity = _chunks(options)
        self._shared = shared
        self.writer: WriterHost | None = None
        if options.process_writer is not None and shared is not None:
            self.writer = WriterHost(options.process_writer, options.chunk, count, shared)
        self.pool = ChunkPool(options.chunk, capacity, self._shared)
        self.growth = PoolSizer(self.pool, self.copy_workers, files=count, bounded=is_bounded, unwanted=unwanted)
        self.saves = SaveTools(
            pool=self.pool,
            planner=Planner(DcpFormat(count)),
            copy_workers=self.copy_workers,
            io_workers=self.io_workers,
            seal_workers=self._seal_workers,
            stager_for=self.stager_for,
            reserve=self.growth.reserve,
            world=world,
            writer=self.writer,
        )
        self._memory = HostCache(available_memory_bytes() // 2)
        self.loads = LoadTools(self._load_workers, self._memory, self.pool, self._placer_for, transforms)

    def stager_for(self, device: torch.device) -> Stager:
        """Give what copies from a device; make it at its first use."""
        stager = self.stagers.get(device)
        if stager is None:
            stager = CpuStager(self.copy_workers) if device.type == "cpu" else AcceleratorStager(device)
            self.stagers[device] = stager
        return stager

    def _placer_for(self, device: torch.device) -> AcceleratorPlacer:
        placer = self.placers.get(device)
        if placer is None:
            stager = self.stager_for(device)
            if not isinstance(stager, AcceleratorStager):
                raise TypeError(f"{device} is no accelerator")
            placer = self.placers[device] = AcceleratorPlacer(stager)
            if self._options.staging_bytes is None:  # some to be read into while others are copied
                self.pool.raise_capacity(2 * self._options.writing_threads)
        return placer

    def close(self) -> None:
        """End all threads and let go of all memory. Blocks."""
        with contextlib.ExitStack() as stack:  # all are closed, whatever one of them raises
            stack.callback(self._memory.close)
            stack.callback(self.pool.drop)
            if self._shared is not None:
                stack.callback(self._shared.close)
            for workers in (self.copy_workers, self.io_workers, self._seal_workers, self._load_workers):
                stack.callback(workers.close)
            for stager in self.stagers.values():
                stack.callback(stager.close)
            for placer in self.placers.values():
                stack.callback(placer.close)


def shared_memory(options: CheckpointerOptions) -> SharedMemory | None:
    """Make the staging memory that a writer process is to share; None where threads write.

    Raises:
        OSError: there is no descriptor for it.
        AiockptError: there is no such memory.
    """
    if options.process_writer is None:
        return None
    is_bounded = options.staging_bytes is not None
    most = _chunks(options) * options.chunk if is_bounded else available_memory_bytes() // 2
    return SharedMemory(max(1, most // options.chunk) * options.chunk)


def _chunks(options: CheckpointerOptions) -> int:
    """Return how many chunks there may be at first."""
    return 1 if options.staging_bytes is None else max(1, options.staging_bytes // options.chunk)
