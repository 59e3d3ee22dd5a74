"""Publishing what several ranks have written: by rank 0, or by its writer process when that is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
from isal.isal_zlib import crc32

from aiockpt._version import __version__
from aiockpt.errors import SaveError
from aiockpt.format.manifest.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.planning.collective.cache import GlobalPlanCache, cache_of_written, files_of
from aiockpt.writing.commit import write_documents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.collective.messages import Summary, Written
    from aiockpt.storage.base import Transaction


WRITER = f"aiockpt {__version__} (torch {torch.__version__})"


def now() -> str:
    """Return the time for a manifest: ISO 8601, UTC, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """What rank 0 knows of a save besides its plan.

    Attributes:
        token: the number of the plan.
        metadata: the user's own facts.
        times_s: durations so far, in seconds.
        started: when the save was called.
    """

    token: int
    metadata: dict[str, JsonValue] = field(repr=False)
    times_s: Mapping[str, float]
    started: float


async def publish_together(
    transaction: Transaction,
    book: GlobalPlanCache | None,
    facts: WorldFacts,
    results: Sequence[Written],
    workers: Workers,
) -> tuple[GlobalPlanCache, list[Summary]]:
    """Check what all ranks have written, write the index, and publish.

    Args:
        transaction: where the files are.
        book: the plan of all ranks; None if each has decided alone what it writes.
        facts: what else there is to say.
        results: what each rank has written.
        workers: for what takes long.

    Returns:
        The plan, and what to tell each rank.

    Raises:
        SaveError: something is missing.
        WriteError: the index can't be written.
        CommitError: it can't be published.
    """
    for rank, written in enumerate(results):
        if written.token != facts.token:
            raise SaveError(f"rank {rank} has written by another plan than rank 0 has; nothing was published")
    if book is None:
        book = await workers.run(cache_of_written, facts.token, results)
    await workers.run(book.check, results)
    files = files_of(results)
    await _look_for(transaction, results)
    document = await workers.run(book.documents, results)
    files = {**files, METADATA_NAME: FileFacts(len(document), crc32(document))}
    times_s = {**facts.times_s, "data_written": time.perf_counter() - facts.started}
    manifest = await workers.run(world_manifest, facts.metadata, times_s, book, files, len(results))
    await write_documents(transaction, {MANIFEST_NAME: manifest, METADATA_NAME: document})
    await transaction.commit()
    sizes = {name: each.nbytes for name, each in files.items()}
    return book, book.summaries(sizes)


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


def world_manifest(
    metadata: dict[str, JsonValue],
    times_s: Mapping[str, float],
    book: GlobalPlanCache,
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
        writer=WRITER,
        created=now(),
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
