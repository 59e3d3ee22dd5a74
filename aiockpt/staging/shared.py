"""Staging memory that another process can map: one file without a name, of which pages exist once they are touched."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any

import torch

from aiockpt.errors import AiockptError

_LEAST_BYTES = 64 << 20


class SharedMemory:
    """Memory for chunks, in one file descriptor and one mapping, however many chunks there are.

    The file has no name, so nothing is left when the last process that has it ends.

    Attributes:
        fd: the file; see memfd_create(2).
        nbytes: its size, of which nothing is taken before it is touched.
        address: of the first byte.
        view: the bytes.
        tensor: the same bytes as a tensor of dtype uint8; it keeps the mapping alive.

    Args:
        nbytes: the most that will be used; less is taken where the process may not map so much.

    Raises:
        AiockptError: there is no such memory here.
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
        weakref.finalize(whole, _libc().munmap, self.address, nbytes).atexit = False
        self.view = memoryview(whole).cast("B")
        self.tensor = torch.frombuffer(whole, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of the file; the memory goes with the last chunk and the last process that has it. Idempotent."""
        self.view, self.tensor = memoryview(b""), torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _map_most(fd: int, nbytes: int) -> tuple[int, int]:
    """Map as much of a file as the process may; give the address and the size.

    Raises:
        OSError: not even a little can be mapped.
    """
    while True:
        try:
            os.ftruncate(fd, nbytes)
            return map_shared(fd, nbytes), nbytes
        except OSError:
            nbytes //= 2
            if nbytes < _LEAST_BYTES:
                raise


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def map_shared(fd: int, nbytes: int) -> int:
    """Map a file, and give the address. Python's own mapping would keep another descriptor of it.

    Raises:
        OSError: it can't be mapped.
    """
    libc = _libc()
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Huge pages, where the system allows them for shared memory; and none of it in forked children.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        libc.madvise(address, nbytes, getattr(mmap, advice))
    return int(address)
