"""Rounds, in which all ranks agree or all fail, over connections of their own, not the caller's process group.

Rank 0 listens, each other rank connects; see `protocol`. Both send heartbeats, so that a side that is silent for the
timeout is taken for dead. If a link breaks, the rank connects again, and repeats what it has asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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
from aiockpt.coordination.protocol import (
    Asking,
    Kind,
    Left,
    RankCall,
    RemoteError,
    Reply,
    Rounds,
    dead_rank_text,
    first_failure,
    silence_text,
    timeout_text,
    to_exception,
    to_remote_error,
)
from aiockpt.coordination.rendezvous import Rendezvous
from aiockpt.core.threads import outlast
from aiockpt.core.wording import some_of
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aiockpt.coordination.ranks import Ranks

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

Decide = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Takes the values of all ranks, in rank order; returns a reply for each rank."""

Undo = Callable[[], Awaitable[None]]

RECONNECT_S = 2.0
"""Limit for a living rank whose link broke to connect again; after it, rank 0 takes it for dead."""
_END_S = 5.0
_FLUSH_S = 60.0
_NOTIFY_S = 2.0
_LONGEST_BEAT_S = 5.0
_SHORTEST_POLL_S = 0.002
_POLL_S = 0.1
_DESCRIPTORS = 4


class Coordinator(ABC):
    """One rank's connection to the other ranks, of a `torch.distributed` process group or of `Ranks`. Rank 0 leads.

    The group only names the ranks and provides the store in which they meet: nothing is ever sent over it,
    and no group is registered with `torch.distributed`, so the program's own collectives and ``new_group`` calls
    may run at the same time, in any order. Every other rank has a link of its own to rank 0, made in the first
    round.
    """

    leader_lives = True  # whether rank 0 can still be reached, as far as this rank has noticed

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self.timeout_s = timeout_s
        self.rank = rendezvous.rank  # in the group, from 0
        self.world_size = rendezvous.world_size
        self.leads = self.rank == 0
        self._beat_s = min(timeout_s / 5, _LONGEST_BEAT_S)
        self._links: dict[int, Link] = {}  # by rank
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: defaultdict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._abandoned = asyncio.Event()
        self._is_abandoned = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def addresses(self, operation: str) -> list[str]:
        """Return the addresses at which other ranks reach this host; see `addresses_of_this_host`.

        Raises OSError, or CoordinationError if they are not found out in time.
        """
        return await self._rendezvous.addresses(operation, time.monotonic() + self.timeout_s)

    def call(self, kind: Kind) -> RankCall:
        """Return a call that all ranks make. To be called for each, first of all, also for one that fails then."""
        return RankCall(kind)

    async def round(self, call: RankCall, operation: str, value: Any, decide: Decide, undo: Undo | None = None) -> Any:
        """Send a value, or this rank's error, to rank 0 and return rank 0's reply.

        Every rank calls it once for each round of a call, in the same order, with the same ``operation`` (such as
        ``the save of runs/a``, for messages) and with a value that can be pickled, or an exception. ``decide`` and
        ``undo`` run on rank 0 only, in the event loop.

        If all ranks sent values, rank 0 runs ``decide`` with them. If a rank sent an error, is dead, or does not
        come within the timeout, or if ``decide`` fails, rank 0 runs ``undo``, and then every rank's call raises
        the same error, which names the rank. Once ``decide`` has succeeded, the round has succeeded: if a rank dies
        before its reply reaches it, only the next round fails.

        The first rounds of calls of one kind run one after the other. The later ones wait for no other call, so that
        the next save is planned while this one is written.

        A cancellation is delivered when the round is over: a rank that left alone would leave the others waiting.
        """
        self._loop = asyncio.get_running_loop()
        if self._is_abandoned:  # before there was a loop to tell
            self._abandoned.set()

        async def in_turn() -> Any:
            async with contextlib.nullcontext() if call.step else self._turns[call.kind]:
                try:
                    return await self._round(call, operation, value, decide, undo)
                finally:
                    call.step += 1

        return await outlast(in_turn())

    @abstractmethod
    async def _round(self, call: RankCall, operation: str, value: Any, decide: Decide, undo: Undo | None) -> Any:
        """Take part in a round; see `round`."""

    @abstractmethod
    async def give_up(self, call: RankCall, operation: str, error: BaseException) -> None:
        """Fail a call on all ranks that this rank hangs in, outside of a round."""

    def tell(self, call: RankCall, operation: str, error: BaseException) -> bool:
        """Fail a call on all ranks where this one can't start the event loop of its rounds.

        Blocks for two seconds at most. Returns False if the store takes no message: the others wait for the timeout.
        """
        return self._rendezvous.tell(self._leave(call, operation, to_remote_error(self.rank, error)), _NOTIFY_S)

    def abandon(self) -> None:
        """Make current and later rounds of this rank fail instead of wait. From any thread; does not block."""
        self._is_abandoned = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits in it
                self._loop.call_soon_threadsafe(self._abandoned.set)

    def close(self) -> None:
        """Close connections. Blocks for a few seconds at most; idempotent. In the event loop's thread.

        A thread that still waits for the store is left behind; it does not delay the end of the process.
        """
        for link in self._links.values():
            link.close()
        for task in self._tasks:
            task.cancel()
        if not self._rendezvous.close(_END_S):
            logger.warning("a thread that waits for the store of the process group is left behind")

    async def _unless_abandoned(self, operation: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a wait for other ranks; end it if the coordinator is abandoned."""
        waiting, abandoned = asyncio.ensure_future(coroutine), asyncio.ensure_future(self._abandoned.wait())
        either: list[asyncio.Future[Any]] = [waiting, abandoned]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            abandoned.cancel()
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        raise CoordinationError(
            f"rank {self.rank} has closed its checkpointer, so the ranks can't agree on {operation}; close it when "
            "every rank has made its last save and load"
        )

    # --- links ------------------------------------------------------------------------------------------

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                logger.error("a task that serves other ranks has failed", exc_info=task.exception())

        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(end)
        return task

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

    @abstractmethod
    def _receive(self, rank: int, message: Any) -> None: ...

    @abstractmethod
    def _lose(self, rank: int) -> None: ...

    @abstractmethod
    def _leave(self, call: RankCall, operation: str, failure: RemoteError) -> Left: ...

    async def _notify(self, left: Left) -> None:
        """Write to the store why this rank leaves a call. Without the store, the others find that it does not come."""
        with contextlib.suppress(CoordinationError):
            await self._rendezvous.notify(left, time.monotonic() + min(_NOTIFY_S, self.timeout_s))


def coordinator_of(group: ProcessGroup | Ranks, *, timeout_s: float) -> Coordinator:
    """Return this rank's coordinator; every process of a group must make those over it in the same order.

    Raises CoordinationError in a process that is not in the group.
    """
    rendezvous = Rendezvous(group)
    return (Leader if rendezvous.rank == 0 else Follower)(rendezvous, timeout_s)


# --- rank 0 -----------------------------------------------------------------------------------------


class Leader(Coordinator):
    """Rank 0's side: collects the messages of all other ranks, then replies to each."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        super().__init__(rendezvous, timeout_s)
        names = [rendezvous.own_name(), *map(rendezvous.rank_name, range(1, self.world_size))]
        self._rounds = Rounds(names, timeout_s, min(RECONNECT_S, timeout_s))
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._has_store = True

    async def _round(self, call: RankCall, operation: str, value: Any, decide: Decide, undo: Undo | None) -> Any:
        replies, messages, cause = list[Any](), list[bytes](), None
        try:
            others = await self._unless_abandoned(operation, self._collect(call, operation))
            values = [_sent(0, value), *others]
            failure = first_failure(values)
            if failure is None:
                replies = list(await decide(values))
                if len(replies) != self.world_size:
                    raise ValueError(f"{len(replies)} replies were made for {self.world_size} ranks")
                # In tuples, so that a reply is never taken for a RemoteError; one that many ranks get, once.
                pickled = {key: pickle.dumps((reply,)) for key, reply in {id(made): made for made in replies}.items()}
                messages = [pickled[id(reply)] for reply in replies[1:]]
            elif isinstance(value, BaseException) and failure == values[0]:
                cause = value
        except BaseException as exc:  # whatever it is, the other ranks must be notified
            failure, cause = to_remote_error(0, exc), exc
        if failure is not None and undo is not None:
            try:
                await undo()
            except BaseException as exc:
                text = f"{failure.message} (and undoing it on rank 0 failed: {type(exc).__name__}: {exc})"
                failure, cause = failure._replace(message=text), cause or exc
        await self._end(call, operation, failure or messages)
        if failure is not None:
            raise _with_note(to_exception(failure, operation, cause), value)
        return replies[0]

    async def _collect(self, call: RankCall, operation: str) -> list[Any]:
        """Wait until every other rank has come, is dead, or is late; return its value or failure, from rank 1 on.

        Raises CoordinationError if this rank can't be reached.
        """
        self._rounds.begin(call, operation, time.monotonic())
        self._deliver()
        self._has_store = True
        if not call.over.is_set():
            await self._open(operation, call.begun + self.timeout_s)
        await call.over.wait()
        return [call.arrivals[rank] for rank in range(1, self.world_size)]

    async def _end(self, call: RankCall, operation: str, outcome: Sequence[bytes] | RemoteError) -> None:
        """Send each rank its reply, or fail the call: also on ranks that are late, and if this one hangs in it."""
        if isinstance(outcome, RemoteError):
            left = self._leave(call, operation, outcome)
            if self._server is None:  # no rank can connect
                await self._notify(left)
        else:
            self._rounds.reply(call, outcome)
        self._deliver()
        flushes = [self._start(link.flush()) for link in self._links.values()]
        if flushes:
            await asyncio.wait(flushes, timeout=min(_FLUSH_S, self.timeout_s))

    async def give_up(self, call: RankCall, operation: str, error: BaseException) -> None:
        await self._end(call, operation, to_remote_error(0, error))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._rounds.close()
        self._deliver()
        super().close()

    def _leave(self, call: RankCall, operation: str, failure: RemoteError) -> Left:
        self._rounds.fail(call, operation, failure, time.monotonic())
        return Left(0, call.kind, 0, operation, failure)

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
        others = self.world_size - 1
        while True:
            are_linked = len(self._links) == others
            await asyncio.sleep(self._beat_s if are_linked else _POLL_S)
            self._tick()
            if are_linked or not self._has_store or not self._rounds.open:
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
            secret, own_name, server = secrets.token_bytes(32), self._rendezvous.own_name(), None
            try:
                server = await listen(await self.addresses(operation), secret, f"0\n{own_name}", self._join)
                # For the links, which would hang without, for the store, and for what the save itself opens.
                check_descriptors(self.world_size + _DESCRIPTORS)
                addresses = [socket_.getsockname()[:2] for socket_ in server.sockets]
                endpoint = Endpoint(addresses, secret, network_namespace(), own_name, self.world_size)
                await self._rendezvous.publish(endpoint, operation, deadline)
                self._server = server
            except (OSError, CoordinationError) as exc:
                raise CoordinationError(f"rank 0 can't be reached for {operation}: {exc}") from exc
            finally:
                if server is not None and self._server is None:
                    server.close()
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
        asyncio.get_running_loop().call_later(2 * _POLL_S + min(RECONNECT_S, self.timeout_s), self._tick)


def _sent(rank: int, value: Any) -> Any:
    return to_remote_error(rank, value) if isinstance(value, BaseException) else value


def _with_note(error: BaseException, value: Any) -> BaseException:
    """Add this rank's own error as a note if all ranks raise another one."""
    if isinstance(value, BaseException) and error.__cause__ is not value:
        error.add_note(f"this rank had failed as well: {type(value).__name__}: {value}")
    return error


# --- the other ranks --------------------------------------------------------------------------------


class Follower(Coordinator):
    """Another rank's side: sends its message to rank 0, then waits for the reply."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        super().__init__(rendezvous, timeout_s)
        self._own_name = rendezvous.own_name()
        self._leader_name = rendezvous.rank_name(0)
        self._asking = Asking(self.rank)
        self._replies: dict[int, asyncio.Future[bytes]] = {}  # by the number of the call
        self._endpoint: Endpoint | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def _round(self, call: RankCall, operation: str, value: Any, decide: Decide, undo: Undo | None) -> Any:
        try:
            message = pickle.dumps(_sent(self.rank, value))
        except Exception as exc:  # it can't be pickled
            value = exc
            message = pickle.dumps(_sent(self.rank, value))
        try:
            reply = pickle.loads(await self._unless_abandoned(operation, self._ask(call, operation, message)))
        except CoordinationError as exc:  # rank 0 can't miss a rank that it has not heard of yet
            await self.give_up(call, operation, exc)
            raise
        if not isinstance(reply, RemoteError):
            return reply[0]
        # A CoordinationError about this rank is what rank 0 found, not the error that this rank has sent.
        is_own = isinstance(value, BaseException) and reply.rank == self.rank and reply.kind != "CoordinationError"
        raise _with_note(to_exception(reply, operation, value if is_own else None), value)

    async def _ask(self, call: RankCall, operation: str, message: bytes) -> bytes:
        """Send a message to rank 0 and return its reply; raise CoordinationError if it is dead: then `give_up`."""
        begun = time.monotonic()
        ask = self._asking.ask(call, operation, message)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[call.number] = reply
        try:
            if 0 in self._links:
                self._links[0].send(pickle.dumps(ask))
            elif self._connecting is None or self._connecting.done():
                self._connecting = self._start(self._connect(operation, begun + self.timeout_s))
            while not reply.done():
                await asyncio.wait([reply], timeout=self._beat_s)
                heard = self._links[0].heard if 0 in self._links else time.monotonic()
                if not reply.done() and time.monotonic() - max(begun, heard) >= self.timeout_s:
                    raise CoordinationError(silence_text(self._leader_name, operation, self.timeout_s))
            return reply.result()
        finally:
            del self._replies[call.number]

    async def give_up(self, call: RankCall, operation: str, error: BaseException) -> None:
        left = self._leave(call, operation, to_remote_error(self.rank, error))
        if 0 in self._links:
            self._links[0].send(pickle.dumps(left))
        else:
            await self._notify(left)

    def _leave(self, call: RankCall, operation: str, failure: RemoteError) -> Left:
        return self._asking.leave(call, operation, failure)

    def _receive(self, rank: int, message: Any) -> None:
        reply = self._replies.get(message.number)
        if self._asking.answers(message) and reply is not None and not reply.done():
            reply.set_result(message.message)

    def _lose(self, rank: int) -> None:
        until = time.monotonic() + min(RECONNECT_S, self.timeout_s)
        self._connecting = self._start(self._connect("this save or load", until))

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
                raise CoordinationError(timeout_text(self._leader_name, operation, self.timeout_s))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
        assert self._endpoint is not None
        self._leader_name = self._endpoint.host
        if self._endpoint.size != self.world_size:
            raise CoordinationError(
                f"{self._own_name} is one of {self.world_size} ranks, but {self._leader_name} one of "
                f"{self._endpoint.size}: all must be given the same number"
            )
        return self._endpoint

    async def _link_to(self, endpoint: Endpoint, deadline: float) -> Link:
        addresses = reachable(endpoint, network_namespace())
        error: BaseException = LinkBrokenError(
            "the name of that host resolves to loopback there, so give it its address in DNS or /etc/hosts"
        )
        while addresses:
            refusals = 0
            for host, port in addresses:
                try:
                    async with asyncio.timeout(min(HELLO_S, max(_POLL_S, deadline - time.monotonic()))):
                        hello = f"{self.rank}\n{self._own_name}"
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
        tried = some_of([f"{host} port {port}" for host, port in addresses], 8)
        raise CoordinationError(
            f"{self._own_name} can't connect to {endpoint.host} at {tried}: {error or type(error).__name__}"
            "; set GLOO_SOCKET_IFNAME on rank 0 to the interface by which the other ranks reach it"
        ) from error
