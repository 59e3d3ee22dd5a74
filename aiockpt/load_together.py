"""Loads by several ranks, each into its part of a state: all succeed, or all fail with the same error.

Each rank reads what it needs by itself. They agree twice: before the first byte is placed, so that what can be known
before changes nothing on any rank, and at the end.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio

from aiockpt.errors import LoadError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence

    from aiockpt.coordination.base import Coordinator


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

    async def agree(self, error: BaseException | None = None, reads: int = 0) -> bool:
        """Tell the others that this rank is well, or what has happened to it.

        Args:
            error: what has happened.
            reads: what this rank is about to read, as a number that is another for other bytes; 0 for nothing.

        Returns:
            Whether another rank of this host is about to read the same.

        Raises:
            AiockptError: a rank has failed, or is gone; the message names it.
        """
        mine = (socket.gethostname(), reads) if error is None else error
        same = False
        with anyio.CancelScope(shield=True):
            try:
                same = await self._coordinator.round("load", self.what, mine, _who_reads_the_same)
            except BaseException as exc:
                self.failed = True
                if isinstance(exc, LoadError):
                    exc.placed = self.filled
                if error is not None:
                    exc.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
                raise
        return same


async def load_together(
    gathering: Gathering,
    turn: asyncio.Lock,
    load: Callable[[Gathering], Awaitable[Any]] | None,
    refusal: BaseException | None = None,
) -> Any:
    """Load with the other ranks.

    Args:
        gathering: this load.
        turn: lets one load of all ranks go on at a time, in the order of the calls, which is the same on every rank.
        load: loads, and agrees once with the others before it changes anything; None if it can't even begin.
        refusal: why not.
    """
    with anyio.CancelScope(shield=True):  # a rank that leaves alone would leave the others waiting
        await turn.acquire()
    try:
        try:
            if load is None:
                raise refusal or LoadError(f"{gathering.what} was refused")
            result = await load(gathering)
        except BaseException as exc:
            if gathering.failed:
                raise
            await gathering.agree(_told(exc, gathering.what))
            raise
        await gathering.agree()
        return result
    finally:
        turn.release()


def _told(error: BaseException, what: str) -> BaseException:
    return error if isinstance(error, Exception) else LoadError(f"{what} was cancelled")


async def _who_reads_the_same(readers: Sequence[tuple[str, int]]) -> list[bool]:
    counts = Counter(readers)
    return [reads != 0 and counts[host, reads] > 1 for host, reads in readers]
