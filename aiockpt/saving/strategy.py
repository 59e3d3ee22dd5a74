"""Strategies: plan, begin and commit a save of one process, alone or in a transaction, or to an existing directory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiockpt.core.threads import SHORT_ITEMS
from aiockpt.errors import AiockptError, CommitError, SaveError
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.planning.dcp_plan import DcpPlan
from aiockpt.planning.encoding import item_ranges
from aiockpt.planning.planner import SavePlan, Summary
from aiockpt.storage.base import shared_storage, shared_transaction
from aiockpt.telemetry.saves import SaveResult
from aiockpt.writing.commit import CommitDocuments, commit_documents

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.layout import Hashing
    from aiockpt.planning.planner import Planner
    from aiockpt.saving.job import AppendSpec, SaveJob
    from aiockpt.storage.base import Transaction
    from aiockpt.writing.file_writer import ChunkWriter


class LocalSave:
    """Plans, begins and commits a save, of one process; others override it. Staging and writing are common to all."""

    can_replan = True  # `plan` may be called a second time, after `invalidate_plan`

    def __init__(self, job: SaveJob, planner: Planner, compute: Workers, io: Workers) -> None:
        self._job = job
        self._planner = planner
        self._compute = compute
        self._io = io
        self._transaction: Transaction | None = None

    async def plan(self) -> SavePlan:
        """Decide what to write. If it raises, nothing has to be undone."""
        snapshot = self._job.snapshot
        is_short = len(snapshot.tensors) <= SHORT_ITEMS
        return await self._compute.run_unless(is_short, self._planner.plan, snapshot, self._job.spec.file_format)

    def invalidate_plan(self) -> None:
        """Drop the cached plan, which has turned out not to fit the tensors."""
        self._planner.invalidate()

    async def begin(self) -> Transaction:
        """Begin the transaction that this process writes to."""
        job = self._job
        self._transaction = await job.storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        return self._transaction

    async def ticket(self) -> str | None:
        """Return what a writer process needs to join the transaction of rank 0; None: it begins its own."""
        return None

    def hashing(self, plan: SavePlan) -> Hashing | None:
        """Return which payloads are to be hashed."""
        return None

    async def documents(self, plan: SavePlan) -> CommitDocuments | None:
        """Encode the metadata and the manifest; None if another process writes them."""
        spec, containers = self._job.spec, self._job.snapshot.containers
        is_short = len(plan.layout.specs) <= SHORT_ITEMS
        arguments = plan, dict(spec.options.metadata or {}), containers, spec.is_transformed, spec.files
        return await self._io.run_unless(is_short, documents_of, *arguments)

    def hook_arguments(self) -> tuple[object, ...]:
        """Return what a pre_commit hook gets if it takes more than the path; raise what keeps it from being called."""
        return ()

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        """Publish what was written. Not to be cancelled: a commit is done or undone as a whole."""
        await writer.encode_documents()
        self._job.consistency.raise_if_aborted()  # a timeout cancels the save's scope, from which this is shielded
        try:
            sizes = await writer.commit()
        except CommitError:
            self._job.consistency.raise_if_aborted()
            raise
        return self._result(plan, writer, sizes, times_s)

    def _result(
        self, plan: SavePlan, writer: ChunkWriter, sizes: dict[str, int], times_s: Mapping[str, float]
    ) -> SaveResult:
        if plan.is_single_file:
            (self._job.single,) = writer.files.values()
        return result_of(self._job, plan, summary_of(self._job, plan, sizes), times_s)

    async def fail(self, error: BaseException) -> BaseException:
        """Undo what was done since `plan`; return the error to raise. Not to be cancelled."""
        transaction, self._transaction = self._transaction, None  # the fallback begins another
        if transaction is not None:
            try:
                await transaction.abort()
            except AiockptError as exc:
                error.add_note(str(exc))
        return error

    async def fall_back(self, fallback: str, hindrance: str | None, *, is_planned: bool) -> str:
        """Return the path to save to after a failure; raise SaveError if this rank, or another, has a hindrance.

        ``is_planned``: what follows is not `plan`, but `begin` for the plan that there is.
        """
        if hindrance is not None:
            raise SaveError(hindrance)
        return fallback


class PartSave(LocalSave):
    """A save of one process that is a part of a transaction: another process may write its files, not its documents."""

    _documents: CommitDocuments | None  # since all is staged

    async def ticket(self) -> str:
        return shared_transaction(await self.begin()).ticket

    async def documents(self, plan: SavePlan) -> None:
        self._documents = await super().documents(plan)

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        documents: dict[str, bytes | bytearray] = {}
        if self._transaction is None:
            raise RuntimeError("a save can't be committed before it has begun")
        await writer.encode_documents()  # which checks that all files are written
        if self._documents is not None:
            files = {image.name: writer.files[image.name] for image in plan.layout.images}
            written_s = {**times_s, "data_written": time.perf_counter() - self._job.spec.started}
            encode, crcs = self._documents.encode, list(array("I", writer.crcs))
            documents = await self._io.run(encode, files, crcs, written_s, writer.encoded or ())
        self._job.consistency.raise_if_aborted()
        await self._transaction.commit(documents)
        sizes = {name: facts.nbytes for name, facts in writer.files.items()}
        sizes |= {name: len(data) for name, data in documents.items() if name != MANIFEST_NAME}
        return self._result(plan, writer, sizes, times_s)


class AppendSave(LocalSave):
    """A save that adds files to a transaction; its caller makes a checkpoint of them."""

    def __init__(self, job: SaveJob, spec: AppendSpec, compute: Workers, io: Workers) -> None:
        super().__init__(job, spec.planner, compute, io)
        self._ticket = spec.ticket

    async def begin(self) -> Transaction:
        storage = shared_storage(self._job.storage)
        self._transaction = await storage.join(self._job.path, self._ticket, workers=self._io)
        return self._transaction

    async def documents(self, plan: SavePlan) -> None:
        """Write none: the caller does."""

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        """Make the files durable, and record where each leaf is."""
        if self._transaction is None or not isinstance(plan, DcpPlan):
            raise RuntimeError("a save can't be committed before it has begun")
        await self._transaction.commit()
        await shared_transaction(self._transaction).release()
        self._job.item_ranges = item_ranges(plan, writer.encoded)
        sizes = {name: facts.nbytes for name, facts in writer.files.items()}
        return result_of(self._job, plan, summary_of(self._job, plan, sizes), times_s)


# --- the commit documents and the result ------------------------------------------------------------


def documents_of(
    plan: SavePlan,
    metadata: dict[str, JsonValue],
    containers: list[dict[str, JsonValue]],
    is_transformed: bool = False,
    files: Mapping[str, bytes] | None = None,
) -> CommitDocuments | None:
    """Encode the metadata and the manifest; None if the checkpoint is one file. Slow for many tensors."""
    if plan.is_single_file:
        return None
    tensors, objects = _counts(plan)
    totals = {"tensors": tensors, "objects": objects, "tensor_bytes": plan.layout.tensor_bytes}
    return commit_documents(plan.drafts(is_transformed=is_transformed), totals, metadata, containers, files or {})


def summary_of(job: SaveJob, plan: SavePlan, sizes: dict[str, int]) -> Summary:
    """Return the summary of a committed checkpoint of one process."""
    nbytes = plan.layout.nbytes
    if job.spec.is_transformed:
        nbytes = sum(sizes[image.name] for image in plan.layout.images)
    return Summary(sizes, nbytes, plan.layout.tensor_bytes, *_counts(plan))


def result_of(job: SaveJob, plan: SavePlan, summary: Summary, times_s: Mapping[str, float]) -> SaveResult:
    """Return the result of a save; of several ranks with the times of this one."""
    files = summary.files or {}
    if plan.is_single_file:
        files = {job.path.rpartition("/")[2]: nbytes for nbytes in files.values()}
    return SaveResult(
        path=job.path,
        nbytes=summary.file_bytes,
        tensor_bytes=summary.tensor_bytes,
        tensors=summary.tensors,
        objects=summary.objects,
        files=files,
        captured_s=times_s["captured"],
        planned_s=times_s["planned"],
        staged_s=times_s["staged"],
        written_s=job.handle._elapsed(),
    )


def _counts(plan: SavePlan) -> tuple[int, int]:
    summary = plan.layout.summary
    objects = len(summary.structure.objects | summary.late_objects)
    return len(summary.specs) - objects, objects
