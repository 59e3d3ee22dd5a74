"""Rank 0 in a save by several ranks: plan for all of them, begin the transaction, publish."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiockpt.errors import SaveError
from aiockpt.planning.collective.cache import SharedPlanCache, plan_cache_of
from aiockpt.planning.collective.messages import PlanRequest, RankAssignment, Written
from aiockpt.storage.base import shared_storage
from aiockpt.writing.collective_commit import WorldFacts, publish_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiockpt.coordination.coordinator import Coordinator
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.cache import GlobalPlanCache
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.planning.planner import FileFormat, SharedFiles, Summary
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import SharedTransaction

_ALIKE = {
    "overwrite": "overwrite",
    "decentralized": "decentralized planning",
    "form": "the form (format, io_threads, hints, division into files)",
}


@dataclass(slots=True)
class CollectiveResources:
    """State that an engine keeps for saving with other ranks."""

    coordinator: Coordinator
    planner: LocalPlanner
    decentralized: bool = False  # each rank decides alone what it writes
    plans: dict[str, GlobalPlanCache] = field(default_factory=dict)  # rank 0: the latest global plan of each format
    tokens: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # rank 0: numbers for global plans
    connected: bool = False  # the lane of the second rounds is connected as well


class GlobalSave:
    """One save as rank 0 leads it."""

    def __init__(
        self, job: SaveJob, form: FileFormat, world: CollectiveResources, compute: Workers, io: Workers
    ) -> None:
        self.transaction: SharedTransaction | None = None
        self._job = job
        self._form = form
        self._plans = world.plans
        self._tokens = world.tokens
        self._compute = compute
        self._io = io
        # The plan of this save: the next save may be planned anew before this one is published.
        self._plan: GlobalPlanCache | None = None
        self._token = 0

    async def decide(self, requests: Sequence[PlanRequest]) -> list[RankAssignment]:
        """Plan for all ranks, and begin the transaction."""
        self._check_alike(requests)
        kept = self._plans.get(self._form.name)
        is_new = kept is None or any(request.token != kept.token for request in requests)
        self._token = kept.token if kept is not None and not is_new else next(self._tokens)
        plan = kept
        if is_new and requests[0].decentralized:
            plan = None
        elif is_new:
            plan = await self._plan_anew(kept, requests)
            if plan is None:  # a rank has sent a token alone, which is not that of the kept plan: all send inventories
                return [RankAssignment(None, 0, None, report_places=False)] * len(requests)
            self._plans[self._form.name] = plan
        self._plan = plan
        job = self._job
        storage = shared_storage(job.spec.storage)
        self.transaction = await storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        shares: Sequence[list[int] | None] = [None] * len(requests)  # the same as in the last save
        shared: Sequence[SharedFiles | None] = [None] * len(requests)
        if is_new and plan is not None:
            shares = plan.plan.assignments
        if isinstance(plan, SharedPlanCache):
            for name, nbytes in plan.sizes.items():
                await self.transaction.reserve("" if plan.is_single_file else name, nbytes)
            if is_new:
                shared = [plan.share_of(rank) for rank in range(len(requests))]
        report, secret = plan is None or not plan.knows_places, secrets.token_bytes(32)
        return [
            RankAssignment(self.transaction.ticket, self._token, share, report, secret, files)
            for share, files in zip(shares, shared, strict=True)
        ]

    def _check_alike(self, requests: Sequence[PlanRequest]) -> None:
        for rank, request in enumerate(requests):
            for name, what in _ALIKE.items():
                mine, theirs = getattr(requests[0], name), getattr(request, name)
                if mine != theirs:
                    raise SaveError(
                        f"{what} is {mine} on rank 0 but {theirs} on rank {rank}; all ranks must pass the same"
                    )

    async def _plan_anew(self, kept: GlobalPlanCache | None, requests: Sequence[PlanRequest]) -> GlobalPlanCache | None:
        """Plan from the ranks' inventories; return None if one of them is not known here."""
        inventories = [
            request.inventory or (kept.ranks[rank] if kept is not None and request.token == kept.token else None)
            for rank, request in enumerate(requests)
        ]
        known = [each for each in inventories if each is not None]
        return (
            await self._compute.run(plan_cache_of, self._token, known, self._form)
            if len(known) == len(requests)
            else None
        )

    async def publish(self, results: Sequence[Written]) -> list[Summary]:
        """Check what all ranks have written, write the metadata and the manifest, and publish."""
        if self.transaction is None:
            raise RuntimeError("a save can't be published before it has begun")
        facts = self._facts()
        plan, summaries = await publish_together(self.transaction, self._plan, facts, results, self._compute)
        if self._plan is None:  # each rank has decided alone what it writes, so the plan was made from the results
            self._plan = self._plans[self._form.name] = plan
        return summaries

    def _facts(self) -> WorldFacts:
        job = self._job
        return WorldFacts(self._token, dict(job.spec.metadata), {"captured": job.captured_s}, job.spec.started)

    def commit_facts(self) -> tuple[GlobalPlanCache | None, WorldFacts]:
        """Return what a writer process needs to publish in rank 0's place."""
        return self._plan, self._facts()

    async def undo(self) -> None:
        """Remove what all ranks have written."""
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            await transaction.abort()
