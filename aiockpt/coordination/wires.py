"""Connections between any two ranks, over which they send each other what they have read from a checkpoint.

For one load, each rank that reads for others listens, and they connect to it; both prove that they know a secret, as
for a `aiockpt.coordination.link`. Then the socket carries messages one way: a head with the CRC-32, and the bytes.
Within a host the bytes are not sent, but stand in memory that both ranks have, until the other side says that it no
longer needs them.

Nothing depends on a wire: a rank reads itself what it is not sent. So a side that is dead, silent or can't be reached
is left out, and what has happened to it is for the rounds of all ranks to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from aiockpt.coordination.link import (
    HELLO_S,
    Endpoint,
    Link,
    LinkBrokenError,
    breaking,
    connect,
    listen,
    network_namespace,
    reachable,
)
from aiockpt.core.wording import some_of

logger = logging.getLogger("aiockpt")

_HEAD = struct.Struct("!QQQ")
_DONE = b"\1"
_MOST_DONE = 64
_MORE = getattr(socket, "MSG_MORE", 0)
_TIME = struct.Struct("ll")  # timeval
_JOIN_S = 5.0
"""Limit for all wires of a load to be made; a rank reads alone what it would be sent over those that are not."""
_MOST_STALL_S = 60.0
"""A rank that is silent for so long is left out."""


class Head(NamedTuple):
    """The head of a message."""

    number: int
    nbytes: int
    check: int  # the CRC-32, or where the bytes begin in the memory that both sides have


class Arena:
    """Memory for what is sent. If it ``is_shared``, other processes of this host may map it; it ends with the last."""

    def __init__(self, nbytes: int, *, is_shared: bool) -> None:
        self.fd = -1
        if not is_shared:
            self.view = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            return
        self.fd = os.memfd_create("aiockpt-wires", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.view = memoryview(mmap.mmap(self.fd, nbytes))

    def close(self) -> None:
        """Close the file; the memory is freed when nothing refers to it. Idempotent."""
        self.view = memoryview(b"")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Wire:
    """A connection that carries messages one way. Its methods block, and raise LinkBrokenError."""

    def __init__(self, own: socket.socket, stall_s: float) -> None:
        self.turn = threading.Lock()  # to be held by a thread that sends
        self._socket = own
        if own.family != socket.AF_UNIX:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Limits of the kernel's: with one of Python's, each call would return after every packet.
        limit = _TIME.pack(int(stall_s), int(stall_s % 1 * 1e6))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, number: int, crc: int, view: memoryview) -> None:
        """Send a message."""
        try:
            with breaking():
                self._socket.sendall(_HEAD.pack(number, len(view), crc), _MORE)
                self._socket.sendall(view)
        except LinkBrokenError:
            self.end()  # a part of a message is no message
            raise

    def head(self) -> Head:
        """Wait for a message; return its head."""
        data = bytearray(_HEAD.size)
        self.fill(memoryview(data))
        return Head(*_HEAD.unpack(data))

    def fill(self, view: memoryview) -> None:
        """Receive bytes of the message whose head was returned."""
        while view:
            with breaking():
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            if not count:
                raise LinkBrokenError("the other side has closed the connection")
            view = view[count:]

    def end(self) -> None:
        """Make all calls of both sides fail, those that wait as well. Does not block."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which no thread may use any more. Idempotent."""
        self._socket.close()


class MemoryWire(Wire):
    """A connection within a host, whose messages stand in memory that both sides have."""

    def __init__(self, own: socket.socket, stall_s: float) -> None:
        super().__init__(own, stall_s)
        self._arena: memoryview | None = None  # of the other side
        self._announced = self._done = 0  # messages
        self._receiving = threading.Lock()
        self._is_broken = False

    def announce(self, number: int, nbytes: int, arena: Arena, offset: int) -> int:
        """Send a message that stands in an arena, always the same one; return its ticket."""
        with breaking():
            if not self._announced:
                socket.send_fds(self._socket, [_DONE], [arena.fd])
            self._socket.sendall(_HEAD.pack(number, nbytes, offset))
        self._announced += 1
        return self._announced

    def wait(self, ticket: int) -> None:
        """Wait until the other side no longer needs the message with this ticket. Any number of threads may wait."""
        while self._done < ticket:
            with self._receiving:  # what one thread receives counts for all
                if self._done < ticket:
                    if not self._is_broken:
                        self._is_broken = True
                        with contextlib.suppress(OSError):
                            count = len(self._socket.recv(_MOST_DONE))
                            self._done, self._is_broken = self._done + count, not count
                    if self._done < ticket and self._is_broken:
                        raise LinkBrokenError("the other side has left")

    def head(self) -> Head:
        if self._arena is None:
            with breaking():
                _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
            if not fds:
                raise LinkBrokenError("the other side has closed the connection")
            try:
                self._arena = memoryview(mmap.mmap(fds[0], 0))
            finally:
                os.close(fds[0])
        return super().head()

    def view(self, head: Head) -> memoryview:
        """Return the bytes of a message, valid until it is `done`."""
        if self._arena is None or head.check + head.nbytes > len(self._arena):
            raise LinkBrokenError("the message is outside of the memory that both sides have")
        return self._arena[head.check : head.check + head.nbytes]

    def done(self) -> None:
        """Allow the other side to use the memory of the message again. Does not block."""
        with breaking():
            self._socket.sendall(_DONE)

    def close(self) -> None:
        self._arena = None
        super().close()


class Wires:
    """A rank's wires of one load."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._stall_s = min(timeout_s, _MOST_STALL_S)
        self._servers: list[asyncio.Server] = []
        self._joined: dict[int, asyncio.Future[Wire]] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._every: list[Wire] = []  # a descriptor is closed when no thread may use it any more
        self.inbound: dict[int, Wire] = {}  # by the rank that reads
        self.outbound: dict[int, Wire] = {}  # by the rank that is sent to

    async def listen(self, hosts: Sequence[str]) -> Endpoint:
        """Listen on these hosts; return what it takes to connect. Raises OSError."""
        secret = secrets.token_bytes(32)
        near = [(f"\0aiockpt-{secrets.token_hex(16)}", 0)] if hasattr(os, "memfd_create") else []
        for where in (*(name for name, _ in near), hosts):
            self._servers.append(await listen(where, secret, str(self._rank), self._join))
        addresses = [*near, *(listening.getsockname()[:2] for listening in self._servers[-1].sockets)]
        return Endpoint(addresses, secret, network_namespace(), socket.gethostname(), 0)

    async def connect(self, readers: Mapping[int, Endpoint], takers: Collection[int]) -> None:
        """Connect to all readers, and wait until all takers have connected; after some seconds without the others."""
        joined = {taker: self._joined_by(taker) for taker in takers}
        reaching = {rank: asyncio.ensure_future(self._reach(rank, endpoint)) for rank, endpoint in readers.items()}
        waits: list[asyncio.Future[Wire]] = [*reaching.values(), *joined.values()]
        try:
            if waits:
                await asyncio.wait(waits, timeout=min(_JOIN_S, self._stall_s))
        finally:
            for task in reaching.values():
                task.cancel()
            await asyncio.gather(*reaching.values(), return_exceptions=True)
            self._stop_listening()
            self.inbound, self.outbound = _made_of(reaching), _made_of(joined)
        absent = sorted({*readers, *takers} - {*self.inbound, *self.outbound})
        if absent:
            logger.warning(
                "this rank, %d, has no connection to %s within %.3g s, so each reads alone what one could send to the "
                "other: allow connections between all ranks, or load with share=False",
                *(self._rank, some_of([f"rank {rank}" for rank in absent], 10), min(_JOIN_S, self._stall_s)),
            )

    def end(self) -> None:
        for wire in self._every:
            wire.end()

    def close(self) -> None:
        """Close all, when no thread uses them any more. Idempotent."""
        self._stop_listening()
        for wire in self._every:
            wire.close()

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._joining:
            task.cancel()

    def _joined_by(self, taker: int) -> asyncio.Future[Wire]:
        return self._joined.setdefault(taker, asyncio.get_running_loop().create_future())

    def _join(self, hello: str, link: Link) -> None:
        async def take() -> None:
            with contextlib.suppress(LinkBrokenError):
                wire = await self._made(link, connected=False)
                if not self._joined_by(int(hello)).done():
                    self._joined_by(int(hello)).set_result(wire)

        task = asyncio.ensure_future(take())
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _made(self, link: Link, *, connected: bool) -> Wire:
        try:
            own = await link.detach(connected=connected)
            wire = (MemoryWire if own.family == socket.AF_UNIX else Wire)(own, self._stall_s)
        finally:
            link.close()
        self._every.append(wire)
        return wire

    async def _reach(self, reader: int, endpoint: Endpoint) -> Wire:
        error: BaseException = LinkBrokenError("it listens at addresses of another network only")
        for host, port in reachable(endpoint, network_namespace()):
            try:
                async with asyncio.timeout(HELLO_S):
                    hello, link = await connect(host, port, endpoint.secret, str(self._rank))
                if hello != str(reader):
                    link.close()
                    raise LinkBrokenError(f"rank {hello} listens there")
                return await self._made(link, connected=True)
            except (OSError, LinkBrokenError) as exc:
                error = exc
        raise error


def _made_of(waits: Mapping[int, asyncio.Future[Wire]]) -> dict[int, Wire]:
    came = {rank: wire for rank, wire in waits.items() if wire.done() and not wire.cancelled()}
    return {rank: wire.result() for rank, wire in came.items() if wire.exception() is None}
