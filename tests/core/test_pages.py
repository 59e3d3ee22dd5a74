"""Fresh memory gets huge pages as long as they cost less than small ones."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from aiockpt.core import pages
from aiockpt.core.pages import HUGE_PAGE_BYTES, PageChoice

MIB = 1 << 20


def costs(choice: PageChoice, nbytes: int, huge_ns: int) -> list[tuple[bool, int]]:
    """Simulate faulting in `nbytes`, with huge pages of ``huge_ns`` each; return the steps, equal neighbours merged."""
    steps: list[tuple[bool, int]] = []
    while nbytes:
        huge, step = choice.next_step(nbytes)
        nbytes -= step
        choice.record(step, huge_ns if huge else 700_000 * step // HUGE_PAGE_BYTES, huge=huge)
        if steps and steps[-1][0] == huge:
            steps[-1] = (huge, steps[-1][1] + step)
        else:
            steps.append((huge, step))
    return steps


def test_cheap_huge_pages_are_used_throughout() -> None:
    assert costs(PageChoice(), 3 << 30, 100_000) == [(True, 3 << 30)]


def test_costly_huge_pages_are_tried_less_and_less_often() -> None:
    steps = costs(PageChoice(), 2 << 30, 5_000_000)
    assert set(steps[0::2]) == {(True, 2 * MIB)}
    assert steps[1::2][:8] == [(False, pause * MIB) for pause in (8, 16, 32, 64, 128, 256, 512, 512)]


def test_pages_that_become_cheap_are_used_again_at_once() -> None:
    choice = PageChoice()
    costs(choice, 26 * MIB, 5_000_000)  # a huge page, 8 MiB, a huge page, and 14 of 16 MiB
    assert costs(choice, 100 * MIB, 100_000) == [(False, 2 * MIB), (True, 98 * MIB)]
    assert costs(choice, 11 * MIB, 5_000_000)[:2] == [(True, 2 * MIB), (False, 8 * MIB)]  # the pause is short again


def test_huge_pages_that_cost_somewhat_more_are_not_used() -> None:
    assert costs(PageChoice(), 1 << 30, 900_000)[-1][0] is False


@pytest.fixture
def memory() -> tuple[int, memoryview]:
    """Return the address of 20 MiB of fresh memory, aligned to a huge page, and a view of it."""
    whole = pages.private_mapping(22 * MIB)
    whole.madvise(mmap.MADV_DONTDUMP)  # keeps the kernel from merging it with its neighbours, for `resident`
    keep = ctypes.c_char.from_buffer(whole)
    skip = -ctypes.addressof(keep) % HUGE_PAGE_BYTES
    return ctypes.addressof(keep) + skip, memoryview(whole)[skip : skip + 20 * MIB]


def resident(address: int, nbytes: int) -> tuple[int, int]:
    """Return the resident bytes of a range, and how many of them are in huge pages."""
    rss = huge = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            begin, end = (int(each, 16) for each in span.groups())
            inside = begin < address + nbytes and end > address
        elif inside and line.startswith("Rss:"):
            rss += int(line.split()[1]) * 1024
        elif inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) * 1024
    return rss, huge


needs_populate = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14),
    reason="this kernel has no MADV_POPULATE_WRITE",
)


@needs_populate
def test_whole_huge_pages_of_the_range_are_faulted_in(memory: tuple[int, memoryview]) -> None:
    address, view = memory
    view[5 * MIB : 5 * MIB + 3] = b"abc"
    pages.fault_in(address + 3 * MIB, 10 * MIB, PageChoice())  # from 4 to 12 MiB
    assert resident(address, len(view))[0] == 8 * MIB
    assert bytes(view[5 * MIB - 1 : 5 * MIB + 4]) == b"\0abc\0"
    pages.fault_in(address + 100, HUGE_PAGE_BYTES, PageChoice())  # no whole huge page
    assert resident(address, len(view))[0] == 8 * MIB


@needs_populate
def test_the_choice_decides_on_the_pages(memory: tuple[int, memoryview]) -> None:
    address, view = memory
    choice = PageChoice()
    choice.record(HUGE_PAGE_BYTES, 50_000_000, huge=True)
    pages.fault_in(address, 8 * MIB, choice)
    assert resident(address, 8 * MIB) == (8 * MIB, 0)
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this machine has no huge pages")
    pages.fault_in(address + 8 * MIB, 2 * MIB, choice)  # tried again after 8 MiB
    assert resident(address, len(view)) == (10 * MIB, 2 * MIB)


def _policy_at(address: int) -> str:
    """Return the memory policy of the mapping at an address."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *_ = line.split()
        if int(start, 16) == address:
            return policy
    return "none"


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA nodes")
def test_pages_of_a_node_are_preferred() -> None:
    whole, skip = pages.map_aligned(8 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole, skip))
    pages.prefer_node(address, 4 * MIB, 0)
    ctypes.memset(address, 1, 8 * MIB)
    assert re.fullmatch(r"prefer(=relative|=static)?:0", _policy_at(address))
    assert _policy_at(address + 4 * MIB) == "default"


def test_a_device_that_is_unknown_has_no_node() -> None:
    assert pages.node_of_pci("ffff:ff:1f.0") is None
