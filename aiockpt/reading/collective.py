"""Collective loads: every rank loads into its part of a state, and all succeed or all fail with the same error.

The ranks meet in up to four rounds:

| round | when | so that |
| --- | --- | --- |
| share | it is planned what to read; skipped if no rank shares | one rank reads what several need |
| check | everything is checked, before the first byte reaches a target | a refusal changes nothing on any rank |
| fill | all tensors are filled | no live object is given a state if a rank failed |
| end | live objects were given their states; skipped if no rank has any | all ranks report the same outcome |

Whether it shares each rank decides itself. One that does not comes to the first round for the check, and once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiockpt.coordination.wires import Wires
from aiockpt.errors import AiockptError, CoordinationError, LoadError
from aiockpt.planning.collective.sharing import plan_shares, shares_of
from aiockpt.reading.read_plan import annotate
from aiockpt.reading.sharing import SharedReads

if TYPE_CHECKING:
    from aiockpt.coordination.coordinator import Coordinator
    from aiockpt.coordination.link import Endpoint
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.sharing import Need, Share
    from aiockpt.reading.apply_live import Filled
    from aiockpt.reading.decoded import DecodedSource
    from aiockpt.storage.base import Source

logger = logging.getLogger("aiockpt")

_MOST_RANKS = 64
"""Ranks that share: each has a connection to all others, and sends to them."""


class _Offer(NamedTuple):
    """A rank comes to share its reads."""

    checkpoint: int  # a hash of its contents: bytes of another one are of no use
    endpoint: Endpoint | None  # None: others can't connect to it, or it needs nothing
    needs: Sequence[Need]


class _Checked(NamedTuple):
    """A rank comes to agree that it can load."""

    host: str
    reads: int  # a hash


class _Again(NamedTuple):
    """Of the same round, the ranks that share will come for the check in the next one."""


class _Sharing(NamedTuple):
    """A rank's part of the plan."""

    shares: Sequence[Share]
    endpoints: Mapping[int, Endpoint]  # of the ranks that read for it


class Gathering:
    """This rank's part in one load of all ranks.

    ``turn`` is held during a load, so that the loads of all ranks run one by one, in the order of the calls.
    ``start_behind`` starts the task that reports a cancellation.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        path: str,
        share: Literal["auto"] | bool,
        turn: asyncio.Lock,
        start_behind: Callable[[Callable[[], Coroutine[Any, Any, None]]], object],
    ) -> None:
        self._coordinator = coordinator
        self._turn = turn
        self._start_behind = start_behind
        self.call = coordinator.call("load")
        self._share = share
        self.what = f"the load of {path}"
        self.failed = False  # the ranks have agreed on it
        self.filled: tuple[str, ...] = ()  # the keys that this rank has filled
        self.is_handing_over = False  # a rank has live objects, so that there is a round at the end
        self._agreed = 0  # rounds after the first one, if that is to share
        self._round: asyncio.Future[Any] | None = None

    def shares(self, source: Source) -> bool:
        """Return whether this rank shares what it reads from a source."""
        return source.is_remote if self._share == "auto" else self._share

    async def share(
        self, checkpoint: int, needs: Sequence[Need], source: DecodedSource, workers: Workers
    ) -> SharedReads:
        """Agree on which rank reads what for which others, and connect to these; see `meet`.

        Args:
            checkpoint: a hash of its contents.
            needs: of this rank.
            source: what it reads from.
            workers: threads to read, to send and to receive.
        """
        rank, timeout_s = self._coordinator.rank, self._coordinator.timeout_s
        wires = Wires(rank, timeout_s)
        try:
            endpoint = None
            try:
                endpoint = await wires.listen(await self._coordinator.addresses(self.what)) if needs else None
            except (OSError, CoordinationError) as exc:
                logger.warning("%s: this rank reads alone, for others can't connect to it: %s", self.what, exc)
            offer = _Offer(checkpoint, endpoint, () if endpoint is None else needs)
            given: _Sharing = await self._meet(offer, partial(_agree_on_reads, workers))
            takers = {taker for share in given.shares if share.reader == rank for taker, *_ in share.takers}
            await wires.connect(given.endpoints, takers)
            shares = {cell: share for share in given.shares for cell in share.cells}
            return SharedReads(rank, shares, wires, source, workers)
        except BaseException:
            wires.close()
            raise

    async def meet(self, error: BaseException | None = None, reads: int = 0) -> bool:
        """Report success or ``error`` to the other ranks, and wait for theirs; ``reads`` is `TargetPlan.read_hash`.

        Cancelling returns at once; `_leave` then notifies the other ranks. Returns whether another rank of this host is
        about to read the same bytes.
        """
        mine = _Checked(socket.gethostname(), reads) if error is None else error
        while True:
            reply = await self._meet(mine, partial(_agree_on_reads, None), error)
            if not isinstance(reply, _Again):
                return bool(reply)

    async def meet_filled(self, *, has_objects: bool) -> None:
        """Report that this rank has filled its tensors, and whether it has live objects; see `meet`."""

        async def any_has(ranks: Sequence[bool]) -> list[bool]:
            return [any(ranks)] * len(ranks)

        await self._meet(has_objects, any_has)

    async def _meet(
        self, mine: Any, decide: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], error: BaseException | None = None
    ) -> Any:
        if isinstance(error, LoadError) and error._state:  # the others get it without the state of this rank's tensors
            mine = copy.copy(error)
            mine._state = ""
        round_ = self._coordinator.round(self.call, self.what, mine, decide)
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
        self._agreed += not isinstance(reply, _Again | _Sharing)
        if self._agreed == 2:
            self.is_handing_over = reply
        return reply

    # --- the turn -----------------------------------------------------------------------------------------

    async def run(self, load: Callable[[Gathering], Awaitable[Filled]]) -> Filled:
        """Load with the other ranks. Cancelling returns at once; a background task notifies the other ranks.

        ``load`` calls `meet` before it changes anything. If any rank has live objects, `conclude` ends the turn.
        """
        # A task of its own: a cancelled load takes its turn all the same, because the other ranks wait for it in this
        # order.
        mine = asyncio.ensure_future(self._turn.acquire())
        with self._ending_turn(mine):
            await asyncio.shield(mine)
            try:
                result = await load(self)
            except Exception as exc:
                if not self.failed:
                    await self.meet(exc)
                raise
            await self.meet_filled(has_objects=bool(result.gifts))
        if not self.is_handing_over:
            self._turn.release()
        return result

    async def conclude(self, error: BaseException | None) -> None:
        """Agree on whether all live objects were given their states, and end the turn."""
        with self._ending_turn():
            await self.meet(error)
        self._turn.release()

    @contextlib.contextmanager
    def _ending_turn(self, mine: asyncio.Future[Any] | None = None) -> Iterator[None]:
        """End the turn after an error; after a cancellation a task does so when it has notified the other ranks."""
        try:
            yield
        except asyncio.CancelledError:
            self._start_behind(partial(self._leave, mine))
            raise
        except BaseException:
            self._turn.release()
            raise

    async def _leave(self, mine: asyncio.Future[Any] | None) -> None:
        """Report the cancellation in the next round, if there is one, then end the turn."""
        if mine is not None:
            await mine
        try:
            with contextlib.suppress(AiockptError):
                if self._round is not None:
                    await self._round
                if self._agreed < (3 if self.is_handing_over else 2) and not self.failed:
                    await self.meet(LoadError(f"{self.what} was cancelled"))
        except Exception:  # the engine must not end with it
            logger.exception("%s: the other ranks could not be told that it was cancelled", self.what)
        finally:
            self._turn.release()


async def _agree_on_reads(workers: Workers | None, ranks: Sequence[_Offer | _Checked]) -> Sequence[object]:
    """Plan what is shared; if no rank shares, return for each whether another one of its host reads the same."""
    offers = {rank: each for rank, each in enumerate(ranks) if isinstance(each, _Offer)}
    if not offers:
        counts = Counter(ranks)
        return [isinstance(each, _Checked) and each.reads != 0 and counts[each] > 1 for each in ranks]
    plan = _plan(offers) if workers is None else await workers.run(_plan, offers)
    again = _Again()
    return [plan.get(rank, again) for rank in range(len(ranks))]


def _plan(offers: Mapping[int, _Offer]) -> dict[int, _Sharing]:
    found: dict[int, _Sharing] = {}
    together: defaultdict[int, list[int]] = defaultdict(list)
    for rank, offer in offers.items():
        together[offer.checkpoint].append(rank)
    for group in (ranks[n : n + _MOST_RANKS] for ranks in together.values() for n in range(0, len(ranks), _MOST_RANKS)):
        shares = plan_shares({rank: offers[rank].needs for rank in group})
        for rank in group:
            mine = shares_of(rank, shares)
            readers = {share.reader: offers[share.reader].endpoint for share in mine if share.reader != rank}
            found[rank] = _Sharing(mine, {reader: where for reader, where in readers.items() if where is not None})
    return found
