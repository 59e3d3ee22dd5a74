"""Rank 0's part in a save by several ranks: it plans for all, begins, and publishes."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiockpt.errors import SaveError
from aiockpt.planning.collective.cache import GlobalPlanCache, cache_of
from aiockpt.planning.collective.messages import PlanRequest, RankAssignment, Summary, Written
from aiockpt.storage.base import shared_storage
from aiockpt.writing.collective_commit import WorldFacts, publish_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiockpt.coordination.base import Coordinator
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import SharedTransaction

_ALIKE = {"overwrite": "overwrite", "decentralized": "decentralized planning", "form": "the form (io_threads, hints)"}


@dataclass(slots=True)
class CollectiveResources:
    """What belongs to an engine that saves together with others.

    Attributes:
        coordinator: the way to the other ranks.
        planner: plans this rank's share.
        decentralized: whether each rank decides alone what it writes.
        books: on rank 0, for each form the plan of all ranks that was made last.
        tokens: on rank 0, numbers for plans, none of which is given twice.
        met: whether the ranks have found each other for the second rounds as well.
    """

    coordinator: Coordinator
    planner: LocalPlanner
    decentralized: bool = False
    books: dict[str, GlobalPlanCache] = field(default_factory=dict)
    tokens: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    met: bool = False


class GlobalSave:
    """Leads one save.

    Args:
        job: the save, as rank 0 has it.
        form: the name of its form.
        world: the plans that are kept, and numbers for new ones.
        compute: threads to plan in.
        io: threads to write in.

    Attributes:
        transaction: what was begun.
    """

    def __init__(self, job: SaveJob, form: str, world: CollectiveResources, compute: Workers, io: Workers) -> None:
        self.transaction: SharedTransaction | None = None
        self._job = job
        self._form = form
        self._books = world.books
        self._tokens = world.tokens
        self._compute = compute
        self._io = io
        # Of this save: the next one may be planned otherwise before this one is published.
        self._book: GlobalPlanCache | None = None
        self._token = 0

    async def decide(self, calls: Sequence[PlanRequest]) -> list[RankAssignment]:
        """Plan for all ranks, and begin.

        Raises:
            SaveError: the ranks contradict each other.
            WriteError: it can't be begun.
        """
        self._check_alike(calls)
        book = self._books.get(self._form)
        fresh = book is None or any(call.token != book.token for call in calls)
        self._token = book.token if book is not None and not fresh else next(self._tokens)
        if fresh and calls[0].decentralized:
            book = None
        elif fresh:
            book = await self._plan(book, calls)
            if book is None:
                return [RankAssignment(None, 0, None, report_places=False)] * len(calls)
            self._books[self._form] = book
        self._book = book
        job = self._job
        storage = shared_storage(job.spec.storage)
        self.transaction = await storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        shares: Sequence[list[int] | None] = (
            book.plan.assignments if fresh and book is not None else [None] * len(calls)
        )
        tell, secret = book is None or not book.knows_places, secrets.token_bytes(32)
        return [
            RankAssignment(self.transaction.ticket, self._token, share, report_places=tell, secret=secret)
            for share in shares
        ]

    def _check_alike(self, calls: Sequence[PlanRequest]) -> None:
        for rank, call in enumerate(calls):
            for name, what in _ALIKE.items():
                mine, theirs = getattr(calls[0], name), getattr(call, name)
                if mine != theirs:
                    raise SaveError(
                        f"{what} is {mine} on rank 0 but {theirs} on rank {rank}; all ranks must pass the same"
                    )

    async def _plan(self, book: GlobalPlanCache | None, calls: Sequence[PlanRequest]) -> GlobalPlanCache | None:
        """Plan anew with what the ranks have; None if some have not said it."""
        holdings = [
            call.inventory or (book.ranks[rank] if book is not None and call.token == book.token else None)
            for rank, call in enumerate(calls)
        ]
        known = [each for each in holdings if each is not None]
        return await self._compute.run(cache_of, self._token, known) if len(known) == len(calls) else None

    async def publish(self, results: Sequence[Written]) -> list[Summary]:
        """Check what all ranks have written, write the index, and publish.

        Raises:
            SaveError: something is missing.
            WriteError: the index can't be written.
            CommitError: it can't be published.
        """
        if self.transaction is None:
            raise RuntimeError("a save can't be published before it has begun")
        facts = self._facts()
        book, summaries = await publish_together(self.transaction, self._book, facts, results, self._compute)
        if self._book is None:  # each rank has decided alone what it writes
            self._book = self._books[self._form] = book
        return summaries

    def _facts(self) -> WorldFacts:
        job = self._job
        return WorldFacts(self._token, dict(job.spec.metadata), {"captured": job.captured_s}, job.spec.started)

    def parting(self) -> tuple[GlobalPlanCache | None, WorldFacts]:
        """Give what it takes to publish."""
        return self._book, self._facts()

    async def undo(self) -> None:
        """Remove what all ranks have written."""
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            await transaction.abort()
