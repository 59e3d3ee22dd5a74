"""Staging of tensors on an accelerator: asynchronous copies on a stream of their own into pinned chunks.

The stream first waits for the event that `save()` recorded in the caller's stream, so the copies see what
the caller's program had computed by then. Nothing here synchronises the device: a thread sleeps on the
event behind a chunk's copies.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiockpt.core.threads import Workers
from aiockpt.errors import StageError
from aiockpt.staging.base import Stager
from aiockpt.staging.device_packing import ChunkFiller
from aiockpt.staging.runtime import runtime_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.staging.base import Pending
    from aiockpt.staging.pool import Chunk
    from aiockpt.staging.runtime import Runtime

logger = logging.getLogger("aiockpt")


class Copies:
    """Copies in a stream of ours, with the event behind them."""

    def __init__(self, event: torch.Event, runtime: Runtime, workers: Workers, sources: list[torch.Tensor]) -> None:
        self._event = event
        self._runtime = runtime
        self._workers = workers
        # Memory that the copies read, kept until they are done.
        self._sources = sources

    async def wait(self) -> None:
        """Return when they are done; a thread sleeps until then."""
        try:
            await self._workers.run(self._runtime.sleep_until, self._event)
        except RuntimeError as exc:
            raise StageError(f"copying from or to the device failed: {exc}") from exc
        self._sources.clear()


class AcceleratorStager(Stager):
    """Copies from one device, in one thread and one stream of its own.

    Args:
        device: the device, with its index.
        runtime: how to reach it; the one that fits if None.
    """

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self.device = device
        self._runtime = runtime if runtime is not None else runtime_of(device)
        self.lags = self._runtime.non_blocking
        self._issuer = Workers(1, f"aiockpt-stage-{device}")
        self._waiter = Workers(2, f"aiockpt-wait-{device}")
        self._pinned: list[Chunk] = []
        self._pins = True

    async def issue(self, pieces: Sequence[Piece], chunk: Chunk, capture: Snapshot, layout: Layout) -> Pending:
        """Enqueue the copies of ``pieces`` into ``chunk``; see `Stager.issue`."""
        event, sources = await self._issuer.run(self._enqueue, pieces, chunk, capture, layout)
        return Copies(event, self._runtime, self._waiter, sources)

    def fence(self) -> None:
        """Let this thread's current stream wait for all copies issued so far; see `Stager.fence`."""
        self._runtime.order_behind(self._runtime.record())

    async def pin(self, chunk: Chunk) -> None:
        """Lock a chunk's memory ahead of its first use."""
        await self._issuer.run(self._pin, chunk)

    def _pin(self, chunk: Chunk) -> None:
        """Lock a chunk's memory, once; in the stager's own thread, whose device is set."""
        self._runtime.enter()
        if chunk.pinned or not self._pins:
            return
        chunk.pinned = self._pins = self._runtime.pin(chunk.address, len(chunk.view))
        if chunk.pinned:
            self._pinned.append(chunk)  # which keeps its memory: what is unmapped while locked could not be told apart
        elif self.device.type == "cuda":
            logger.warning(
                "staging memory could not be locked for %s, so copies are slower; look at the limit of locked memory, "
                "see 'ulimit -l'",
                self.device,
            )

    def close(self) -> None:
        """Unlock the chunks, end the threads, and let go of the stream."""
        self._waiter.close()
        self._issuer.executor.submit(self._unpin).result()
        self._issuer.close()
        self._runtime.close()

    def _unpin(self) -> None:
        if self._pinned:
            self._runtime.enter()
        for chunk in self._pinned:
            self._runtime.unpin(chunk.address)
            chunk.pinned = False
        self._pinned.clear()

    def _enqueue(
        self, pieces: Sequence[Piece], chunk: Chunk, capture: Snapshot, layout: Layout
    ) -> tuple[torch.Event, list[torch.Tensor]]:
        self._pin(chunk)
        filler = ChunkFiller(chunk, self.device, capture, layout, non_blocking=self._runtime.non_blocking)
        with self._runtime.stream():
            ready = capture.events.get(self.device)
            if ready is not None:
                self._runtime.wait_for(ready)
            try:
                for piece in pieces:
                    filler.add(piece)
                filler.flush()
            except BaseException:
                # The chunk goes back to the pool: nothing may be still on its way into it.
                self._runtime.sleep_until(self._runtime.record())
                raise
            return self._runtime.record(), filler.sources
