"""The two sides of the links between ranks: rank 0 listens, each other rank connects; see `protocol`.

Both send heartbeats, so that a side that is silent for the timeout is taken for dead. If a link breaks, the rank
connects again, and repeats what it has asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from aiockpt.coordination.link import (
    HELLO_S,
    Endpoint,
    Link,
    LinkBrokenError,
    check_descriptors,
    connect,
    listen,
    network_namespace,
    reachable,
)
from aiockpt.coordination.outcome import (
    RemoteError,
    dead_rank_text,
    silence_text,
    timeout_text,
)
from aiockpt.coordination.protocol import Asking, Left, RankCall, Reply, Rounds
from aiockpt.coordination.rendezvous import RankAddress, Rendezvous
from aiockpt.core.wording import some_of
from aiockpt.errors import CoordinationError

logger = logging.getLogger("aiockpt")

RECONNECT_S = 2.0
"""Limit for a living rank whose link broke to connect again; after it, rank 0 takes it for dead."""
_FLUSH_S = 60.0
_NOTIFY_S = 2.0
_LONGEST_BEAT_S = 5.0
_SHORTEST_POLL_S = 0.002
_POLL_S = 0.1
_DESCRIPTORS = 4


class _Side:
    """The common part of both sides: links with heartbeats, and the meeting in the store."""

    def __init__(self, address: RankAddress, *, timeout_s: float) -> None:
        self._address = address
        self._rendezvous = Rendezvous(address)
        self._timeout_s = timeout_s
        self._beat_s = min(timeout_s / 5, _LONGEST_BEAT_S)
        self._links: dict[int, Link] = {}  # by rank
        self._tasks: set[asyncio.Task[None]] = set()

    async def addresses(self, operation: str) -> list[str]:
        """Return the addresses at which other ranks reach this host; see `addresses_of_this_host`."""
        if self._address.host:
            return [self._address.host]
        return await self._rendezvous.addresses(operation, time.monotonic() + self._timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Close all links; return whether the thread that uses the store has ended in time."""
        for link in self._links.values():
            link.close()
        for task in self._tasks:
            task.cancel()
        return self._rendezvous.close(timeout_s)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task that serves other ranks has failed", exc_info=task.exception())

    def _use(self, rank: int, link: Link) -> None:
        """Use a new link until it breaks."""
        if rank in self._links:
            self._links[rank].close()
        self._links[rank] = link
        self._start(self._serve(rank, link))

    async def _serve(self, rank: int, link: Link) -> None:
        beats = self._start(self._beat(link))
        try:
            while True:
                self._receive(rank, pickle.loads(await link.receive()))
        except LinkBrokenError:
            if self._links.get(rank) is link:
                del self._links[rank]
                self._lose(rank)
        finally:
            beats.cancel()
            link.close()

    async def _beat(self, link: Link) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            link.beat()

    def _receive(self, rank: int, message: Any) -> None:
        raise NotImplementedError

    def _lose(self, rank: int) -> None:
        raise NotImplementedError

    async def _notify(self, left: Left) -> None:
        """Write to the store why this rank leaves a call. Without the store, the others find that it does not come."""
        with contextlib.suppress(CoordinationError):
            await self._rendezvous.notify(left, time.monotonic() + min(_NOTIFY_S, self._timeout_s))


class Leader(_Side):
    """Rank 0's side: collects the messages of all other ranks, then replies to each."""

    leader_lives = True

    def __init__(self, address: RankAddress, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        names = [address.own_name(), *map(address.rank_name, range(1, address.world_size))]
        self._rounds = Rounds(names, timeout_s, min(RECONNECT_S, timeout_s))
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._has_store = True

    async def collect(self, call: RankCall, operation: str) -> list[Any]:
        """Wait until every other rank has come, is dead, or is late; return its value or failure, from rank 1 on.

        Raises CoordinationError if this rank can't be reached.
        """
        round_ = self._rounds.begin(call, operation, begun := time.monotonic())
        self._deliver()
        self._has_store = True
        if not round_.over.is_set():
            await self._open(operation, begun + self._timeout_s)
        await round_.over.wait()
        return [round_.arrivals[rank] for rank in range(1, self._address.world_size)]

    async def end(self, call: RankCall, operation: str, outcome: Sequence[bytes] | RemoteError) -> None:
        """Send each rank its reply, or fail the call: also on ranks that are late, and if this one hangs in it."""
        if isinstance(outcome, RemoteError):
            if self._server is None:  # no rank can connect
                await self._notify(Left(0, call.kind, 0, operation, outcome))
            self._rounds.fail(call, operation, outcome)
        else:
            self._rounds.reply(call, outcome)
        self._deliver()
        flushes = [self._start(link.flush()) for link in self._links.values()]
        if flushes:
            await asyncio.wait(flushes, timeout=min(_FLUSH_S, self._timeout_s))

    give_up = end

    def tell(self, call: RankCall, operation: str, failure: RemoteError) -> bool:
        """Fail the call; see `Coordinator.tell`."""
        self._rounds.fail(call, operation, failure)
        return self._rendezvous.tell(Left(0, call.kind, 0, operation, failure), _NOTIFY_S)

    def close(self, timeout_s: float) -> bool:  # noqa: D102
        if self._server is not None:
            self._server.close()
        self._rounds.close()
        self._deliver()
        return super().close(timeout_s)

    def _deliver(self) -> None:
        replies, self._rounds.outbox = self._rounds.outbox, []
        for rank, reply in replies:
            if rank in self._links:
                self._links[rank].send(pickle.dumps(reply))

    def _tick(self) -> None:
        self._rounds.tick(time.monotonic(), {rank: link.heard for rank, link in self._links.items()})
        self._deliver()

    async def _watch(self) -> None:
        """Look for ranks that are late or dead, and for those that have left without a link."""
        others = self._address.world_size - 1
        while True:
            are_linked = len(self._links) == others
            await asyncio.sleep(self._beat_s if are_linked else _POLL_S)
            self._tick()
            if are_linked or not self._has_store or not self._rounds.are_open:
                continue
            lefts = list[Left]()
            try:
                _, lefts = await self._rendezvous.read("this save or load", time.monotonic() + _NOTIFY_S)
            except CoordinationError:
                self._has_store = False  # in this round ranks without a link are just late
            for left in lefts:
                if left.rank:  # the last one stands for a rank of a larger size, which has no place here
                    self._receive(left.rank, left._replace(rank=min(left.rank, others)))

    async def _open(self, operation: str, deadline: float) -> None:
        """Listen, and let the other ranks know where; once."""
        async with self._opening:
            if self._server is not None:
                return
            secret, own_name = secrets.token_bytes(32), self._address.own_name()
            try:
                server = await listen(await self.addresses(operation), secret, f"0\n{own_name}", self._join)
                try:
                    # For the links, which would hang without, for the store, and for what the save itself opens.
                    check_descriptors(self._address.world_size + _DESCRIPTORS)
                    addresses = [socket_.getsockname()[:2] for socket_ in server.sockets]
                    endpoint = Endpoint(addresses, secret, network_namespace(), own_name, self._address.world_size)
                    await self._rendezvous.publish(endpoint, operation, deadline)
                except BaseException:
                    server.close()
                    raise
            except (OSError, CoordinationError) as exc:
                raise CoordinationError(f"rank 0 can't be reached for {operation}: {exc}") from exc
            self._server = server
            self._start(self._watch())

    def _join(self, hello: str, link: Link) -> None:
        rank, _, name = hello.partition("\n")
        self._rounds.join(int(rank), name)
        self._use(int(rank), link)

    def _receive(self, rank: int, message: Any) -> None:
        if isinstance(message, Left):
            self._rounds.leave(message, time.monotonic())
        else:
            self._rounds.ask(rank, message, time.monotonic())
        self._deliver()

    def _lose(self, rank: int) -> None:
        self._rounds.lose(rank, time.monotonic())
        asyncio.get_running_loop().call_later(2 * _POLL_S + min(RECONNECT_S, self._timeout_s), self._tick)


class Follower(_Side):
    """Another rank's side: sends its message to rank 0, then waits for the reply."""

    def __init__(self, address: RankAddress, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._own_name = address.own_name()
        self._leader_name = address.rank_name(0)
        self._asking = Asking(address.rank)
        self._replies: dict[int, asyncio.Future[bytes]] = {}  # by the number of the call
        self._endpoint: Endpoint | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.leader_lives = True  # as far as is known

    async def ask(self, call: RankCall, operation: str, message: bytes) -> bytes:
        """Send a message to rank 0 and return its reply; raise CoordinationError if it is dead: then `give_up`."""
        begun = time.monotonic()
        ask = self._asking.ask(call, operation, message)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[call.number] = reply
        try:
            if 0 in self._links:
                self._links[0].send(pickle.dumps(ask))
            elif self._connecting is None or self._connecting.done():
                self._connecting = self._start(self._connect(operation, begun + self._timeout_s))
            while not reply.done():
                await asyncio.wait([reply], timeout=self._beat_s)
                heard = self._links[0].heard if 0 in self._links else time.monotonic()
                if not reply.done() and time.monotonic() - max(begun, heard) >= self._timeout_s:
                    raise CoordinationError(silence_text(self._leader_name, operation, self._timeout_s))
            return reply.result()
        finally:
            del self._replies[call.number]

    async def give_up(self, call: RankCall, operation: str, failure: RemoteError) -> None:
        """Inform rank 0 that this rank has raised an error instead of waiting on, or of coming."""
        left = self._asking.leave(call, operation, failure)
        if 0 in self._links:
            self._links[0].send(pickle.dumps(left))
        else:
            await self._notify(left)

    def tell(self, call: RankCall, operation: str, failure: RemoteError) -> bool:
        """Leave the call; see `Coordinator.tell`."""
        return self._rendezvous.tell(self._asking.leave(call, operation, failure), _NOTIFY_S)

    def _receive(self, rank: int, message: Any) -> None:
        reply = self._replies.get(message.number)
        if self._asking.answers(message) and reply is not None and not reply.done():
            reply.set_result(message.message)

    def _lose(self, rank: int) -> None:
        until = time.monotonic() + min(RECONNECT_S, self._timeout_s)
        self._connecting = self._start(self._connect("this save or load", until))

    # --- the link -------------------------------------------------------------------------------------

    async def _connect(self, operation: str, deadline: float) -> None:
        """Connect to rank 0, and say what it may lack; fail what waits if that can't be done in time."""
        try:
            endpoint = await self._find(operation, deadline)
            link = await self._link_to(endpoint, deadline)
        except CoordinationError as exc:
            for ask in self._asking.asks.values():
                text = str(exc) if self.leader_lives else dead_rank_text(self._leader_name, ask.operation)
                error = CoordinationError(text)
                error.__cause__ = exc.__cause__
                reply = self._replies.get(ask.number)
                if reply is not None and not reply.done():
                    reply.set_exception(error)
            return
        self.leader_lives = True
        for message in self._asking.unanswered():
            link.send(pickle.dumps(message))
        self._use(0, link)

    async def _find(self, operation: str, deadline: float) -> Endpoint:
        """Return where rank 0 listens; raise CoordinationError if it does not until the deadline."""
        pause_s = _SHORTEST_POLL_S
        # If it was dead, it may listen elsewhere by now, as it could not say in time where it did.
        while self._endpoint is None or not self.leader_lives:
            least = time.monotonic() + _NOTIFY_S  # the store gets some time even if there is none left
            until = max(deadline, least) if self._endpoint is None else least
            try:
                self._endpoint, lefts = await self._rendezvous.read(operation, until)
            except CoordinationError:
                if self._endpoint is None:
                    raise
                break  # the store has ended too
            for left in lefts:  # rank 0 may have left a call before it listened
                for ask in list(self._asking.asks.values()):
                    if left.rank == 0 and (ask.kind, ask.operation) == (left.kind, left.operation):
                        self._receive(0, Reply(ask.number, ask.step, pickle.dumps(left.failure)))
            if self._endpoint is not None:
                break
            if time.monotonic() >= deadline:
                raise CoordinationError(timeout_text(self._leader_name, operation, self._timeout_s))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
        assert self._endpoint is not None
        self._leader_name = self._endpoint.host
        size, own_size = self._endpoint.size, self._address.world_size
        if size != own_size:
            text = f"{self._own_name} is one of {own_size} ranks, but {self._leader_name} one of {size}"
            raise CoordinationError(f"{text}: all must be given the same number")
        return self._endpoint

    async def _link_to(self, endpoint: Endpoint, deadline: float) -> Link:
        addresses = reachable(endpoint, network_namespace())
        hello, tried = f"{self._address.rank}\n{self._own_name}", [f"{host} port {port}" for host, port in addresses]
        error: BaseException = LinkBrokenError(
            "the name of that host resolves to loopback there, so give it its address in DNS or /etc/hosts"
        )
        while addresses:
            refusals = 0
            for host, port in addresses:
                try:
                    async with asyncio.timeout(min(HELLO_S, max(_POLL_S, deadline - time.monotonic()))):
                        return (await connect(host, port, endpoint.secret, hello))[1]
                except (OSError, LinkBrokenError, TimeoutError) as exc:
                    error = exc
                    refusals += isinstance(exc, ConnectionRefusedError)
            self.leader_lives = refusals < len(addresses)
            # An error of this host's own, such as EMFILE, is no matter of time.
            is_own = not isinstance(error, LinkBrokenError | TimeoutError | ConnectionError)
            if is_own or not self.leader_lives or time.monotonic() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        raise CoordinationError(
            f"{self._own_name} can't connect to {endpoint.host} at {some_of(tried, 8)}: {error or type(error).__name__}"
            "; set GLOO_SOCKET_IFNAME on rank 0 to the interface by which the other ranks reach it"
        ) from error
