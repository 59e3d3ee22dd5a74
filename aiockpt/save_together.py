"""Saves by several ranks: each writes its share; rank 0 plans, and publishes when all have written theirs.

A save has two rounds. In the first, each rank says what it has, or that it has the same as last time; rank 0 decides
who writes what, and begins. In the second, each says what it has written; rank 0 checks that nothing is missing,
writes the index, and publishes. A rank that fails between them brings its error to the second, where all fail with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
from isal.isal_zlib import crc32

from aiockpt.course import Course, Transferred
from aiockpt.errors import AiockptError, CoordinationError, SaveCancelledError, SaveError, TornSnapshotError
from aiockpt.format.manifest import MANIFEST_NAME, FileFacts
from aiockpt.format.metadata import METADATA_NAME
from aiockpt.planning.dcp_plan import DcpPlan
from aiockpt.planning.world_book import WorldBook, Written, files_of
from aiockpt.planning.world_plan import Holdings, plan_world
from aiockpt.planning.world_planner import holdings_of, places_of
from aiockpt.save_alone import write_documents
from aiockpt.save_summary import world_manifest, world_result
from aiockpt.staging.base import LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.coordination.base import Coordinator
    from aiockpt.handle import SaveResult
    from aiockpt.job import SaveJob
    from aiockpt.planning.dcp_plan import DcpForm
    from aiockpt.planning.plans import SavePlan
    from aiockpt.planning.world_planner import Offer, WorldPlanner
    from aiockpt.storage.base import Transaction
    from aiockpt.threads import Workers


@dataclass(frozen=True, slots=True)
class WorldTools:
    """What belongs to an engine that saves together with others.

    Attributes:
        coordinator: the way to the other ranks.
        planner: plans this rank's share.
        books: on rank 0, for each form the plan of all ranks that was made last.
    """

    coordinator: Coordinator
    planner: WorldPlanner
    books: dict[str, WorldBook] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a rank brings to the first round.

    Attributes:
        overwrite: as the caller said.
        token: the plan of all ranks that the rank's kept layout belongs to, if that may serve.
        holdings: what the rank has, where it does not.
    """

    overwrite: bool
    token: int | None
    holdings: Holdings | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Orders:
    """What rank 0 replies.

    Attributes:
        ticket: for taking part in the transaction; None: come again, with all that you have.
        token: the plan of all ranks.
        leaves: what to write; None: the same as last time.
        tell_places: say where the items are.
    """

    ticket: str | None
    token: int
    leaves: list[int] | None = field(repr=False)
    tell_places: bool


class TogetherCourse(Course):
    """Plans, begins and commits a save with the other ranks.

    Args:
        job: the save.
        form: the format.
        world: the other ranks, and what is kept for saving with them.
        previous: the save before, whose rounds come before this one's.
        compute: threads to plan in.
        io: threads to write in.
    """

    def __init__(
        self, job: SaveJob, form: DcpForm, world: WorldTools, previous: SaveJob | None, compute: Workers, io: Workers
    ) -> None:
        self._job = job
        self._form = form
        self._world = world
        self._previous = previous
        self._compute = compute
        self._io = io
        self._what = f"the save of {job.path}"
        self._transaction: Transaction | None = None
        self._ticket = ""
        self._tell_places = False
        self._over = False

    async def plan(self) -> SavePlan:
        """Agree with the other ranks on who writes what. A cancellation takes effect when they have agreed."""
        with anyio.CancelScope(shield=True):  # a rank that leaves alone would leave the others waiting
            if self._previous is not None:
                await self._previous.planned.wait()
            mine, offer = await self._look()
            orders = await self._first_round(mine)
            if orders.ticket is None:
                mine, offer = await self._look(again=False)
                orders = await self._first_round(mine)
        self._ticket, self._tell_places = orders.ticket or "", orders.tell_places
        try:
            return await self._share(offer, orders)
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                error = await self.fail(exc)
            raise error from error.__cause__

    async def _look(self, *, again: bool = True) -> tuple[_Call | BaseException, Offer | None]:
        job = self._job
        try:
            if job.refused is not None:
                return job.refused, None
            if job.cancel_asked:
                return SaveCancelledError(f"the save of {job.path} was cancelled"), None
            offer = await self._compute.run(self._world.planner.offer, job.capture, self._form, again=again)
            holdings = None
            if offer.survey is not None:
                holdings = await self._compute.run(holdings_of, offer.survey, job.capture)
        except Exception as exc:  # goes to all ranks, this one among them
            return exc, None
        return _Call(job.overwrite, offer.token, holdings), offer

    async def _first_round(self, mine: _Call | BaseException) -> _Orders:
        orders: _Orders = await self._world.coordinator.round("plan", self._what, mine, self._decide, self._undo)
        return orders

    async def _share(self, offer: Offer | None, orders: _Orders) -> DcpPlan:
        if offer is None:
            raise RuntimeError("a rank that brought an error was given orders")
        if orders.leaves is None and offer.plan is not None:
            return offer.plan
        job, planner = self._job, self._world.planner
        survey = offer.survey
        if survey is None:  # the layout would serve, but another rank's has changed, and with it who writes what
            survey = (await self._compute.run(planner.offer, job.capture, self._form, again=False)).survey
        if survey is None or orders.leaves is None:
            raise RuntimeError("rank 0 has given no orders to a rank without a plan")
        return await self._compute.run(planner.take, job.capture, self._form, survey, orders.token, orders.leaves)

    # --- rank 0 -----------------------------------------------------------------------------------

    async def _decide(self, calls: Sequence[_Call]) -> list[_Orders]:
        """Plan for all ranks, and begin."""
        book = self._world.books.get(self._form.name)
        token = book.token if book is not None else None
        fresh = book is None or any(call.token != token for call in calls)
        if fresh:
            known = book.ranks if book is not None else []
            holdings = [
                call.holdings or (known[rank] if call.token is not None and call.token == token else None)
                for rank, call in enumerate(calls)
            ]
            complete = [each for each in holdings if each is not None]
            if len(complete) < len(calls):
                return [_Orders(None, 0, None, False)] * len(calls)
            book = await self._compute.run(_make_book, (token or 0) + 1, complete)
            self._world.books[self._form.name] = book
        if book is None:
            raise RuntimeError("there is no plan")
        job = self._job
        if len({call.overwrite for call in calls}) > 1:
            raise SaveError("overwrite= differs between the ranks; all must pass the same")
        self._transaction = await job.storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        shares: Sequence[list[int] | None] = book.plan.shares if fresh else [None] * len(calls)
        return [_Orders(self._transaction.ticket, book.token, share, not book.knows_places) for share in shares]

    async def _publish(self, results: Sequence[Written]) -> list[_Summary]:
        """Check what all ranks have written, write the index, and publish."""
        book, transaction, job = self._world.books[self._form.name], self._transaction, self._job
        if transaction is None:
            raise RuntimeError("a save can't be published before it has begun")
        await self._compute.run(book.check, results)
        files = files_of(results)
        await self._look_for(transaction, results)
        document = await self._compute.run(book.documents, results)
        files = {**files, METADATA_NAME: FileFacts(len(document), crc32(document))}
        manifest = await self._compute.run(world_manifest, job, book, files, len(results))
        await write_documents(transaction, {MANIFEST_NAME: manifest, METADATA_NAME: document})
        await transaction.commit()
        summary = _Summary(
            {name: facts.nbytes for name, facts in files.items()}, book.tensor_bytes, book.tensors, book.objects
        )
        return [summary] * len(results)

    @staticmethod
    async def _look_for(transaction: Transaction, results: Sequence[Written]) -> None:
        """Check that the files of all ranks can be seen from here."""
        seen = await transaction.sizes()
        for rank, written in enumerate(results):
            for name, facts in written.files.items():
                if seen.get(name) != facts.nbytes:
                    found = "is not there" if name not in seen else f"has {seen[name]} bytes there"
                    raise SaveError(
                        f"rank {rank} has written {name} ({facts.nbytes} bytes), which {found} as rank 0 sees it: all "
                        "ranks must save to one file system that every host has mounted"
                    )

    async def _undo(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.abort()

    # --- every rank -------------------------------------------------------------------------------

    async def begin(self) -> Transaction:
        """Take part in what rank 0 has begun."""
        if self._transaction is None:
            job = self._job
            self._transaction = await job.storage.join(job.path, self._ticket, workers=self._io)
        return self._transaction

    async def finish(self, transferred: Transferred) -> SaveResult:
        """Say what this rank has written, and wait until all of it is published."""
        plan, transaction, leads = transferred.plan, self._transaction, self._world.coordinator.leads
        if transaction is None or not isinstance(plan, DcpPlan):
            raise RuntimeError("a save can't be finished before it has begun")
        if not leads:
            await transaction.commit()
        places = places_of(plan.layout) if self._tell_places else None
        objects = dict(zip(plan.layout.objects, (place for _, place in plan.objects), strict=True))
        mine = Written(transferred.files, sum(map(len, transferred.crcs)), objects, places)
        summary: _Summary = await self._last_round(mine)
        return world_result(self._job, transferred.times_s, *summary.facts)

    async def _last_round(self, mine: Written | BaseException) -> Any:
        """Bring what was written, or an error, to rank 0; clean up if that fails."""
        if self._previous is not None:
            await self._previous.over.wait()
        self._over = True
        coordinator = self._world.coordinator
        try:
            return await coordinator.round("finish", self._what, mine, self._publish, self._undo)
        except CoordinationError:
            if not coordinator.leads and self._transaction is not None:
                await self._transaction.abort()
                if not coordinator.leader_lives:
                    await self._transaction.sweep()
            raise

    async def fail(self, error: BaseException) -> BaseException:
        """Bring an error to the other ranks; give the one that all of them raise."""
        if self._over:
            return error
        if isinstance(error, LayoutMismatchError):
            torn = TornSnapshotError(
                f"{error} changed its shape, dtype or device while {self._job.path} was being saved; await `staged` "
                "before changing tensors"
            )
            torn.__cause__ = error
            error = torn
        if not isinstance(error, Exception):
            error = SaveCancelledError(f"the save of {self._job.path} was cancelled; nothing of it is left")
        if not self._world.coordinator.leads and self._transaction is not None:
            await self._transaction.abort()
        try:
            await self._last_round(error)
        except AiockptError as exc:
            return exc
        return error


@dataclass(frozen=True, slots=True)
class _Summary:
    """What rank 0 tells all ranks of the checkpoint."""

    files: dict[str, int]
    tensor_bytes: int
    tensors: int
    objects: int

    @property
    def facts(self) -> tuple[dict[str, int], int, int, int]:
        return self.files, self.tensor_bytes, self.tensors, self.objects


def _make_book(token: int, holdings: Sequence[Holdings]) -> WorldBook:
    return WorldBook(token, holdings, plan_world(holdings))
