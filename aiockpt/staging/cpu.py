"""Stages tensors in host memory: plain copies in a few threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from aiockpt.core.threads import SHORT_BYTES, SHORT_ITEMS
from aiockpt.staging.base import Done, Fill, LayoutMismatchError, Pending, Stager, check_memory, copy_strided, restore
from aiockpt.staging.pool import Chunk, copy_small

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot


SMALL_BYTES = 32 << 10
"""Below this, copying takes less time than releasing the GIL and acquiring it again."""

_CPU = torch.device("cpu")


class CpuStager(Stager):
    """Copies from host memory; each call uses one copy thread for one chunk.

    One thread uses about half of the memory bandwidth, so two help and more don't.
    """

    is_async = False

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def issue(self, fills: Sequence[Fill], snapshot: Snapshot, layout: Layout) -> Sequence[Pending]:
        for chunk, pieces in fills:
            is_short = len(pieces) <= SHORT_ITEMS and layout.nbytes <= SHORT_BYTES and chunk.faulted_bytes > 0
            await self._workers.run_unless(is_short, copy_pieces, pieces, chunk, snapshot, layout)
        return [Done()] * len(fills)


def copy_pieces(pieces: Sequence[Piece], chunk: Chunk, snapshot: Snapshot, layout: Layout) -> None:
    """Copy the pieces of host tensors into a chunk. Blocks; larger copies release the GIL."""
    # Not all of it: the state may be small.
    chunk.fault_in(pieces[-1].at + pieces[-1].stop - pieces[-1].start if pieces else 1)
    base = chunk.address
    tensors, specs, eager = snapshot.tensors, layout.specs, snapshot.eager
    arena = snapshot.arenas.get(_CPU)  # this reference keeps the memory, though the save were given up meanwhile
    copies = 0 if arena is None else arena.data_ptr()
    for piece in pieces:
        leaf, start, stop, at = piece
        tensor, spec = tensors[leaf], specs[leaf]
        if spec is not None and spec.device != _CPU:
            continue
        # `matching` inlined, and no objects made: there may be 100,000 pieces of a KiB each.
        if tensor is None or spec is None or not spec.describes(tensor):
            raise LayoutMismatchError(snapshot.structure.names[leaf])
        copied = eager.get(leaf)
        if copied is not None and arena is not None:
            if stop > copied[1]:
                raise LayoutMismatchError(snapshot.structure.names[leaf])
            if spec.is_raw:
                copy_small(base + at, copies + copied[0] + start, stop - start)
            else:
                source = restore(arena[copied[0] : sum(copied)], tensor)
                copy_strided(piece, source, spec, chunk.tensor[at : at + stop - start])
        elif spec.is_raw:
            storage = tensor.untyped_storage()  # this reference keeps the memory from being freed while it is read
            check_memory(snapshot.structure.names[leaf], tensor)
            copy = copy_small if stop - start < SMALL_BYTES else ctypes.memmove
            copy(base + at, tensor.data_ptr() + start, stop - start)
            del storage
        else:
            check_memory(snapshot.structure.names[leaf], tensor)
            copy_strided(piece, tensor, spec, chunk.tensor[at : at + stop - start])
