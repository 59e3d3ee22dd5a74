"""The pool of chunks."""

from __future__ import annotations

import anyio
import pytest

from aiockpt.core import pages
from aiockpt.core.pages import HUGE_PAGE_BYTES
from aiockpt.staging.pool import ChunkPool, SharedMemory

pytestmark = pytest.mark.asyncio


async def test_chunks_are_aligned_and_reused() -> None:
    pool = ChunkPool(1 << 16, 2)
    first, second = await pool.acquire(), await pool.acquire()
    assert first.chunk is not second.chunk
    for lease in (first, second):
        assert lease.chunk.address % HUGE_PAGE_BYTES == 0
        assert len(lease.chunk.view) == lease.chunk.tensor.numel() == 1 << 16
        assert lease.chunk.tensor.data_ptr() == lease.chunk.address
    first.chunk.view[5] = 77
    assert first.chunk.tensor[5] == 77
    chunk = first.chunk
    first.release()
    first.release()
    assert first.released
    assert pool.leased == 1
    again = await pool.acquire()
    assert again.chunk is chunk
    for lease in (second, again):
        lease.release()
    assert (pool.leased, pool.made) == (0, 2)


async def test_a_chunk_is_faulted_in_as_far_as_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "fault_in", lambda address, nbytes, **_: asked.append((address, nbytes)))
    lease = await ChunkPool(4 * HUGE_PAGE_BYTES + 4096, 1).acquire()
    chunk, step = lease.chunk, HUGE_PAGE_BYTES
    for nbytes in (100, step, step + 1, 5, 2 * step):
        chunk.fault_in(nbytes)
    chunk.touch()
    begin = chunk.address
    assert asked == [(begin, step), (begin + step, step), (begin + 2 * step, 2 * step + 4096)]
    lease.release()


async def test_waiting_is_first_come_first_served_and_safe_to_cancel() -> None:
    pool = ChunkPool(4096, 1)
    lease = await pool.acquire()
    order: list[int] = []

    async def take(number: int) -> None:
        got = await pool.acquire()
        order.append(number)
        got.release()

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(take, number)
            await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0) as scope:
            await pool.acquire()
        assert scope.cancelled_caught
        assert not pool.available
        lease.release()
    assert order == [0, 1, 2, 3]
    assert pool.leased == 0


async def test_the_capacity_grows_and_chunks_are_made_in_advance() -> None:
    pool = ChunkPool(4096, 1)
    pool.raise_capacity(3)
    pool.raise_capacity(2)
    assert pool.capacity == 3
    fresh = pool.lease_new(10)
    assert len(fresh) == pool.made == pool.leased == 3
    assert not pool.available  # a chunk that is being touched is not available: touching zeroes it
    assert pool.lease_new(10) == []
    for lease in fresh:
        lease.chunk.touch()
        lease.release()
    assert pool.lease_new(10) == []
    leases = [await pool.acquire() for _ in range(3)]
    assert pool.made == 3
    for lease in leases:
        lease.release()
    pool.drop()
    assert pool.made == 0


async def test_a_quarantined_chunk_is_replaced_and_dropped_when_it_is_released() -> None:
    pool = ChunkPool(4096, 2)
    stuck, other = await pool.acquire(), await pool.acquire()
    stuck.chunk.view[:4] = b"mine"
    stuck.quarantine()
    stuck.quarantine()
    assert (pool.leased, pool.quarantined, pool.made) == (1, 1, 2)
    third = await pool.acquire()
    assert third.chunk is not stuck.chunk
    third.chunk.view[:4] = b"else"
    assert not pool.available
    stuck.release()
    stuck.release()
    assert (pool.quarantined, pool.made) == (0, 2)
    assert not pool.available  # its place is taken
    other.release()
    third.release()
    fourth, fifth = await pool.acquire(), await pool.acquire()
    assert stuck.chunk not in (fourth.chunk, fifth.chunk)
    fourth.release()
    fifth.release()
    assert (pool.leased, pool.made) == (0, 2)


async def test_no_more_chunks_are_replaced_than_the_capacity() -> None:
    pool = ChunkPool(4096, 2)
    held = []
    for _ in range(4):
        lease = await pool.acquire()
        lease.quarantine()
        held.append(lease)
    assert (pool.quarantined, pool.made) == (4, 4)
    assert not pool.available
    held[3].release()  # this chunk was not replaced
    assert pool.available
    again = await pool.acquire()
    assert again.chunk is held[3].chunk
    again.release()
    for lease in held:
        lease.release()
    assert (pool.leased, pool.quarantined, pool.made) == (0, 0, 2)


async def test_shared_memory_has_a_place_for_each_chunk_and_no_more() -> None:
    shared = SharedMemory(3 * 4096)
    pool = ChunkPool(4096, 2, shared)
    first, second = await pool.acquire(), await pool.acquire()
    first.quarantine()  # there is room for one replacement
    third = await pool.acquire()
    assert {lease.chunk.number for lease in (first, second, third)} == {0, 1, 2}
    second.quarantine()  # and now for none
    assert not pool.available
    first.release()
    second.release()
    again = await pool.acquire()
    assert again.chunk is second.chunk
    third.release()
    again.release()
    pool.drop()
    fresh = pool.lease_new(2)
    assert len({lease.chunk.number for lease in fresh}) == 2
    for lease in fresh:
        lease.release()
    pool.drop()
    del first, second, third, again, fresh, lease
    shared.close()


async def test_quarantined_chunks_that_are_not_replaced_stay_within_the_capacity() -> None:
    shared = SharedMemory(8 * 4096)
    pool = ChunkPool(4096, 8, shared)
    held = [await pool.acquire() for _ in range(6)]
    for lease in held:
        lease.quarantine()
    assert (pool.in_reach, pool.made) == (2, 6)
    fresh = pool.lease_new(100)
    assert {lease.chunk.number for lease in [*held, *fresh]} == set(range(8))
    assert all(len(lease.chunk.view) == 4096 for lease in fresh)
    for lease in [*held, *fresh]:
        lease.release()
    pool.drop()
    small = ChunkPool(4096, 4, shared)
    held = [await small.acquire() for _ in range(4)]
    for lease in held:
        lease.quarantine()
    small.raise_capacity(8)
    more = []
    while small.available:
        more.append(await small.acquire())
    assert {lease.chunk.number for lease in [*held, *more]} == set(range(8))
    for lease in [*held, *more]:
        lease.release()
    assert (small.leased, small.quarantined) == (0, 0)
    small.drop()
    del held, fresh, more, lease, pool, small
    shared.close()
