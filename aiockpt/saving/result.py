"""The commit documents and the result of a save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.format.manifest.manifest import Manifest
from aiockpt.planning.dcp_plan import DcpPlan
from aiockpt.planning.encoding import draft_of
from aiockpt.planning.planner import Summary
from aiockpt.telemetry.saves import SaveResult
from aiockpt.writing.commit import CommitDocuments, now, writer_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.planning.planner import SavePlan
    from aiockpt.saving.job import SaveJob


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
    objects = len(plan.layout.summary.object_leaves)
    return len(plan.layout.specs) - objects, objects
