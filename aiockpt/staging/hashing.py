"""Hashes of the payloads of host tensors, from their own memory, before anything is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from aiockpt.staging.base import LayoutMismatchError, check_memory

if TYPE_CHECKING:
    from aiockpt.format.hashes import NewHash
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.planning.specs import TensorSpec

_CPU = torch.device("cpu")


def is_hashable(spec: TensorSpec | None) -> bool:
    """Return whether a tensor's memory in this process is, byte for byte, its payload."""
    return spec is not None and spec.is_raw and spec.device == _CPU


def hash_payloads(leaves: Sequence[int], snapshot: Snapshot, layout: Layout, new_hash: NewHash) -> dict[int, str]:
    """Return the hash of each leaf's payload. Blocks; long ones release the GIL.

    Raises:
        LayoutMismatchError: a tensor is not as the layout has it.
    """
    tensors, specs, eager, names = snapshot.tensors, layout.specs, snapshot.eager, snapshot.structure.names
    arena = snapshot.arenas.get(_CPU)  # this reference keeps the memory, though the save were given up meanwhile
    found: dict[int, str] = {}
    for leaf in leaves if tensors else ():
        tensor, spec = tensors[leaf], specs[leaf]
        if tensor is None or spec is None or not spec.describes(tensor):
            raise LayoutMismatchError(names[leaf])
        copied = eager.get(leaf)
        nbytes = tensor.numel() * tensor.dtype.itemsize
        storage = None
        if copied is not None and arena is not None:
            if nbytes > copied[1]:
                raise LayoutMismatchError(names[leaf])
            address = arena.data_ptr() + copied[0]
        else:
            storage = tensor.untyped_storage()  # this reference keeps the memory from being freed while it is read
            check_memory(names[leaf], tensor)
            address = tensor.data_ptr()
        digest = new_hash()
        if nbytes:
            digest.update(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))
        del storage
        found[leaf] = digest.hexdigest()
    return found
