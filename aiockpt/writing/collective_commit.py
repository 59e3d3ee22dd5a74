"""The commit of a checkpoint that several ranks have written, by rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aiockpt.errors import SaveError
from aiockpt.format.names import MANIFEST_NAME, SINGLE_NAME
from aiockpt.writing.commit import commit_documents

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts, JsonValue
    from aiockpt.planning.collective.cache import GlobalPlanCache
    from aiockpt.planning.collective.messages import Written
    from aiockpt.planning.planner import Summary
    from aiockpt.storage.base import SharedTransaction


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """Facts that rank 0 knows of a save, besides its plan."""

    metadata: dict[str, JsonValue] = field(repr=False)  # the user's own
    files: Mapping[str, bytes] = field(repr=False)  # that the user adds
    is_transformed: bool  # items are stored in another form than they were planned in
    times_s: Mapping[str, float]  # durations so far
    started: float  # when the save was called


async def publish_together(
    transaction: SharedTransaction,
    plan_cache: GlobalPlanCache,
    facts: WorldFacts,
    results: Sequence[Written],
    workers: Workers,
) -> list[Summary]:
    """Check what the ranks have written, write the index and the manifest, and publish; return a summary for each rank.

    Raises SaveError if something is missing.
    """
    await workers.run(plan_cache.check, results)
    await _check_visible(transaction, results, is_single_file=plan_cache.is_single_file)
    files = dict(await workers.run(plan_cache.data_files, results))
    sizes = {name: each.nbytes for name, each in files.items()}
    item_bytes = sum(sizes.values())
    documents: Mapping[str, bytes | bytearray] = {}
    if not plan_cache.is_single_file:
        times_s = {**facts.times_s, "data_written": time.perf_counter() - facts.started}
        documents = await workers.run(documents_of_ranks, plan_cache, facts, results, files, times_s)
        sizes |= {name: len(data) for name, data in documents.items() if name != MANIFEST_NAME}
    await transaction.commit(documents)
    return plan_cache.summaries(sizes, item_bytes)


def documents_of_ranks(
    plan_cache: GlobalPlanCache,
    facts: WorldFacts,
    results: Sequence[Written],
    files: Mapping[str, FileFacts],
    times_s: Mapping[str, float],
) -> dict[str, bytes | bytearray]:
    """Encode the manifest and the documents of a checkpoint that several ranks have written. Slow for many items."""
    drafts = plan_cache.drafts([written.objects for written in results], is_transformed=facts.is_transformed)
    totals = {
        "tensors": plan_cache.tensors,
        "objects": plan_cache.objects,
        "tensor_bytes": plan_cache.tensor_bytes,
        "ranks": len(results),
    }
    crcs = np.frombuffer(b"".join(written.crcs for written in results), np.uint32).tolist()
    encoded = [items for written in results for items in written.encoded or ()]
    documents = commit_documents(drafts, totals, facts.metadata, plan_cache.plan.containers, facts.files)
    return documents.encode(files, crcs, times_s, encoded)


async def _check_visible(transaction: SharedTransaction, results: Sequence[Written], *, is_single_file: bool) -> None:
    """Raise SaveError unless rank 0's host sees the files of all ranks: the path may be a local disk of each host."""
    sizes = await transaction.sizes()
    for rank, written in enumerate(results):
        for name, facts in written.files.items():
            seen = sizes.get(SINGLE_NAME if is_single_file else name)
            if seen != facts.nbytes:
                found = "is not there" if seen is None else f"has {seen} bytes there"
                raise SaveError(
                    f"rank {rank} has written {name} ({facts.nbytes} bytes), which {found} as rank 0 sees it: all "
                    "ranks must save to one file system that every host has mounted, or with a manager that has "
                    "own_disks=True"
                )
