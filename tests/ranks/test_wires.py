"""Wires between any two ranks: messages, limits, and sides that are not there."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiockpt.coordination.link import Endpoint, LinkBrokenError
from aiockpt.coordination.wires import Arena, Head, MemoryWire, Wire, Wires

PAYLOAD = memoryview(os.urandom(9_000_001))
AT = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Return memory with the payload."""
    made = Arena(AT + len(PAYLOAD), is_shared=True)
    made.view[AT:] = PAYLOAD
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Return as many threads as wait at once."""
    with ThreadPoolExecutor(12) as pool:
        yield pool


async def mesh(count: int, timeout_s: float = 30.0, *, near: bool = False) -> list[Wires]:
    """Return the wires of ranks that are all connected to each other, within a host or by TCP."""
    every = [Wires(rank, timeout_s) for rank in range(count)]
    endpoints = {rank: await each.listen(["127.0.0.1"]) for rank, each in enumerate(every)}
    if not near:
        endpoints = {rank: each._replace(addresses=each.addresses[1:]) for rank, each in endpoints.items()}

    def others(rank: int) -> Mapping[int, Endpoint]:
        return {other: endpoint for other, endpoint in endpoints.items() if other != rank}

    await asyncio.gather(*(each.connect(others(rank), others(rank).keys()) for rank, each in enumerate(every)))
    return every


def send_over(wire: Wire, number: int, crc: int, arena: Arena, at: int) -> None:
    """Send all of an arena from a position on."""
    if isinstance(wire, MemoryWire):
        wire.wait(wire.announce(number, len(arena.view) - at, arena, at))
    else:
        wire.send(number, crc, arena.view[at:])


@pytest.mark.both_loops
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.asyncio
async def test_every_rank_sends_to_every_other_at_once(near: bool, threads: ThreadPoolExecutor, arena: Arena) -> None:
    every, run = await mesh(3, near=near), asyncio.get_running_loop().run_in_executor

    def send(rank: int, to: int) -> None:
        send_over(every[rank].outbound[to], rank, 7, arena, AT)
        send_over(every[rank].outbound[to], 100 + rank, 8, arena, AT + len(PAYLOAD))

    def receive(rank: int, reader: int) -> list[Head]:
        wire, data = every[rank].inbound[reader], bytearray(len(PAYLOAD))
        first = wire.head()
        if isinstance(wire, MemoryWire):
            assert wire.view(first) == PAYLOAD
            with pytest.raises(LinkBrokenError):
                wire.view(first._replace(check=AT + 1))
            wire.done()
            heads = [first, wire.head()]
            wire.done()
            return heads
        wire.fill(memoryview(data)[: first.nbytes])
        assert data == PAYLOAD
        return [first, wire.head()]

    pairs = [(rank, other) for rank in range(3) for other in range(3) if rank != other]
    sent = [run(threads, send, *pair) for pair in pairs]
    heads = await asyncio.gather(*(run(threads, receive, *pair) for pair in pairs), *sent)
    checks = (AT, AT + len(PAYLOAD)) if near else (7, 8)
    assert heads[:6] == [[Head(other, len(PAYLOAD), checks[0]), Head(100 + other, 0, checks[1])] for _, other in pairs]
    assert {type(wire) for each in every for wire in each.inbound.values()} == {MemoryWire if near else Wire}
    for each in every:
        each.close()
        each.close()


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.asyncio
async def test_side_that_ends_or_is_silent_breaks_the_wire(near: bool, arena: Arena) -> None:
    one, other = await mesh(2, timeout_s=0.2, near=near)
    with pytest.raises(LinkBrokenError):  # silent
        await asyncio.to_thread(one.inbound[1].head)
    with pytest.raises(LinkBrokenError):  # not received
        await asyncio.to_thread(lambda: [send_over(one.outbound[1], 0, 0, arena, AT) for _ in range(5)])
    waiting = asyncio.ensure_future(asyncio.to_thread(other.inbound[0].fill, memoryview(bytearray(10 * len(PAYLOAD)))))
    one.end()
    with pytest.raises(LinkBrokenError):
        await waiting
    for each in (one, other):
        each.close()


@pytest.mark.asyncio
async def test_ranks_that_do_not_come_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.coordination.wires._JOIN_S", 0.3)
    one, other = Wires(0, 30.0), Wires(1, 30.0)
    await one.listen(["127.0.0.1"])
    theirs = await other.listen(["127.0.0.1"])
    gone = Endpoint([("127.0.0.1", 1)], b"", theirs.namespace, "", 0)
    stranger = theirs._replace(secret=bytes(32))
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(one.connect({1: theirs, 2: gone, 3: stranger}, [4]), other.connect({}, [0]))
    assert list(one.inbound) == [1]
    assert list(other.outbound) == [0]
    assert not one.outbound
    assert "no connection to rank 2, rank 3, rank 4 within 0.3 s" in caplog.text
    for each in (one, other):
        each.close()
