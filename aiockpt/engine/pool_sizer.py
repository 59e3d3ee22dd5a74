"""How much staging memory there is: as much as a state needs, made ahead of the next save."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from aiockpt.core.machine import available_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiockpt.core.threads import Workers
    from aiockpt.staging.base import Stager
    from aiockpt.staging.pool import ChunkPool, Lease

logger = logging.getLogger("aiockpt")


class PoolSizer:
    """Lets the pool grow with the states that are saved. For the engine's loop.

    Args:
        pool: the pool.
        workers: threads that fault memory in.
        files: how many files a state is spread over, each of which may end in a chunk of its own.
        bounded: the caller has said how large the pool may be.
        unwanted: tells that nobody will want memory made ahead, or that a save wants the threads.
    """

    def __init__(
        self, pool: ChunkPool, workers: Workers, *, files: int, bounded: bool, unwanted: Callable[[], bool]
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._files = files
        self._bounded = bounded
        self._unwanted = unwanted
        self._nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Let the pool grow to the size of a state, up to half of the memory that is available."""
        self._nbytes = nbytes
        if not self._bounded:
            chunk = self._pool.chunk_bytes
            most = (available_memory_bytes() + self._pool.made * chunk) // 2
            self._pool.raise_capacity(max(1, min(self._wanted(nbytes), most // chunk)))

    async def prewarm(self, nbytes: int, stagers: Sequence[Stager]) -> None:
        """Make staging memory for a state of this size, and fault it in with several threads."""
        self.reserve(nbytes)
        await self._touch(self._pool.lease_new(self._wanted(nbytes)), stagers)

    async def fill(self, stagers: Sequence[Stager]) -> None:
        """Make what the pool may still grow by, while nothing is in flight.

        The first save writes its chunks back so early that it gets by with fewer than it may have; the next
        one, which finds memory that was touched, would otherwise have to fault in the rest.
        """
        try:
            await self._touch(self._pool.lease_new(self._wanted(self._nbytes)), stagers, only_if_idle=True)
        except (OSError, MemoryError, RuntimeError) as exc:
            logger.warning("no more staging memory could be made ahead of the next save: %s", exc)

    def _wanted(self, nbytes: int) -> int:
        return -(-nbytes // self._pool.chunk_bytes) + self._files

    async def _touch(self, leases: list[Lease], stagers: Sequence[Stager], *, only_if_idle: bool = False) -> None:
        """Fault the memory of fresh chunks in, with all copy threads, and give the chunks to the pool."""

        async def touch(lease: Lease) -> None:
            if only_if_idle and self._unwanted():
                return
            await self._workers.run(lease.chunk.touch)
            for stager in stagers:
                await stager.pin(lease.chunk)
            lease.release()

        try:
            async with anyio.create_task_group() as tasks:
                for lease in leases:
                    tasks.start_soon(touch, lease)
        finally:
            for lease in leases:
                lease.release()
