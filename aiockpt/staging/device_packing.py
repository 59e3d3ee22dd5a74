"""Filling one chunk from a device: large pieces go straight, small ones are gathered on the device first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aiockpt.staging.base import LayoutMismatchError, check, check_memory, copy_strided, restore

if TYPE_CHECKING:
    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.planning.specs import TensorSpec
    from aiockpt.staging.pool import Chunk

PACK_BYTES = 256 << 10
"""Pieces up to this size are gathered on the device and copied together: a copy costs some 10 us however small."""
PACKED_BYTES = 4 << 20
"""So much is gathered before it is copied: this is the device memory that gathering takes."""
GAP_BYTES = 4096
"""What lies between two items of a file is shorter; pieces further apart are copied apart."""
LEAST_BYTES = 64 << 10
"""A piece that the device has no memory to make dense is split down to this size."""


class ChunkFiller:
    """Enqueues the copies of one chunk in the current stream, one piece after the other; ends with `flush`.

    Args:
        chunk: where the bytes go.
        device: the device whose pieces are copied.
        capture: the tensors.
        layout: what the pieces assume of them.
        non_blocking: leave the copies under way.

    Attributes:
        sources: the memory of others that the copies read. Memory of its own needs no keeping: it goes back to the
            stream's part of the allocator, in order with the copies.
    """

    def __init__(
        self, chunk: Chunk, device: torch.device, capture: Snapshot, layout: Layout, *, non_blocking: bool
    ) -> None:
        self._chunk = chunk
        self._device = device
        self._capture = capture
        self._layout = layout
        self._non_blocking = non_blocking
        self._small: list[tuple[int, int, torch.Tensor]] = []
        self._begin = self._end = 0
        self._gaps: dict[int, torch.Tensor] = {}
        self.sources = [capture.arenas[device]] if device in capture.arenas else []

    def add(self, piece: Piece) -> None:
        """Copy a piece, or note it for the next `flush`.

        Raises:
            LayoutMismatchError: its tensor is not what the layout assumed.
            StageError: its tensor has no memory.
        """
        leaf, start, stop, at = piece
        spec = self._layout.specs[leaf]
        if spec is not None and spec.device != self._device:
            self.flush()  # what is copied with the gaps in it must leave this piece alone
            return
        tensor, spec = check(leaf, self._capture, self._layout)
        eager = self._capture.eager.get(leaf)
        if eager is not None:
            offset, nbytes = eager
            if stop > nbytes:
                raise LayoutMismatchError(self._capture.structure.names[leaf])
            arena = self._capture.arenas[self._device]
            if spec.is_raw:
                self._add(at, stop - start, arena.narrow(0, offset + start, stop - start))
                return
            tensor = restore(arena.narrow(0, offset, nbytes), tensor)
        elif spec.is_raw:
            source = self._bytes_of(piece, tensor)
            self.sources.append(source)
            self._add(at, stop - start, source)
            return
        check_memory(self._capture.structure.names[leaf], tensor)
        self.sources.append(tensor)
        self._add_strided(piece, tensor, spec)

    def flush(self) -> None:
        """Gather the pieces that were noted, with the gaps between them, and copy them at once."""
        small, self._small = self._small, []
        if not small:
            return
        parts: list[torch.Tensor] = []
        position = self._begin
        try:
            for at, nbytes, source in small:
                if at > position:  # framing, which is filled in after the copy
                    parts.append(self._gap(at - position))
                parts.append(source)
                position = at + nbytes
            packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        except torch.OutOfMemoryError:
            for at, nbytes, source in small:
                self._copy(at, nbytes, source)
            return
        self._copy(self._begin, position - self._begin, packed)

    def _bytes_of(self, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
        """Give the bytes of a piece of a tensor that is stored as it lies."""
        nbytes = tensor.nbytes
        check_memory(self._capture.structure.names[piece.leaf], tensor)
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return flat if piece.stop - piece.start == nbytes else flat[piece.start : piece.stop]

    def _add_strided(self, piece: Piece, tensor: torch.Tensor, spec: TensorSpec) -> None:
        """Make a piece dense on the device, in parts if there is no memory for it as a whole."""
        _, start, stop, at = piece
        try:
            dense = torch.empty(stop - start, dtype=torch.uint8, device=self._device)
            copy_strided(piece, tensor, spec, dense)
        except torch.OutOfMemoryError:
            self.flush()
            half = (stop - start) // 2 // LEAST_BYTES * LEAST_BYTES
            if not half:
                raise
            self._add_strided(piece._replace(stop=start + half), tensor, spec)
            self._add_strided(piece._replace(start=start + half, at=at + half), tensor, spec)
            return
        self._add(at, stop - start, dense)

    def _add(self, at: int, nbytes: int, source: torch.Tensor) -> None:
        if nbytes > PACK_BYTES:
            self.flush()
            self._copy(at, nbytes, source)
            return
        end = at + nbytes
        if self._small and (at - self._end > GAP_BYTES or end - self._begin > PACKED_BYTES):
            self.flush()
        if not self._small:
            self._begin = at
        self._small.append((at, nbytes, source))
        self._end = end

    def _copy(self, at: int, nbytes: int, source: torch.Tensor) -> None:
        self._chunk.tensor[at : at + nbytes].copy_(source, non_blocking=self._non_blocking)

    def _gap(self, nbytes: int) -> torch.Tensor:
        """Give so many zeros; made once for each length, of which framing has few."""
        if not self._gaps:
            self._gaps[GAP_BYTES] = torch.zeros(GAP_BYTES, dtype=torch.uint8, device=self._device)
        if nbytes not in self._gaps:
            self._gaps[nbytes] = self._gaps[GAP_BYTES][:nbytes]
        return self._gaps[nbytes]
