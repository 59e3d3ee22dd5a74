"""Saves by several ranks: each rank writes its share; rank 0 plans, and publishes when all have written.

A save has two rounds of messages. In the first, each rank sends its inventory, or the token of the last plan if nothing
has changed; rank 0 assigns every shard to a rank and begins the transaction. In the second, each rank reports what it
has written; rank 0 checks that nothing is missing, writes the metadata, and publishes. A rank that fails between the
rounds sends its error in the second, and all ranks fail with it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import anyio
import numpy as np

from aiockpt.core.wording import some_of
from aiockpt.errors import AiockptError, CoordinationError, SaveError, printable
from aiockpt.format.names import MANIFEST_NAME, SINGLE_NAME
from aiockpt.planning.collective.cache import GlobalPlanCache, plan_cache_of
from aiockpt.planning.collective.messages import (
    PlanRequest,
    RankAssignment,
    RankInventory,
    Written,
    inventory_of,
    places_of,
)
from aiockpt.planning.collective.plan import differing_replicas
from aiockpt.planning.planner import Planner, ReusedPlan, StateSummary, Summary, summarize
from aiockpt.saving.job import RefusedSpec
from aiockpt.saving.strategy import LocalSave, result_of
from aiockpt.snapshot.sampling import digest_replicas
from aiockpt.staging.base import LayoutMismatchError
from aiockpt.storage.base import SharedTransaction, shared_storage
from aiockpt.writing.commit import commit_documents

if TYPE_CHECKING:
    from aiockpt.coordination.coordinator import Coordinator
    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts, JsonValue
    from aiockpt.planning.planner import FileFormat, SavePlan
    from aiockpt.saving.job import SaveJob
    from aiockpt.telemetry.saves import SaveResult
    from aiockpt.writing.file_writer import ChunkWriter


logger = logging.getLogger("aiockpt")


class CollectiveSave(LocalSave):
    """A save with other ranks."""

    can_replan = False
    _transaction: SharedTransaction | None = None
    _assignment: RankAssignment  # since `plan`

    def __init__(
        self,
        job: SaveJob,
        file_format: FileFormat,
        world: CollectiveResources,
        compute: Workers,
        io: Workers,
    ) -> None:
        super().__init__(job, world.planner, compute, io)
        self._file_format = file_format
        self._world = world
        self._operation = f"the save of {job.path}"
        self._call = world.coordinator.call("save") if job.spec.call is None else job.spec.call
        self._global = self._lead()
        self._over = False  # this rank has entered the second round: it must not enter it again to report a failure

    def _lead(self) -> GlobalSave:
        return GlobalSave(self._job, self._file_format, self._world, self._compute, self._io)

    async def plan(self) -> SavePlan:
        """Agree with the other ranks on what each of them writes. A cancellation takes effect after that."""
        with anyio.CancelScope(shield=True):  # a rank that leaves alone would leave the others waiting
            await self._job.turn.wait_for("planned")
            request, proposal = await self._propose()
            assignment = await self._first_round(request)
            if assignment.ticket is None:  # rank 0 lacks an inventory
                request, proposal = await self._propose(again=False)
                assignment = await self._first_round(request)
        self._assignment = assignment
        try:
            return await self._share(proposal, assignment)
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                error = await self.fail(exc)
            raise error from error.__cause__

    async def _propose(
        self, *, again: bool = True
    ) -> tuple[PlanRequest | BaseException, ReusedPlan | StateSummary | None]:
        """Return the message to rank 0, with the cached plan if it fits, or else with the summary of what to plan."""
        job, name = self._job, self._file_format.name
        try:
            if isinstance(job.spec, RefusedSpec):
                return job.spec.error, None
            if job.cancel_asked or job.consistency.abort_error is not None:
                return job.cancellation, None
            digests = (
                None if job.spec.options.replicas == "trust" else await self._compute.run(digest_replicas, job.snapshot)
            )
            reuse = partial(self._world.planner.reuse, job.snapshot, self._file_format, together=True)
            reused = await self._compute.run(reuse) if again else None
            options = job.spec.options.replicas, job.spec.is_transformed, job.spec.fallback is not None
            if reused is not None:
                return PlanRequest(job.overwrite, name, reused.token, None, digests, *options), reused
            summary = await self._compute.run(summarize, job.snapshot, self._file_format)
            names, framing = summary.structure.names, self._file_format.framing
            arguments = summary, job.snapshot.containers, lambda leaf, spec: framing(names[leaf], spec)
            inventory = await self._compute.run(inventory_of, *arguments)
        except Exception as exc:  # goes to all ranks, this one among them
            return exc, None
        return PlanRequest(job.overwrite, name, None, inventory, digests, *options), summary

    async def _first_round(self, request: PlanRequest | BaseException) -> RankAssignment:
        lead, round_ = self._global, self._world.coordinator.round
        return cast("RankAssignment", await round_(self._call, self._operation, request, lead.decide, lead.undo))

    async def _share(self, proposal: ReusedPlan | StateSummary | None, assignment: RankAssignment) -> SavePlan:
        job, planner = self._job, self._world.planner
        if isinstance(proposal, StateSummary):
            summary = proposal
        elif proposal is not None and assignment.leaves is None and proposal.token == assignment.token:
            return proposal.plan
        else:  # this rank's state is unchanged, but another rank's has changed, and with it the assignment
            summary = await self._compute.run(summarize, job.snapshot, self._file_format)
        if assignment.leaves is None:
            raise RuntimeError("rank 0 has given no assignment to a rank without a plan")
        given = assignment.leaves, assignment.token, assignment.shared
        return await self._compute.run(planner.lay_out, job.snapshot, self._file_format, summary, *given)

    async def begin(self) -> SharedTransaction:
        """Join the transaction that rank 0 has begun."""
        self._transaction = self._global.transaction
        if self._transaction is None:
            job = self._job
            self._transaction = await shared_storage(job.storage).join(
                job.path, self._assignment.ticket or "", workers=self._io
            )
        return self._transaction

    async def ticket(self) -> str:
        return (await self.begin()).ticket

    async def documents(self, plan: SavePlan) -> None:
        """Encode none: rank 0 does, when all have written."""

    def _written(self, plan: SavePlan, writer: ChunkWriter) -> Written:
        """Return this rank's report."""
        places = places_of(plan.layout) if self._assignment.report_places else None
        items = sum(len(image.slots) for image in plan.layout.images)
        return Written(writer.files, items, dict(plan.object_places), places, writer.crcs, writer.encoded)

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        """Report what this rank has written, and wait until rank 0 has published everything."""
        transaction, leads = self._transaction, self._world.coordinator.leads
        if transaction is None:
            raise RuntimeError("a save can't be committed before it has begun")
        try:
            if not leads:  # a joined transaction only makes this rank's files durable
                await transaction.commit()
            summary = await self._last_round(self._written(plan, writer))
        finally:
            await transaction.release()
        if summary.files is None:
            summary = replace(summary, files={name: facts.nbytes for name, facts in writer.files.items()})
        return result_of(self._job, plan, summary, times_s)

    async def _last_round(self, mine: Written | BaseException) -> Summary:
        """Report what was written, or an error, to rank 0; clean up if that fails. Return rank 0's summary."""
        await self._job.turn.wait_for("over")
        self._over = True
        coordinator, lead = self._world.coordinator, self._global
        try:
            return cast("Summary", await coordinator.round(self._call, self._operation, mine, lead.publish, lead.undo))
        except CoordinationError as exc:
            if not coordinator.leads:  # if rank 0 is dead, the other ranks remove its directory
                await self._leave(exc, sweep=not coordinator.leader_lives)
            raise

    async def _leave(self, error: BaseException, *, sweep: bool = False) -> None:
        """Close what this rank has open; if that fails too, add a note to the error that led here."""
        if self._transaction is None:
            return
        try:
            await (self._transaction.discard_all() if sweep else self._transaction.abort())
        except Exception as exc:  # the other ranks wait for this rank's report
            error.add_note(str(exc))

    async def fail(self, error: BaseException) -> BaseException:
        """Report an error to the other ranks; return the one that all of them raise."""
        if self._over:
            return error
        if isinstance(error, LayoutMismatchError):
            error = self._job.torn_by(error)
        if not isinstance(error, Exception):
            error = self._job.cancellation
        if not self._world.coordinator.leads:  # before the report, after which rank 0 removes the files
            await self._leave(error)
        try:
            await self._last_round(error)
        except AiockptError as exc:
            return exc
        return error

    async def fall_back(self, fallback: str, hindrance: str | None, *, is_planned: bool) -> str:
        """Agree on the path: all ranks save there, or none; rank 0 begins the transaction if there is a plan."""
        job, coordinator = self._job, self._world.coordinator
        operation = f"the fallback of {self._operation}"
        self._call, self._transaction = coordinator.call("fallback"), None
        job.spec = replace(job.spec, call=self._call)  # this one has to be given up from now on
        mine = is_planned if hindrance is None else SaveError(hindrance)
        decide = partial(self._global.fall_back, fallback)
        path, ticket = await coordinator.round(self._call, operation, mine, decide, self._global.undo)
        if ticket is not None:
            self._assignment = replace(self._assignment, ticket=ticket)
        self._operation, self._over = f"the save of {path}", False
        return str(path)


# --- rank 0 -----------------------------------------------------------------------------------------


_SHOWN = 20
_ALIKE = {
    "overwrite": "overwrite",
    "file_format": "the file format (io_threads, hints, division into files)",
    "replicas": "replicas",
    "is_transformed": "the use of compress or transforms",
    "has_fallback": "the use of fallback_path",
}


@dataclass(slots=True)
class CollectiveResources:
    """State that an engine keeps for saving with other ranks."""

    coordinator: Coordinator
    planner: Planner
    plans: dict[str, GlobalPlanCache] = field(default_factory=dict)  # rank 0: the latest global plan of each format
    tokens: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # rank 0: numbers for global plans
    differing: set[str] = field(default_factory=set)  # rank 0: the tensors that it has warned of


@dataclass(eq=False)
class GlobalSave:
    """Rank 0's part in one save of several ranks."""

    _job: SaveJob
    _file_format: FileFormat
    _world: CollectiveResources
    _compute: Workers
    _io: Workers
    transaction: SharedTransaction | None = None
    # Kept apart from those of the world: the next save may be planned anew before this one is published.
    plan: GlobalPlanCache | None = None

    async def decide(self, requests: Sequence[PlanRequest]) -> list[RankAssignment]:
        """Plan for all ranks, and begin the transaction."""
        self._check_alike(requests)
        plans, name = self._world.plans, self._file_format.name
        kept = plans.get(name)
        plan = await self._plan(kept, requests)
        if plan is None:  # a rank has sent a token alone, which is not that of the kept plan: all send inventories
            return [RankAssignment(None, 0, None, report_places=False)] * len(requests)
        self.plan = plans[name] = plan
        ticket = await self._begin(self._job.path, overwrite=self._job.overwrite)
        given = RankAssignment(ticket, plan.token, None, not plan.knows_places)  # the same leaves as in the last save
        if plan is kept:
            return [given] * len(requests)
        leaves = enumerate(plan.plan.assignments)
        return [replace(given, leaves=mine, shared=plan.share_of(rank)) for rank, mine in leaves]

    async def _begin(self, path: str, *, overwrite: bool) -> str:
        """Begin the transaction; return its ticket."""
        storage, plan = shared_storage(self._job.storage), self.plan
        self.transaction = await storage.begin(path, overwrite=overwrite, workers=self._io)
        for name, nbytes in plan.sizes.items() if plan is not None else ():
            await self.transaction.reserve("" if plan is not None and plan.is_single_file else name, nbytes)
        return self.transaction.ticket

    async def fall_back(self, path: str, are_planned: Sequence[bool]) -> list[tuple[str, str | None]]:
        """Return the path to save to, and the ticket of the transaction if all ranks have a plan."""
        ticket = await self._begin(path, overwrite=False) if all(are_planned) else None
        return [(path, ticket)] * len(are_planned)

    def _check_alike(self, requests: Sequence[PlanRequest]) -> None:
        for rank, request in enumerate(requests):
            for name, option in _ALIKE.items():
                mine, theirs = getattr(requests[0], name), getattr(request, name)
                if mine != theirs:
                    raise SaveError(
                        f"{option} is {mine} on rank 0 but {theirs} on rank {rank}; all ranks must pass the same"
                    )

    async def _plan(self, kept: GlobalPlanCache | None, requests: Sequence[PlanRequest]) -> GlobalPlanCache | None:
        """Return the plan: the kept one if it fits; None if a rank's inventory is not known here."""
        ranks = [
            request.inventory or (kept.ranks[rank] if kept is not None and request.token == kept.token else None)
            for rank, request in enumerate(requests)
        ]
        known = [inventory for inventory in ranks if inventory is not None]
        if len(known) < len(ranks):
            return None
        digests = [request.digests for request in requests if request.digests is not None]
        apart = await self._differing(known, digests)
        if kept is not None:
            if apart <= kept.apart and all(request.token == kept.token for request in requests):
                return kept
            apart |= kept.apart
        return await self._compute.run(plan_cache_of, next(self._world.tokens), known, self._file_format, apart)

    async def _differing(self, ranks: Sequence[RankInventory], digests: Sequence[bytes]) -> frozenset[str]:
        """Return the plain tensors that differ between the ranks; warn of those that are new, or raise SaveError."""
        if len(digests) < len(ranks) or not any(digests):
            return frozenset()
        differing = await self._compute.run(differing_replicas, ranks, digests)
        new = [name for name in differing if name not in self._world.differing]
        advice = "make them equal, as by broadcasting them, or put the rank into their names"
        if differing and self._job.spec.options.replicas == "error":
            raise SaveError(f"{some_of(differing, _SHOWN)}: these tensors differ between the ranks; {advice}")
        if new:
            self._world.differing.update(new)
            text = "%s: these tensors differ between the ranks, so those of the lowest rank are saved; %s"
            logger.warning(text, printable(some_of(new, _SHOWN)), advice)
        return frozenset(differing)

    async def publish(self, results: Sequence[Written]) -> list[Summary]:
        """Check what all ranks have written, write the metadata and the manifest, and publish; sum up for each rank."""
        transaction, plan = self._begun
        await _check_visible(transaction, results, is_single_file=plan.is_single_file)
        documents, summaries = await self._documents(results)
        await transaction.commit(documents)
        return summaries

    @property
    def _begun(self) -> tuple[SharedTransaction, GlobalPlanCache]:
        if self.transaction is None or self.plan is None:
            raise RuntimeError("a save can't be published before it has begun")
        return self.transaction, self.plan

    async def _documents(self, results: Sequence[Written]) -> tuple[Mapping[str, bytes | bytearray], list[Summary]]:
        """Check what all ranks have written; return the metadata and the manifest, and the summary for each rank."""
        (_, plan), job, run = self._begun, self._job, self._compute.run
        await run(plan.check, results)
        files = dict(await run(plan.data_files, results))
        sizes = {name: facts.nbytes for name, facts in files.items()}
        item_bytes = sum(sizes.values())
        documents: Mapping[str, bytes | bytearray] = {}
        if not plan.is_single_file:
            times_s = {"captured": job.captured_s, "data_written": time.perf_counter() - job.spec.started}
            given = dict(job.spec.options.metadata or {}), job.spec.files
            documents = await run(documents_of_ranks, plan, results, files, times_s, *given, job.spec.is_transformed)
            sizes |= {name: len(data) for name, data in documents.items() if name != MANIFEST_NAME}
        return documents, plan.summaries(sizes, item_bytes)

    async def undo(self) -> None:
        """Remove what all ranks have written."""
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            await transaction.abort()


def documents_of_ranks(
    plan_cache: GlobalPlanCache,
    results: Sequence[Written],
    files: Mapping[str, FileFacts],
    times_s: Mapping[str, float],
    metadata: dict[str, JsonValue],
    added: Mapping[str, bytes],
    is_transformed: bool,
) -> dict[str, bytes | bytearray]:
    """Encode the manifest and the documents of a checkpoint that several ranks have written. Slow for many items."""
    drafts = plan_cache.drafts([written.objects for written in results], is_transformed=is_transformed)
    totals = {
        "tensors": len(plan_cache.plan.tensors),
        "objects": len(plan_cache.plan.objects),
        "tensor_bytes": plan_cache.tensor_bytes,
        "ranks": len(results),
    }
    crcs = np.frombuffer(b"".join(written.crcs for written in results), np.uint32).tolist()
    encoded = [items for written in results for items in written.encoded or ()]
    documents = commit_documents(drafts, totals, metadata, plan_cache.plan.containers, added)
    return documents.encode(files, crcs, times_s, encoded)


async def _check_visible(transaction: SharedTransaction, results: Sequence[Written], *, is_single_file: bool) -> None:
    """Raise SaveError unless rank 0's host sees the files of all ranks: the path may be a local disk of each host."""
    sizes = await transaction.sizes()
    for rank, written in enumerate(results):
        for name, facts in written.files.items():
            seen = sizes.get(SINGLE_NAME if is_single_file else name)
            if seen != facts.nbytes:
                size = "is not there" if seen is None else f"has {seen} bytes there"
                raise SaveError(
                    f"rank {rank} has written {name} ({facts.nbytes} bytes), which {size} as rank 0 sees it: all "
                    "ranks must save to one file system that every host has mounted, or with a manager that has "
                    "own_disks=True"
                )
