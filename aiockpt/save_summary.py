"""What is said of a save once its bytes are written: the manifest in the checkpoint, and the result for the caller."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from aiockpt._version import __version__
from aiockpt.ending import Ending
from aiockpt.format.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import METADATA_NAME
from aiockpt.handle import SaveResult
from aiockpt.planning.codings import draft_of
from aiockpt.planning.dcp_plan import DcpPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.format.manifest import JsonValue
    from aiockpt.job import SaveJob
    from aiockpt.planning.plans import SavePlan
    from aiockpt.planning.world_book import WorldBook
    from aiockpt.world_messages import Summary


_WRITER = f"aiockpt {__version__} (torch {torch.__version__})"


def ending_of(job: SaveJob, plan: SavePlan) -> Ending | None:
    """Encode what makes a checkpoint of the files with items; None if it is one file. Takes long for many tensors."""
    if plan.is_single_file:
        return None
    tensors, objects = _counts(plan)
    manifest = Manifest(
        writer=_WRITER,
        created=_now(),
        metadata=job.metadata,
        totals={
            "tensors": tensors,
            "objects": objects,
            "tensor_bytes": plan.layout.tensor_bytes,
            "file_bytes": plan.layout.nbytes,
        },
        containers=job.capture.containers,
    )
    names = [image.name for image in plan.layout.images]
    if job.is_transformed and isinstance(plan, DcpPlan):
        return Ending(names, {}, manifest, None, draft_of(plan))
    return Ending(names, plan.documents(), manifest, plan.index())


def result_of(job: SaveJob, plan: SavePlan, sizes: Mapping[str, int], times_s: Mapping[str, float]) -> SaveResult:
    """Sum up a save that has been committed."""
    tensors, objects = _counts(plan)
    if plan.is_single_file:
        sizes = {job.path.rpartition("/")[2]: plan.layout.nbytes}
    return SaveResult(
        path=job.path,
        nbytes=sum(sizes[image.name] for image in plan.layout.images) if job.is_transformed else plan.layout.nbytes,
        tensor_bytes=plan.layout.tensor_bytes,
        tensors=tensors,
        objects=objects,
        files=dict(sizes),
        captured_s=times_s["captured"],
        planned_s=times_s["planned"],
        staged_s=times_s["staged"],
        written_s=job.handle._elapsed(),
    )


def world_manifest(
    metadata: dict[str, JsonValue],
    times_s: Mapping[str, float],
    book: WorldBook,
    files: Mapping[str, FileFacts],
    ranks: int,
) -> bytes:
    """Encode the manifest of a checkpoint that several ranks have written.

    Args:
        metadata: the user's own facts.
        times_s: durations in seconds.
        book: the plan of all ranks.
        files: every other file of the checkpoint.
        ranks: how many ranks there are.
    """
    items = sum(facts.nbytes for name, facts in files.items() if name != METADATA_NAME)
    manifest = Manifest(
        writer=_WRITER,
        created=_now(),
        metadata=metadata,
        files=files,
        totals={
            "tensors": book.tensors,
            "objects": book.objects,
            "tensor_bytes": book.tensor_bytes,
            "file_bytes": items,
            "ranks": ranks,
        },
        times_s=times_s,
        containers=book.plan.containers,
    )
    return encode_manifest(manifest)


def world_result(
    job: SaveJob, files: Mapping[str, FileFacts], times_s: Mapping[str, float], summary: Summary
) -> SaveResult:
    """Sum up a checkpoint that several ranks have written, with the times of this one."""
    return SaveResult(
        path=job.path,
        nbytes=summary.file_bytes,
        tensor_bytes=summary.tensor_bytes,
        tensors=summary.tensors,
        objects=summary.objects,
        files=summary.files if summary.files is not None else {name: facts.nbytes for name, facts in files.items()},
        captured_s=times_s["captured"],
        planned_s=times_s["planned"],
        staged_s=times_s["staged"],
        written_s=job.handle._elapsed(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _counts(plan: SavePlan) -> tuple[int, int]:
    objects = len(plan.layout.survey.object_leaves)
    return len(plan.layout.specs) - objects, objects
