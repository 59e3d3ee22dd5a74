"""The messages of a round between rank 0 and the other ranks, and their meaning. Pure: no sockets, no clock.

| message | from | content |
| --- | --- | --- |
| `Ask` | a rank | it has come to a round, with its value or its error |
| `Reply` | rank 0 | its decision, or the failure that all ranks raise |
| `Left` | a rank | it has left a call, with the failure that it raised |

A rank has the timeout to come to a round, and so has rank 0 once another rank has asked. Calls of one kind are in the
same order on all ranks, so the operation of a rank's next call shows whether it is the one that rank 0 has come to:

| the rank's call | then |
| --- | --- |
| the same operation | it takes part in the round |
| one that rank 0 has failed without this rank | it is late, and gets that failure |
| another one | a rank has skipped a call, and both calls fail, with an error that names both |

Each rank counts its calls. A message names the call by this number, so that what is sent again after a broken link is
known again.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aiockpt.coordination.outcome import (
    SAME_CALLS,
    Arrival,
    Arrived,
    Dead,
    RemoteError,
    TimedOut,
    coordination_failure,
    silence_text,
    timeout_text,
    to_remote_error,
)

Kind = Literal["save", "load", "agree", "fallback"]

_REMEMBERED = 64
_KEPT_REPLIES = 8
_WHOLE_CALL = -1


@dataclass(slots=True, eq=False)
class RankCall:
    """One call that all ranks make.

    Attributes:
        number: of this rank's calls, if it is not rank 0; 0 until its first message.
        step: of the next round.
        operation: of the first round. It and what follows are known to rank 0.
        numbers: what the other ranks count it as.
        failure: how it has ended, pickled.
        replied: the step of the last replies.
        replies: from rank 1 on; none if they are old.
    """

    kind: Kind
    number: int = 0
    step: int = 0
    operation: str = ""
    numbers: dict[int, int] = field(default_factory=dict)
    failure: bytes | None = None
    replied: int = -1
    replies: Sequence[bytes] = ()


class Ask(NamedTuple):
    """A rank has come to a round."""

    kind: Kind
    number: int  # of the call
    step: int
    operation: str
    message: bytes  # the pickled value, or its RemoteError


class Reply(NamedTuple):
    """Rank 0 has decided."""

    number: int
    step: int  # or `_WHOLE_CALL`, for a failure
    message: bytes


class Left(NamedTuple):
    """A rank has left a call, and raised this."""

    rank: int
    kind: Kind
    number: int
    operation: str
    failure: RemoteError


# --- the ranks behind rank 0 ------------------------------------------------------------------------


class Asking:
    """What a rank has to say to rank 0, and says again over a new link."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = itertools.count(1)
        self.asks: dict[int, Ask] = {}  # not replied to, by the number of the call
        self._lefts: deque[Left] = deque(maxlen=_REMEMBERED)

    def ask(self, call: RankCall, operation: str, message: bytes) -> Ask:
        """Return the message for the next round of a call."""
        call.number = call.number or next(self._numbers)
        ask = self.asks[call.number] = Ask(call.kind, call.number, call.step, operation, message)
        return ask

    def leave(self, call: RankCall, operation: str, failure: RemoteError) -> Left:
        """Return the message for a call that this rank leaves."""
        call.number = call.number or next(self._numbers)
        self.asks.pop(call.number, None)
        self._lefts.append(left := Left(self._rank, call.kind, call.number, operation, failure))
        return left

    def answers(self, reply: Reply) -> bool:
        """Return whether a reply is to what is asked, which is then no longer so."""
        ask = self.asks.get(reply.number)
        if ask is None or reply.step not in (ask.step, _WHOLE_CALL):
            return False
        del self.asks[reply.number]
        return True

    def unanswered(self) -> list[Ask | Left]:
        """Return the messages that rank 0 may lack, in the order of the calls."""
        return sorted([*self._lefts, *self.asks.values()], key=lambda message: message.number)


# --- rank 0 -----------------------------------------------------------------------------------------


class _Pending(NamedTuple):
    message: Ask | Left
    since: float


@dataclass(slots=True, eq=False)
class _Lane:
    """The calls of one kind of another rank."""

    pending: dict[int, _Pending] = field(default_factory=dict)  # what rank 0 has not come to
    passed: int = 0  # the last call that was compared with those of rank 0
    calls: dict[int, RankCall] = field(default_factory=dict)  # those of rank 0 that they were, by the rank's number
    missed: list[RankCall] = field(default_factory=list)  # that rank 0 has failed, and the rank has not come to


@dataclass(slots=True, eq=False)
class _Peer:
    """Another rank."""

    rank: int
    name: str
    broken: float | None = None  # since when it has no link any more
    lanes: defaultdict[Kind, _Lane] = field(default_factory=lambda: defaultdict(_Lane))


@dataclass(slots=True, eq=False)
class Round:
    """A round that rank 0 has begun."""

    call: RankCall
    step: int
    operation: str
    begun: float
    size: int  # the number of other ranks
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)  # all have arrived

    def arrive(self, rank: int, arrival: Arrival) -> None:
        """Note how a rank has come to the round, or why it does not."""
        self.arrivals[rank] = arrival
        if len(self.arrivals) == self.size:
            self.over.set()


class Rounds:
    """All rounds, as rank 0 sees them.

    Attributes:
        outbox: replies to be sent, each with its rank; to one without a link they are lost.
    """

    def __init__(self, names: Sequence[str], timeout_s: float, patience_s: float) -> None:
        self._own_name = names[0]
        self._peers = [_Peer(rank, names[rank]) for rank in range(1, len(names))]
        self._timeout_s = timeout_s
        self._patience_s = patience_s  # for a rank whose link is broken
        self._open: list[Round] = []
        self._kept: deque[RankCall] = deque()  # have replies
        self.outbox: list[tuple[int, Reply]] = []

    def begin(self, call: RankCall, operation: str, now: float) -> Round:
        """Come to the next round of a call."""
        call.operation = call.operation or operation
        round_ = Round(call, call.step, operation, now, len(self._peers))
        if call.failure is not None:
            self._fail_round(round_, pickle.loads(call.failure))
            return round_
        self._open.append(round_)
        for peer in self._peers:
            self._look(peer, call.kind)
        return round_

    def reply(self, call: RankCall, messages: Sequence[bytes]) -> None:
        """End a round with a message for each rank, from rank 1 on."""
        if call.failure is not None:
            return
        self._open = [round_ for round_ in self._open if round_.call is not call]
        call.replied, call.replies = call.step, messages
        self._kept.append(call)
        if len(self._kept) > _KEPT_REPLIES and (old := self._kept.popleft()) not in self._kept:
            old.replies = ()
        for rank, number in call.numbers.items():
            self.outbox.append((rank, Reply(number, call.step, messages[rank - 1])))

    def fail(self, call: RankCall, operation: str, failure: RemoteError) -> None:
        """End a call on all ranks, also on those that have not come to it yet."""
        if call.failure is not None:
            return
        call.operation, call.failure, call.replies = call.operation or operation, pickle.dumps(failure), ()
        for round_ in self._open:
            if round_.call is call:
                self._fail_round(round_, failure)
        self._open = [round_ for round_ in self._open if round_.call is not call]
        for peer in self._peers:
            lane, number = peer.lanes[call.kind], call.numbers.get(peer.rank)
            if number is not None:
                lane.pending.pop(number, None)
                self.outbox.append((peer.rank, Reply(number, _WHOLE_CALL, call.failure)))
            else:
                lane.missed = [*lane.missed[1 - _REMEMBERED :], call]
                self._look(peer, call.kind)

    def join(self, rank: int, name: str) -> None:
        """Take note of a rank's new link."""
        peer = self._peers[rank - 1]
        peer.name, peer.broken = name, None

    def lose(self, rank: int, now: float) -> None:
        """Take note that a rank's link is broken."""
        self._peers[rank - 1].broken = now

    def ask(self, rank: int, ask: Ask, now: float) -> None:
        """Take a rank's question: reply at once if its round has ended."""
        peer = self._peers[rank - 1]
        lane = peer.lanes[ask.kind]
        call, pending = lane.calls.get(ask.number), lane.pending.get(ask.number)
        if pending is not None and isinstance(pending.message, Left):
            self._refuse(peer, ask, pending.message.failure)
        elif call is not None and call.failure is not None:
            self.outbox.append((rank, Reply(ask.number, _WHOLE_CALL, call.failure)))
        elif call is not None and call.replies and ask.step == call.replied:
            self.outbox.append((rank, Reply(ask.number, ask.step, call.replies[rank - 1])))
        elif (ask.step or ask.number <= lane.passed) if call is None else ask.step <= call.replied:
            text = f"the reply of rank 0 to {peer.name} was lost, as their connection broke during {ask.operation}"
            self._refuse(peer, ask, coordination_failure(rank, text))
        elif not any(round_.call is call and rank in round_.arrivals for round_ in self._open):
            lane.pending[ask.number] = _Pending(ask, now)
            self._look(peer, ask.kind)

    def leave(self, left: Left, now: float) -> None:
        """Take note that a rank has left a call, though rank 0 may have come to it and wait for others."""
        peer = self._peers[left.rank - 1]
        lane = peer.lanes[left.kind]
        call = lane.calls.get(left.number)
        if left.number > lane.passed if call is None else call.failure is None:
            lane.pending[left.number] = _Pending(left, now)
            for round_ in self._open:
                if call is not None and round_.call is call:
                    round_.arrive(left.rank, left.failure)
            self._look(peer, left.kind)

    def tick(self, now: float, heard: Mapping[int, float]) -> None:
        """Find ranks that are late, and those that rank 0 has let wait; ``heard``: the last sign of linked ranks."""
        for round_ in self._open:
            for peer in self._peers:
                absence = None if peer.rank in round_.arrivals else self._absence(round_, peer, now, heard)
                if absence is not None:
                    round_.arrive(peer.rank, absence)
        for peer in self._peers:
            for lane in peer.lanes.values():
                for ask, since in list(lane.pending.values()):
                    if isinstance(ask, Ask) and now - since >= self._timeout_s:
                        name = _at(self._own_name, [round_.operation for round_ in self._open])
                        text = timeout_text(name, ask.operation, self._timeout_s)
                        self._end(peer, lane, ask, coordination_failure(0, text), now)

    # --- which call is meant ---------------------------------------------------------------------------

    def _look(self, peer: _Peer, kind: Kind) -> None:
        """Compare what a rank has sent with the rounds that rank 0 has begun."""
        lane, first = peer.lanes[kind], None
        for round_ in self._open:
            if round_.call.kind == kind and peer.rank not in round_.arrivals:
                if not round_.step:
                    first = round_
                elif (pending := lane.pending.get(round_.call.numbers.get(peer.rank, 0))) is not None:
                    self._take(peer, lane, pending.message, round_)
        while self._catch_up(peer, lane):
            pass
        for number in sorted(number for number in lane.pending if number > lane.passed):
            message, since = lane.pending[number]
            if first is not None and message.operation == first.operation:
                lane.missed.clear()
                self._bind(peer, lane, number, first.call)
                self._take(peer, lane, message, first)
                return
            if isinstance(message, Ask):  # else rank 0 goes on to a later call than the one that the rank has left
                if first is not None:
                    text = f"rank 0 is at {first.operation} while rank {peer.rank} is at {message.operation}"
                    failure = coordination_failure(peer.rank, f"{text}: {SAME_CALLS}")
                    first.arrive(peer.rank, failure)
                    self._end(peer, lane, message, failure, since)
                return

    def _catch_up(self, peer: _Peer, lane: _Lane) -> bool:
        """Let a rank pass the first call that rank 0 has failed without it; return whether there was one."""
        for number in sorted(number for number in lane.pending if number > lane.passed):
            message = lane.pending[number].message
            for place, call in enumerate(lane.missed):
                if call.operation == message.operation and call.failure is not None:
                    del lane.missed[: place + 1]
                    self._bind(peer, lane, number, call)
                    if isinstance(message, Ask):
                        self.outbox.append((peer.rank, Reply(number, _WHOLE_CALL, call.failure)))
                    return True
            if isinstance(message, Ask):
                return False
        return False

    def _bind(self, peer: _Peer, lane: _Lane, number: int, call: RankCall) -> None:
        """Note that a rank's call is this one of rank 0; those before it are over."""
        lane.passed = number
        lane.calls[number] = call
        call.numbers[peer.rank] = number
        for old in [old for old in lane.pending if old < number and old not in lane.calls]:
            del lane.pending[old]
        if call.failure is not None:
            del lane.pending[number]
        if len(lane.calls) > _REMEMBERED:
            oldest = next(iter(lane.calls))
            del lane.calls[oldest]
            lane.pending.pop(oldest, None)

    def _take(self, peer: _Peer, lane: _Lane, message: Ask | Left, round_: Round) -> None:
        if isinstance(message, Left):
            round_.arrive(peer.rank, message.failure)
            return
        del lane.pending[message.number]
        try:
            round_.arrive(peer.rank, Arrived(pickle.loads(message.message)))
        except Exception as exc:  # a class of the value can't be imported here
            round_.arrive(peer.rank, to_remote_error(peer.rank, exc))

    def _end(self, peer: _Peer, lane: _Lane, ask: Ask, failure: RemoteError, now: float) -> None:
        """Fail a rank's call to which rank 0 does not come."""
        if (call := lane.calls.get(ask.number)) is not None:
            self.fail(call, ask.operation, failure)
            return
        self._refuse(peer, ask, failure)
        lane.pending[ask.number] = _Pending(Left(peer.rank, ask.kind, ask.number, ask.operation, failure), now)

    def _refuse(self, peer: _Peer, ask: Ask, failure: RemoteError) -> None:
        self.outbox.append((peer.rank, Reply(ask.number, _WHOLE_CALL, pickle.dumps(failure))))

    # --- ranks that do not come ------------------------------------------------------------------------

    def _fail_round(self, round_: Round, failure: RemoteError) -> None:
        for peer in self._peers:
            round_.arrive(peer.rank, failure)

    def _absence(self, round_: Round, peer: _Peer, now: float, heard: Mapping[int, float]) -> Arrival | None:
        if peer.broken is not None:
            return Dead(peer.name) if now - peer.broken > self._patience_s else None
        if now - round_.begun < self._timeout_s:
            return None
        if now - heard.get(peer.rank, now) >= self._timeout_s:
            return coordination_failure(peer.rank, silence_text(peer.name, round_.operation, self._timeout_s))
        asks = [pending.message for lane in peer.lanes.values() for pending in lane.pending.values()]
        return TimedOut(_at(peer.name, [ask.operation for ask in asks if isinstance(ask, Ask)]), self._timeout_s)


def _at(name: str, operations: Sequence[str]) -> str:
    """Return the name of a rank with what it has called instead, if anything."""
    return f"{name.removesuffix(',')}, which is at {' and '.join(operations)}," if operations else name
