"""Copies values that were read from host memory into tensors on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.core.threads import Workers
from aiockpt.errors import LoadError
from aiockpt.staging.base import RAW_DTYPES, Pending
from aiockpt.staging.cuda import AcceleratorStager, Copies
from aiockpt.staging.runtime import CAPTURING, Runtime, is_capturing, running_in, runtime_of

if TYPE_CHECKING:
    from aiockpt.staging.pool import Chunk


class Placement(NamedTuple):
    """Values in host memory, and the region of a tensor to fill with them."""

    region: torch.Tensor  # of any dtype, device and strides
    data: torch.Tensor  # in a shape that broadcasts to the region's
    conj: bool = False  # stored conjugated
    neg: bool = False  # stored negated


def place(placement: Placement, *, non_blocking: bool = False) -> torch.Tensor:
    """Copy the values, bit for bit if the dtypes are equal, else with a cast.

    Return the source of the copy. The caller keeps it until a copy that does not block is done.
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
    """Copies to one device, in one thread and one stream of its own; the device's stager pins the chunks."""

    def __init__(self, stager: AcceleratorStager, runtime: Runtime | None = None) -> None:
        self.device = stager.device
        self._stager = stager
        self._runtime = runtime if runtime is not None else runtime_of(stager.device)
        self._issuer = Workers(1, f"aiockpt-place-{self.device}")
        self._waiter = Workers(2, f"aiockpt-placed-{self.device}")

    async def begin(self, ready: torch.Event | None) -> None:
        """Make later copies wait for an event of the caller's stream, whose work may still use the targets."""
        with self._errors():
            await self._issuer.run(self._begin, ready)

    async def new(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], stream: Any = None
    ) -> list[torch.Tensor]:
        """Create tensors on the device, to be filled by `issue`.

        ``stream`` is the stream that will use them: their memory is then freed in order with its work. None: the
        device's default stream.
        """
        with self._errors():
            return await self._issuer.run(self._new, shapes, stream)

    async def issue(self, placements: Sequence[Placement], chunk: Chunk) -> Pending:
        """Enqueue copies whose data is in ``chunk``; they are done once the result's `wait` returns."""
        with self._errors():
            await self._stager.pin(chunk)
            event, sources = await self._issuer.run(self._enqueue, placements)
        return Copies(event, self._runtime, self._waiter, sources)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            raise LoadError(f"copying to {self.device} failed: {exc}") from exc

    def close(self) -> None:
        self._waiter.close()
        self._issuer.close()
        self._runtime.close()

    def _begin(self, ready: torch.Event | None) -> None:
        self._runtime.enter()
        if ready is not None:
            self._runtime.wait_for(ready)

    def _new(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], stream: Any) -> list[torch.Tensor]:
        self._runtime.enter()
        with running_in(stream):
            if is_capturing(self.device):
                raise LoadError(CAPTURING.format(self.device))
            try:
                made = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
            except torch.OutOfMemoryError as exc:
                raise LoadError(f"{self.device} has no memory for what is to be loaded: {exc}") from exc
            # The allocator may return memory that queued work of its stream still uses: order the copies behind that.
            self._runtime.wait_for(self._runtime.record_current())
        return made

    def _enqueue(self, placements: Sequence[Placement]) -> tuple[torch.Event, list[torch.Tensor]]:
        self._runtime.enter()
        with self._runtime.stream():
            try:
                sources = [place(placement, non_blocking=True) for placement in placements]
                return self._runtime.record(), sources
            except BaseException:
                # The chunk returns to the pool: no copy may still read it.
                self._runtime.drain()
                raise
