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

_CPU = torch.device("cpu")


def hash_payloads(leaves: Sequence[int], snapshot: Snapshot, layout: Layout, new_hash: NewHash) -> dict[int, str]:
    """Return the hash of each payload that is, byte for byte, memory of this process. Blocks; may release the GIL.

    Raises:
        LayoutMismatchError: a tensor is not as the layout has it.
    """
    tensors, specs, eager, names = snapshot.tensors, layout.specs, snapshot.eager, snapshot.structure.names
    arena = snapshot.arenas.get(_CPU)  # this reference keeps the memory, though the save were given up meanwhile
    copies = memoryview(b"") if arena is None else arena.numpy().data
    found: dict[int, str] = {}
    for leaf in leaves if tensors else ():
        tensor, spec = tensors[leaf], specs[leaf]
        if spec is None or not spec.is_raw or spec.device != _CPU:
            continue
        if tensor is None or not spec.describes(tensor):
            raise LayoutMismatchError(names[leaf])
        nbytes = tensor.nbytes
        copied = eager.get(leaf)
        if copied is not None and arena is not None:
            begin, size = copied
            if nbytes > size:
                raise LayoutMismatchError(names[leaf])
            found[leaf] = new_hash(copies[begin : begin + nbytes]).hexdigest()
            continue
        storage = tensor.untyped_storage()  # this reference keeps the memory from being freed while it is read
        check_memory(names[leaf], tensor)
        # `from_address` of no bytes would be a view of a null pointer.
        data = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else b""
        found[leaf] = new_hash(data).hexdigest()
        del storage
    return found
