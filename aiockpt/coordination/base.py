"""The interface between the engine and the other ranks: rounds, in which all agree or all fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiockpt import errors
from aiockpt.errors import AiockptError, CoordinationError, LoadError, SaveError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Lane = Literal["plan", "finish", "load"]
"""What a round belongs to. Within a lane, rounds come one after the other, in the same order on every rank; rounds
of different lanes don't wait for each other, so that the next save is planned while this one is written."""


class RemoteError(NamedTuple):
    """An error on its way to the other ranks.

    Attributes:
        rank: where it happened.
        kind: the name of its class in `aiockpt.errors`.
        message: its text.
    """

    rank: int
    kind: str
    message: str


def remote_error_of(rank: int, error: BaseException) -> RemoteError:
    """Describe an error for the other ranks."""
    kind = type(error).__name__ if isinstance(error, AiockptError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return RemoteError(rank, kind, text)


def error_of(trouble: RemoteError, what: str, cause: BaseException | None = None) -> AiockptError:
    """Make the error that every rank raises.

    Args:
        trouble: what happened, and on which rank.
        what: what all ranks were at, such as ``the save of runs/a``.
        cause: the error itself, on the rank where it happened.
    """
    default = LoadError if what.startswith("the load") else SaveError
    kind = getattr(errors, trouble.kind, default) if trouble.kind else default
    if not (isinstance(kind, type) and issubclass(kind, AiockptError)):
        kind = default
    named = kind is CoordinationError or trouble.message.startswith("rank ")
    error = kind(trouble.message if named else f"rank {trouble.rank}: {trouble.message}")
    error.__cause__ = cause
    return error


class Coordinator(ABC):
    """One rank's way to the others. Rank 0 leads.

    Attributes:
        rank: the number of this rank in its group, from 0.
        world_size: how many ranks there are.
    """

    rank: int
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
    async def round(
        self,
        lane: Lane,
        what: str,
        mine: Any,
        decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Bring a value, or the error that this rank has met, to rank 0; get its reply.

        Every rank calls it once for each round of a lane, in the same order. When all have brought values, rank 0
        runs ``decide`` with them, in the order of the ranks, which gives a reply for each. When a rank has brought
        an error, is gone, or does not come within the timeout, or when ``decide`` fails, every rank's call raises
        the same error, which names the rank. Once ``decide`` has succeeded the round has: a rank that is gone when
        it is to be told does not change that for the others, but fails their next round.

        A cancellation that comes while it waits is delivered when the round is over: a rank that left alone would
        leave the others waiting.

        Args:
            lane: what the round belongs to.
            what: what all ranks are at, such as ``the save of runs/a``; for messages. All must be at the same.
            mine: a value that can be pickled, or an exception.
            decide: runs on rank 0 only, in the event loop.
            undo: runs on rank 0 only, when the round fails, before any rank is told.

        Returns:
            The reply for this rank.

        Raises:
            AiockptError: of the class of the error that a rank has brought; its message names the rank, and on
                that rank the error itself is the cause.
            CoordinationError: a rank is gone or did not come in time.
        """

    def abandon(self) -> None:
        """Let rounds that are on, and those to come, fail here instead of waiting. From any thread; does not block."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and connections. Blocks; idempotent."""
