"""Staging memory: fixed-size, page-aligned chunks, leased from one pool and used again and again."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import anyio
import torch

if TYPE_CHECKING:
    from aiockpt.staging.shared import SharedMemory

HUGE_PAGE_BYTES = 2 << 20

copy_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.PyDLL(None)))
"""Copy memory (target, source, bytes) and keep the interpreter: for pieces so small that letting go costs more."""


def private_mapping(nbytes: int) -> mmap.mmap:
    """Map anonymous memory, private to the process: shared memory, Python's default, seldom gets huge pages."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Mapping:
    """Anonymous memory that starts at a huge page's border, not touched yet.

    Attributes:
        address: of the first byte.
        view: the bytes.
        tensor: the same bytes as a tensor of dtype uint8; it keeps the memory alive.
    """

    __slots__ = ("address", "tensor", "view")

    def __init__(self, nbytes: int) -> None:
        whole = private_mapping(nbytes + HUGE_PAGE_BYTES)
        # Huge pages, where the kernel has them; and no copies in children, which would be made while we write.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):
                whole.madvise(getattr(mmap, advice))
        begin = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        skip = -begin % HUGE_PAGE_BYTES
        self.address = begin + skip
        self.view = memoryview(whole)[skip : skip + nbytes]
        self.tensor = torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=skip)


class Chunk:
    """One piece of staging memory; see `Mapping` for its attributes.

    Attributes:
        number: its place in the memory that it was cut from.
        pinned: it is locked in memory for a device.

    Args:
        nbytes: its size.
        number: see above.
        shared: the memory to cut it from; None for memory of its own.
    """

    __slots__ = ("_mapping", "address", "number", "pinned", "tensor", "view")

    def __init__(self, nbytes: int, number: int = 0, shared: SharedMemory | None = None) -> None:
        self.number = number
        self.pinned = False
        self._mapping: Mapping | SharedMemory
        if shared is None:
            self._mapping = mapping = Mapping(nbytes)
            self.address, self.view, self.tensor = mapping.address, mapping.view, mapping.tensor
            return
        begin = number * nbytes
        self._mapping = shared
        self.address = shared.address + begin
        self.view = shared.view[begin : begin + nbytes]
        self.tensor = shared.tensor[begin : begin + nbytes]

    def touch(self) -> None:
        """Fault all pages in. Blocks; releases the interpreter."""
        ctypes.memset(self.address, 0, len(self.view))


class Lease:
    """The right to use one chunk until it is released. To be released on the engine's loop, once or more."""

    __slots__ = ("_pool", "chunk")

    def __init__(self, pool: ChunkPool, chunk: Chunk) -> None:
        self._pool: ChunkPool | None = pool
        self.chunk = chunk

    @property
    def released(self) -> bool:
        """Whether the chunk was given back."""
        return self._pool is None

    def release(self) -> None:
        """Give the chunk back. Idempotent."""
        if self._pool is not None:
            self._pool._take_back(self.chunk)
            self._pool = None


class ChunkPool:
    """A bounded number of chunks, made when first needed.

    Args:
        chunk_bytes: the size of each, a multiple of 4096.
        capacity: how many there may be at most; see `allow`.
        shared: the memory to cut them from; None: each has memory of its own.
    """

    def __init__(self, chunk_bytes: int, capacity: int, shared: SharedMemory | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        self._shared = shared
        self._most = sys.maxsize if shared is None else shared.nbytes // chunk_bytes
        self.capacity = capacity = min(capacity, self._most)
        self._free: list[Chunk] = []
        self._made = 0
        self._permits = anyio.Semaphore(capacity)
        self._leased = 0

    def __repr__(self) -> str:
        return (
            f"<ChunkPool {self._leased} leased, {len(self._free)} free, {self.capacity} at most, "
            f"of {self.chunk_bytes} bytes>"
        )

    @property
    def leased(self) -> int:
        """How many chunks are out."""
        return self._leased

    @property
    def made(self) -> int:
        """How many chunks exist."""
        return self._made

    @property
    def available(self) -> bool:
        """Whether `acquire` would return at once."""
        return self._permits.value > 0

    def allow(self, capacity: int) -> None:
        """Raise the bound to ``capacity`` chunks, as far as there is memory; it is never lowered."""
        capacity = min(capacity, self._most)
        for _ in range(self.capacity, capacity):
            self._permits.release()
        self.capacity = max(self.capacity, capacity)

    async def acquire(self) -> Lease:
        """Wait for a chunk. First come, first served; safe to cancel."""
        await self._permits.acquire()
        try:
            chunk = self._free.pop() if self._free else self._make()
        except BaseException:
            self._permits.release()
            raise
        return self._lease(chunk)

    def fresh(self, count: int) -> list[Lease]:
        """Make chunks until ``count`` exist, as far as the bound allows; to be touched, then released.

        They are leased, so that nobody gets one while it is being touched.
        """
        leases: list[Lease] = []
        try:
            while self._made < min(count, self.capacity) and self.available:
                chunk = self._make()
                self._permits.acquire_nowait()
                leases.append(self._lease(chunk))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def drop(self) -> None:
        """Let go of all memory that is not leased."""
        self._made -= len(self._free)
        self._free.clear()

    def _lease(self, chunk: Chunk) -> Lease:
        self._leased += 1
        return Lease(self, chunk)

    def _make(self) -> Chunk:
        chunk = Chunk(self.chunk_bytes, self._made, self._shared)
        self._made += 1
        return chunk

    def _take_back(self, chunk: Chunk) -> None:
        self._free.append(chunk)
        self._leased -= 1
        self._permits.release()
