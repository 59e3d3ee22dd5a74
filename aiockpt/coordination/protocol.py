"""The rounds between rank 0 and each other rank, over one link for each of them.

| message | from | content |
| --- | --- | --- |
| `Ask` | a rank | it has come to a round, with its value or its error |
| `Come` | rank 0 | it has come to the round as well: from now on only its silence ends the wait |
| `Reply` | rank 0 | its decision, or the failure that all ranks raise |
| `Left` | a rank | it has stopped waiting, with the failure that it raised |

Each side sends heartbeats. A rank has the timeout to come to a round. Once rank 0 has come, it may take as long as it
works, but may not be silent for longer than the timeout.

A round is named by its call: the n-th save, load or agreement of a rank, counted at the call, so that one that fails
before its first message, or without any link, counts like the others. Rank 0 remembers how the last calls have ended,
and replies at once to a rank that comes late. If the program skips a call on some rank, the counts differ from then on.
Then rank 0 goes by the operation and corrects the count: it fails its own call, which that rank does not make, and
waits for that rank's call in its next one.

If a link breaks, the rank connects again, and repeats what it has asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import secrets
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from aiockpt.coordination.link import (
    HELLO_S,
    Endpoint,
    Link,
    LinkBrokenError,
    connect,
    listen,
    network_namespace,
    reachable,
)
from aiockpt.coordination.outcome import (
    SAME_CALLS,
    Arrival,
    Arrived,
    Dead,
    Key,
    Left,
    RemoteError,
    TimedOut,
    coordination_failure,
    dead_rank_text,
    silence_text,
    timeout_text,
    to_remote_error,
)
from aiockpt.coordination.rendezvous import RankAddress, Rendezvous
from aiockpt.errors import CoordinationError

logger = logging.getLogger("aiockpt")

Kind = Literal["save", "load", "agree", "fallback"]

RECONNECT_S = 2.0
"""Limit for a living rank whose link broke to connect again; after it, rank 0 takes it for dead."""
_HOLD_S = 5.0
"""How long the call of a rank that is ahead waits for rank 0 to come to it, after rank 0 has failed the one before."""
_FLUSH_S = 60.0
_NOTIFY_S = 2.0
_LONGEST_BEAT_S = 5.0
_SHORTEST_POLL_S = 0.002
_POLL_S = 0.1
_REMEMBERED = 64
_KEPT_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class RankCall:
    """One call that all ranks make: the n-th of its kind, as this rank has counted; then as rank 0 has."""

    kind: Kind
    number: int
    step: int = 0  # of the next round

    @property
    def key(self) -> Key:
        """The name of the next round."""
        return Key(self.kind, self.number, self.step)


class Ask(NamedTuple):
    """A rank has come to a round."""

    key: Key
    operation: str
    message: bytes  # the pickled value, or its RemoteError


class Come(NamedTuple):
    """Rank 0 has come to a round."""

    key: Key


class Reply(NamedTuple):
    """Rank 0 has decided."""

    key: Key  # the one of the Ask
    number: int  # of the call, as rank 0 has counted
    message: bytes


class _End(NamedTuple):
    """How a call, or its last round so far, has ended on rank 0."""

    operation: str
    step: int
    failure: bytes | None
    replies: Sequence[bytes] = ()  # from rank 1 on; none if they are large


@dataclass(slots=True, eq=False)
class _Peer:
    """Another rank, as rank 0 sees it."""

    rank: int
    name: str
    link: Link | None = field(default=None, repr=False)
    broken: float | None = None  # since when there is none any more
    asks: dict[Key, Ask] = field(default_factory=dict)  # in their order; not replied to
    taken: dict[Key, Key] = field(default_factory=dict)  # rank 0's key of a round -> the rank's own
    shifts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # rank 0's number less this rank's
    ahead: dict[Key, RemoteError] = field(default_factory=dict)  # calls that rank 0 had not come to -> how one failed
    left: list[Left] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Round:
    """A round that rank 0 collects."""

    key: Key
    operation: str
    begun: float
    found: dict[int, Arrival] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    has_store: bool = True


class _Side:
    """The common part of both sides: the links' tasks, and the heartbeats."""

    def __init__(self, address: RankAddress, *, timeout_s: float) -> None:
        self._address = address
        self._rendezvous = Rendezvous(address.store)
        self._timeout_s = timeout_s
        self._beat_s = min(timeout_s / 5, _LONGEST_BEAT_S)
        self._tasks: set[asyncio.Task[None]] = set()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), CoordinationError | None):
            logger.error("a task that serves other ranks has failed", exc_info=task.exception())

    async def addresses(self, operation: str) -> list[str]:
        """Return the addresses of this host; see `Rendezvous.addresses`."""
        return await self._rendezvous.addresses(operation, time.monotonic() + self._timeout_s)

    async def _beat(self, link: Link) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            link.beat()

    def close(self, timeout_s: float) -> bool:
        """Close all links; return whether the thread that uses the store has ended in time."""
        for task in self._tasks:
            task.cancel()
        return self._rendezvous.close(timeout_s)


class Leader(_Side):
    """Rank 0's side: collects the messages of all other ranks, then replies to each."""

    def __init__(self, address: RankAddress, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._peers = [_Peer(rank, address.rank_name(rank)) for rank in range(1, address.world_size)]
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._rounds: list[_Round] = []
        self._ends: dict[str, dict[int, _End]] = defaultdict(dict)  # of each kind, by rank 0's number

    async def collect(self, call: RankCall, operation: str) -> list[Arrival]:
        """Wait until every other rank has come, is dead, or is late; return one arrival for each, from rank 1 on.

        Raises CoordinationError if this rank can't be reached.
        """
        round_ = _Round(call.key, operation, time.monotonic())
        if (end := self._ends[call.kind].get(call.number)) is not None and end.failure is not None:
            return [pickle.loads(end.failure)] * len(self._peers)  # `give_up` was called meanwhile
        await self._open(call, operation, round_.begun + self._timeout_s)
        self._rounds.append(round_)
        try:
            while True:
                round_.over.clear()
                for peer in self._peers:
                    self._look(round_, peer)
                if len(round_.found) == len(self._peers):
                    return [round_.found[peer.rank] for peer in self._peers]
                are_linked = all(peer.link is not None for peer in self._peers)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._beat_s if are_linked else _POLL_S):
                        await round_.over.wait()
                if not are_linked:
                    await self._read_notices(round_)
        finally:
            self._rounds.remove(round_)

    async def give_up(self, call: RankCall, operation: str, failure: RemoteError) -> None:
        """Fail a call on all ranks, though this one hangs in it."""
        if self._server is None:  # no rank can connect
            with contextlib.suppress(CoordinationError):
                await self._rendezvous.notify(Left(0, call.key, operation, failure), time.monotonic() + _NOTIFY_S)
        await self.reply(call, operation, [pickle.dumps(failure)] * len(self._peers), failed=True)
        for round_ in self._rounds:
            if round_.key == call.key:
                round_.found = {peer.rank: failure for peer in self._peers}
                round_.over.set()

    async def reply(self, call: RankCall, operation: str, messages: Sequence[bytes], *, failed: bool) -> None:
        """Send its reply to every rank that has come, from rank 1 on, and remember it for those that are late."""
        kept = messages if sum(map(len, messages)) <= _KEPT_BYTES else ()
        end = _End(operation, call.step, messages[0]) if failed else _End(operation, call.step, None, kept)
        ends = self._ends[call.kind]
        ends.pop(call.number, None)
        ends[call.number] = end
        if (old := ends.get(call.number - 3)) is not None:
            ends[call.number - 3] = old._replace(replies=())
        while len(ends) > _REMEMBERED:
            del ends[next(iter(ends))]
        for peer, message in zip(self._peers, messages, strict=True):
            if (theirs := peer.taken.pop(call.key, None)) is not None:
                self._answer(peer, theirs, call.number, message)
            for ask in [ask for ask in peer.asks.values() if self._number(peer, ask) == call.number]:
                self._late(peer, ask)
        flushes = [self._start(peer.link.flush()) for peer in self._peers if peer.link is not None]
        if flushes:
            await asyncio.wait(flushes, timeout=min(_FLUSH_S, self._timeout_s))

    def close(self, timeout_s: float) -> bool:  # noqa: D102
        if self._server is not None:
            self._server.close()
        for peer in self._peers:
            for key, failure in list(peer.ahead.items()):
                self._answer(peer, key, key.number, pickle.dumps(failure))
            if peer.link is not None:
                peer.link.close()
        return super().close(timeout_s)

    async def _open(self, call: RankCall, operation: str, deadline: float) -> None:
        """Listen, and let the other ranks know where; once."""
        async with self._opening:
            if self._server is not None:
                return
            secret, name = secrets.token_bytes(32), f"0\n{self._address.own_name()}"
            try:
                host = self._address.host
                hosts = [host] if host else await self._rendezvous.addresses(operation, deadline)
                server = await listen(hosts, secret, name, self._join)
                try:
                    addresses = [socket_.getsockname()[:2] for socket_ in server.sockets]
                    own_name, size = self._address.own_name(), self._address.world_size
                    endpoint = Endpoint(addresses, secret, network_namespace(), own_name, size)
                    await self._rendezvous.publish(endpoint, operation, deadline)
                except BaseException:
                    server.close()
                    raise
            except (OSError, CoordinationError) as exc:
                error = coordination_failure(0, f"rank 0 can't be reached for {operation}: {exc}")
                with contextlib.suppress(CoordinationError):
                    left = Left(0, call.key, operation, error)
                    await self._rendezvous.notify(left, time.monotonic() + _NOTIFY_S)
                raise CoordinationError(error.message) from exc
            self._server = server

    def _join(self, hello: str, link: Link) -> None:
        """Take a rank's new link."""
        rank, _, name = hello.partition("\n")
        peer = self._peers[int(rank) - 1]
        if peer.link is not None:
            peer.link.close()
        peer.link, peer.name, peer.broken = link, name, None
        self._start(self._serve(peer, link))

    async def _serve(self, peer: _Peer, link: Link) -> None:
        beats = self._start(self._beat(link))
        try:
            while True:
                message = pickle.loads(await link.receive())
                if isinstance(message, Left):
                    self._note(peer, message)
                elif not self._late(peer, message):
                    peer.asks[message.key] = message
                self._news(peer)
        except LinkBrokenError:
            if peer.link is link:
                peer.link, peer.broken = None, time.monotonic()
        finally:
            beats.cancel()
            link.close()
            self._news(peer)

    def _note(self, peer: _Peer, left: Left) -> None:
        """Take note that a rank has left a round, though rank 0 has come to it and waits for others."""
        peer.asks.pop(left.key, None)
        peer.left.append(left)
        del peer.left[:-_REMEMBERED]
        for round_ in self._rounds:
            if peer.taken.get(round_.key) == left.key:
                round_.found[peer.rank] = left.failure

    def _news(self, peer: _Peer) -> None:
        for round_ in self._rounds:
            self._look(round_, peer)
            if len(round_.found) == len(self._peers) or peer.link is None:
                round_.over.set()

    async def _read_notices(self, round_: _Round) -> None:
        """Read why ranks without a link have left. If the store has ended, they are just late."""
        if round_.has_store:
            try:
                deadline = max(round_.begun + self._timeout_s, time.monotonic() + _POLL_S)
                for left in await self._rendezvous.notices(round_.operation, deadline):
                    if left.rank:  # the last one stands for a rank of a larger size, which has no place here
                        self._note(self._peers[min(left.rank, len(self._peers)) - 1], left)
            except CoordinationError:
                round_.has_store = False

    # --- which call is meant ---------------------------------------------------------------------------

    def _number(self, peer: _Peer, message: Ask | Left) -> int:
        """Return the number of a rank's call as rank 0 counts."""
        kind, number, step = message.key
        return number if step else number + peer.shifts[kind]

    def _late(self, peer: _Peer, ask: Ask) -> bool:
        """Reply to a rank at once if its round has ended."""
        number = self._number(peer, ask)
        end = self._ends[ask.key.kind].get(number)
        if end is None or end.operation != ask.operation or (end.failure is None and ask.key.step > end.step):
            return False
        if end.failure is not None:
            message = end.failure
        elif end.replies and ask.key.step == end.step:
            message = end.replies[peer.rank - 1]
        else:
            text = f"the reply of rank 0 to {peer.name} was lost, as their connection broke during {ask.operation}"
            message = pickle.dumps(coordination_failure(peer.rank, text))
        self._answer(peer, ask.key, number, message)
        return True

    def _answer(self, peer: _Peer, key: Key, number: int, message: bytes) -> None:
        peer.asks.pop(key, None)
        peer.ahead.pop(key, None)
        if peer.link is not None:
            peer.link.send(pickle.dumps(Reply(key, number, message)))

    def _look(self, round_: _Round, peer: _Peer) -> None:
        """Find out whether a rank has come to a round, and if not, whether it still may."""
        if peer.rank in round_.found:
            return
        arrival = self._failure_it_left_with(round_, peer) or self._come(round_, peer) or self._absence(round_, peer)
        if arrival is not None:
            round_.found[peer.rank] = arrival

    def _failure_it_left_with(self, round_: _Round, peer: _Peer) -> RemoteError | None:
        kind, number, step = round_.key
        for left in peer.left:
            is_same_step = (left.key.kind, left.key.step, left.operation) == (kind, step, round_.operation)
            if is_same_step and self._number(peer, left) == number:
                return left.failure
        return None

    def _come(self, round_: _Round, peer: _Peer) -> Arrival | None:
        kind, number, step = round_.key
        if step:
            ask = peer.asks.get(round_.key)
            return None if ask is None else self._take(round_, peer, ask)
        is_known = any(end.operation == round_.operation for end in self._ends[kind].values())
        for ask in [ask for ask in peer.asks.values() if ask.key.kind == kind and not ask.key.step]:
            shifted = self._number(peer, ask)
            if ask.operation == round_.operation:
                # If an operation was called before, as when one path is saved to again and again, only numbers tell
                # which of the calls is meant.
                if shifted == number or not is_known or ask.key in peer.ahead:
                    peer.shifts[kind] = number - ask.key.number
                    return self._take(round_, peer, ask)
                if shifted > number:
                    text = f"{peer.name} has left {round_.operation} for a later call of it"
                    return coordination_failure(peer.rank, text)
            text = f"rank 0 is at {round_.operation} while rank {peer.rank} is at {ask.operation}: {SAME_CALLS}"
            failure = coordination_failure(peer.rank, text)
            is_past = any(end.operation == ask.operation for end in self._ends[kind].values())
            if not is_past and ask.operation != round_.operation and ask.key not in peer.ahead:
                # It is ahead, unless rank 0 has skipped that call: what rank 0 calls next shows which it is.
                peer.ahead[ask.key] = failure
                self._start(self._hold(peer, ask, failure))
                return failure
            self._answer(peer, ask.key, shifted, pickle.dumps(peer.ahead.get(ask.key, failure)))
        return None

    async def _hold(self, peer: _Peer, ask: Ask, failure: RemoteError) -> None:
        await asyncio.sleep(min(_HOLD_S, self._timeout_s))
        if peer.asks.get(ask.key) is ask and ask.key not in peer.taken.values():
            self._answer(peer, ask.key, ask.key.number, pickle.dumps(failure))

    def _take(self, round_: _Round, peer: _Peer, ask: Ask) -> Arrival:
        peer.taken[round_.key] = ask.key
        if peer.link is not None:
            peer.link.send(pickle.dumps(Come(ask.key)))
        try:
            return Arrived(pickle.loads(ask.message))
        except Exception as exc:  # a class of the value can't be imported here
            return to_remote_error(peer.rank, exc)

    def _absence(self, round_: _Round, peer: _Peer) -> Arrival | None:
        now = time.monotonic()
        if peer.link is None and peer.broken is not None:
            return Dead(peer.name) if now - peer.broken > min(RECONNECT_S, self._timeout_s) else None
        if now - round_.begun < self._timeout_s:
            return None
        if peer.link is not None and now - peer.link.heard >= self._timeout_s:
            return coordination_failure(peer.rank, silence_text(peer.name, round_.operation, self._timeout_s))
        return TimedOut(peer.name, self._timeout_s)


@dataclass(slots=True, eq=False)
class _OpenAsk:
    """A question of this rank that rank 0 has not answered."""

    ask: Ask
    reply: asyncio.Future[Reply]
    has_come: bool = False  # rank 0


class Follower(_Side):
    """Another rank's side: sends its message to rank 0, then waits for the reply."""

    def __init__(self, address: RankAddress, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._own_name = address.own_name()
        self._leader_name = address.rank_name(0)
        self._pending: dict[Key, _OpenAsk] = {}
        self._endpoint: Endpoint | None = None
        self._link: Link | None = None
        self._broken = 0.0  # when the last link was
        self._connecting: asyncio.Task[None] | None = None
        self.leader_lives = True  # as far as is known

    async def ask(self, call: RankCall, operation: str, message: bytes) -> bytes:
        """Send a message to rank 0 and return its reply; raise CoordinationError if it is dead or does not come."""
        begun = time.monotonic()
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        pending = _OpenAsk(Ask(call.key, operation, message), reply)
        self._pending[pending.ask.key] = pending
        try:
            if self._link is None:
                await self._wait_for_link(operation, begun + self._timeout_s, reply)
            else:
                self._link.send(pickle.dumps(pending.ask))
            await self._wait_for_reply(pending, begun)
        except CoordinationError as exc:
            if not reply.done():  # else rank 0 knows
                await self.give_up(call, operation, coordination_failure(self._address.rank, str(exc)))
            raise
        finally:  # the call may be one round on by now
            del self._pending[pending.ask.key]
        answer = reply.result()
        call.number = answer.number
        return answer.message

    async def _wait_for_reply(self, pending: _OpenAsk, begun: float) -> None:
        timeout_s, operation = self._timeout_s, pending.ask.operation
        while not pending.reply.done():
            await asyncio.wait([pending.reply], timeout=self._beat_s)
            silent_s = time.monotonic() - max(begun, self._broken if self._link is None else self._link.heard)
            if pending.reply.done():
                return
            if silent_s >= timeout_s:
                raise CoordinationError(silence_text(self._leader_name, operation, timeout_s))
            if not pending.has_come and time.monotonic() - begun >= timeout_s:
                raise CoordinationError(timeout_text(self._leader_name, operation, timeout_s))

    async def give_up(self, call: RankCall, operation: str, failure: RemoteError) -> None:
        """Inform rank 0 that this rank has raised an error instead of waiting on, or of coming."""
        left = Left(self._address.rank, call.key, operation, failure)
        if self._link is not None:
            self._link.send(pickle.dumps(left))
        else:
            with contextlib.suppress(CoordinationError):  # then rank 0 finds that this rank does not come
                await self._rendezvous.notify(left, time.monotonic() + min(_NOTIFY_S, self._timeout_s))

    def close(self, timeout_s: float) -> bool:  # noqa: D102
        if self._link is not None:
            self._link.close()
        return super().close(timeout_s)

    # --- the link -------------------------------------------------------------------------------------

    async def _wait_for_link(self, operation: str, deadline: float, reply: asyncio.Future[Reply]) -> None:
        """Wait until there is a link, or rank 0 has explained why there is none; raise what hinders it."""
        if self._connecting is None or self._connecting.done():
            self._connecting = self._start(self._connect(operation, deadline))
        either: list[asyncio.Future[Any]] = [self._connecting, reply]
        until_s = deadline + 2 * _NOTIFY_S - time.monotonic()  # it knows best why it is late
        await asyncio.wait(either, timeout=until_s, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done() and self._link is None:
            if either[0].done():
                either[0].result()
            raise CoordinationError(timeout_text(self._leader_name, operation, self._timeout_s))

    async def _connect(self, operation: str, deadline: float) -> None:
        """Connect to rank 0, and ask what is pending; raise CoordinationError if that can't be done in time."""
        pause_s = _SHORTEST_POLL_S
        if not self.leader_lives:  # or it listens elsewhere by now, as it could not say in time where it did
            with contextlib.suppress(CoordinationError):  # the store has ended too
                self._endpoint = await self._rendezvous.endpoint(operation, time.monotonic() + _NOTIFY_S)
        while self._endpoint is None:
            until = max(deadline, time.monotonic() + _NOTIFY_S)  # the store gets some time even if there is none left
            self._endpoint = await self._rendezvous.endpoint(operation, until)
            for left in await self._rendezvous.notices(operation, until):
                pending = self._pending.get(left.key) if left.rank == 0 else None
                if pending is not None and pending.ask.operation == left.operation and not pending.reply.done():
                    pending.reply.set_result(Reply(left.key, left.key.number, pickle.dumps(left.failure)))
            if self._endpoint is None:
                if time.monotonic() >= deadline:
                    raise CoordinationError(timeout_text(self._leader_name, operation, self._timeout_s))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
        if self._endpoint.size != self._address.world_size:
            raise CoordinationError(
                f"{self._own_name} is one of {self._address.world_size} ranks, but {self._endpoint.host} one of "
                f"{self._endpoint.size}: all must be given the same number"
            )
        hello, link = await self._connect_to(self._endpoint, operation, deadline)
        self._leader_name = hello.partition("\n")[2]
        self._link, self.leader_lives = link, True
        self._start(self._read(link))
        for pending in self._pending.values():
            link.send(pickle.dumps(pending.ask))

    async def _connect_to(self, endpoint: Endpoint, operation: str, deadline: float) -> tuple[str, Link]:
        addresses = reachable(endpoint, network_namespace())
        if not addresses:
            raise CoordinationError(
                f"{self._own_name} can't connect to {endpoint.host} for the name of that host resolves to loopback "
                "there: give it its address in DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME on rank 0 to the interface "
                "by which the other ranks reach it"
            )
        tried = [f"{host} port {port}" for host, port in addresses]
        hello = f"{self._address.rank}\n{self._own_name}"
        error: BaseException = TimeoutError("there was no time left")
        while True:
            refusals = 0
            for host, port in addresses:
                try:
                    async with asyncio.timeout(min(HELLO_S, max(_POLL_S, deadline - time.monotonic()))):
                        return await connect(host, port, endpoint.secret, hello)
                except (OSError, LinkBrokenError, TimeoutError) as exc:
                    error = exc
                    refusals += isinstance(exc, ConnectionRefusedError)
            if refusals == len(addresses):
                self.leader_lives = False
                raise CoordinationError(dead_rank_text(endpoint.host, operation)) from error
            # An error of this host's own, such as EMFILE, is no matter of time.
            if time.monotonic() >= deadline or not isinstance(error, LinkBrokenError | TimeoutError | ConnectionError):
                raise CoordinationError(
                    f"{self._own_name} can't connect to {endpoint.host} at {' or '.join(tried)}: "
                    f"{error or type(error).__name__}; set GLOO_SOCKET_IFNAME on rank 0 to the interface by which the "
                    "other ranks reach it"
                ) from error
            await asyncio.sleep(_POLL_S)

    async def _read(self, link: Link) -> None:
        beats = self._start(self._beat(link))
        try:
            while True:
                message = pickle.loads(await link.receive())
                pending = self._pending.get(message.key)
                if pending is None or pending.reply.done():
                    continue
                if isinstance(message, Come):
                    pending.has_come = True
                else:
                    pending.reply.set_result(message)
        except LinkBrokenError:
            self._link, self._broken = None, time.monotonic()
            self._connecting = self._start(self._reconnect())
        finally:
            beats.cancel()
            link.close()

    async def _reconnect(self) -> None:
        try:
            await self._connect("this save or load", time.monotonic() + min(RECONNECT_S, self._timeout_s))
        except CoordinationError as exc:
            for pending in self._pending.values():
                if not pending.reply.done():
                    is_dead = not self.leader_lives
                    text = dead_rank_text(self._leader_name, pending.ask.operation) if is_dead else str(exc)
                    failure = pickle.dumps(coordination_failure(0, text))
                    pending.reply.set_result(Reply(pending.ask.key, pending.ask.key.number, failure))
