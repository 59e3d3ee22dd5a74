"""Delta saves: files of the base whose items have not changed become files of the new checkpoint, by links.

First the payloads are hashed that are likely unchanged: those that have a hash in the base. Then files are linked, and
what could not be, for whatever reason, is written as in any other save. So a link is made before `staged`, while the
tensors are there to be written instead. What changes from save to save has no hash, and takes no more time than without
a base: whether it still changes is seen by its CRC.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import numpy as np

from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.spans import span
from aiockpt.core.threads import SHORT_ITEMS, run_each
from aiockpt.errors import AiockptError
from aiockpt.format.layouts import DOCUMENT_BYTES
from aiockpt.format.manifest.reader import decode_manifest
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.planning.dcp_plan import DcpFormat, DcpPlan, prefix_of
from aiockpt.planning.delta import (
    SINCE_FULL,
    AdoptedFiles,
    BaseContents,
    adopted_files,
    choose_files,
    contents_of,
    lay_out_delta,
    match,
)
from aiockpt.planning.layout import Hashing, lay_out
from aiockpt.saving.staging_session import Leases, StagerRouter
from aiockpt.saving.strategy import LocalSave
from aiockpt.staging.base import Fill
from aiockpt.staging.hashing import hash_payloads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.engine.resources import EngineResources
    from aiockpt.planning.base import DeltaSpec
    from aiockpt.planning.dcp_plan import DcpLayout
    from aiockpt.planning.layout import Piece
    from aiockpt.planning.planner import SavePlan
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import Source, Transaction
    from aiockpt.telemetry.saves import SaveResult
    from aiockpt.writing.commit import CommitDocuments
    from aiockpt.writing.file_writer import ChunkWriter

_BATCH_BYTES = 32 << 20  # hashed by one call into a thread
_FILES_FOR_EACH_WRITER = 4  # adopted at most

logger = logging.getLogger("aiockpt")


class DeltaSave(LocalSave):
    """A save of one process that keeps hashes, and shares files with its base."""

    def __init__(self, job: SaveJob, spec: DeltaSpec, tools: EngineResources, leases: Leases) -> None:
        super().__init__(job, tools.planner, tools.copy_workers, tools.io_workers)
        self._spec = spec
        self._tools = tools
        self._leases = leases  # of the save, which sets them apart if a thread hangs
        self._reset()

    def _reset(self) -> None:
        self._base: BaseContents | None = None
        self._rows = np.zeros(0, dtype=np.int64)  # by leaf: that of the base with the same form, or -1
        self._hot: frozenset[int] = frozenset()  # leaves that have changed, or have no hash in the base
        self._adopted = AdoptedFiles()
        self._since_full = 0

    async def plan(self) -> SavePlan:
        plan = await super().plan()
        self._reset()
        self._base = base = await self._look_at_base()
        if base is None or not isinstance(plan, DcpPlan):
            return plan
        # Its turn to read the tensors, as that of copying them.
        await self._job.turn.wait_for("staged")
        is_short = len(plan.layout.specs) <= SHORT_ITEMS
        self._rows = rows = await self._compute.run_unless(is_short, match, plan.layout, base)
        names, calmed = plan.layout.structure.names, self._spec.memory.calmed
        matched = np.flatnonzero(rows >= 0)
        is_hashed = np.array([base.hashes[row] is not None for row in rows[matched].tolist()], dtype=bool)
        kept = matched[is_hashed]
        hot = [leaf for leaf in matched[~is_hashed].tolist() if names[leaf] not in calmed]
        full_every = self._spec.full_every
        if full_every is not None and base.since_full + 1 >= full_every:
            self._hot = frozenset(hot)
            return self._laid_out(plan, frozenset(kept.tolist()), 0)
        with span("hash"):
            hashes = await self._hashes(plan.layout, kept, base)
        pairs = zip(kept.tolist(), rows[kept].tolist(), strict=True)
        is_same = np.array([hashes.get(leaf) == base.hashes[row] for leaf, row in pairs], dtype=bool)
        self._hot = frozenset([*hot, *kept[~is_same].tolist()])
        return await self._sharing(plan, base, kept[is_same])

    async def _look_at_base(self) -> BaseContents | None:
        """Return what the base stores; None if there is none that can be used."""
        path = self._spec.memory.path if self._spec.is_auto else self._spec.path
        if path is None:
            return None
        try:
            source = await self._job.storage.open(path, workers=self._io)
            return await self._io.run(_read_contents, path, source)
        except (AiockptError, OSError) as exc:
            logger.info("%s can't be the base of %s, which is written in full: %s", path, self._job.path, exc)
            return None

    async def _hashes(self, layout: DcpLayout, kept: NDArray[np.int64], base: BaseContents) -> dict[int, str]:
        """Return the hashes of leaves that have one in the base."""
        snapshot, hashes = self._job.snapshot, dict[int, str]()
        batch_of = np.cumsum(base.entries.length_of[self._rows[kept]]) // _BATCH_BYTES
        batches = [batch.tolist() for batch in np.split(kept, np.flatnonzero(np.diff(batch_of)) + 1) if len(batch)]

        async def take(batch: Sequence[int]) -> None:
            hashes.update(await self._compute.run(hash_payloads, batch, snapshot, layout, self._spec.new_hash))

        async def stage(leaves: Sequence[int]) -> None:
            hashes.update(await self._staged_hashes(layout, leaves))

        count = self._compute.count
        await run_each(take, batches, count)
        staged = [leaf for leaf in kept.tolist() if leaf not in hashes]
        await run_each(stage, [staged[first::count] for first in range(min(count, len(staged)))], count)
        self._job.consistency.raise_if_aborted()
        return hashes

    async def _staged_hashes(self, layout: DcpLayout, leaves: Sequence[int]) -> dict[int, str]:
        """Return the hashes of what is on other devices, or has gaps: it is copied to a chunk as if to be written."""
        tools, image = self._tools, lay_out("", 0, [(leaf, layout.framings[leaf]) for leaf in leaves])
        digests, step = {leaf: self._spec.new_hash() for leaf in leaves}, tools.pool.chunk_bytes
        router = StagerRouter(layout, self._job.snapshot, tools.stager_for)
        tools.growth.reserve(min(image.nbytes, self._compute.count * step))
        leases = self._leases

        def update(view: memoryview, pieces: Sequence[Piece]) -> None:
            for leaf, start, stop, position in pieces:
                digests[leaf].update(view[position : position + stop - start])

        for begin in range(0, image.nbytes, step):
            end = min(begin + step, image.nbytes)
            await self._job.throttle.acquire(end - begin)
            lease, pieces = await leases.acquire(), image.pieces(begin, end)
            (leases.pending[lease],) = await router.issue([Fill(lease.chunk, pieces)])
            await leases.pending[lease].wait()
            await self._compute.run(update, lease.chunk.view, pieces)
            lease.release()
        return {leaf: digest.hexdigest() for leaf, digest in digests.items()}

    async def _sharing(self, plan: DcpPlan, base: BaseContents, unchanged: NDArray[np.int64]) -> DcpPlan:
        """Begin the transaction, link files of the base, and lay out the rest."""
        chosen = choose_files(unchanged, self._rows, base, _FILES_FOR_EACH_WRITER * self._io.count)
        names = {file: f"{prefix_of(0)}{number}.distcp" for number, file in enumerate(chosen)}
        if chosen:
            transaction = await super().begin()
            try:
                wanted = {file: (name, base.files[file]) for file, name in names.items()}
                with span("share"):
                    linked = await transaction.adopt(base.path, wanted)
            except BaseException as exc:
                with anyio.CancelScope(shield=True):
                    await self.fail(exc)
                raise
            taken = {file: name for file, name in names.items() if file in linked}
            self._adopted = adopted_files(taken, unchanged, self._rows, base)
            self._since_full = base.since_full + 1 if taken else 0
        live = {leaf for places in self._adopted.places.values() for leaf, _ in places}
        return self._laid_out(plan, frozenset(unchanged.tolist()) - live, len(chosen))

    def _laid_out(self, plan: DcpPlan, cold: frozenset[int], first: int) -> DcpPlan:
        if not self._adopted.files and not cold:
            return plan
        memory, file_format = self._spec.memory, self._job.spec.file_format or DcpFormat(self._io.count)
        assert isinstance(file_format, DcpFormat)
        delta = lay_out_delta(plan, self._job.snapshot, file_format, self._adopted, cold, first, memory.layout)
        memory.layout = delta.layout
        return delta

    async def begin(self) -> Transaction:
        return await super().begin() if self._transaction is None else self._transaction

    def hashing(self, plan: SavePlan) -> Hashing | None:
        return Hashing(self._spec.new_hash, self._hot)

    async def documents(self, plan: SavePlan) -> CommitDocuments | None:
        documents = await super().documents(plan)
        if documents is None:
            return None
        totals = {**documents.manifest.totals, SINCE_FULL: self._since_full, "bytes_reused": self._adopted.nbytes}
        return replace(documents, manifest=replace(documents.manifest, totals=totals), adopted=self._adopted)

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        adopted, transaction = self._adopted, self._transaction
        if transaction is not None:
            await transaction.vouch(writer.files)
        result = await super().commit(plan, writer, times_s)
        self._spec.memory.written(self._job.path, self._calmed(plan, writer))
        sizes = {name: facts.nbytes for name, facts in adopted.files.items()}
        nbytes = result.nbytes + adopted.nbytes
        return replace(result, nbytes=nbytes, bytes_reused=adopted.nbytes, files={**sizes, **result.files})

    def _calmed(self, plan: SavePlan, writer: ChunkWriter) -> frozenset[str]:
        """Return the keys that used to change, and have not, by their CRCs: the next save hashes them."""
        base, names = self._base, plan.layout.structure.names
        if base is None or not self._hot:
            return frozenset()
        slots = (slot.leaf for image in plan.layout.images for slot in image.slots)
        written = zip(slots, array("I", writer.crcs), strict=True)
        known = {leaf: (int(self._rows[leaf]), crc) for leaf, crc in written if leaf in self._hot}
        return frozenset(
            names[leaf]
            for leaf, (row, crc) in known.items()
            if base.hashes[row] is None and base.entries.crc_of[row] == crc
        )


@gc_pause()  # all the items of a base: a collection would look at each
def _read_contents(path: str, source: Source) -> BaseContents | None:
    """Return what a base stores, and close it. Blocks."""
    try:
        nbytes = source.files.get(MANIFEST_NAME, 0)
        if not 0 < nbytes <= DOCUMENT_BYTES:
            return None
        return contents_of(path, decode_manifest(source.read_bytes(MANIFEST_NAME, 0, nbytes)))
    finally:
        source.close()
