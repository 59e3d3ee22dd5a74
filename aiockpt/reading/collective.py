"""Collective loads: every rank loads into its part of a state, and all succeed or all fail with the same error.

Each rank reads the bytes that it needs. The ranks agree at up to three points:

| round | when | so that |
| --- | --- | --- |
| 1 | the load is planned, before the first byte reaches a target | a refusal changes nothing on any rank |
| 2 | all tensors are filled | no live object is given a state if a rank failed |
| 3 | live objects were given their states; skipped if no rank has any | all ranks report the same outcome |
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError, LoadError
from aiockpt.reading.read_plan import annotate

if TYPE_CHECKING:
    from aiockpt.coordination.coordinator import Coordinator
    from aiockpt.reading.apply_live import Filled

_leavers: set[asyncio.Future[None]] = set()
"""Tasks that notify the other ranks of a cancellation; asyncio itself holds tasks only weakly."""


class Gathering:
    """This rank's part in one load of all ranks."""

    def __init__(self, coordinator: Coordinator, path: str) -> None:
        self._coordinator = coordinator
        self._call = coordinator.call("load")
        self.what = f"the load of {path}"
        self.failed = False  # the ranks have agreed on it
        self.filled: tuple[str, ...] = ()  # the keys that this rank has filled
        self.is_handing_over = False  # a rank has live objects, so that there is a third round
        self._agreed = 0  # rounds
        self._round: asyncio.Future[Any] | None = None

    async def meet(self, error: BaseException | None = None, reads: int = 0) -> bool:
        """Report success or ``error`` to the other ranks, and wait for theirs; ``reads`` is `TargetPlan.read_hash`.

        Cancelling returns at once; `leave` then notifies the other ranks. Returns whether another rank of this host is
        about to read the same bytes.
        """
        mine = (socket.gethostname(), reads) if error is None else error
        same: bool = await self._meet(mine, _read_the_same, error)
        return same

    async def meet_filled(self, *, has_objects: bool) -> None:
        """Report that this rank has filled its tensors, and whether it has live objects; see `meet`."""
        await self._meet(has_objects, _any_hands_over)

    async def _meet(
        self, mine: Any, decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], error: BaseException | None = None
    ) -> Any:
        if (
            isinstance(error, LoadError) and error._state
        ):  # the other ranks get it without the state of this rank's tensors
            mine = copy.copy(error)
            mine._state = ""
        round_ = self._coordinator.round(self._call, self.what, mine, decide)
        self._round = asyncio.ensure_future(self._counted(round_))
        try:
            return await asyncio.shield(self._round)
        except LoadError as exc:
            # All ranks raise the same new error; on this rank it has the attributes of the original, such as keys.
            if error is not None:
                exc.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
            elif self._agreed:
                annotate(exc, len(self.filled), self.filled)
            if exc.__cause__ is mine:
                exc.__cause__ = error
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

    async def leave(self) -> None:
        """Report the cancellation of this rank in the next round, if there is one."""
        with contextlib.suppress(AiockptError):
            if self._round is not None:
                await self._round
            if self._agreed < (3 if self.is_handing_over else 2) and not self.failed:
                await self.meet(LoadError(f"{self.what} was cancelled"))


async def load_together(
    gathering: Gathering,
    turn: asyncio.Lock,
    load: Callable[[Gathering], Awaitable[Filled]],
) -> Filled:
    """Load with the other ranks. Cancelling returns at once; a background task notifies the other ranks.

    ``turn`` is held during a load, so that the loads of all ranks run one by one, in the order of the calls. If any
    rank has live objects, `conclude` releases it. ``load`` calls `Gathering.agree` before it changes anything.
    """
    # A task of its own: a cancelled load takes its turn all the same, because the other ranks wait for it in this
    # order.
    mine = asyncio.ensure_future(turn.acquire())
    with _ending_turn(gathering, turn, mine):
        await asyncio.shield(mine)
        try:
            result = await load(gathering)
        except Exception as exc:
            if not gathering.failed:
                await gathering.meet(exc)
            raise
        await gathering.meet_filled(has_objects=bool(result.gifts))
    if not gathering.is_handing_over:
        turn.release()
    return result


async def conclude(gathering: Gathering, turn: asyncio.Lock, error: BaseException | None) -> None:
    """Agree on whether all live objects were given their states, and end the turn; see `load_together`."""
    with _ending_turn(gathering, turn):
        await gathering.meet(error)
    turn.release()


@contextlib.contextmanager
def _ending_turn(gathering: Gathering, turn: asyncio.Lock, mine: asyncio.Future[Any] | None = None) -> Iterator[None]:
    """End the turn after an error; after a cancellation a task does so when it has notified the other ranks."""
    try:
        yield
    except asyncio.CancelledError:
        leaving = asyncio.ensure_future(_leave(gathering, mine, turn))
        _leavers.add(leaving)
        leaving.add_done_callback(_leavers.discard)
        raise
    except BaseException:
        turn.release()
        raise


async def _leave(gathering: Gathering, mine: asyncio.Future[Any] | None, turn: asyncio.Lock) -> None:
    """Report the cancellation when the other ranks arrive, then end the turn."""
    if mine is not None:
        await mine
    try:
        await gathering.leave()
    finally:
        turn.release()


async def _read_the_same(readers: Sequence[tuple[str, int]]) -> list[bool]:
    counts = Counter(readers)
    return [reads != 0 and counts[host, reads] > 1 for host, reads in readers]


async def _any_hands_over(ranks: Sequence[bool]) -> list[bool]:
    return [any(ranks)] * len(ranks)
