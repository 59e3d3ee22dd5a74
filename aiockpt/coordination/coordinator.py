"""Ranks that agree over connections of their own, never over the caller's process group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import anyio

from aiockpt.coordination.base import Coordinator, Lane, RemoteError, error_of, remote_error_of
from aiockpt.coordination.follower import Follower
from aiockpt.coordination.leader import Leader
from aiockpt.coordination.outcome import Arrived, coordination_failure, first_failure, gone_text
from aiockpt.coordination.rendezvous import RankAddress
from aiockpt.core.threads import DaemonThreads
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from torch.distributed import ProcessGroup

    from aiockpt.coordination.outcome import Arrival

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_END_S = 5.0


@dataclass(slots=True)
class _Way:
    """What one lane has of its own: a thread, the order of its rounds, and links made in the first of them."""

    lane: Lane
    thread: DaemonThreads
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # not anyio's: it is made in the caller's thread
    leader: Leader | None = None
    follower: Follower | None = None


class _Verdict(NamedTuple):
    """What rank 0 tells: a reply for each rank, or the trouble and, if it happened here, the error."""

    replies: Sequence[Any] = ()
    messages: Sequence[bytes] = ()
    trouble: RemoteError | None = None
    cause: BaseException | None = None


class ProcessGroupCoordinator(Coordinator):
    """Agrees with the other ranks of a `torch.distributed` process group.

    The group itself only says who the ranks are and where they meet (its store): nothing is ever sent over it,
    and no group is registered with `torch.distributed`, so the program's own collectives and ``new_group`` calls
    may go on at the same time, in any order. Every other rank has a link of its own to rank 0, made in the first
    round of each lane.

    Every process of the group must make its coordinators over it in the same order.

    Args:
        group: the ranks; of any backend.
        timeout_s: how long a round waits for ranks to come, in seconds.

    Raises:
        CoordinationError: this process is not in the group.
    """

    def __init__(self, group: ProcessGroup, *, timeout_s: float) -> None:
        self._place = RankAddress(group)
        self.rank = self._place.rank
        self.world_size = self._place.world_size
        self._timeout_s = timeout_s
        self._gone: dict[int, str] = {}
        self._ways: dict[Lane, _Way] = {
            lane: _Way(lane, DaemonThreads(1, f"aiockpt-ranks-{lane}")) for lane in get_args(Lane)
        }
        self._abandoned = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def leader_lives(self) -> bool:
        """Whether rank 0 can still be reached; see `Coordinator.leader_lives`."""
        return 0 not in self._gone

    async def round(
        self,
        lane: Lane,
        what: str,
        mine: Any,
        decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Agree; see `Coordinator.round`."""
        self._loop = asyncio.get_running_loop()
        return await _to_its_end(self._in_turn(self._ways[lane], what, mine, decide, undo))

    def abandon(self) -> None:
        """Stop waiting for other ranks; see `Coordinator.abandon`."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits in it
                self._loop.call_soon_threadsafe(self._abandoned.set)

    def close(self) -> None:
        """Let go of threads and connections. Blocks for a few seconds at most; idempotent.

        A thread that still waits for another rank is left behind until it gives up; it does not hold up the
        process's end.
        """
        for way in self._ways.values():
            if not way.thread.end(_END_S):
                logger.warning("a thread that waits for other ranks is left behind; they have not come")
                continue
            for side in (way.leader, way.follower):
                if side is not None:
                    side.close()
            way.leader = way.follower = None

    async def _run(self, way: _Way, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the lane's thread; go on without it when the round is abandoned."""
        hop = asyncio.get_running_loop().run_in_executor(way.thread, function, *args)
        leave = asyncio.ensure_future(self._abandoned.wait())
        either: list[asyncio.Future[Any]] = [hop, leave]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leave.cancel()
        if hop.done():
            return hop.result()
        hop.cancel()
        raise CoordinationError("this rank's checkpointer was closed while it waited for the other ranks")

    async def _in_turn(
        self,
        way: _Way,
        what: str,
        mine: Any,
        decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
        undo: Callable[[], Awaitable[None]] | None,
    ) -> Any:
        async with way.turn:
            if not self.leads:
                return await self._follow(way, what, mine)
            verdict = await self._verdict(way, what, mine, decide)
            if verdict.trouble is not None:
                verdict = await self._undone(verdict.trouble, verdict.cause, undo)
            if way.leader is not None:
                await self._run(way, way.leader.answer, what, verdict.messages)
            if verdict.trouble is not None:
                raise _with_note(error_of(verdict.trouble, what, verdict.cause), mine)
            return verdict.replies[0]

    async def _verdict(
        self, way: _Way, what: str, mine: Any, decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
    ) -> _Verdict:
        """Hear every rank, and decide when there is no trouble. Never raises."""
        try:
            arrivals = [_brought(0, what, mine), *await self._run(way, self._collect, way, what)]
        except Exception as exc:
            trouble = coordination_failure(0, f"rank 0 could not reach the other ranks for {what}: {exc}")
            return _Verdict(trouble=trouble, cause=exc)
        found = first_failure(arrivals, what)
        if found is not None:
            is_mine = isinstance(mine, BaseException) and found == remote_error_of(0, mine)
            return _Verdict(trouble=found, cause=mine if is_mine else None)
        try:
            replies = await decide([arrival.value for arrival in arrivals if isinstance(arrival, Arrived)])
            if len(replies) != self.world_size:
                raise ValueError(f"{len(replies)} replies were made for {self.world_size} ranks")
            return _Verdict(replies, _messages(replies[1:]))
        except BaseException as exc:  # whatever it is, the others must be told
            return _Verdict(trouble=remote_error_of(0, exc), cause=exc)

    async def _undone(
        self, trouble: RemoteError, cause: BaseException | None, undo: Callable[[], Awaitable[None]] | None
    ) -> _Verdict:
        """Undo, and make the message that tells everyone."""
        if undo is not None:
            try:
                await undo()
            except BaseException as exc:
                text = f"{trouble.message} (and undoing it on rank 0 failed: {type(exc).__name__}: {exc})"
                trouble = trouble._replace(message=text)
                cause = cause or exc
        messages = [pickle.dumps(trouble)] * (self.world_size - 1)
        return _Verdict(messages=messages, trouble=trouble, cause=cause)

    async def _follow(self, way: _Way, what: str, mine: Any) -> Any:
        try:
            message = pickle.dumps(_brought(self.rank, what, mine))
        except Exception as exc:  # it can't be pickled
            mine = exc
            message = pickle.dumps(_brought(self.rank, what, mine))
        reply = pickle.loads(await self._run(way, self._ask, way, what, message))
        if not isinstance(reply, RemoteError):
            return reply[0]
        is_mine = isinstance(mine, BaseException) and reply.rank == self.rank and reply.kind != "CoordinationError"
        raise _with_note(error_of(reply, what, mine if is_mine else None), mine)

    def _collect(self, way: _Way, what: str) -> Sequence[Arrival]:
        if way.leader is None:
            meeting = self._place.meeting(way.lane)
            way.leader = Leader(self._place, meeting, timeout_s=self._timeout_s, gone=self._gone)
        return way.leader.collect(what)

    def _ask(self, way: _Way, what: str, message: bytes) -> bytes:
        if 0 in self._gone:  # which may have taken the store along
            raise CoordinationError(gone_text(self._gone[0], what))
        if way.follower is None:
            try:
                meeting = self._place.meeting(way.lane)
            except RuntimeError as exc:
                raise CoordinationError(f"the store of the process group failed during {what}: {exc}") from exc
            way.follower = Follower(self._place, meeting, timeout_s=self._timeout_s, gone=self._gone)
        return way.follower.ask(what, message)


def _brought(rank: int, what: str, mine: Any) -> Arrived:
    return Arrived(what, remote_error_of(rank, mine) if isinstance(mine, BaseException) else mine)


def _with_note(error: BaseException, mine: Any) -> BaseException:
    """Keep this rank's own error in sight when all ranks raise another one."""
    if isinstance(mine, BaseException) and error.__cause__ is not mine:
        error.add_note(f"this rank had failed as well: {type(mine).__name__}: {mine}")
    return error


def _messages(replies: Sequence[Any]) -> list[bytes]:
    """Pickle replies; those that are one object once."""
    made = {id(reply): reply for reply in replies}
    pickled = {key: pickle.dumps((reply,)) for key, reply in made.items()}
    return [pickled[id(reply)] for reply in replies]


async def _to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run something that others count on to its end, in a task of its own; deliver a cancellation after it."""
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
