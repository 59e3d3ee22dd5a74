"""The interface to the other ranks: rounds, in which all ranks agree or all fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

Lane = Literal["plan", "finish", "load", "agree"]
"""Rounds of one lane run one after the other, in the same order on every rank. Rounds of different lanes don't wait
for each other, so that the next save is planned while this one is written."""

Decide = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Takes the values of all ranks, in rank order; returns a reply for each rank."""

Undo = Callable[[], Awaitable[None]]


class Coordinator(ABC):
    """One rank's connection to the other ranks of its group. Rank 0 leads."""

    rank: int  # in the group, from 0
    world_size: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def leader_lives(self) -> bool:
        """Whether rank 0 can still be reached, as far as this rank has noticed."""
        return True

    @abstractmethod
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

    def abandon(self) -> None:
        """Make current and later rounds of this rank fail instead of wait. From any thread; does not block."""

    @abstractmethod
    def close(self) -> None:
        """Close threads and connections. Blocks; idempotent."""
