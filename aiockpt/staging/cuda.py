"""Staging of tensors on an accelerator: asynchronous copies on a stream of their own into pinned chunks.

The stream first waits for the event that `save()` recorded in the caller's stream, so the copies see what
the caller's program had computed by then. Nothing here synchronises the device: a thread sleeps on the
event behind a chunk's copies.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aiockpt.errors import StageError
from aiockpt.staging.base import LayoutMismatchError, Stager, check, check_extent, copy_strided, restore
from aiockpt.threads import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.source import Capture
    from aiockpt.staging.base import Pending
    from aiockpt.staging.pool import Chunk

PACK_BYTES = 256 << 10
"""Pieces up to this size are gathered on the device and copied together: a copy costs some 10 us however small."""


class Runtime(Protocol):
    """The few things that staging asks of a device; `TorchRuntime` for real ones."""

    def enter(self) -> None:
        """Make the device current in this thread, where that is kept for each thread."""

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""

    def wait_for(self, event: torch.Event) -> None:
        """Let the staging stream wait for an event."""

    def record(self) -> torch.Event:
        """Record an event in the staging stream."""

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream, the device's default one."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory so that the device copies to it directly; False where that can't be done."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


class TorchRuntime:
    """A device of torch: CUDA, or another accelerator through ``torch.accelerator``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream: Any = _cuda_stream(device) if self._is_cuda else torch.Stream(device)

    def enter(self) -> None:
        """Make the device current in this thread: pinning would use device 0 otherwise."""
        if self._is_cuda:
            torch.cuda.set_device(self._device)
        else:
            torch.accelerator.set_device_index(self._device.index or 0)

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""
        if self._is_cuda:
            return torch.cuda.stream(self._stream)
        torch.accelerator.set_stream(self._stream)  # the thread is the stager's own
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        """Let the staging stream wait for an event."""
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        """Record an event in the staging stream; waiting for it sleeps rather than spins."""
        event = torch.Event(self._device, blocking=True)
        event.record(self._stream)
        return event

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream, the device's default one."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def pin(self, address: int, nbytes: int) -> bool:
        """Register the memory with the CUDA driver: for all devices, at its own size."""
        if not self._is_cuda:
            return False
        portable = 1
        return int(_cudart().cudaHostRegister(address, nbytes, portable)) == 0

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        _cudart().cudaHostUnregister(address)


def _cuda_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Copies:
    """Copies in a stream of ours, with the event behind them."""

    def __init__(self, event: torch.Event, workers: Workers, sources: list[torch.Tensor]) -> None:
        self._event = event
        self._workers = workers
        # Memory that the copies read, kept until they are done.
        self._sources = sources

    async def wait(self) -> None:
        """Return when they are done; a thread sleeps until then."""
        try:
            await self._workers.run(self._event.synchronize)
        except RuntimeError as exc:
            raise StageError(f"copying from or to the device failed: {exc}") from exc
        self._sources.clear()


class AcceleratorStager(Stager):
    """Copies from one device, in one thread and one stream of its own.

    Args:
        device: the device, with its index.
        runtime: how to reach it; `TorchRuntime` if None.
    """

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self.device = device
        self._runtime = runtime if runtime is not None else TorchRuntime(device)
        self._issuer = Workers(1, f"aiockpt-stage-{device}")
        self._waiter = Workers(2, f"aiockpt-wait-{device}")
        self._pinned: list[Chunk] = []

    async def issue(self, pieces: Sequence[Piece], chunk: Chunk, capture: Capture, layout: Layout) -> Pending:
        """Enqueue the copies of ``pieces`` into ``chunk``; see `Stager.issue`."""
        event, sources = await self._issuer.run(self._enqueue, pieces, chunk, capture, layout)
        return Copies(event, self._waiter, sources)

    def fence(self) -> Sequence[tuple[torch.device, torch.Event]]:
        """Give an event behind all copies issued so far."""
        return [(self.device, self._runtime.record())]

    async def pin(self, chunk: Chunk) -> None:
        """Lock a chunk's memory ahead of its first use."""
        await self._issuer.run(self._pin, chunk)

    def _pin(self, chunk: Chunk) -> None:
        """Lock a chunk's memory, once; in the stager's own thread, whose device is set."""
        self._runtime.enter()
        if not chunk.pinned:
            chunk.pinned = self._runtime.pin(chunk.address, len(chunk.view))
            if chunk.pinned:
                self._pinned.append(chunk)

    def close(self) -> None:
        """Unlock the chunks and end the threads."""
        self._waiter.close()
        self._issuer.executor.submit(self._unpin).result()
        self._issuer.close()

    def _unpin(self) -> None:
        self._runtime.enter()
        for chunk in self._pinned:
            self._runtime.unpin(chunk.address)
            chunk.pinned = False
        self._pinned.clear()

    def _enqueue(
        self, pieces: Sequence[Piece], chunk: Chunk, capture: Capture, layout: Layout
    ) -> tuple[torch.Event, list[torch.Tensor]]:
        self._pin(chunk)
        sources: list[torch.Tensor] = []
        with self._runtime.stream():
            self._runtime.wait_for(capture.events[self.device])
            small: list[tuple[int, torch.Tensor]] = []
            try:
                for piece in pieces:
                    source = self._bytes_of(piece, capture, layout)
                    sources.append(source)
                    if len(source) <= PACK_BYTES:
                        small.append((piece.at, source))
                        continue
                    self._copy_packed(small, chunk)
                    chunk.tensor[piece.at : piece.at + len(source)].copy_(source, non_blocking=True)
                self._copy_packed(small, chunk)
            except BaseException:
                # The chunk goes back to the pool: nothing may be still on its way into it.
                self._runtime.record().synchronize()
                raise
            return self._runtime.record(), sources

    def _bytes_of(self, piece: Piece, capture: Capture, layout: Layout) -> torch.Tensor:
        """Give the bytes of a piece as a tensor of dtype uint8 on the device."""
        leaf, start, stop, _ = piece
        tensor, spec = check(leaf, capture, layout)
        eager = capture.eager.get(leaf)
        if eager is not None:
            offset, nbytes = eager
            if stop > nbytes:
                raise LayoutMismatchError(capture.structure.names[leaf])
            raw = capture.arenas[tensor.device][offset : offset + nbytes]
            if spec.is_raw:
                return raw[start:stop]
            dense = torch.empty(stop - start, dtype=torch.uint8, device=tensor.device)
            copy_strided(piece, restore(raw, tensor), spec, dense)
            return dense
        check_extent(capture.structure.names[leaf], tensor)
        if spec.is_raw:
            flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            return flat[start:stop]
        dense = torch.empty(stop - start, dtype=torch.uint8, device=tensor.device)
        copy_strided(piece, tensor, spec, dense)
        return dense

    @staticmethod
    def _copy_packed(small: list[tuple[int, torch.Tensor]], chunk: Chunk) -> None:
        """Gather pieces on the device, with the gaps between them, and copy them at once; empties ``small``."""
        if not small:
            return
        parts: list[torch.Tensor] = []
        begin = position = small[0][0]
        for at, source in small:
            if at > position:  # framing, which is filled in after the copy
                parts.append(torch.empty(at - position, dtype=torch.uint8, device=source.device))
            parts.append(source)
            position = at + len(source)
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        chunk.tensor[begin:position].copy_(packed, non_blocking=True)
        small.clear()
