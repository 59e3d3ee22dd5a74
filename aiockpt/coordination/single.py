"""A world of one rank: every round is decided at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.coordination.base import Coordinator, Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


class SingleCoordinator(Coordinator):
    """Agrees with itself."""

    rank = 0
    world_size = 1

    async def round(
        self,
        lane: Lane,
        what: str,
        mine: Any,
        decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Decide; see `Coordinator.round`."""
        try:
            if isinstance(mine, BaseException):
                raise mine
            (reply,) = await decide([mine])
        except BaseException:
            if undo is not None:
                await undo()
            raise
        return reply

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""
