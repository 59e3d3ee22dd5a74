"""Pages of fresh memory: huge ones where they cost little, small ones elsewhere.

The kernel clears each page when it is first written. Huge pages (2 MiB) take 0.1 ms each, a seventh of what small pages
take, if the memory is there. In a virtual machine that gets its memory from the host on demand a huge page can take
5 ms, seven times as much as small ones, and that changes within seconds. So a thread that is about to fill memory
faults its pages in first, step by step, and what a step has cost decides on the next one; see madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
import time
from functools import cache
from pathlib import Path

from aiockpt.core.forks import ModuleLock
from aiockpt.core.machine import libc

HUGE_PAGE_BYTES = 2 << 20

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_SMALL = getattr(mmap, "MADV_NOHUGEPAGE", None)
_POPULATE_WRITE = 23  # since Linux 5.14; Python does not name it
_WIPE_ON_FORK = 18  # since Linux 4.14
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of system calls: the C library does not have this one
_PREFERRED = 1  # of mbind: other nodes, if that one has no memory

_FIRST_PAUSE_BYTES = 8 << 20  # of small pages after a huge one that cost too much; doubles each time
_LONGEST_PAUSE_BYTES = 512 << 20
_SMALL_NS = 750_000  # for 2 MiB, until it is measured
_NEWEST = 0.25  # the weight of a new measurement


def private_mapping(nbytes: int) -> mmap.mmap:
    """Map private anonymous memory: shared memory, Python's default, seldom gets huge pages."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def map_aligned(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory for bytes that begin at a huge page, empty in forked children; return it, and where they begin."""
    whole = private_mapping(nbytes + HUGE_PAGE_BYTES)
    # Copy-on-write for a child would copy every page that is written here. The address stays taken in the child: else
    # its own memory might come there, and would be unmapped when the child frees this object.
    with contextlib.suppress(OSError, AttributeError):
        try:
            whole.madvise(_WIPE_ON_FORK)
        except OSError:
            whole.madvise(mmap.MADV_DONTFORK)
    return whole, -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % HUGE_PAGE_BYTES


class PageChoice:
    """Chooses the size of pages by what they have cost. Thread-safe.

    Costs are the thread's own time, in ns for 2 MiB: a busy machine does not change them.
    """

    def __init__(self) -> None:
        self._lock = ModuleLock()
        self._small_ns: float = _SMALL_NS
        self._huge_ns: float = 0.0
        self._small_left = 0  # bytes in small pages before the next huge one is tried
        self._pause_bytes = _FIRST_PAUSE_BYTES

    @property
    def prefers_huge(self) -> bool:
        """Whether huge pages cost less at the moment."""
        return not self._small_left

    def next_step(self, most: int) -> tuple[bool, int]:
        """Return whether the next pages are to be huge, and how many bytes of them, of at most ``most``."""
        with self._lock.held():
            if not self._small_left:
                return True, min(most, HUGE_PAGE_BYTES)
            step = min(most, self._small_left)
            self._small_left -= step
            return False, step

    def record(self, nbytes: int, cost_ns: int, *, huge: bool) -> None:
        """Take the cost of a step into account."""
        cost = cost_ns * HUGE_PAGE_BYTES / nbytes
        with self._lock.held():
            if not huge:
                self._small_ns += _NEWEST * (cost - self._small_ns)
                return
            is_probe = self._huge_ns > self._small_ns  # the last ones cost too much: this one counts alone
            self._huge_ns = cost if is_probe else self._huge_ns + _NEWEST * (cost - self._huge_ns)
            if self._huge_ns > self._small_ns:
                self._small_left = self._pause_bytes
                self._pause_bytes = min(2 * self._pause_bytes, _LONGEST_PAUSE_BYTES)
            else:
                self._pause_bytes = _FIRST_PAUSE_BYTES


_choice = PageChoice()


def advise(address: int, nbytes: int, choice: PageChoice = _choice) -> None:
    """Ask for the pages that cost less at the moment, for a range that others fault in."""
    begin, end = _huge_pages(address, nbytes)
    if begin < end:
        _advise(begin, end - begin, _HUGE if choice.prefers_huge else _SMALL)


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages, whatever they cost."""
    _advise(address, nbytes, _HUGE)


def fault_in(address: int, nbytes: int, choice: PageChoice = _choice, *, advised: bool = False) -> None:
    """Fault in the whole huge pages of a range of private memory, in huge or in small pages. What is there stays.

    Blocks, and releases the GIL. Does nothing where the kernel can't. ``advised``: `advise` was called for the range.
    """
    at, end = _huge_pages(address, nbytes)
    asked_until = end if advised else at  # huge pages may have been asked for up to here
    while at < end:
        huge, step = choice.next_step(end - at)
        if huge and (asked_until <= at or advised):
            advised = False
            _advise(at, end - at, _HUGE)
            asked_until = end
        elif not huge and (at < asked_until or _is_always_huge()):
            # Only where it is needed: madvise takes the lock of the address space for writing, so it waits for the page
            # faults of all threads, and holds up those that come after.
            _advise(at, end - at, _SMALL)
            asked_until = at
        began = time.thread_time_ns()
        if not _populate(at, step):
            return
        choice.record(step, time.thread_time_ns() - began, huge=huge)
        at += step


def node_of_pci(address: str) -> int | None:
    """Return the NUMA node of a PCI device, as ``0000:17:00.0``; None if it is unknown, or if there is only one."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    with contextlib.suppress(OSError, ValueError):
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        return node if node >= 0 and len(nodes) > 1 else None
    return None


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Ask for pages of a NUMA node, where a range has none yet; see mbind(2). Does nothing where the kernel can't."""
    number = _MBIND.get(platform.machine())
    if number is not None and sys.platform == "linux":
        mask = (ctypes.c_ulong * 16)()
        mask[node // 64] = 1 << node % 64
        arguments = (address, nbytes, _PREFERRED, ctypes.addressof(mask), 8 * ctypes.sizeof(mask), 0)
        libc().syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))


def _huge_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Return begin and end of the whole huge pages in a range."""
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return begin, (address + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def _advise(address: int, nbytes: int, advice: int | None) -> None:
    if advice is not None:  # a kernel without huge pages refuses, and needs no advice
        libc().madvise(address, nbytes, advice)


def _populate(address: int, nbytes: int) -> bool:
    """Fault in pages; return whether the kernel did."""
    return bool(libc().madvise(address, nbytes, _POPULATE_WRITE) == 0)


@cache
def _is_always_huge() -> bool:
    """Return whether the kernel uses huge pages without being asked for them."""
    with contextlib.suppress(OSError):
        return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return False
