"""Rank 0's side of a lane: hear every rank, then answer each. Blocking, for the lane's thread."""

from __future__ import annotations

import contextlib
import pickle
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiockpt.coordination.base import RemoteError, remote_error_of
from aiockpt.coordination.outcome import Arrival, Arrived, Dead, TimedOut, coordination_failure
from aiockpt.coordination.pair_channel import TRANSFER_S, Link, LinkBrokenError, LinkTimeoutError
from aiockpt.coordination.rendezvous import appears, pauses, put
from aiockpt.coordination.store_keys import NO_LINK, Word, key, left_in, sealed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiockpt.coordination.pair_channel import Sending
    from aiockpt.coordination.rendezvous import RankAddress, Rendezvous

CONNECT_S = 30.0
"""How long two ranks that are both there may take to make a link."""
WORD_S = 2.0
"""How long after a link broke a living rank may take to say why, in the store."""


@dataclass(slots=True)
class _Peer:
    """Another rank, as rank 0 sees it."""

    rank: int
    who: str
    generation: int = 0
    link: Link | None = field(default=None, repr=False)
    missed: bool = False


class Leader:
    """Hears the others and answers them.

    Args:
        place: this rank's place in the group.
        meeting: the lane's way to the others.
        timeout_s: how long a round waits for the other ranks, all together.
        gone: the ranks that are known to be gone, and how to name them; shared by all lanes, and added to.
    """

    def __init__(self, place: RankAddress, meeting: Rendezvous, *, timeout_s: float, gone: dict[int, str]) -> None:
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._gone = gone
        self._introduced = place.introduced().encode()
        self._peers = [_Peer(rank, place.named(rank)) for rank in range(1, place.world_size)]

    def collect(self, what: str) -> list[Arrival]:
        """Wait until every other rank has come, is gone, or is late.

        Args:
            what: what rank 0 is at.

        Returns:
            One for each rank from 1 on.
        """
        deadline = time.monotonic() + self._timeout_s
        found: dict[int, Arrival] = {rank: Dead(who) for rank, who in self._gone.items()}
        while pending := [peer for peer in self._peers if peer.rank not in found]:
            found |= self._connect(pending, what, deadline)
            for peer in pending:
                if peer.link is not None and (arrival := self._hear(peer, what, deadline)) is not None:
                    found[peer.rank] = arrival
        return [found[peer.rank] for peer in self._peers]

    def answer(self, what: str, replies: Sequence[bytes]) -> None:
        """Tell every rank that lives; leave word for those that are late.

        Args:
            what: what rank 0 is at.
            replies: a message for each rank from 1 on.
        """
        posted: list[tuple[_Peer, bytes, Sending]] = []
        for peer, reply in zip(self._peers, replies, strict=True):
            if peer.missed:
                self._leave_word(peer, what, reply)
            elif peer.link is not None:
                with contextlib.suppress(LinkBrokenError):  # the next round finds out what has become of it
                    posted.append((peer, reply, peer.link.post(reply)))
        deadline = time.monotonic() + TRANSFER_S
        for peer, reply, sending in posted:
            try:
                sending.wait(deadline - time.monotonic())
            except LinkTimeoutError:
                self._miss(peer)
                self._leave_word(peer, what, reply)
            except LinkBrokenError:
                pass  # as above

    def close(self) -> None:
        """Drop all links."""
        for peer in self._peers:
            peer.link = None

    def _connect(self, peers: Iterable[_Peer], what: str, deadline: float) -> dict[int, Arrival]:
        """Be ready for those with a link, and make one with each of the others that comes in time."""
        found: dict[int, Arrival] = {}
        for peer in peers:
            if peer.link is not None:
                with contextlib.suppress(LinkBrokenError):  # which is dealt with when its turn comes
                    peer.link.expect()
        waiting = [peer for peer in peers if peer.link is None]
        try:
            for pause_s in pauses():
                for peer in waiting:
                    if (trouble := self._welcome(peer, what)) is not None:
                        found[peer.rank] = trouble
                waiting = [peer for peer in waiting if peer.link is None and peer.rank not in found]
                if not waiting:
                    break
                if time.monotonic() >= deadline:
                    return found | {peer.rank: self._miss(peer) for peer in waiting}
                time.sleep(pause_s)
        except RuntimeError as exc:  # the store's
            trouble = coordination_failure(0, f"the store of the process group failed during {what}: {exc}")
            found |= {peer.rank: trouble for peer in waiting if peer.link is None}
        return found

    def _welcome(self, peer: _Peer, what: str) -> RemoteError | None:
        """Make the link that a rank has asked for, if it has; or find that it has given up on this very round."""
        store = self._meeting.store
        if not store.check([key("knock", peer.rank, peer.generation + 1)]):
            return None
        peer.generation += 1
        if store.check([key("left", peer.rank, peer.generation)]):
            return self._same_round(peer, what)
        peer.who = store.get(key("knock", peer.rank, peer.generation)).decode()
        put(store, key("open", peer.rank, peer.generation), self._introduced)
        limit_s = min(self._timeout_s, CONNECT_S)
        with contextlib.suppress(LinkBrokenError):  # if it lives it asks again
            peer.link = self._meeting.link(peer.rank, peer.generation, side=0, timeout_s=limit_s)
            peer.link.expect()
        return None

    def _same_round(self, peer: _Peer, what: str) -> RemoteError | None:
        """Give what a rank that gave up told its caller, when that was about this very round and not an earlier one."""
        left = left_in(self._meeting.store.get(key("left", peer.rank, peer.generation)))
        return left.trouble if left.what == what else None

    def _hear(self, peer: _Peer, what: str, deadline: float) -> Arrival | None:
        """Take a rank's message; None when it gave up on an earlier round, and needs a new link."""
        assert peer.link is not None
        try:
            message = peer.link.take(deadline - time.monotonic())
        except LinkTimeoutError:
            return self._miss(peer)
        except LinkBrokenError:
            peer.link = None
            if self._has_left(peer):
                return self._same_round(peer, what)
            self._gone[peer.rank] = peer.who
            return Dead(peer.who)
        try:
            return Arrived(*pickle.loads(message))
        except Exception as exc:  # what it pickled can't be found here
            return remote_error_of(peer.rank, exc)

    def _has_left(self, peer: _Peer) -> bool:
        try:
            return appears(self._meeting.store, key("left", peer.rank, peer.generation), WORD_S)
        except RuntimeError:
            return False  # with neither link nor store there is no way to it

    def _miss(self, peer: _Peer) -> TimedOut:
        """Give up on a rank for this round, in a way that it can find out."""
        store = self._meeting.store
        with contextlib.suppress(RuntimeError):  # without the store it finds no word, and takes rank 0 for gone
            if peer.link is None:
                peer.generation += 1
                put(store, key("open", peer.rank, peer.generation), NO_LINK)
            else:
                put(store, key("missed", peer.rank, peer.generation), b"")
        peer.link, peer.missed = None, True
        return TimedOut(peer.who, self._timeout_s)

    def _leave_word(self, peer: _Peer, what: str, reply: bytes) -> None:
        peer.missed = False
        with contextlib.suppress(RuntimeError):  # as above
            put(self._meeting.store, key("word", peer.rank, peer.generation), sealed(Word(what, reply)))
