"""Strategies: plan, begin and commit a save of one process, or one that adds files to an existing directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiockpt.core.threads import SHORT_ITEMS
from aiockpt.errors import AiockptError, SaveError
from aiockpt.format.manifest.manifest import Manifest
from aiockpt.planning.dcp_plan import DcpFormat, DcpPlan
from aiockpt.planning.encoding import draft_of, item_ranges
from aiockpt.planning.planner import Planner, SavePlan, Summary, summarize
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.telemetry.saves import SaveResult
from aiockpt.writing.commit import CommitDocuments, now, writer_name

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import Transaction
    from aiockpt.writing.file_writer import ChunkWriter


class SaveStrategy(ABC):
    """Plans, begins and commits one save. Staging and writing are the same for all strategies."""

    can_replan = False  # `plan` may be called a second time, after `invalidate_plan`

    @abstractmethod
    async def plan(self) -> SavePlan:
        """Decide what to write. If it raises, nothing has to be undone."""

    def invalidate_plan(self) -> None:
        """Drop the cached plan, which has turned out not to fit the tensors."""

    @abstractmethod
    async def begin(self) -> Transaction:
        """Begin the transaction that this process writes to."""

    async def ticket(self) -> str | None:
        """Return what a writer process needs to join the transaction of rank 0; None: it begins its own."""
        return None

    async def documents(self, plan: SavePlan) -> CommitDocuments | None:
        """Encode the metadata and the manifest; None if another process writes them."""
        return None

    async def recovery_record(self, plan: SavePlan) -> bytes | None:
        """Return what the writer processes of several ranks need to commit without the trainers; None for one rank."""
        return None

    @abstractmethod
    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        """Publish what was written. Not to be cancelled: a commit is done or undone as a whole."""

    @abstractmethod
    async def fail(self, error: BaseException) -> BaseException:
        """Undo what was done since `plan`; return the error to raise. Not to be cancelled."""


class _SaveAlone(SaveStrategy):
    """A save without other ranks."""

    def __init__(self, job: SaveJob, compute: Workers, io: Workers) -> None:
        self._job = job
        self._compute = compute
        self._io = io
        self._transaction: Transaction | None = None

    async def fail(self, error: BaseException) -> BaseException:
        transaction, self._transaction = self._transaction, None  # the fallback begins another
        if transaction is not None:
            try:
                await transaction.abort()
            except AiockptError as exc:
                error.add_note(str(exc))
        return error


class LocalSave(_SaveAlone):
    """A save of one process."""

    can_replan = True

    def __init__(self, job: SaveJob, planner: Planner, compute: Workers, io: Workers) -> None:
        super().__init__(job, compute, io)
        self._planner = planner

    async def plan(self) -> SavePlan:
        snapshot = self._job.snapshot
        is_short = len(snapshot.tensors) <= SHORT_ITEMS
        return await self._compute.run_unless(is_short, self._planner.plan, snapshot, self._job.spec.form)

    def invalidate_plan(self) -> None:
        self._planner.invalidate()

    async def begin(self) -> Transaction:
        job = self._job
        self._transaction = await job.spec.storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        return self._transaction

    async def documents(self, plan: SavePlan) -> CommitDocuments | None:
        return await self._io.run_unless(len(plan.layout.specs) <= SHORT_ITEMS, documents_of, self._job, plan)

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        await writer.write_documents()
        self._job.consistency.raise_if_aborted()  # a timeout cancels the save's scope, from which this is shielded
        sizes = await writer.commit()
        return result_of(self._job, plan, summary_of(self._job, plan, sizes), times_s)


class AppendSave(_SaveAlone):
    """A save that adds files to an existing directory; its caller makes a checkpoint of them."""

    def __init__(self, job: SaveJob, form: DcpFormat, planner: LocalPlanner, compute: Workers, io: Workers) -> None:
        super().__init__(job, compute, io)
        self._form = form
        self._planner = planner

    async def plan(self) -> SavePlan:
        return await self._compute.run(self._plan)

    def _plan(self) -> SavePlan:
        snapshot, form, planner = self._job.snapshot, self._form, self._planner
        reused = planner.reuse(snapshot, form)
        if reused is not None:
            return reused.plan
        summary = summarize(snapshot, form)
        return planner.lay_out(snapshot, form, summary, 0, range(len(summary.specs)))

    async def begin(self) -> Transaction:
        """Check that files can be added to the directory."""
        storage = self._job.spec.storage
        if not isinstance(storage, LocalStorage):
            raise SaveError("files can be added to directories only")
        self._transaction = storage.append_to(self._job.path, workers=self._io)
        return self._transaction

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        """Make the files durable, and record where each leaf is."""
        if self._transaction is None or not isinstance(plan, DcpPlan):
            raise RuntimeError("a save can't be committed before it has begun")
        await self._transaction.commit()
        self._job.item_ranges = item_ranges(plan, writer.encoded)
        sizes = {name: facts.nbytes for name, facts in writer.files.items()}
        return result_of(self._job, plan, summary_of(self._job, plan, sizes), times_s)


# --- the commit documents and the result ------------------------------------------------------------


def documents_of(job: SaveJob, plan: SavePlan) -> CommitDocuments | None:
    """Encode the metadata and the manifest; None if the checkpoint is one file. Slow for many tensors."""
    if plan.is_single_file:
        return None
    tensors, objects = _counts(plan)
    manifest = Manifest(
        writer=writer_name(),
        created=now(),
        metadata=dict(job.spec.metadata),
        totals={
            "tensors": tensors,
            "objects": objects,
            "tensor_bytes": plan.layout.tensor_bytes,
            "file_bytes": plan.layout.nbytes,
        },
        containers=job.snapshot.containers,
    )
    names = [image.name for image in plan.layout.images]
    if job.spec.is_transformed and isinstance(plan, DcpPlan):
        return CommitDocuments(names, {}, manifest, None, draft_of(plan))
    return CommitDocuments(names, plan.documents(), manifest, plan.index())


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
