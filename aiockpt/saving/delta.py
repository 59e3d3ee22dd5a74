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

from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.spans import span
from aiockpt.core.threads import SHORT_ITEMS, run_each
from aiockpt.errors import AiockptError
from aiockpt.format.layouts import DOCUMENT_BYTES
from aiockpt.format.manifest.reader import decode_manifest
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.planning.base import SINCE_FULL, BaseContents, BaseItem, DeltaSpec, contents_of
from aiockpt.planning.dcp_plan import DcpFormat, DcpPlan, prefix_of
from aiockpt.planning.delta import (
    AdoptedFiles,
    DeltaLayout,
    KeptLayout,
    adopted_images,
    choose_files,
    lay_out_delta,
    match,
)
from aiockpt.planning.layout import Hashing, lay_out
from aiockpt.saving.staging_session import Leases, StagerRouter
from aiockpt.saving.strategy import LocalSave
from aiockpt.staging.base import Fill
from aiockpt.staging.hashing import hash_payloads, is_hashable

if TYPE_CHECKING:
    from aiockpt.engine.resources import EngineResources
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
        self._matched: dict[int, BaseItem] = {}  # the leaves that the base has in the same form
        self._hot: frozenset[int] = frozenset()  # those that have changed, or have no hash there
        self._adopted = AdoptedFiles()
        self._since_full = 0

    async def plan(self) -> SavePlan:
        plan = await super().plan()
        self._reset()
        base = await self._look_at_base()
        if base is None or not isinstance(plan, DcpPlan):
            return plan
        # Its turn to read the tensors, as that of copying them.
        await self._job.turn.wait_for("staged")
        is_short = len(plan.layout.specs) <= SHORT_ITEMS
        self._matched = await self._compute.run_unless(is_short, match, plan.layout, base)
        names, calmed = plan.layout.structure.names, self._spec.memory.calmed
        kept = {leaf: item for leaf, item in self._matched.items() if item.hash is not None}
        hot = {leaf for leaf in self._matched.keys() - kept.keys() if names[leaf] not in calmed}
        full_every = self._spec.full_every
        if full_every is not None and base.since_full + 1 >= full_every:
            self._hot = frozenset(hot)
            return self._laid_out(plan, {}, {}, frozenset(kept), 0)
        with span("hash"):
            unchanged = await self._unchanged(plan, kept)
        self._hot = frozenset(hot | (kept.keys() - unchanged.keys()))
        return await self._sharing(plan, base, unchanged)

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

    async def _unchanged(self, plan: DcpPlan, kept: Mapping[int, BaseItem]) -> dict[int, BaseItem]:
        """Return the leaves whose payloads have the hashes of the base."""
        layout, snapshot, hashes = plan.layout, self._job.snapshot, dict[int, str]()
        batches: list[list[int]] = [[]]
        staged: list[int] = []
        filled = 0
        for leaf, item in kept.items():
            if not is_hashable(layout.specs[leaf]):
                staged.append(leaf)
                continue
            batches[-1].append(leaf)
            filled += item.form.nbytes
            if filled >= _BATCH_BYTES:
                filled = 0
                batches.append([])

        async def take(batch: Sequence[int]) -> None:
            hashes.update(await self._compute.run(hash_payloads, batch, snapshot, layout, self._spec.new_hash))

        async def stage(leaves: Sequence[int]) -> None:
            hashes.update(await self._staged_hashes(layout, leaves))

        count = self._compute.count
        await run_each(take, [batch for batch in batches if batch], count)
        await run_each(stage, [staged[first::count] for first in range(min(count, len(staged)))], count)
        self._job.consistency.raise_if_aborted()
        return {leaf: item for leaf, item in kept.items() if hashes.get(leaf) == item.hash}

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

    async def _sharing(self, plan: DcpPlan, base: BaseContents, unchanged: Mapping[int, BaseItem]) -> DcpPlan:
        """Begin the transaction, link files of the base, and lay out the rest."""
        chosen = choose_files(unchanged, base, _FILES_FOR_EACH_WRITER * self._io.count)
        new_names = {file: f"{prefix_of(0)}{number}.distcp" for number, file in enumerate(chosen)}
        taken: list[str] = []
        if chosen:
            transaction = await super().begin()
            try:
                wanted = {file: (name, base.files[file]) for file, name in new_names.items()}
                with span("share"):
                    linked = await transaction.adopt(base.path, wanted)
                taken = [file for file in chosen if file in linked]
            except BaseException as exc:
                with anyio.CancelScope(shield=True):
                    await self.fail(exc)
                raise
        leaves = {new_names[file]: chosen[file] for file in taken}
        facts = {new_names[file]: base.files[file] for file in taken}
        live = [leaf for own in leaves.values() for leaf in own]
        items = [unchanged[leaf] for leaf in live]
        self._adopted = AdoptedFiles(facts, [item.crc for item in items], [item.hash for item in items])
        self._since_full = base.since_full + 1 if taken else 0
        cold = frozenset(unchanged.keys() - set(live))
        return self._laid_out(plan, leaves, unchanged, cold, len(chosen))

    def _laid_out(
        self,
        plan: DcpPlan,
        leaves: Mapping[str, Sequence[int]],
        items: Mapping[int, BaseItem],
        cold: frozenset[int],
        first: int,
    ) -> DcpPlan:
        memory, snapshot = self._spec.memory, self._job.snapshot
        images = adopted_images(plan.layout, leaves, items, self._adopted.files)
        if not images and not cold:
            return plan
        file_format = self._job.spec.file_format or DcpFormat(self._io.count)
        assert isinstance(file_format, DcpFormat)
        delta = lay_out_delta(plan, snapshot, file_format, images, cold, first, memory.layout)
        if isinstance(delta.layout, DeltaLayout):
            memory.layout = KeptLayout(delta.layout, cold)
        return delta

    async def begin(self) -> Transaction:
        return await super().begin() if self._transaction is None else self._transaction

    def hashing(self, plan: SavePlan) -> Hashing | None:
        leaves = range(len(plan.layout.specs))
        return Hashing(self._spec.new_hash, frozenset(leaves) - self._hot if self._hot else leaves)

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
        crcs, names = array("I", writer.crcs), plan.layout.structure.names
        slots = (slot.leaf for image in plan.layout.images for slot in image.slots)
        calmed = [names[leaf] for leaf, crc in zip(slots, crcs, strict=True) if self._has_calmed(leaf, crc)]
        self._spec.memory.written(self._job.path, frozenset(calmed))
        sizes = {name: facts.nbytes for name, facts in adopted.files.items()}
        nbytes = result.nbytes + adopted.nbytes
        return replace(result, nbytes=nbytes, bytes_reused=adopted.nbytes, files={**sizes, **result.files})

    def _has_calmed(self, leaf: int, crc: int) -> bool:
        """Return whether a leaf that used to change has not, by its CRC: the next save hashes it."""
        return leaf in self._hot and self._matched[leaf].hash is None and self._matched[leaf].crc == crc


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
