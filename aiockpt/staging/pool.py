"""Staging memory: fixed-size, page-aligned chunks that are leased from a pool and reused."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections import deque

import anyio
import torch

from aiockpt.core import pages
from aiockpt.core.machine import libc
from aiockpt.errors import AiockptError

copy_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.PyDLL(None)))
"""memmove(target, source, nbytes) without releasing the GIL: cheaper for small pieces."""


class MappedMemory:
    """Private anonymous memory, aligned to a huge page, not faulted in yet."""

    __slots__ = ("address", "tensor", "view")

    def __init__(self, nbytes: int) -> None:
        whole, skip = pages.map_aligned(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(whole, skip))
        self.view = memoryview(whole)[skip : skip + nbytes]
        # The same bytes as dtype uint8; it keeps the memory alive.
        self.tensor = torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=skip)
        pages.advise(self.address, nbytes)


class ArenaCache:
    """Memory for copies made at the call of a save, kept for the next one: filling fresh pages takes thrice as long.

    Takes no lock: a signal handler may save in the middle of it, and finalizers run in any thread.
    """

    def __init__(self) -> None:
        self._free: deque[MappedMemory] = deque(maxlen=1)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised memory of dtype uint8; it comes back when no tensor refers to it any more."""
        memory = None
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
        if memory is None or len(memory.view) < nbytes:
            memory = MappedMemory(nbytes)
        # The tensor's storage keeps `owner` alive, so that it ends with the last tensor on this memory, views included.
        owner = (ctypes.c_char * nbytes).from_buffer(memory.view)
        weakref.finalize(owner, self._free.append, memory).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def clear(self) -> None:
        """Free what is kept."""
        self._free.clear()


class Chunk:
    """A piece of staging memory: of a private mapping, or number ``number`` of those in shared memory."""

    __slots__ = ("_mapping", "address", "arena", "faulted_bytes", "number", "tensor", "view")

    def __init__(
        self, nbytes: int, number: int = 0, mapping: MappedMemory | SharedMemory | None = None, begin: int = 0
    ) -> None:
        self.number = number
        self._mapping = mapping = MappedMemory(nbytes) if mapping is None else mapping
        # From its beginning on; the pages of the rest are not faulted in, as far as we know.
        self.faulted_bytes = 0 if isinstance(mapping, MappedMemory) else nbytes
        self.address = mapping.address + begin
        self.arena = (self.address, nbytes)  # the memory around it that devices lock at once: address and size
        self.view = mapping.view[begin : begin + nbytes]
        self.tensor = mapping.tensor[begin : begin + nbytes]

    def touch(self) -> None:
        """Fault all pages in, by writing to them. Blocks; releases the GIL."""
        self.fault_in(len(self.view))
        ctypes.memset(self.address, 0, len(self.view))  # shared memory, and what this kernel can't populate

    def fault_in(self, nbytes: int) -> None:
        """Fault in missing pages up to so many bytes, where the kernel can; contents stay. Blocks; releases the GIL."""
        begin, step = self.faulted_bytes, pages.HUGE_PAGE_BYTES
        if nbytes > begin:
            self.faulted_bytes = end = min(-(-nbytes // step) * step, len(self.view))
            pages.fault_in(self.address + begin, end - begin, advised=True)


class Lease:
    """The right to use a chunk until it is released. Use it only on the engine's loop."""

    __slots__ = ("_pool", "_quarantined", "chunk", "replaced")

    def __init__(self, pool: ChunkPool, chunk: Chunk) -> None:
        self._pool: ChunkPool | None = pool
        self._quarantined = False
        self.chunk = chunk
        self.replaced = False  # in quarantine, and the pool may make another chunk in its place

    @property
    def released(self) -> bool:
        """Whether the chunk is back in the pool."""
        return self._pool is None

    def release(self) -> None:
        """Return the chunk to the pool. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._take_back(self, quarantined=self._quarantined)

    def quarantine(self) -> None:
        """Set the chunk apart, because its thread hangs and may never release it. A late release returns the chunk."""
        if self._pool is not None and not self._quarantined:
            self._quarantined = True
            self.replaced = self._pool._set_apart()


class ChunkPool:
    """A bounded number of chunks, allocated on first use: each privately, or all in shared memory.

    ``chunk_bytes`` is a multiple of 4096.
    """

    def __init__(self, chunk_bytes: int, capacity: int, shared: SharedMemory | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        self._shared = shared
        self._most = sys.maxsize if shared is None else shared.nbytes // chunk_bytes
        self.capacity = capacity = min(capacity, self._most)
        self._free: list[Chunk] = []
        self._permits = anyio.Semaphore(capacity)
        self.made = 0  # chunks that exist
        self.leased = 0  # in use, except those in quarantine
        self.quarantined = 0  # held by threads that hang
        self._replaced = 0
        self._spare: list[Chunk] = []  # not counted in `made`, but it stays mapped and locked

    def __repr__(self) -> str:
        return (
            f"<ChunkPool {self.leased} leased, {len(self._free)} free, {self.capacity} at most, "
            f"of {self.chunk_bytes} bytes>"
        )

    @property
    def in_reach(self) -> int:
        """Number of chunks that one save can get over time: all except those in quarantine without a replacement."""
        return self.capacity - (self.quarantined - self._replaced)

    @property
    def available(self) -> bool:
        """Whether `acquire` would return at once."""
        return self._permits.value > 0

    def raise_capacity(self, capacity: int) -> None:
        """Raise the capacity, as far as the shared memory reaches. It is never lowered."""
        capacity = min(capacity, self._most - self._replaced)
        for _ in range(self.capacity, capacity):
            self._permits.release()
        self.capacity = max(self.capacity, capacity)

    async def acquire(self) -> Lease:
        """Wait for a chunk. First come, first served; safe to cancel."""
        await self._permits.acquire()
        return self._take()

    def acquire_nowait(self) -> Lease | None:
        """Return a chunk; None if `acquire` would wait."""
        if not self.available:
            return None
        self._permits.acquire_nowait()
        return self._take()

    def _take(self) -> Lease:
        try:
            chunk = self._free.pop() if self._free else self._make()[0]
        except BaseException:
            self._permits.release()
            raise
        return self._lease(chunk)

    def lease_new(self, count: int, arena_bytes: int = 0) -> list[Lease]:
        """Create chunks until ``count`` exist, as far as the capacity allows, and lease them.

        As many as ``arena_bytes`` hold are locked together. The caller touches and releases them. Leased, no save gets
        one whose pages are being faulted in.
        """
        leases: list[Lease] = []
        try:
            while (wanted := min(count, self.capacity) - (self.made - self._replaced)) > 0 and self.available:
                most = min(wanted, self._permits.value, max(1, arena_bytes // self.chunk_bytes))
                for chunk in self._make(most):
                    self._permits.acquire_nowait()
                    leases.append(self._lease(chunk))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def drop(self) -> None:
        """Free all chunks that are not leased."""
        self.made -= len(self._free)
        self._free.clear()
        self._spare.clear()

    def _lease(self, chunk: Chunk) -> Lease:
        self.leased += 1
        return Lease(self, chunk)

    def _make(self, count: int = 1) -> list[Chunk]:
        """Create chunks of one arena, or take up one that was replaced."""
        nbytes, first = self.chunk_bytes, self.made
        if self._spare:
            chunks = [self._spare.pop()]
        elif first + count > self._most:
            raise RuntimeError(f"all {self._most} chunks of the shared staging memory exist")
        else:
            mapping = self._shared or MappedMemory(count * nbytes)
            begin = 0 if self._shared is None else first * nbytes
            chunks = [Chunk(nbytes, first + each, mapping, begin + each * nbytes) for each in range(count)]
            for chunk in chunks:
                chunk.arena = (chunks[0].address, count * nbytes)
        self.made += len(chunks)
        return chunks

    def _set_apart(self) -> bool:
        """Count a chunk as quarantined; return whether it may be replaced.

        At most as many are replaced as the pool's capacity: a disk that hangs must not use up all memory.
        """
        self.leased -= 1
        self.quarantined += 1
        if self.quarantined > self.capacity or self.capacity + self.quarantined > self._most:
            return False
        self._permits.release()
        self._replaced += 1
        return True

    def _take_back(self, lease: Lease, *, quarantined: bool) -> None:
        if quarantined:
            self.quarantined -= 1
        else:
            self.leased -= 1
        if lease.replaced:
            self._replaced -= 1
            self.made -= 1
            self._spare.append(lease.chunk)
            return
        self._free.append(lease.chunk)
        self._permits.release()


# --- memory that another process can map ----------------------------------------------------------

_LEAST_SHARED_BYTES = 64 << 20


class SharedMemory:
    """Memory for all chunks, in one mapping of one memfd_create(2) file, which dies with the last process that has it.

    At most ``nbytes`` large, and less if the process may not map so much. Pages exist once they are touched.
    """

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise AiockptError("writer='process' needs Linux (memfd_create); use writer='thread' here")
        self.fd = os.memfd_create("aiockpt-staging", os.MFD_CLOEXEC)
        try:
            self.address, nbytes = _map_most(self.fd, nbytes)
        except OSError as exc:
            os.close(self.fd)
            raise AiockptError(
                f"can't map {nbytes} bytes of staging memory to share with a process: {exc}; set staging_bytes to less"
            ) from exc
        self.nbytes = nbytes
        whole = (ctypes.c_char * nbytes).from_address(self.address)
        # Not at exit: a daemon thread that hangs in a write may still use the memory.
        weakref.finalize(whole, _unmap, self.address, nbytes, os.getpid()).atexit = False
        self.view = memoryview(whole).cast("B")
        self.tensor = torch.frombuffer(whole, dtype=torch.uint8)  # keeps the mapping alive

    def close(self) -> None:
        """Close the file. The last chunk and the last process that maps it free the memory. Idempotent."""
        # On the CPU whatever default device the program has set.
        self.view, self.tensor = memoryview(b""), torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _map_most(fd: int, nbytes: int) -> tuple[int, int]:
    """Map as much of a file as the process may; return the address and the size."""
    while True:
        try:
            os.ftruncate(fd, nbytes)
            return _map_shared(fd, nbytes), nbytes
        except OSError:
            nbytes //= 2
            if nbytes < _LEAST_SHARED_BYTES:
                raise


def _map_shared(fd: int, nbytes: int) -> int:
    """Map a file, and return the address. Python's own mmap would keep a duplicate of the descriptor."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)
    address = libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Huge pages if the system allows them for shared memory. No mapping in forked children, which would keep the memory
    # after this process and the writer process have ended.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        libc().madvise(address, nbytes, getattr(mmap, advice))
    return int(address)


def _unmap(address: int, nbytes: int, pid: int) -> None:
    """Unmap shared memory, but nothing in a forked child, which has memory of its own there."""
    if os.getpid() == pid:
        libc().munmap(address, nbytes)
