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
| another one | a rank has skipped a call: rank 0's fails, naming both, and the rank's waits for the next one |

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
from typing import Any, Literal, NamedTuple

from aiockpt import errors
from aiockpt.core.wording import some_of
from aiockpt.errors import AiockptError, CoordinationError, LoadError, SaveError

# --- failures, as they are sent -----------------------------------------------------------------------


SAME_CALLS = (
    "every rank must call save and load the same number of times and in the same order; "
    "to save or load on one rank alone, give its checkpointer process_group=None"
)


class RemoteError(NamedTuple):
    """An error on its way to the other ranks."""

    rank: int  # where it happened
    kind: str  # the name of its class in aiockpt.errors; empty for any other class
    message: str


def first_failure(arrivals: Sequence[Any]) -> RemoteError | None:
    """Return the failure that all ranks raise, of a rank that does not come before one that has failed."""
    failures = [arrival for arrival in arrivals if isinstance(arrival, RemoteError)]
    return min(failures, key=lambda failure: failure.kind != "CoordinationError", default=None)


def coordination_failure(rank: int, text: str) -> RemoteError:
    """Return a failure that becomes a `CoordinationError` with exactly this text."""
    return RemoteError(rank, "CoordinationError", text)


def dead_rank_text(rank_name: str, operation: str) -> str:
    """Return the message for a rank whose process has ended."""
    return (
        f"{rank_name} is gone, so the ranks can't agree on {operation}: its process has ended, or its checkpointer was "
        f"closed; restart the job, or make a new checkpointer over a process group of the ranks that are left"
    )


def silence_text(rank_name: str, operation: str, after_s: float) -> str:
    """Return the message for a rank that sends no heartbeats."""
    return (
        f"{rank_name} was silent for {after_s:g} s during {operation}: its process is frozen, or the network between "
        "the hosts is cut"
    )


def timeout_text(rank_names: str, operation: str, after_s: float) -> str:
    """Return the message for ranks that did not come in time."""
    return f"{rank_names} did not come to {operation} within {after_s:g} s: {SAME_CALLS}"


def to_remote_error(rank: int, error: BaseException) -> RemoteError:
    """Return an error in the form in which it is sent to the other ranks."""
    kind = type(error).__name__ if isinstance(error, AiockptError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return RemoteError(rank, kind, text)


def to_exception(failure: RemoteError, operation: str, cause: BaseException | None = None) -> AiockptError:
    """Return the error that a rank raises; ``cause`` is the error itself, on the rank where it happened."""
    default = LoadError if operation.startswith("the load") else SaveError
    kind = getattr(errors, failure.kind, default) if failure.kind else default
    if not (isinstance(kind, type) and issubclass(kind, AiockptError)):
        kind = default
    names_rank = kind is CoordinationError or failure.message.startswith("rank ")
    error = kind(failure.message if names_rank else f"rank {failure.rank}: {failure.message}")
    error.__cause__ = cause
    return error


# --- messages -----------------------------------------------------------------------------------------


Kind = Literal["save", "load", "agree", "fallback"]

_REMEMBERED = 64  # calls of a kind
_KEPT_REPLIES = 4  # calls of a kind that have them
_WHOLE_CALL = -1
_HOLD_S = 5.0
"""How long a rank that is ahead waits for rank 0, which has failed the call before."""


@dataclass(slots=True, eq=False)
class RankCall:
    """One call that all ranks make; what follows the step is known to rank 0, with an open round at most."""

    kind: Kind
    number: int = 0  # of this rank's calls, from its first message on
    step: int = 0  # of the next round
    operation: str = ""
    numbers: dict[int, int] = field(default_factory=dict)  # of the calls of the other ranks that are this one
    begun: float = 0.0  # the last round
    arrivals: dict[int, Any] = field(default_factory=dict)  # the values of the others in it, or RemoteErrors
    over: asyncio.Event = field(default_factory=asyncio.Event)  # all have arrived
    failure: bytes | None = None  # how it has ended, pickled
    replied: int = -1  # the step of the last replies
    replies: Sequence[bytes] = ()  # these, from rank 1 on; none if they are old


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
    """The messages of a rank to rank 0, which are repeated over a new link."""

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


@dataclass(slots=True, eq=False)
class _Lane:
    """The calls of one kind of another rank."""

    pending: dict[int, tuple[Ask | Left, float]] = field(default_factory=dict)  # what rank 0 has not come to, and since
    passed: int = 0  # the last call that was one of rank 0, and the number of that one
    passed_own: int = 0
    held: dict[int, RemoteError] = field(default_factory=dict)  # asked ahead of rank 0 -> how the call there failed


@dataclass(slots=True, eq=False)
class _Peer:
    """Another rank."""

    rank: int
    name: str
    broken: float | None = None  # since when it has no link any more
    lanes: defaultdict[Kind, _Lane] = field(default_factory=lambda: defaultdict(_Lane))


class Rounds:
    """All rounds, as rank 0 sees them."""

    def __init__(self, names: Sequence[str], timeout_s: float, patience_s: float) -> None:
        self._own_name = names[0]
        self._peers = [_Peer(rank, names[rank]) for rank in range(1, len(names))]
        self._timeout_s = timeout_s
        self._patience_s = patience_s  # for a rank whose link is broken
        self._calls: defaultdict[Kind, deque[RankCall]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._numbers = itertools.count(1)
        self.open: list[RankCall] = []  # the calls with a round for which rank 0 waits for others, or decides
        # replies to be sent, each with its rank; to one without a link they are lost
        self.outbox: list[tuple[int, Reply]] = []

    def begin(self, call: RankCall, operation: str, now: float) -> None:
        """Come to the next round of a call."""
        self._count(call, operation)
        call.begun, call.arrivals, call.over = now, {}, asyncio.Event()
        self.open.append(call)
        for peer in self._peers:
            if call.failure is not None:
                self._arrive(call, peer.rank, pickle.loads(call.failure))
            else:
                self._compare(peer, call.kind, now)
                self._look(peer, call)

    def reply(self, call: RankCall, messages: Sequence[bytes]) -> None:
        """End a round with a message for each rank, from rank 1 on."""
        self.open = [other for other in self.open if other is not call]
        if call.failure is None:
            call.replied, call.replies = call.step, messages
            for rank, number in call.numbers.items():
                self.outbox.append((rank, Reply(number, call.step, messages[rank - 1])))

    def fail(self, call: RankCall, operation: str, failure: RemoteError, now: float) -> None:
        """End a call on all ranks, also on those that have not come to it yet."""
        is_open, self.open = call in self.open, [other for other in self.open if other is not call]
        if call.failure is not None:
            return
        self._count(call, operation)
        call.failure, call.replies = pickle.dumps(failure), ()
        for peer in self._peers:
            if is_open:
                self._arrive(call, peer.rank, failure)
            number = call.numbers.get(peer.rank)
            if number is not None:
                peer.lanes[call.kind].pending.pop(number, None)
                self.outbox.append((peer.rank, Reply(number, _WHOLE_CALL, call.failure)))
            self._compare(peer, call.kind, now)

    def _count(self, call: RankCall, operation: str) -> None:
        if not call.number:
            call.number, call.operation = next(self._numbers), operation
            calls = self._calls[call.kind]
            calls.append(call)
            for old in itertools.islice(reversed(calls), _KEPT_REPLIES, _KEPT_REPLIES + 1):
                old.replies = ()

    # --- the other ranks -------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse what ranks have asked ahead of rank 0."""
        for peer in self._peers:
            for number, failure in [item for lane in peer.lanes.values() for item in lane.held.items()]:
                self.outbox.append((peer.rank, Reply(number, _WHOLE_CALL, pickle.dumps(failure))))

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
        lane, call = peer.lanes[ask.kind], self._call_of(peer, ask)
        pending, _ = lane.pending.get(ask.number, (None, now))
        if isinstance(pending, Left):
            self._refuse(peer, ask, pending.failure)
        elif call is not None and call.failure is not None:
            self.outbox.append((rank, Reply(ask.number, _WHOLE_CALL, call.failure)))
        elif call is not None and call.replies and ask.step == call.replied:
            self.outbox.append((rank, Reply(ask.number, ask.step, call.replies[rank - 1])))
        elif (ask.step or ask.number <= lane.passed) if call is None else ask.step <= call.replied:
            text = f"the reply of rank 0 to {peer.name} was lost, as their connection broke during {ask.operation}"
            self._refuse(peer, ask, coordination_failure(rank, text))
        elif call not in self.open or rank not in call.arrivals:
            self._note(peer, ask, now)

    def leave(self, left: Left, now: float) -> None:
        """Take note that a rank has left a call, though rank 0 may have come to it and wait for others."""
        peer = self._peers[left.rank - 1]
        call = self._call_of(peer, left)
        if left.number > peer.lanes[left.kind].passed if call is None else call.failure is None:
            if call is not None:
                call.arrivals.pop(left.rank, None)
            self._note(peer, left, now)

    def tick(self, now: float, heard: Mapping[int, float]) -> None:
        """Find ranks that are late, and those that rank 0 has let wait; ``heard``: the last sign of linked ranks."""
        for call in self.open:
            self._miss(call, now, heard)
        name = _with_calls(self._own_name, [call.operation for call in self.open])
        for peer in self._peers:
            for lane in peer.lanes.values():
                for message, since in list(lane.pending.values()):
                    if isinstance(message, Ask) and now - since >= self._timeout_s:
                        text = timeout_text(name, message.operation, self._timeout_s)
                        self._end(peer, message, lane.held.get(message.number, coordination_failure(0, text)), now)

    # --- which call is meant ---------------------------------------------------------------------------

    def _call_of(self, peer: _Peer, message: Ask | Left) -> RankCall | None:
        """Return the call of rank 0 that a rank's call is; None if it is not known yet, or any more."""
        calls = reversed(self._calls[message.kind])
        return next((call for call in calls if call.numbers.get(peer.rank) == message.number), None)

    def _note(self, peer: _Peer, message: Ask | Left, now: float) -> None:
        peer.lanes[message.kind].pending[message.number] = message, now
        self._compare(peer, message.kind, now)
        for call in self.open:
            if call.kind == message.kind:
                self._look(peer, call)

    def _compare(self, peer: _Peer, kind: Kind, now: float) -> None:
        """Compare a rank's next calls with those of rank 0 that it has not come to: failed ones, and an open one."""
        lane = peer.lanes[kind]
        calls = [call for call in self._calls[kind] if call.number > lane.passed_own]
        for number in sorted(number for number in lane.pending if number > lane.passed):
            message, _ = lane.pending[number]
            if (call := next((call for call in calls if call.operation == message.operation), None)) is not None:
                self._pass(peer, lane, message, call)
                return self._compare(peer, kind, now)
            if isinstance(message, Left):  # rank 0 may come to this call
                continue
            waiting = (call for call in self.open if call in calls and peer.rank not in call.arrivals)
            if (call := next(waiting, None)) is None:
                return None
            if number in lane.held:  # rank 0 has not come to it next
                self._end(peer, message, lane.held[number], now)
                continue
            text = f"rank 0 is at {call.operation} while rank {peer.rank} is at {message.operation}: {SAME_CALLS}"
            lane.held[number] = coordination_failure(peer.rank, text)
            lane.pending[number] = message, now - self._timeout_s + min(_HOLD_S, self._timeout_s)
            self._arrive(call, peer.rank, lane.held[number])
            return None
        return None

    def _pass(self, peer: _Peer, lane: _Lane, message: Ask | Left, call: RankCall) -> None:
        """Note that a rank's call is this one of rank 0; those before it are over."""
        lane.passed, lane.passed_own = message.number, call.number
        call.numbers[peer.rank] = message.number
        lane.held = {number: failure for number, failure in lane.held.items() if number > message.number}
        for old, _ in list(lane.pending.values()):
            if old.number < message.number and self._call_of(peer, old) is None:
                del lane.pending[old.number]
        if call.failure is not None:
            del lane.pending[message.number]
            self.outbox.append((peer.rank, Reply(message.number, _WHOLE_CALL, call.failure)))

    def _look(self, peer: _Peer, call: RankCall) -> None:
        """Take what a rank has sent for an open round."""
        pending = peer.lanes[call.kind].pending
        message, _ = pending.get(call.numbers.get(peer.rank, 0), (None, 0.0))
        if isinstance(message, Left):
            self._arrive(call, peer.rank, message.failure)
        elif message is not None and peer.rank not in call.arrivals:
            del pending[message.number]
            try:
                self._arrive(call, peer.rank, pickle.loads(message.message))
            except Exception as exc:  # a class of the value can't be imported here
                self._arrive(call, peer.rank, to_remote_error(peer.rank, exc))

    def _arrive(self, call: RankCall, rank: int, arrival: Any) -> None:
        """Note the value that a rank has come with, or why it does not."""
        call.arrivals[rank] = arrival
        if len(call.arrivals) == len(self._peers):
            call.over.set()

    def _end(self, peer: _Peer, ask: Ask, failure: RemoteError, now: float) -> None:
        """Fail a rank's call to which rank 0 does not come."""
        if (call := self._call_of(peer, ask)) is not None:
            self.fail(call, ask.operation, failure, now)
        else:
            self._refuse(peer, ask, failure)
            peer.lanes[ask.kind].held.pop(ask.number, None)
            left = Left(peer.rank, ask.kind, ask.number, ask.operation, failure)
            peer.lanes[ask.kind].pending[ask.number] = left, now

    def _refuse(self, peer: _Peer, ask: Ask, failure: RemoteError) -> None:
        self.outbox.append((peer.rank, Reply(ask.number, _WHOLE_CALL, pickle.dumps(failure))))

    def _miss(self, call: RankCall, now: float, heard: Mapping[int, float]) -> None:
        """Find the ranks that do not come to a round."""
        late, operation, timeout_s = dict[int, str](), call.operation, self._timeout_s
        for peer in [peer for peer in self._peers if peer.rank not in call.arrivals]:
            text = ""
            if peer.broken is not None:
                if now - peer.broken > self._patience_s:
                    text = dead_rank_text(peer.name, operation)
            elif now - call.begun >= timeout_s:
                if now - heard.get(peer.rank, now) >= timeout_s:
                    text = silence_text(peer.name, operation, timeout_s)
                else:
                    asks = [message for lane in peer.lanes.values() for message, _ in lane.pending.values()]
                    late[peer.rank] = _with_calls(peer.name, [ask.operation for ask in asks if isinstance(ask, Ask)])
            if text:
                self._arrive(call, peer.rank, coordination_failure(peer.rank, text))
        for rank in late:
            text = timeout_text(some_of(list(late.values()), 8), operation, timeout_s)
            self._arrive(call, rank, coordination_failure(min(late), text))


def _with_calls(name: str, operations: Sequence[str]) -> str:
    """Return the name of a rank with what it has called instead, if anything."""
    return f"{name.removesuffix(',')}, which is at {' and '.join(operations)}," if operations else name
