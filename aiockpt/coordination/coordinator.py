"""Rounds, in which all ranks agree or all fail, over connections of their own, not the caller's process group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.coordination.outcome import (
    RemoteError,
    coordination_failure,
    first_failure,
    to_exception,
    to_remote_error,
)
from aiockpt.coordination.protocol import Kind, RankCall
from aiockpt.coordination.rendezvous import RankAddress
from aiockpt.coordination.sides import Follower, Leader
from aiockpt.core.threads import outlast
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aiockpt.coordination.ranks import Ranks

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

Decide = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Takes the values of all ranks, in rank order; returns a reply for each rank."""

Undo = Callable[[], Awaitable[None]]

_END_S = 5.0


class Coordinator:
    """One rank's connection to the other ranks, of a `torch.distributed` process group or of `Ranks`. Rank 0 leads.

    The group only names the ranks and provides the store in which they meet: nothing is ever sent over it,
    and no group is registered with `torch.distributed`, so the program's own collectives and ``new_group`` calls
    may run at the same time, in any order. Every other rank has a link of its own to rank 0, made in the first
    round.

    Every process of the group must make its coordinators over it in the same order. A process that is not in the
    group gets a CoordinationError.
    """

    def __init__(self, group: ProcessGroup | Ranks, *, timeout_s: float) -> None:
        self._address = address = RankAddress(group)
        self.timeout_s = timeout_s
        self.rank = address.rank  # in the group, from 0
        self.world_size = address.world_size
        self._side = (Leader if self.rank == 0 else Follower)(address, timeout_s=timeout_s)
        self._turns: defaultdict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._abandoned = asyncio.Event()
        self._is_abandoned = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def leader_lives(self) -> bool:
        """Whether rank 0 can still be reached, as far as this rank has noticed."""
        return self._side.leader_lives

    async def addresses(self, operation: str) -> list[str]:
        """Return the addresses at which other ranks reach this host; see `addresses_of_this_host`.

        Raises OSError, or CoordinationError if they are not found out in time.
        """
        return await self._side.addresses(operation)

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
        return await outlast(self._round_in_turn(call, operation, value, decide, undo))

    async def give_up(self, call: RankCall, operation: str, error: BaseException) -> None:
        """Fail a call on all ranks that this rank hangs in, outside of a round."""
        await self._side.give_up(call, operation, to_remote_error(self.rank, error))

    def tell(self, call: RankCall, operation: str, error: BaseException) -> bool:
        """Fail a call on all ranks where this one can't start the event loop of its rounds.

        Blocks for two seconds at most. Returns False if the store takes no message: the others wait for the timeout.
        """
        return self._side.tell(call, operation, to_remote_error(self.rank, error))

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
        if not self._side.close(_END_S):
            logger.warning("a thread that waits for the store of the process group is left behind")

    async def _round_in_turn(
        self, call: RankCall, operation: str, value: Any, decide: Decide, undo: Undo | None
    ) -> Any:
        async with contextlib.nullcontext() if call.step else self._turns[call.kind]:
            try:
                if isinstance(self._side, Leader):
                    return await self._lead(self._side, call, operation, value, decide, undo)
                return await self._follow(self._side, call, operation, value)
            finally:
                call.step += 1

    async def _lead(
        self, leader: Leader, call: RankCall, operation: str, value: Any, decide: Decide, undo: Undo | None
    ) -> Any:
        replies, messages, cause = list[Any](), list[bytes](), None
        try:
            others = await self._unless_abandoned(operation, leader.collect(call, operation))
            values = [_sent(0, value), *others]
            failure = first_failure(values)
            if failure is None:
                replies = list(await decide(values))
                if len(replies) != self.world_size:
                    raise ValueError(f"{len(replies)} replies were made for {self.world_size} ranks")
                messages = _pickled_replies(replies[1:])
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
        await leader.end(call, operation, failure or messages)
        if failure is not None:
            raise _with_note(to_exception(failure, operation, cause), value)
        return replies[0]

    async def _follow(self, follower: Follower, call: RankCall, operation: str, value: Any) -> Any:
        try:
            message = pickle.dumps(_sent(self.rank, value))
        except Exception as exc:  # it can't be pickled
            value = exc
            message = pickle.dumps(_sent(self.rank, value))
        try:
            reply = pickle.loads(await self._unless_abandoned(operation, follower.ask(call, operation, message)))
        except CoordinationError as exc:  # rank 0 can't miss a rank that it has not heard of yet
            await follower.give_up(call, operation, coordination_failure(self.rank, str(exc)))
            raise
        if not isinstance(reply, RemoteError):
            return reply[0]
        # A CoordinationError about this rank is what rank 0 found, not the error that this rank has sent.
        is_own = isinstance(value, BaseException) and reply.rank == self.rank and reply.kind != "CoordinationError"
        raise _with_note(to_exception(reply, operation, value if is_own else None), value)

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


def _sent(rank: int, value: Any) -> Any:
    return to_remote_error(rank, value) if isinstance(value, BaseException) else value


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
