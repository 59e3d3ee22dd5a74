"""Loads by several ranks, each into its part of a state: all succeed, or all fail with the same error.

Each rank reads what it needs by itself. They agree twice: before the first byte is placed, so that what can be known
before changes nothing on any rank, and at the end.
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

_ROUNDS = 2

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
    """

    def __init__(self, coordinator: Coordinator, path: str) -> None:
        self._coordinator = coordinator
        self.what = f"the load of {path}"
        self.failed = False
        self.filled: tuple[str, ...] = ()
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
        round_ = self._coordinator.round("load", self.what, mine, _who_reads_the_same)
        self._round = asyncio.ensure_future(self._counted(round_))
        try:
            same: bool = await asyncio.shield(self._round)
        except LoadError as exc:
            exc.placed = self.filled
            if error is not None:
                exc.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
            raise
        return same

    async def _counted(self, round_: Coroutine[Any, Any, Any]) -> Any:
        try:
            reply = await round_
        except BaseException:
            self.failed = True
            raise
        self._agreed += 1
        return reply

    async def see_out(self) -> None:
        """Take part in what is left of a load that this rank has left."""
        with contextlib.suppress(AiockptError):
            if self._round is not None:
                await self._round
            if self._agreed < _ROUNDS and not self.failed:
                await self.agree(LoadError(f"{self.what} was cancelled"))


async def load_together(
    gathering: Gathering,
    turn: asyncio.Lock,
    load: Callable[[Gathering], Awaitable[Any]] | None,
    refusal: BaseException | None = None,
) -> Any:
    """Load with the other ranks.

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
    turn.release()
    return result


async def _in_turn(
    gathering: Gathering, load: Callable[[Gathering], Awaitable[Any]] | None, refusal: BaseException | None
) -> Any:
    try:
        if load is None:
            raise refusal or LoadError(f"{gathering.what} was refused")
        result = await load(gathering)
    except Exception as exc:
        if not gathering.failed:
            await gathering.agree(exc)
        raise
    await gathering.agree()
    return result


async def _leave(gathering: Gathering, mine: asyncio.Future[Any], turn: asyncio.Lock) -> None:
    """Tell the others that this rank has left, when they come."""
    await mine
    try:
        await gathering.see_out()
    finally:
        turn.release()


async def _who_reads_the_same(readers: Sequence[tuple[str, int]]) -> list[bool]:
    counts = Counter(readers)
    return [reads != 0 and counts[host, reads] > 1 for host, reads in readers]
