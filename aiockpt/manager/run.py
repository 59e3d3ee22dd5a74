"""A run as all parts of its manager see it: its directory, what rank 0 does for all ranks, and methods that wait.

Methods that wait are written once, as coroutines: in the async manager they suspend, in the blocking one they block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.errors import AiockptError

if TYPE_CHECKING:
    from aiockpt.engine.facade import EngineAccess
    from aiockpt.manager.retention import Retention
    from aiockpt.manager.scan import StepScanner

T = TypeVar("T")


class ManagedRun(ABC):
    """The base of a manager."""

    directory: str
    writes: bool
    _access: EngineAccess
    _scanner: StepScanner
    _retention: Retention

    @abstractmethod
    async def _call(self, method: str, *args: object, **options: object) -> Any:
        """Call a method of the checkpointer, and wait for its result."""

    @abstractmethod
    async def _inspect(self, path: str) -> Mapping[str, Any]:
        """Open a checkpoint, which checks its structure and the sizes of its files; return the info of each key."""

    @abstractmethod
    async def _agree(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> T:
        """Agree with the other ranks; see `EngineAccess.agree`."""

    @abstractmethod
    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that blocks."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides, or there are no other ranks."""
        return self._access.leads

    async def _led(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do something on rank 0 alone; its result, or its error, is that of all ranks."""
        if self._access.world_size == 1:
            return await work()
        value: T | BaseException | None = None
        error: BaseException | None = None
        if self.leads:
            try:
                value = await work()
            except BaseException as exc:  # raised below, once the other ranks have been notified
                error = exc
                value = exc if isinstance(exc, Exception) else AiockptError(f"{what} was interrupted: {exc!r}")
        try:
            result: T = await self._agree(what, value, of_rank_0)
        except AiockptError:
            # The error itself: what the other ranks get is made of its class name and text, and lacks its attributes.
            if error is not None:
                raise error from None
            raise
        return result


def of_rank_0(values: Sequence[Any]) -> Any:
    """Return the value of rank 0, for `EngineAccess.agree`."""
    return values[0]
