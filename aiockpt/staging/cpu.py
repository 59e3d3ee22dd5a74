"""Staging of tensors in host memory: plain copies in a few threads."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from aiockpt.staging.base import Done, LayoutMismatchError, Stager, check, copy_strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.source import Capture
    from aiockpt.staging.base import Pending
    from aiockpt.staging.pool import Chunk
    from aiockpt.threads import Workers


class CpuStager(Stager):
    """Copies from host memory; each call takes one of the copy threads for one chunk.

    Args:
        workers: the copy threads. One fills about half of the memory's bandwidth, so two help and more don't.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def issue(self, pieces: Sequence[Piece], chunk: Chunk, capture: Capture, layout: Layout) -> Pending:
        """Copy ``pieces`` into ``chunk``; see `Stager.issue`."""
        await self._workers.run(copy_pieces, pieces, chunk, capture, layout)
        return Done()


def copy_pieces(pieces: Sequence[Piece], chunk: Chunk, capture: Capture, layout: Layout) -> None:
    """Copy the pieces of host tensors into a chunk. Blocks; the copying itself releases the interpreter."""
    base = chunk.address
    copy = ctypes.memmove
    for piece in pieces:
        leaf, start, stop, at = piece
        tensor, spec = check(leaf, capture, layout)
        eager = capture.eager.get(leaf)
        if eager is not None:
            if stop > eager.nbytes:
                raise LayoutMismatchError(capture.structure.names[leaf])
            copy(base + at, capture.arenas[eager.device].data_ptr() + eager.offset + start, stop - start)
        elif spec.is_raw:
            # Held so that nobody can free the memory while it is read.
            storage = tensor.untyped_storage()
            copy(base + at, tensor.data_ptr() + start, stop - start)
            del storage
        else:
            copy_strided(piece, tensor, spec, chunk.tensor[at : at + stop - start])
