"""Placing what was read: from host memory into tensors, wherever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.core.threads import Workers
from aiockpt.errors import LoadError
from aiockpt.staging.base import RAW_DTYPES
from aiockpt.staging.cuda import Copies
from aiockpt.staging.runtime import making_in, runtime_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.staging.base import Pending
    from aiockpt.staging.cuda import AcceleratorStager
    from aiockpt.staging.pool import Chunk
    from aiockpt.staging.runtime import Runtime


class Placement(NamedTuple):
    """Values in host memory, and the part of a tensor that they belong to.

    Attributes:
        region: where they go; of any dtype, device and strides.
        data: the values, in a shape that broadcasts to the region's.
        conj: they are stored conjugated.
        neg: they are stored negated.
    """

    region: torch.Tensor
    data: torch.Tensor
    conj: bool = False
    neg: bool = False


def place(placement: Placement, *, non_blocking: bool = False) -> torch.Tensor:
    """Copy, casting where the dtypes differ, bit by bit where they don't.

    Returns:
        What is read; to be kept until a copy that does not block is done.
    """
    region, data, conj, neg = placement
    with torch.no_grad():
        if conj:
            data = data.conj_physical()
        if neg:
            data = data.neg()
        if region.dtype is data.dtype and not (region.is_conj() or region.is_neg()):
            raw = RAW_DTYPES[data.dtype.itemsize]
            region, data = region.view(raw), data.view(raw)
        region.copy_(data, non_blocking=non_blocking)
    return data


class AcceleratorPlacer:
    """Copies to one device, in one thread and one stream of its own.

    Args:
        stager: the device's stager, which locks chunks in memory.
        runtime: how to reach the device; the one that fits if None.
    """

    def __init__(self, stager: AcceleratorStager, runtime: Runtime | None = None) -> None:
        self.device = stager.device
        self._stager = stager
        self._runtime = runtime if runtime is not None else runtime_of(stager.device)
        self._issuer = Workers(1, f"aiockpt-place-{self.device}")
        self._waiter = Workers(2, f"aiockpt-placed-{self.device}")

    async def begin(self, ready: torch.Event | None) -> None:
        """Let the copies to come wait for an event of the caller's stream, whose work may use the targets."""
        await self._issuer.run(self._begin, ready)

    async def new(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], stream: Any = None
    ) -> list[torch.Tensor]:
        """Make tensors on the device, to be filled by `issue`.

        Args:
            shapes: their shapes and dtypes.
            stream: the stream that will use them, so that their memory goes back in order with its work; None for
                the device's default stream.

        Raises:
            LoadError: the device has not enough memory.
        """
        return await self._issuer.run(self._new, shapes, stream)

    async def issue(self, placements: Sequence[Placement], chunk: Chunk) -> Pending:
        """Enqueue copies whose data is in ``chunk``; when the result's `wait` returns, they are done."""
        await self._stager.pin(chunk)
        event, sources = await self._issuer.run(self._enqueue, placements)
        return Copies(event, self._runtime, self._waiter, sources)

    def close(self) -> None:
        """End the threads, and let go of the stream."""
        self._waiter.close()
        self._issuer.close()
        self._runtime.close()

    def _begin(self, ready: torch.Event | None) -> None:
        self._runtime.enter()
        if ready is not None:
            self._runtime.wait_for(ready)

    def _new(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], stream: Any) -> list[torch.Tensor]:
        self._runtime.enter()
        with making_in(stream):
            try:
                made = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
            except torch.OutOfMemoryError as exc:
                raise LoadError(f"{self.device} has no memory for what is to be loaded: {exc}") from exc
            # The allocator may have given memory that work in its stream still uses.
            self._runtime.wait_for(self._runtime.record_current())
        return made

    def _enqueue(self, placements: Sequence[Placement]) -> tuple[torch.Event, list[torch.Tensor]]:
        self._runtime.enter()
        with self._runtime.stream():
            try:
                sources = [place(placement, non_blocking=self._runtime.non_blocking) for placement in placements]
            except BaseException:
                # The chunk goes back to the pool: nothing may still read it.
                self._runtime.sleep_until(self._runtime.record())
                raise
            return self._runtime.record(), sources
