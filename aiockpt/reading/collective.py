"""Loads by several ranks, each into its part of a state: all succeed, or all fail with the same error.

Each rank reads what it needs by itself. They agree before the first byte is placed, so that what can be known before
changes nothing on any rank; when all is placed; and where a rank has live objects once more, when these were given
their states.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError, LoadError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from aiockpt.coordination.base import Coordinator
    from aiockpt.reading.apply_live import Filled

_leaving: set[asyncio.Future[None]] = set()
"""Those that tell others of a cancellation; held, for nobody else does."""


class Gathering:
    """One load of all ranks.

    Args:
        coordinator: the way to the other ranks.
        path: the checkpoint.

    Attributes:
        what: what all ranks are at, for messages.
        failed: whether the ranks have agreed that it has failed.
        filled: the keys that this rank has filled.
        is_handing_over: whether a rank has live objects that are given their states when all is placed.
    """

    def __init__(self, coordinator: Coordinator, path: str) -> None:
        self._coordinator = coordinator
        self.what = f"the load of {path}"
        self.failed = False
        self.filled: tuple[str, ...] = ()
        self.is_handing_over = False
        self._agreed = 0
        self._round: asyncio.Future[Any] | None = None

    async def agree(self, error: BaseException | None = None, reads: int = 0) -> bool:
        """Tell the others that this rank is well, or what has happened to it.

        Who is cancelled meanwhile goes; `see_out` then tells the others.

        Args:
            error: what has happened.
            reads: what this rank is about to read, as a number that is another for other bytes; 0 for nothing.

        Returns:
            Whether another rank of this host is about to read the same.

        Raises:
            AiockptError: a rank has failed, or is gone; the message names it.
        """
        mine = (socket.gethostname(), reads) if error is None else error
        same: bool = await self._meet(mine, _who_reads_the_same, error)
        return same

    async def agree_filled(self, *, has_objects: bool) -> None:
        """Tell the others that this rank has filled its tensors, and whether it has live objects; see `agree`."""
        await self._meet(has_objects, _who_hands_over)

    async def _meet(
        self, mine: Any, decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], error: BaseException | None = None
    ) -> Any:
        round_ = self._coordinator.round("load", self.what, mine, decide)
        self._round = asyncio.ensure_future(self._counted(round_))
        try:
            return await asyncio.shield(self._round)
        except LoadError as exc:
            exc.placed = self.filled
            if error is not None:
                exc.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
            raise

    async def _counted(self, round_: Coroutine[Any, Any, Any]) -> Any:
        try:
            reply = await round_
        except BaseException:
            self.failed = True
            raise
        self._agreed += 1
        if self._agreed == 2:
            self.is_handing_over = reply
        return reply

    async def see_out(self) -> None:
        """Take part in what is left of a load that this rank has left."""
        with contextlib.suppress(AiockptError):
            if self._round is not None:
                await self._round
            if self._agreed < (3 if self.is_handing_over else 2) and not self.failed:
                await self.agree(LoadError(f"{self.what} was cancelled"))


async def load_together(
    gathering: Gathering,
    turn: asyncio.Lock,
    load: Callable[[Gathering], Awaitable[Filled]] | None,
    refusal: BaseException | None = None,
) -> Filled:
    """Load with the other ranks.

    If live objects are to be given their states, on any rank, the turn is kept until `conclude`.

    Who is cancelled while it waits for the others goes at once; the others are told in the background.

    Args:
        gathering: this load.
        turn: lets one load of all ranks go on at a time, in the order of the calls, which is the same on every rank.
        load: loads, and agrees once with the others before it changes anything; None if it can't even begin.
        refusal: why not.
    """
    mine = asyncio.ensure_future(turn.acquire())
    try:
        await asyncio.shield(mine)
        result = await _in_turn(gathering, load, refusal)
    except asyncio.CancelledError:
        leaving = asyncio.ensure_future(_leave(gathering, mine, turn))
        _leaving.add(leaving)
        leaving.add_done_callback(_leaving.discard)
        raise
    except BaseException:
        turn.release()
        raise
    if not gathering.is_handing_over:
        turn.release()
    return result


async def conclude(gathering: Gathering, turn: asyncio.Lock, error: BaseException | None) -> None:
    """Tell the other ranks that live objects have their states, or why not; see `load_together`.

    Raises:
        AiockptError: a rank has failed; the message names it.
    """
    try:
        await gathering.agree(error)
    except asyncio.CancelledError:
        leaving = asyncio.ensure_future(_leave(gathering, None, turn))
        _leaving.add(leaving)
        leaving.add_done_callback(_leaving.discard)
        raise
    except BaseException:
        turn.release()
        raise
    turn.release()


async def _in_turn(
    gathering: Gathering, load: Callable[[Gathering], Awaitable[Filled]] | None, refusal: BaseException | None
) -> Filled:
    try:
        if load is None:
            raise refusal or LoadError(f"{gathering.what} was refused")
        result = await load(gathering)
    except Exception as exc:
        if not gathering.failed:
            await gathering.agree(exc)
        raise
    await gathering.agree_filled(has_objects=bool(result.gifts))
    return result


async def _leave(gathering: Gathering, mine: asyncio.Future[Any] | None, turn: asyncio.Lock) -> None:
    """Tell the others that this rank has left, when they come."""
    if mine is not None:
        await mine
    try:
        await gathering.see_out()
    finally:
        turn.release()


async def _who_reads_the_same(readers: Sequence[tuple[str, int]]) -> list[bool]:
    counts = Counter(readers)
    return [reads != 0 and counts[host, reads] > 1 for host, reads in readers]


async def _who_hands_over(ranks: Sequence[bool]) -> list[bool]:
    return [any(ranks)] * len(ranks)
