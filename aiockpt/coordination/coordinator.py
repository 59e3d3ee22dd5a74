"""Rounds, in which all ranks agree or all fail, over connections of their own, not the caller's process group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import anyio

from aiockpt.coordination.outcome import (
    Arrival,
    Arrived,
    RemoteError,
    coordination_failure,
    dead_rank_text,
    first_failure,
    store_failure_text,
    to_exception,
    to_remote_error,
)
from aiockpt.coordination.protocol import Follower, Leader
from aiockpt.coordination.rendezvous import RankAddress
from aiockpt.core.threads import DaemonThreads
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


logger = logging.getLogger("aiockpt")

T = TypeVar("T")

Lane = Literal["plan", "finish", "load", "agree"]
"""Rounds of one lane run one after the other, in the same order on every rank. Rounds of different lanes don't wait
for each other, so that the next save is planned while this one is written."""

Decide = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Takes the values of all ranks, in rank order; returns a reply for each rank."""

Undo = Callable[[], Awaitable[None]]

_END_S = 5.0


@dataclass(slots=True)
class _LaneState:
    """A lane's thread, the order of its rounds, and its links, which are made in its first round."""

    lane: Lane
    thread: DaemonThreads
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # not anyio's: it is made in the caller's thread
    leader: Leader | None = None
    follower: Follower | None = None


class _Outcome(NamedTuple):
    """A round's outcome on rank 0: a reply for each rank, or the failure and, if it happened here, the error."""

    replies: Sequence[Any] = ()
    messages: Sequence[bytes] = ()  # the pickled replies, from rank 1 on
    failure: RemoteError | None = None
    cause: BaseException | None = None


class Coordinator:
    """One rank's connection to the other ranks of a `torch.distributed` process group of any backend. Rank 0 leads.

    The group only names the ranks and provides the store in which they meet: nothing is ever sent over it,
    and no group is registered with `torch.distributed`, so the program's own collectives and ``new_group`` calls
    may run at the same time, in any order. Every other rank has a link of its own to rank 0, made in the first
    round of each lane.

    Every process of the group must make its coordinators over it in the same order. A process that is not in the
    group gets a CoordinationError.
    """

    def __init__(self, group: ProcessGroup, *, timeout_s: float) -> None:
        self._address = RankAddress(group)
        self.rank = self._address.rank  # in the group, from 0
        self.world_size = self._address.world_size
        self._timeout_s = timeout_s
        self._dead_ranks: dict[int, str] = {}
        self._lanes: dict[Lane, _LaneState] = {
            lane: _LaneState(lane, DaemonThreads(1, f"aiockpt-ranks-{lane}")) for lane in get_args(Lane)
        }
        self._abandoned = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def leader_lives(self) -> bool:
        """Whether rank 0 can still be reached, as far as this rank has noticed."""
        return 0 not in self._dead_ranks

    async def round(self, lane: Lane, operation: str, value: Any, decide: Decide, undo: Undo | None = None) -> Any:
        """Send a value, or this rank's error, to rank 0 and return rank 0's reply.

        Every rank calls it once for each round of a lane, in the same order, with the same ``operation`` (such as
        ``the save of runs/a``, for messages) and with a value that can be pickled, or an exception. ``decide`` and
        ``undo`` run on rank 0 only, in the event loop.

        If all ranks sent values, rank 0 runs ``decide`` with them. If a rank sent an error, is dead, or does not
        come within the timeout, or if ``decide`` fails, rank 0 runs ``undo``, and then every rank's call raises
        the same error, which names the rank. Once ``decide`` has succeeded, the round has succeeded: if a rank dies
        before its reply reaches it, only the next round fails.

        A cancellation is delivered when the round is over: a rank that left alone would leave the others waiting.
        """
        self._loop = asyncio.get_running_loop()
        return await _run_to_completion(self._round_in_turn(self._lanes[lane], operation, value, decide, undo))

    def abandon(self) -> None:
        """Make current and later rounds of this rank fail instead of wait. From any thread; does not block."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits in it
                self._loop.call_soon_threadsafe(self._abandoned.set)

    def close(self) -> None:
        """Close threads and connections. Blocks for a few seconds at most; idempotent.

        A thread that still waits for another rank is left behind until it times out; it does not delay the end of
        the process.
        """
        for state in self._lanes.values():
            if not state.thread.end(_END_S):
                logger.warning("a thread that waits for other ranks is left behind; they have not come")
                continue  # it still uses its link
            for side in (state.leader, state.follower):
                if side is not None:
                    side.close()
            state.leader = state.follower = None

    async def _round_in_turn(
        self, state: _LaneState, operation: str, value: Any, decide: Decide, undo: Undo | None
    ) -> Any:
        async with state.turn:
            if self.leads:
                return await self._lead(state, operation, value, decide, undo)
            return await self._follow(state, operation, value)

    async def _lead(self, state: _LaneState, operation: str, value: Any, decide: Decide, undo: Undo | None) -> Any:
        outcome = await self._decide(state, operation, value, decide)
        if outcome.failure is not None:
            outcome = await self._undo(outcome.failure, outcome.cause, undo)
        if state.leader is not None:
            await self._run(state, state.leader.reply, operation, outcome.messages)
        if outcome.failure is not None:
            raise _with_note(to_exception(outcome.failure, operation, outcome.cause), value)
        return outcome.replies[0]

    async def _decide(self, state: _LaneState, operation: str, value: Any, decide: Decide) -> _Outcome:
        """Collect the messages of all ranks, and decide unless one has failed. Never raises."""
        try:
            arrivals = [_own_arrival(0, operation, value), *await self._run(state, self._collect, state, operation)]
        except Exception as exc:
            failure = coordination_failure(0, f"rank 0 could not reach the other ranks for {operation}: {exc}")
            return _Outcome(failure=failure, cause=exc)
        found = first_failure(arrivals, operation)
        if found is not None:
            is_own = isinstance(value, BaseException) and found == to_remote_error(0, value)
            return _Outcome(failure=found, cause=value if is_own else None)
        try:
            replies = await decide([arrival.value for arrival in arrivals if isinstance(arrival, Arrived)])
            if len(replies) != self.world_size:
                raise ValueError(f"{len(replies)} replies were made for {self.world_size} ranks")
            return _Outcome(replies, _pickled_replies(replies[1:]))
        except BaseException as exc:  # whatever it is, the other ranks must be notified
            return _Outcome(failure=to_remote_error(0, exc), cause=exc)

    async def _undo(self, failure: RemoteError, cause: BaseException | None, undo: Undo | None) -> _Outcome:
        """Run ``undo``, and return the failure as a reply for every rank."""
        if undo is not None:
            try:
                await undo()
            except BaseException as exc:
                text = f"{failure.message} (and undoing it on rank 0 failed: {type(exc).__name__}: {exc})"
                failure = failure._replace(message=text)
                cause = cause or exc
        messages = [pickle.dumps(failure)] * (self.world_size - 1)
        return _Outcome(messages=messages, failure=failure, cause=cause)

    async def _follow(self, state: _LaneState, operation: str, value: Any) -> Any:
        try:
            message = pickle.dumps(_own_arrival(self.rank, operation, value))
        except Exception as exc:  # it can't be pickled
            value = exc
            message = pickle.dumps(_own_arrival(self.rank, operation, value))
        reply = pickle.loads(await self._run(state, self._ask, state, operation, message))
        if not isinstance(reply, RemoteError):
            return reply[0]
        # A CoordinationError about this rank is what rank 0 found, not the error that this rank has sent.
        is_own = isinstance(value, BaseException) and reply.rank == self.rank and reply.kind != "CoordinationError"
        raise _with_note(to_exception(reply, operation, value if is_own else None), value)

    async def _run(self, state: _LaneState, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the lane's thread; go on without it if the coordinator is abandoned."""
        call = asyncio.get_running_loop().run_in_executor(state.thread, function, *args)
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        either: list[asyncio.Future[Any]] = [call, abandoned]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            abandoned.cancel()
        if call.done():
            return call.result()
        call.cancel()  # ends the future; the thread goes on waiting, and `close` may leave it behind
        raise CoordinationError("this rank's checkpointer was closed while it waited for the other ranks")

    def _collect(self, state: _LaneState, operation: str) -> Sequence[Arrival]:
        if state.leader is None:
            rendezvous = self._address.rendezvous(state.lane)
            state.leader = Leader(self._address, rendezvous, timeout_s=self._timeout_s, dead_ranks=self._dead_ranks)
        return state.leader.collect(operation)

    def _ask(self, state: _LaneState, operation: str, message: bytes) -> bytes:
        if 0 in self._dead_ranks:  # the store may have ended with it
            raise CoordinationError(dead_rank_text(self._dead_ranks[0], operation))
        if state.follower is None:
            try:
                rendezvous = self._address.rendezvous(state.lane)
            except RuntimeError as exc:
                raise CoordinationError(store_failure_text(operation, exc)) from exc
            state.follower = Follower(self._address, rendezvous, timeout_s=self._timeout_s, dead_ranks=self._dead_ranks)
        return state.follower.ask(operation, message)


def _own_arrival(rank: int, operation: str, value: Any) -> Arrived:
    return Arrived(operation, to_remote_error(rank, value) if isinstance(value, BaseException) else value)


def _with_note(error: BaseException, value: Any) -> BaseException:
    """Add this rank's own error as a note if all ranks raise another one."""
    if isinstance(value, BaseException) and error.__cause__ is not value:
        error.add_note(f"this rank had failed as well: {type(value).__name__}: {value}")
    return error


def _pickled_replies(replies: Sequence[Any]) -> list[bytes]:
    """Pickle replies; an object that is the reply for many ranks is pickled once."""
    made = {id(reply): reply for reply in replies}
    # In tuples, so that a reply is never taken for a RemoteError.
    pickled = {key: pickle.dumps((reply,)) for key, reply in made.items()}
    return [pickled[id(reply)] for reply in replies]


async def _run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that other ranks wait for to its end, as a task of its own; deliver a cancellation after it."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as exc:  # asyncio's own, which no shield keeps out
                cancelled = exc
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()
