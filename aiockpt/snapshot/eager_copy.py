"""Copying small tensors at the call: what a forward pass may change, above all."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from aiockpt.core.extent import freed_message, is_freed
from aiockpt.errors import SaveError
from aiockpt.planning.planner import CHECKED_AHEAD
from aiockpt.staging.pool import MappedMemory as MappedMemory
from aiockpt.staging.pool import copy_small

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiockpt.planning.snapshot import Snapshot


EAGER_TENSOR_BYTES = 64 << 10
"""Tensors up to this size are copied at the call ..."""
EAGER_BYTES = 16 << 20
"""... until this much has been copied."""


def copy_at_once(capture: Snapshot, devices: set[torch.device]) -> None:
    """Copy the small tensors, up to a total: those that a forward pass may change, above all.

    Raises:
        SaveError: a tensor reaches out of its storage. Of very many tensors those that are not copied here are looked
            at when they are staged.
    """
    chosen: dict[torch.device, dict[int, int]] = {device: {} for device in devices}
    (only,) = devices if len(devices) == 1 else (None,)
    versions = capture.versions
    total = 0
    for leaf, tensor in enumerate(capture.tensors):
        if total > EAGER_BYTES and leaf >= CHECKED_AHEAD:
            break
        if tensor is None:
            continue
        if is_freed(tensor):
            raise SaveError(freed_message(capture.structure.names[leaf]))
        if total > EAGER_BYTES or tensor.layout is not torch.strided or tensor.is_quantized:
            continue
        nbytes = tensor.nbytes
        if not 0 < nbytes <= EAGER_TENSOR_BYTES:
            continue
        if tensor.is_contiguous():
            chosen[only or tensor.device][leaf] = nbytes
            # Its form is taken now as well, not only its bytes. Not by detach(), which lets go of the interpreter; the
            # version counter, which this one does not share, is of no use for what is copied at once.
            capture.tensors[leaf] = tensor.data
        else:
            try:
                # The copy keeps the strides that it will be stored with, and is nobody else's.
                capture.tensors[leaf] = tensor.clone()
            except torch.OutOfMemoryError:
                continue  # it is copied with the large ones
        versions[leaf] = None
        total += nbytes
    for device, sizes in chosen.items():
        if sizes:
            try:
                capture.arenas[device] = _pack(capture, device, sizes)
            except torch.OutOfMemoryError:
                _copy_later(capture, sizes)


def _copy_later(capture: Snapshot, leaves: Iterable[int]) -> None:
    """Let tensors be copied with the large ones after all: their device has no memory to spare."""
    for leaf in leaves:
        tensor = capture.tensors[leaf]
        del capture.eager[leaf]
        capture.versions[leaf] = None if tensor is None or tensor.is_inference() else tensor._version


def _pack(capture: Snapshot, device: torch.device, sizes: dict[int, int]) -> torch.Tensor:
    tensors = [capture.tensors[leaf] for leaf in sizes]
    ends = list(accumulate(sizes.values()))
    for (leaf, nbytes), end in zip(sizes.items(), ends, strict=True):
        capture.eager[leaf] = (end - nbytes, nbytes)
    if device.type != "cpu":
        # One kernel on the caller's stream, so in order with whatever changes the tensors next.
        return torch.cat([_raw_bytes(tensor) for tensor in tensors if tensor is not None])
    arena = MappedMemory(ends[-1])
    target = arena.address
    for tensor, nbytes in zip(tensors, sizes.values(), strict=True):
        copy_small(target, tensor.data_ptr(), nbytes)  # type: ignore[union-attr]
        target += nbytes
    return arena.tensor


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """See the memory of a contiguous tensor as bytes, lazy conjugation and negation left aside."""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.reshape(-1).view(torch.uint8)
