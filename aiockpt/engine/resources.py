"""Resources of an engine: worker threads, staging memory, stagers of devices, and the writer process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import anyio

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.lazy import lazy_property
from aiockpt.core.machine import cores, memory_share_bytes, python_program
from aiockpt.core.threads import Duty, Origin, Workers
from aiockpt.errors import LoadError, unwrapped
from aiockpt.staging.cpu import CpuStager
from aiockpt.staging.cuda import AcceleratorStager
from aiockpt.staging.host_cache import HostCache
from aiockpt.staging.pool import ChunkPool, Lease, SharedMemory
from aiockpt.staging.runtime import is_host
from aiockpt.staging.scatter import AcceleratorPlacer

if TYPE_CHECKING:
    import torch

    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import CheckpointerOptions
    from aiockpt.planning.planner import Planner
    from aiockpt.reading.executor import LoadTools
    from aiockpt.saving.collective import CollectiveResources
    from aiockpt.staging.base import Stager
    from aiockpt.writing.process.supervisor import WriterHost

logger = logging.getLogger("aiockpt")

# Threads that compute CRCs give way to the caller's, which halves the lag of its loop. Threads that copy keep their
# priority, as training may wait for them.
_NICE = 10

_ARENA_BYTES = 256 << 20  # of staging memory are locked at once


class EngineResources:
    """The resources, made by the engine's loop and for it."""

    def __init__(
        self,
        options: CheckpointerOptions,
        transforms: Sequence[Transform],
        world: Callable[[], CollectiveResources | None],
        is_unwanted: Callable[[], bool],
        *,
        origin: Origin,
        shared: SharedMemory | None = None,
    ) -> None:
        self._options = options
        count = options.writing_threads
        saving, loading = Duty(origin, "saves", "a thread that saves"), Duty(origin, "loads", "a thread that loads")
        self.copy_workers = Workers(max(2, min(4, cores())), "aiockpt-copy", duty=saving)
        self.io_workers = Workers(count, "aiockpt-io", duty=saving)
        self.seal_workers = Workers(min(count, max(2, cores())), "aiockpt-seal", nice=_NICE, duty=saving)
        # Twice as many as write: each also checks and places what it has read, during which it does not read.
        self._load_workers = Workers(2 * count, "aiockpt-load", duty=loading)
        self.stagers: dict[torch.device, Stager] = {}
        self.placers: dict[torch.device, AcceleratorPlacer] = {}
        is_bounded = options.staging_bytes is not None
        capacity = _chunks(options)
        self._shared = shared
        self.writer: WriterHost | None = None
        if options.process_writer is not None and shared is not None:
            from aiockpt.writing.process.supervisor import WriterHost  # imported already, by `shared_memory`

            self.writer = WriterHost(options.process_writer, options.chunk, count, shared.fd)
        self.pool = ChunkPool(options.chunk, capacity, self._shared)
        self.growth = PoolSizer(self.pool, self.copy_workers, files=count, bounded=is_bounded, is_unwanted=is_unwanted)
        self.world = world  # the other ranks to save with
        self._memory = HostCache(memory_share_bytes())
        self._transforms = transforms

    @lazy_property
    def planner(self) -> Planner:
        """The planner of saves without other ranks; made at the first one."""
        from aiockpt.planning.dcp_plan import DcpFormat  # imported already, by the thread that has submitted the save
        from aiockpt.planning.planner import Planner

        return Planner(DcpFormat(self._options.writing_threads))

    @lazy_property
    def loads(self) -> LoadTools:
        """Resources of the engine for loads; made at the first one."""
        from aiockpt.reading.executor import LoadTools

        return LoadTools(self._load_workers, self._memory, self.pool, self._placer_for, self._transforms)

    def stager_for(self, device: torch.device) -> Stager:
        """Return the stager of a device; create it at its first use."""
        stager = self.stagers.get(device)
        if stager is None:
            stager = CpuStager(self.copy_workers) if is_host(device) else AcceleratorStager(device)
            self.stagers[device] = stager
        return stager

    def _placer_for(self, device: torch.device) -> AcceleratorPlacer:
        placer = self.placers.get(device)
        if placer is None:
            try:
                stager = self.stager_for(device)
                if not isinstance(stager, AcceleratorStager):
                    raise TypeError(f"{device} is no accelerator")
                placer = self.placers[device] = AcceleratorPlacer(stager)
            except RuntimeError as exc:
                raise LoadError(f"{device} can't be used: {exc}") from exc
            if self._options.staging_bytes is None:  # chunks to read into while others are copied
                self.pool.raise_capacity(2 * self._options.writing_threads)
        return placer

    def close(self) -> None:
        """End all threads and free all memory. Blocks."""
        # In reverse order: first what uses threads and chunks, then the threads, then the memory. If closing one of
        # them raises, the others are closed all the same.
        with contextlib.ExitStack() as stack:
            stack.callback(self._memory.close)
            stack.callback(self.pool.drop)
            if self._shared is not None:
                stack.callback(self._shared.close)
            for workers in (self.copy_workers, self.io_workers, self.seal_workers, self._load_workers):
                stack.callback(workers.close)
            for stager in self.stagers.values():
                stack.callback(stager.close)
            for placer in self.placers.values():
                stack.callback(placer.close)


def shared_memory(options: CheckpointerOptions) -> SharedMemory | None:
    """Allocate the staging memory that a writer process shares, or return None; raise OSError or AiockptError."""
    if options.process_writer is None:
        return None
    import aiockpt.writing.process.client  # before the engine's thread wants them
    import aiockpt.writing.process.supervisor  # noqa: F401

    python_program()  # refuses before anything is started
    is_bounded = options.staging_bytes is not None
    chunks = _chunks(options) if is_bounded else max(1, memory_share_bytes() // options.chunk)
    return SharedMemory(chunks * options.chunk)


def _chunks(options: CheckpointerOptions) -> int:
    """Return the number of chunks that the pool may hold at first."""
    return 1 if options.staging_bytes is None else max(1, options.staging_bytes // options.chunk)


# --- staging memory ---------------------------------------------------------------------------------


@dataclass(eq=False)
class PoolSizer:
    """Lets the pool grow to the size of the states that are saved, ahead of the next save. For the engine's loop."""

    _pool: ChunkPool
    _workers: Workers  # they fault memory in
    files: int  # each of which may end in a chunk of its own
    bounded: bool  # by the caller's staging_bytes
    is_unwanted: Callable[[], bool]  # a save wants the threads, or the engine closes
    _chunks: int = 0

    def reserve(self, nbytes: int, chunks: int = 0) -> None:
        """Allow the pool to grow to the size of a state, but at most to half of the available memory.

        ``chunks``: how many its files take.
        """
        self._chunks = chunks
        if not self.bounded and self._wanted(nbytes) > self._pool.capacity:
            chunk = self._pool.chunk_bytes
            most = memory_share_bytes() + self._pool.made * chunk // 2
            # A pool without any chunk would never let a save begin.
            self._pool.raise_capacity(max(1, min(self._wanted(nbytes), most // chunk)))

    async def prewarm(self, nbytes: int, stagers: Sequence[Stager]) -> None:
        """Allocate staging memory for a state of this size, and fault it in with several threads."""
        self.reserve(nbytes)
        # In arenas, because locking takes milliseconds however little it is, and hampers the launch of kernels.
        await self._touch(self._pool.lease_new(self._wanted(nbytes), _ARENA_BYTES), stagers)

    async def fill(self, stagers: Sequence[Stager]) -> None:
        """Allocate the rest of what the pool may hold, while nothing is in flight.

        The first save returns its chunks so early that it needs fewer than it may have. The next save copies faster,
        into memory that is faulted in already, and would have to fault in the rest.
        """
        try:
            await self._touch(self._pool.lease_new(self._chunks), stagers, only_if_idle=True)
        except Exception as exc:  # maybe in a group; the next save allocates what it needs, or fails
            logger.warning("no more staging memory could be allocated ahead of the next save: %s", unwrapped(exc))

    def _wanted(self, nbytes: int) -> int:
        return -(-nbytes // self._pool.chunk_bytes) + self.files

    async def _touch(self, leases: list[Lease], stagers: Sequence[Stager], *, only_if_idle: bool = False) -> None:
        """Fault in the memory of new chunks with all copy threads, and return the chunks to the pool."""

        async def touch(arena: list[Lease]) -> None:
            for stager in stagers:
                stager.settle(arena[0].chunk)
            async with anyio.create_task_group() as tasks:
                for lease in arena:
                    if only_if_idle and self.is_unwanted():  # a save needs the copy threads now
                        return
                    tasks.start_soon(self._workers.run, lease.chunk.touch)
            for stager in stagers:
                await stager.pin(arena[0].chunk)
            for lease in arena:
                lease.release()

        try:
            async with anyio.create_task_group() as tasks:
                for _, arena in groupby(leases, key=lambda lease: lease.chunk.arena):
                    tasks.start_soon(touch, list(arena))
        finally:
            for lease in leases:
                lease.release()
