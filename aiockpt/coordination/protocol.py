"""The protocol of one lane between rank 0 and each other rank. Blocking, for the lane's thread.

In each round, rank 0 collects a message from every rank and then replies to each, over one link per rank. While a rank
has no link, it and rank 0 use keys in the store. A link has a generation, a number that grows with each link that
rank k asks for. For generation g of rank k::

    connect/k/g  rank k asks for a link; its name, host and process
    accept/k/g   rank 0 accepts, with its own name, host and process; or NO_LINK: the round ended without rank k
    missed/k/g   rank 0 stopped waiting for rank k and closed the link
    reply/k/g    what rank 0 would have replied in the round that rank k missed, and the operation of that round
    left/k/g     rank k stopped waiting for rank 0 and closed the link; its operation, and the failure it raised

A rank that comes late reads the reply and fails, or succeeds, as the others did. If the reply is about another
operation, the rank has skipped a call, and joins the current round. So the ranks need not agree on round numbers.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aiockpt.coordination.outcome import (
    Arrival,
    Arrived,
    Dead,
    RemoteError,
    TimedOut,
    coordination_failure,
    dead_rank_text,
    store_failure_text,
    timeout_text,
    to_remote_error,
)
from aiockpt.coordination.pair_channel import TRANSFER_S, Link, LinkBrokenError, LinkTimeoutError, Sending
from aiockpt.coordination.rendezvous import RankAddress, Rendezvous, poll_intervals
from aiockpt.errors import CoordinationError

CONNECT_S = 30.0
"""Limit for connecting two ranks that are both there."""
REASON_S = 2.0
"""Limit for a living rank to set the key that says why it closed a link. Without the key it counts as dead."""
DECIDE_S = 1800.0
"""Limit for rank 0 to decide, once all ranks have come. It may be publishing a checkpoint on slow storage. If its
process ends, this is noticed at once, so the limit is for a rank 0 that has frozen or can't be reached."""
NO_LINK = b"-"


@dataclass(slots=True)
class _Peer:
    """Another rank, as rank 0 sees it."""

    rank: int
    name: str
    generation: int = 0
    link: Link | None = field(default=None, repr=False)
    missed: bool = False  # this round, so that it needs a reply in the store


class Leader:
    """Rank 0's side: collects the messages of all other ranks, then replies to each."""

    def __init__(
        self, address: RankAddress, rendezvous: Rendezvous, *, timeout_s: float, dead_ranks: dict[int, str]
    ) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s  # of a round, for all other ranks together
        self._dead_ranks = dead_ranks  # their names; shared by all lanes, and added to
        self._own_name = address.own_name().encode()
        self._peers = [_Peer(rank, address.rank_name(rank)) for rank in range(1, address.world_size)]

    def collect(self, operation: str) -> list[Arrival]:
        """Wait until every other rank has come, is dead, or is late; return one arrival for each, from rank 1 on."""
        deadline = time.monotonic() + self._timeout_s
        found: dict[int, Arrival] = {rank: Dead(name) for rank, name in self._dead_ranks.items()}
        while pending := [peer for peer in self._peers if peer.rank not in found]:
            found |= self._connect(pending, operation, deadline)
            for peer in pending:
                if peer.link is not None and (arrival := self._receive(peer, operation, deadline)) is not None:
                    found[peer.rank] = arrival
        return [found[peer.rank] for peer in self._peers]

    def reply(self, operation: str, replies: Sequence[bytes]) -> None:
        """Send its reply to every rank that lives, from rank 1 on; store the reply for those that are late."""
        # All sends begin before one is waited for, so that a slow rank delays no other.
        sent: list[tuple[_Peer, bytes, Sending]] = []
        for peer, reply in zip(self._peers, replies, strict=True):
            if peer.missed:
                self._store_reply(peer, operation, reply)
            elif peer.link is not None:
                with contextlib.suppress(LinkBrokenError):  # the next round finds out why
                    sent.append((peer, reply, peer.link.start_send(reply)))
        deadline = time.monotonic() + TRANSFER_S
        for peer, reply, sending in sent:
            try:
                sending.wait(deadline - time.monotonic())
            except LinkTimeoutError:
                self._give_up_on(peer)
                self._store_reply(peer, operation, reply)
            except LinkBrokenError:
                pass  # as above

    def close(self) -> None:
        """Close all links."""
        for peer in self._peers:
            peer.link = None  # gloo closes the connection with the last reference

    def _connect(self, peers: Iterable[_Peer], operation: str, deadline: float) -> dict[int, Arrival]:
        """Be ready to receive from ranks with a link; accept the others as they come, until the deadline."""
        found: dict[int, Arrival] = {}
        for peer in peers:
            if peer.link is not None:
                with contextlib.suppress(LinkBrokenError):  # handled when its message is received
                    peer.link.start_receive()
        waiting = [peer for peer in peers if peer.link is None]
        try:
            for interval_s in poll_intervals():
                for peer in waiting:
                    if (failure := self._accept(peer, operation)) is not None:
                        found[peer.rank] = failure
                waiting = [peer for peer in waiting if peer.link is None and peer.rank not in found]
                if not waiting:
                    break
                if time.monotonic() >= deadline:
                    return found | {peer.rank: self._give_up_on(peer) for peer in waiting}
                time.sleep(interval_s)
        except RuntimeError as exc:  # the store's
            failure = coordination_failure(0, store_failure_text(operation, exc))
            found |= {peer.rank: failure for peer in waiting if peer.link is None}
        return found

    def _accept(self, peer: _Peer, operation: str) -> RemoteError | None:
        """Connect to a rank if it has asked for it; return its failure if it has already left this round."""
        rendezvous = self._rendezvous
        if not rendezvous.has("connect", peer.rank, peer.generation + 1):
            return None
        peer.generation += 1
        if rendezvous.has("left", peer.rank, peer.generation):
            return self._failure_it_left_with(peer, operation)
        peer.name = rendezvous.get("connect", peer.rank, peer.generation).decode()
        rendezvous.put("accept", peer.rank, peer.generation, self._own_name)
        limit_s = min(self._timeout_s, CONNECT_S)
        with contextlib.suppress(LinkBrokenError):  # if it lives it asks again
            peer.link = rendezvous.link(peer.rank, peer.generation, side=0, timeout_s=limit_s)
            peer.link.start_receive()
        return None

    def _receive(self, peer: _Peer, operation: str, deadline: float) -> Arrival | None:
        """Receive a rank's message; return None if it had left an earlier round, and needs a new link."""
        assert peer.link is not None
        try:
            message = peer.link.receive(deadline - time.monotonic())
        except LinkTimeoutError:
            return self._give_up_on(peer)
        except LinkBrokenError:
            peer.link = None
            if self._rendezvous.is_explained("left", peer.rank, peer.generation, REASON_S):
                return self._failure_it_left_with(peer, operation)
            self._dead_ranks[peer.rank] = peer.name
            return Dead(peer.name)
        try:
            return Arrived(*pickle.loads(message))
        except Exception as exc:  # a class of the value can't be imported here
            return to_remote_error(peer.rank, exc)

    def _failure_it_left_with(self, peer: _Peer, operation: str) -> RemoteError | None:
        """Return the failure that a rank raised when it left, or None if it left an earlier round, not this one."""
        left_operation, failure = pickle.loads(self._rendezvous.get("left", peer.rank, peer.generation))
        return failure if left_operation == operation else None

    def _give_up_on(self, peer: _Peer) -> TimedOut:
        """Go on without a rank in this round, and set the key by which it finds out."""
        with contextlib.suppress(RuntimeError):  # without the store it finds no key, and takes rank 0 for dead
            if peer.link is None:
                peer.generation += 1
                self._rendezvous.put("accept", peer.rank, peer.generation, NO_LINK)
            else:
                self._rendezvous.put("missed", peer.rank, peer.generation, b"")
        peer.link, peer.missed = None, True
        return TimedOut(peer.name, self._timeout_s)

    def _store_reply(self, peer: _Peer, operation: str, reply: bytes) -> None:
        peer.missed = False
        with contextlib.suppress(RuntimeError):  # as above
            self._rendezvous.put("reply", peer.rank, peer.generation, pickle.dumps((operation, reply)))


class Follower:
    """Another rank's side: sends its message to rank 0, then waits for the reply.

    It waits as long for rank 0 to come as rank 0 waits for it. It waits longer for the reply, by the time that rank 0
    may wait for the other ranks and then take to decide.
    """

    def __init__(
        self, address: RankAddress, rendezvous: Rendezvous, *, timeout_s: float, dead_ranks: dict[int, str]
    ) -> None:
        self._rank = address.rank
        self._own_name = address.own_name().encode()
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._come_s = timeout_s + min(timeout_s, CONNECT_S)  # rank 0 may be connecting to others first
        self._reply_s = timeout_s + TRANSFER_S + DECIDE_S
        self._dead_ranks = dead_ranks  # holds the name of rank 0 once it is known to be dead; added to
        self._leader_name = address.rank_name(0)
        self._generation = 0
        self._link: Link | None = None

    def ask(self, operation: str, message: bytes) -> bytes:
        """Send a message to rank 0 and return its reply; raise CoordinationError if it is dead or does not come."""
        while True:
            try:
                reply = self._try(operation, message)
            except LinkTimeoutError as exc:
                raise self._leave(operation) from exc
            except RuntimeError as exc:  # the store's
                self._link = None
                raise CoordinationError(
                    f"{store_failure_text(operation, exc)}; it is served by rank 0 or by the launcher of the job, "
                    "which may have ended"
                ) from exc
            if reply is not None:
                return reply

    def close(self) -> None:
        """Close the link."""
        self._link = None

    def _try(self, operation: str, message: bytes) -> bytes | None:
        """Ask once; return None if rank 0 has meanwhile ended another round, which this rank has skipped."""
        link = self._link or self._connect()
        if link is None:
            return self._stored_reply(operation)
        self._link = link
        try:
            link.start_receive()
            link.start_send(message).wait(self._come_s)
            return link.receive(self._reply_s)
        except LinkBrokenError as exc:
            self._link = None
            if self._rendezvous.is_explained("missed", self._rank, self._generation, REASON_S):
                return self._stored_reply(operation)
            self._dead_ranks[0] = self._leader_name
            raise CoordinationError(dead_rank_text(self._leader_name, operation)) from exc

    def _connect(self) -> Link | None:
        """Ask rank 0 for a link; return None if it has ended a round without this rank."""
        self._generation += 1
        rendezvous, rank, generation = self._rendezvous, self._rank, self._generation
        rendezvous.put("connect", rank, generation, self._own_name)
        if not rendezvous.wait_for("accept", rank, generation, self._come_s):
            raise LinkTimeoutError("no link was opened")
        answer = rendezvous.get("accept", rank, generation)
        if answer == NO_LINK:
            return None
        self._leader_name = answer.decode()
        try:
            return rendezvous.link(rank, generation, side=1, timeout_s=min(self._timeout_s, CONNECT_S))
        except LinkBrokenError as exc:
            raise LinkTimeoutError("the link could not be made") from exc

    def _stored_reply(self, operation: str) -> bytes | None:
        """Wait for the reply in the store; return None if it is about another operation."""
        if not self._rendezvous.wait_for("reply", self._rank, self._generation, self._reply_s):
            raise LinkTimeoutError("rank 0 stored no reply")
        stored: tuple[str, bytes] = pickle.loads(self._rendezvous.get("reply", self._rank, self._generation))
        return stored[1] if stored[0] == operation else None

    def _leave(self, operation: str) -> CoordinationError:
        """Leave the round, and set the key by which rank 0 finds out; return the error to raise."""
        self._link = None
        failure = coordination_failure(0, timeout_text(self._leader_name, operation, self._timeout_s))
        with contextlib.suppress(RuntimeError):  # without the store rank 0 takes this rank for dead
            self._rendezvous.put("left", self._rank, self._generation, pickle.dumps((operation, failure)))
        return CoordinationError(failure.message)
