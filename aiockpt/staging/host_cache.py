"""Host memory for loaded tensors: page-aligned, and reused once the tensors are freed.

Filling fresh memory costs more than reading the bytes from the page cache, because the kernel clears every page first.
So the memory of freed tensors is kept, marked with MADV_FREE: the next load of tensors of these sizes reuses it without
page faults, and the kernel reclaims it whenever it runs short; see madvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import defaultdict, deque
from typing import NamedTuple

import torch

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.pages import HUGE_PAGE_BYTES, private_mapping
from aiockpt.errors import LoadError

_FREE = getattr(mmap, "MADV_FREE", None)


class HostMemory(NamedTuple):
    """Memory for a tensor."""

    tensor: torch.Tensor  # of dtype uint8
    is_fresh: bool  # its pages are not faulted in


class _MappedBlock:
    """A mapping whose bytes from ``skip`` on are aligned to a huge page."""

    __slots__ = ("nbytes", "skip", "whole")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0  # mmap aligns to 4 KiB only
        self.whole = private_mapping(nbytes + slack)
        self.skip = -ctypes.addressof(ctypes.c_char.from_buffer(self.whole)) % HUGE_PAGE_BYTES if slack else 0


class HostCache:
    """Allocates memory for new tensors, and keeps up to ``limit_bytes`` of freed tensors' memory. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[_MappedBlock]] = defaultdict(list)
        self._free_bytes = 0
        self._order: deque[_MappedBlock] = deque()
        # Tensors are freed in any thread, even within `take`, so the finalizer takes no lock: deque is thread-safe.
        self._returned: deque[_MappedBlock] = deque()
        self._closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for reuse."""
        with self._lock:
            self._collect_returned()
            return self._free_bytes

    def take(self, nbytes: int) -> HostMemory:
        """Return uninitialised memory, at least 1 byte, page-aligned."""
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            self._collect_returned()
            block = self._free[size].pop() if self._free.get(size) else None
            if block is not None:
                self._order.remove(block)
                self._free_bytes -= size
        is_fresh = block is None
        if block is None:
            try:
                block = _MappedBlock(size)
            except OSError as exc:
                raise LoadError(f"there is no memory for the {nbytes} bytes of a tensor: {exc}") from exc
        # The tensor's storage keeps `owner` alive, so that it ends with the last tensor on this memory, views included.
        owner = (ctypes.c_char * nbytes).from_buffer(block.whole, block.skip)
        tensor = torch.frombuffer(owner, dtype=torch.uint8)
        weakref.finalize(owner, _give_back, weakref.ref(self), block).atexit = False
        return HostMemory(tensor, is_fresh)

    def close(self) -> None:
        """Free everything that is kept, and keep nothing from now on. Idempotent."""
        self._closed = True  # first: a finalizer that runs meanwhile, without the lock, must add nothing
        with self._lock:
            self._free.clear()
            self._order.clear()
            self._free_bytes = 0
            self._returned.clear()

    def _collect_returned(self) -> None:
        """Move returned blocks to the free lists; with the lock held."""
        while self._returned:
            block = self._returned.popleft()
            self._free[block.nbytes].append(block)
            self._order.append(block)
            self._free_bytes += block.nbytes
        while self._free_bytes > self.limit_bytes:  # the oldest first: its size may never be needed again
            oldest = self._order.popleft()
            self._free[oldest.nbytes].remove(oldest)
            self._free_bytes -= oldest.nbytes


def _give_back(owner: weakref.ref[HostCache], block: _MappedBlock) -> None:
    """Keep the memory of a freed tensor. Runs as its finalizer."""
    cache = owner()
    if cache is None or cache._closed or _FREE is None:
        return
    try:
        block.whole.madvise(_FREE, block.skip, block.nbytes)
    except OSError:
        return  # not supported by this kernel: the memory is freed
    cache._returned.append(block)
