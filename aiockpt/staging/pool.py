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


class MappedMemory:
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
    """One piece of staging memory; see `MappedMemory` for its attributes.

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
        self._mapping: MappedMemory | SharedMemory
        if shared is None:
            self._mapping = mapping = MappedMemory(nbytes)
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
    """The right to use one chunk until it is released. To be released on the engine's loop, once or more.

    Attributes:
        chunk: the chunk.
        replaced: it is in quarantine, and somebody else may have another chunk in its place.
    """

    __slots__ = ("_pool", "_quarantined", "chunk", "replaced")

    def __init__(self, pool: ChunkPool, chunk: Chunk) -> None:
        self._pool: ChunkPool | None = pool
        self._quarantined = False
        self.chunk = chunk
        self.replaced = False

    @property
    def released(self) -> bool:
        """Whether the chunk was given back."""
        return self._pool is None

    def release(self) -> None:
        """Give the chunk back. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._take_back(self, quarantined=self._quarantined)

    def quarantine(self) -> None:
        """Set the chunk apart: a thread holds it that may never come back. If it does, it is released all the same."""
        if self._pool is not None and not self._quarantined:
            self._quarantined = True
            self.replaced = self._pool._set_apart()


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
        self._quarantined = 0
        self._replaced = 0
        self._spare: list[int] = []

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
    def quarantined(self) -> int:
        """How many chunks are held by threads that may never come back."""
        return self._quarantined

    @property
    def in_reach(self) -> int:
        """How many chunks one save may have at most, by and by: not those that hang, and have not been replaced."""
        return self.capacity - (self._quarantined - self._replaced)

    @property
    def available(self) -> bool:
        """Whether `acquire` would return at once."""
        return self._permits.value > 0

    def allow(self, capacity: int) -> None:
        """Raise the bound to ``capacity`` chunks, as far as there is memory; it is never lowered."""
        capacity = min(capacity, self._most - self._replaced)
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
            while self._made - self._replaced < min(count, self.capacity) and self.available:
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
        for chunk in self._free:
            self._forget(chunk)
        self._free.clear()

    def _lease(self, chunk: Chunk) -> Lease:
        self._leased += 1
        return Lease(self, chunk)

    def _make(self) -> Chunk:
        number = self._spare.pop() if self._spare else self._made
        if number >= self._most:
            raise RuntimeError(f"all {self._most} chunks of the shared staging memory exist")
        try:
            chunk = Chunk(self.chunk_bytes, number, self._shared)
        except BaseException:
            self._spare.append(number)
            raise
        self._made += 1
        return chunk

    def _forget(self, chunk: Chunk) -> None:
        self._made -= 1
        self._spare.append(chunk.number)

    def _set_apart(self) -> bool:
        """Count a chunk as held by a thread that may never come back; tell whether there may be another in its place.

        There may, until as much is held so as the pool may have: a disk that hangs must not take all memory.
        """
        self._leased -= 1
        self._quarantined += 1
        if self._quarantined > self.capacity or self.capacity + self._quarantined > self._most:
            return False
        self._permits.release()
        self._replaced += 1
        return True

    def _take_back(self, lease: Lease, *, quarantined: bool) -> None:
        if quarantined:
            self._quarantined -= 1
        else:
            self._leased -= 1
        if lease.replaced:
            self._replaced -= 1
            self._forget(lease.chunk)
            return
        self._free.append(lease.chunk)
        self._permits.release()
