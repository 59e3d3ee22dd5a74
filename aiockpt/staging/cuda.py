"""Stages tensors on an accelerator: asynchronous copies into pinned chunks, on a separate stream.

The stream first waits for the event that `save()` recorded in the caller's stream, so the copies see what the caller's
program had computed by then. Nothing here synchronises the device: a thread sleeps on the event that follows a chunk's
copies. Large pieces are copied one by one; small ones are packed on the device and copied together.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from aiockpt.core import pages
from aiockpt.core.extent import address_of, freed_message, plain_memory
from aiockpt.core.threads import Workers
from aiockpt.errors import StageError
from aiockpt.staging.base import (
    RAW_DTYPES,
    Fill,
    LayoutMismatchError,
    Pending,
    Stager,
    check_memory,
    copy_strided,
    matching,
    restore,
    with_lazy_bits,
)
from aiockpt.staging.runtime import ALREADY_LOCKED, Copy, Runtime, by_address, bytes_of, runtime_of

if TYPE_CHECKING:
    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.planning.specs import TensorSpec
    from aiockpt.staging.pool import Chunk

logger = logging.getLogger("aiockpt")

PACK_BYTES = 256 << 10
"""Pieces up to this size are packed on the device and copied together: a copy of any size costs some 10 us."""
PACKED_BYTES = 4 << 20
"""Limit for small pieces that are packed together; packing takes as much device memory."""
FILLS_PER_EVENT = 8
"""Chunks that are copied and waited for together: a thread's wait costs some 50 us."""
GAP_BYTES = 4096
"""The framing between two items is shorter; pieces further apart are copied separately."""
LEAST_BYTES = 64 << 10
"""If the device has no memory to make a piece dense, the piece is split, down to this size."""


class Copies:
    """Copies in a staging stream, and the event that follows them."""

    def __init__(self, event: torch.Event, runtime: Runtime, workers: Workers, sources: list[torch.Tensor]) -> None:
        self._event = event
        self._runtime = runtime
        self._workers = workers
        # Memory that the copies read, kept until they are done.
        self._sources = sources
        self._done = False

    async def wait(self) -> None:
        """Wait until they are done; a thread sleeps on the event."""
        if self._done:
            return
        try:
            await self._workers.run(self._runtime.sleep_until, self._event)
        except RuntimeError as exc:
            raise StageError(f"copying from or to the device failed: {exc}") from exc
        self._done = True
        self._sources.clear()


class AcceleratorStager(Stager):
    """Copies from one device, in one thread and one stream of its own."""

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self.device = device
        self._runtime = runtime if runtime is not None else runtime_of(device)
        self._issuer = Workers(1, f"aiockpt-stage-{device}")
        self._waiter = Workers(2, f"aiockpt-wait-{device}")
        self._locked: dict[int, Chunk] = {}  # by address of their arena; mapped as long as the device has it registered
        self._locks = True  # until it fails: it is tried, and warned of, once
        self._node = self._runtime.node()

    async def issue(self, fills: Sequence[Fill], snapshot: Snapshot, layout: Layout) -> Sequence[Pending]:
        issued: list[Copies] = []
        for event, sources, count in await self._issuer.run(self._enqueue, fills, snapshot, layout):
            issued += [Copies(event, self._runtime, self._waiter, sources)] * count
        return issued

    def fence(self) -> None:
        self._runtime.order_behind(self._runtime.record())

    def settle(self, chunk: Chunk) -> None:
        if self._node is not None:
            pages.prefer_node(*chunk.arena, self._node)

    async def pin(self, chunk: Chunk) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that has failed, as the copies then say
            if not self._locked:
                await self._issuer.run(self._load_kernels)
            if chunk.arena[0] not in self._locked and self._locks:
                await self._issuer.run(self._pin, [chunk])

    def _pin(self, chunks: Sequence[Chunk]) -> None:
        """Lock the arenas of chunks, each once, in the stager's own thread: there the device is current."""
        self._runtime.enter()
        for chunk in chunks:
            address, nbytes = chunk.arena
            if address in self._locked or not self._locks:
                continue
            self.settle(chunk)
            error = self._runtime.lock(address, nbytes)
            self._locks = error in (0, ALREADY_LOCKED)  # already: by another device's stager, for all devices
            if self._locks:
                self._locked[address] = chunk
            elif error is not None:
                logger.warning(
                    "staging memory could not be locked for %s, so copies are slower: the driver's error %d for %d "
                    "bytes",
                    *(self.device, error, nbytes),
                )

    def _load_kernels(self) -> None:
        """Launch the kernels that staging uses: loading them later would wait for kernels of NCCL's that spin."""
        self._runtime.enter()
        with self._runtime.stream(), contextlib.suppress(torch.OutOfMemoryError):
            some = torch.zeros(8, dtype=torch.uint8, device=self.device)
            torch.cat([some, some])[::2].clone().ne(some).any()

    def close(self) -> None:
        # In this order: the stream may be given to another stager only when no copy is in flight.
        self._waiter.close()
        self._issuer.submit(self._unpin).result()
        self._issuer.close()
        self._runtime.close()

    def _unpin(self) -> None:
        if self._locked:
            with contextlib.suppress(RuntimeError):  # of a device that has failed; its memory is unlocked all the same
                self._runtime.enter()
        for address in self._locked:
            self._runtime.unlock(address)
        self._locked.clear()

    def _enqueue(
        self, fills: Sequence[Fill], snapshot: Snapshot, layout: Layout
    ) -> list[tuple[torch.Event, list[torch.Tensor], int]]:
        """Enqueue copies; return events, each with the memory that the copies before it read, and how many fills."""
        self._pin([chunk for chunk, _ in fills])
        issued = []
        with self._runtime.stream():
            ready = snapshot.events.get(self.device)
            if ready is not None:
                self._runtime.wait_for(ready)
            try:
                for begin in range(0, len(fills), FILLS_PER_EVENT):
                    group = fills[begin : begin + FILLS_PER_EVENT]
                    filler = ChunkFiller(self.device, snapshot, layout, self._runtime)
                    for chunk, pieces in group:
                        filler.fill(chunk, pieces)
                    filler.copy_all()
                    issued.append((self._runtime.record(), filler.sources, len(group)))
            except BaseException:
                # The chunks return to the pool: no copy into them may be in flight.
                self._runtime.drain()
                raise
        return issued


class ChunkFiller:
    """Enqueues copies in the current stream, which is the staging stream. Call `copy_all` at the end."""

    def __init__(self, device: torch.device, snapshot: Snapshot, layout: Layout, runtime: Runtime) -> None:
        self._device = device
        self._snapshot = snapshot
        self._layout = layout
        self._runtime = runtime
        self._chunk: Chunk
        self._copies: list[Copy] = []
        self._made_bytes = 0  # device memory that was made for them
        self._small: list[tuple[int, int, torch.Tensor]] = []
        self._begin = self._end = 0
        self._gaps: dict[int, torch.Tensor] = {}
        # Memory of the state that the copies read. Memory allocated here needs no reference once its copy is enqueued:
        # it returns to the stream's part of the allocator, in order with the copies.
        self.sources = [snapshot.arenas[device]] if device in snapshot.arenas else []
        self._leaf = -1  # of the last source, if it is copied as it is

    def fill(self, chunk: Chunk, pieces: Sequence[Piece]) -> None:
        """Copy pieces into a chunk, at the next `copy_all`."""
        self._chunk = chunk
        for piece in pieces:
            self._add_piece(piece)
        self._pack()

    def copy_all(self) -> None:
        """Enqueue the copies."""
        copies, self._copies, self._made_bytes = self._copies, [], 0
        self._runtime.copy(copies)

    def _add_piece(self, piece: Piece) -> None:
        leaf, start, stop, at = piece
        spec = self._layout.specs[leaf]
        if spec is not None and spec.device != self._device:
            self._pack()  # a packed copy overwrites the gaps between its pieces, and this piece must not be in one
            return
        if leaf == self._leaf and spec is not None and spec.is_raw:  # pieces of one tensor follow each other
            self._add(at, stop - start, self.sources[-1], start)
            return
        tensor, spec = matching(leaf, self._snapshot, self._layout)
        eager = self._snapshot.eager.get(leaf)
        if eager is not None:
            offset, nbytes = eager
            if stop > nbytes:
                raise LayoutMismatchError(self._snapshot.structure.names[leaf])
            arena = self._snapshot.arenas[self._device]
            if spec.is_raw:
                self._add(at, stop - start, arena, offset + start)
                return
            tensor = restore(arena.narrow(0, offset, nbytes), tensor)
        self._runtime.use(tensor)  # first: so it can be read even if the program frees it under its tensors
        check_memory(self._snapshot.structure.names[leaf], tensor)
        self.sources.append(tensor)
        self._leaf = leaf if spec.is_raw else -1
        if spec.is_raw:
            self._add(at, stop - start, tensor, start)
        else:
            raw = self._fixed(leaf, plain_memory(tensor.detach()).view(RAW_DTYPES[tensor.itemsize]))
            self._add_strided(piece, with_lazy_bits(raw.view(tensor.dtype), tensor), spec)

    def _fixed(self, leaf: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor for a kernel by its address, as the program may free the memory before the launch."""
        fixed = by_address(tensor)
        if fixed is None:
            raise StageError(freed_message(self._snapshot.structure.names[leaf], tensor))
        return fixed

    def _pack(self) -> None:
        """Pack the small pieces that were kept, with the gaps between them, to be copied together."""
        small, self._small = self._small, []
        if not small:
            return
        parts: list[torch.Tensor] = []
        position = self._begin
        try:
            for at, nbytes, source in small:
                if at > position:  # framing, which is written after the copy
                    parts.append(self._gap(at - position))
                parts.append(source)
                position = at + nbytes
            packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        except torch.OutOfMemoryError:
            for at, nbytes, source in small:
                self._copy(at, nbytes, source)
            return
        self._copy(self._begin, position - self._begin, packed, made_bytes=packed.nbytes if len(parts) > 1 else 0)

    def _add_strided(self, piece: Piece, tensor: torch.Tensor, spec: TensorSpec) -> None:
        """Make a piece dense on the device; in parts, if there is no memory for the whole."""
        _, start, stop, at = piece
        try:
            dense = torch.empty(stop - start, dtype=torch.uint8, device=self._device)
            copy_strided(piece, tensor, spec, dense)
        except torch.OutOfMemoryError:
            self._pack()
            self.copy_all()  # frees the memory that was made for earlier ones
            half = (stop - start) // 2 // LEAST_BYTES * LEAST_BYTES
            if not half:
                raise
            self._add_strided(piece._replace(stop=start + half), tensor, spec)
            self._add_strided(piece._replace(start=start + half, at=at + half), tensor, spec)
            return
        self._add(at, stop - start, dense, made_bytes=dense.nbytes)

    def _add(self, at: int, nbytes: int, source: torch.Tensor, start: int = 0, *, made_bytes: int = 0) -> None:
        """Copy bytes of a dense tensor to ``at``, or keep them to be packed."""
        if nbytes > PACK_BYTES:
            self._pack()
            self._copy(at, nbytes, source, start, made_bytes=made_bytes)
            return
        end = at + nbytes
        if self._small and (at - self._end > GAP_BYTES or end - self._begin > PACKED_BYTES):
            self._pack()
        if not self._small:
            self._begin = at
        self._small.append((at, nbytes, self._fixed(self._leaf, bytes_of(source, start, nbytes))))
        self._end = end

    def _copy(self, at: int, nbytes: int, source: torch.Tensor, start: int = 0, *, made_bytes: int = 0) -> None:
        # The first of these is the address of the storage, which a view may begin further on.
        address = address_of(source) + int(source.storage_offset()) * source.itemsize + start
        self._copies.append(Copy(self._chunk, at, nbytes, source, start, address))
        self._made_bytes += made_bytes
        if self._made_bytes >= PACKED_BYTES:
            self.copy_all()

    def _gap(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` zero bytes. They are cached by length, of which framing has few."""
        if not self._gaps:
            self._gaps[GAP_BYTES] = torch.zeros(GAP_BYTES, dtype=torch.uint8, device=self._device)
        if nbytes not in self._gaps:
            self._gaps[nbytes] = self._gaps[GAP_BYTES][:nbytes]
        return self._gaps[nbytes]
