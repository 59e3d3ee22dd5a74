"""The save pipeline: plan, stage, write, commit. The only module that knows both staging and storage."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio
import torch
from isal.isal_zlib import crc32

from aiockpt._version import __version__
from aiockpt.errors import AiockptError, SaveCancelledError, SaveError, StageError, TornSnapshotError
from aiockpt.format.manifest import MANIFEST_NAME, FileFacts, Manifest, encode_manifest
from aiockpt.format.metadata import METADATA_NAME
from aiockpt.handle import Phase, ProgressEvent, SaveResult
from aiockpt.planning.layout import BLOCK_BYTES, Sealer, align_up
from aiockpt.staging.base import Done, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from aiockpt.job import SaveJob
    from aiockpt.planning.layout import FileImage, Piece
    from aiockpt.planning.planner import Layout, Planner, SavePlan
    from aiockpt.planning.source import Capture
    from aiockpt.staging.base import Pending, Stager
    from aiockpt.staging.pool import Chunk, ChunkPool, Lease
    from aiockpt.storage.base import Transaction
    from aiockpt.threads import Workers

T = TypeVar("T")


@dataclass(frozen=True)
class SaveTools:
    """What the engine lends to every save."""

    pool: ChunkPool
    planner: Planner
    copy_workers: Workers
    io_workers: Workers
    seal_workers: Workers
    stager_for: Callable[[torch.device], Stager]
    reserve: Callable[[int], None]


async def run_save(job: SaveJob, tools: SaveTools, previous: SaveJob | None) -> None:
    """Run one save to its end, whatever that is; never raises."""
    error: BaseException | None = None
    result: SaveResult | None = None
    try:
        with job.scope:
            if job.cancel_asked:
                job.scope.cancel()
            result = await _Save(job, tools, previous).run()
        if result is None:
            error = SaveCancelledError(f"the save of {job.path} was cancelled; nothing of it is left")
    except BaseException as exc:  # delivered to whoever waits, never dropped
        error = _first(exc)
    finally:
        if error is not None:
            job.handle.staged._settle(None, error)
        job.capture.release()
        job.issued.set()
        job.handle.written._settle(result, error)
        job.handle._wake()
        job.cancelled._settle(isinstance(error, SaveCancelledError))
        job.staging_over.set()
        job.over.set()


def _first(error: BaseException) -> BaseException:
    """Give the first error in a group; make it one of ours."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, AiockptError):
        return error
    wrapped = SaveError(f"the save failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class _Save:
    """The course of one save."""

    def __init__(self, job: SaveJob, tools: SaveTools, previous: SaveJob | None) -> None:
        self._job = job
        self._tools = tools
        self._previous = previous
        self._staged_bytes = 0
        self._written_bytes = 0
        self._total_bytes = 0
        self._planned_s = 0.0
        self._staged_s = 0.0
        self._files: dict[str, FileFacts] = {}
        self._transaction: Transaction | None = None

    async def run(self) -> SaveResult:
        previous = self._previous
        self._previous = None
        try:
            return await self._attempt(previous)
        except* LayoutMismatchError as group:
            mismatch = _first(group)
        # A tensor is not what the kept layout says, though it has the same name: plan from the beginning.
        self._tools.planner.forget()
        self._staged_bytes = self._written_bytes = 0
        self._files.clear()
        try:
            return await self._attempt(previous)
        except* LayoutMismatchError:
            raise TornSnapshotError(
                f"{mismatch.__cause__} changed its shape, dtype or device while {self._job.path} was being saved; "
                "await `staged` before changing tensors"
            ) from None

    async def _attempt(self, previous: SaveJob | None) -> SaveResult:
        job, tools = self._job, self._tools
        begin = time.perf_counter()
        plan = await tools.copy_workers.run(tools.planner.plan, job.capture)
        self._planned_s = time.perf_counter() - begin
        self._total_bytes = sum(image.nbytes for image in plan.layout.images)
        self._report("planned")
        if previous is not None:
            await previous.staging_over.wait()
        tools.reserve(self._total_bytes)
        try:
            transaction = await self._transfer(plan, previous)
            await self._describe(plan, transaction)
            self._report("written")
            with anyio.CancelScope(shield=True):  # from here on it is done or undone, not half
                await transaction.commit()
        except BaseException as exc:
            await self._abort(exc)
            raise
        self._report("committed")
        return self._result(plan)

    async def _begin(self, ready: _Later[Transaction]) -> None:
        job = self._job
        self._transaction = await job.storage.begin(job.path, overwrite=job.overwrite, workers=self._tools.io_workers)
        ready.set(self._transaction)

    async def _abort(self, error: BaseException) -> None:
        """Remove what was written; should that fail too, say so on the error that led here."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            with anyio.CancelScope(shield=True):
                try:
                    await transaction.abort()
                except AiockptError as exc:
                    error.add_note(str(exc))

    async def _transfer(self, plan: SavePlan, previous: SaveJob | None) -> Transaction:
        """Stage and write all files. Staging waits for nothing but staging memory."""
        job = self._job
        layout = plan.layout
        router = _Router(layout, job.capture, self._tools)
        job.stagers = router.stagers
        transaction: _Later[Transaction] = _Later()
        async with _Leases(self._tools.pool) as leases, anyio.create_task_group() as writing:
            writing.start_soon(self._begin, transaction)
            async with anyio.create_task_group() as staging:
                for number, image in enumerate(layout.images):
                    filled_in, filled_out = anyio.create_memory_object_stream[_Filled](math.inf)
                    sealed_in, sealed_out = anyio.create_memory_object_stream[_Filled](1)
                    sealer = Sealer(image, plan.head if number == 0 else b"")
                    staging.start_soon(self._stage, image, router, leases, filled_in)
                    writing.start_soon(self._seal, image, sealer, filled_out, sealed_in)
                    writing.start_soon(self._write, image, transaction, sealed_out, previous)
            await self._tools.copy_workers.run(job.check_for_changes)
            self._staged_s = job.handle._elapsed()
            job.capture.release()
            job.staging_over.set()
            self._report("staged")
            job.handle.staged._settle(None)
        return await transaction.get()

    async def _stage(
        self, image: FileImage, router: _Router, leases: _Leases, send: MemoryObjectSendStream[_Filled]
    ) -> None:
        """Fill the chunks of one file, in order, as the pool gives them out."""
        step = self._tools.pool.chunk_bytes
        before: _Filled | None = None
        with send:
            for start in range(0, max(image.nbytes, 1), step):
                stop = min(start + step, image.nbytes)
                if before is not None and (isinstance(before.pending, Done) or not leases.available):
                    # Never wait for a chunk while holding one that could be written and given back.
                    await self._pass_on(before, send)
                    before = None
                lease = await leases.acquire()
                filled = _Filled(lease, start, stop, await router.issue(image.pieces(start, stop), lease.chunk))
                leases.pending[lease] = filled.pending
                if stop == image.nbytes:
                    router.last_issued(self._job)
                if before is not None:
                    await self._pass_on(before, send)
                before = filled
            if before is not None:
                await self._pass_on(before, send)

    async def _pass_on(self, filled: _Filled, send: MemoryObjectSendStream[_Filled]) -> None:
        await filled.pending.wait()
        self._staged_bytes += filled.stop - filled.start
        self._report("staging")
        with contextlib.suppress(anyio.BrokenResourceError):  # the writer has failed, which ends this task too
            send.send_nowait(filled)

    async def _seal(
        self,
        image: FileImage,
        sealer: Sealer,
        receive: MemoryObjectReceiveStream[_Filled],
        send: MemoryObjectSendStream[_Filled],
    ) -> None:
        """Complete the chunks of one file, one ahead of the writing."""
        with receive, send:
            async for filled in receive:
                view = filled.lease.chunk.view
                await self._tools.seal_workers.run(sealer.seal, view, filled.start, filled.stop)
                if filled.stop == image.nbytes:
                    self._files[image.name] = FileFacts(image.nbytes, sealer.file_crc)
                with contextlib.suppress(anyio.BrokenResourceError):  # the writer has failed, which ends this too
                    await send.send(filled)

    async def _write(
        self,
        image: FileImage,
        transaction: _Later[Transaction],
        receive: MemoryObjectReceiveStream[_Filled],
        previous: SaveJob | None,
    ) -> None:
        """Write the chunks of one file as they come."""
        with receive:
            if previous is not None:
                await previous.over.wait()
            sink = await (await transaction.get()).create(image.name, image.nbytes)
            async for filled in receive:
                length = align_up(filled.stop - filled.start, BLOCK_BYTES)
                if length:
                    await sink.write(filled.lease.chunk.view[:length])
                filled.lease.release()
                self._written_bytes += filled.stop - filled.start
                self._report("writing")
            await sink.finish()

    async def _describe(self, plan: SavePlan, transaction: Transaction) -> None:
        """Write the manifest, then the metadata."""
        metadata = await self._tools.io_workers.run(plan.metadata)
        self._files[METADATA_NAME] = FileFacts(len(metadata), crc32(metadata))
        manifest = encode_manifest(self._manifest(plan))
        for name, data in ((MANIFEST_NAME, manifest), (METADATA_NAME, metadata)):
            sink = await transaction.create(name, len(data))
            await sink.write(memoryview(data))
            await sink.finish()

    def _manifest(self, plan: SavePlan) -> Manifest:
        layout = plan.layout
        images = {image.name: self._files[image.name] for image in layout.images}
        return Manifest(
            writer=f"aiockpt {__version__} (torch {torch.__version__})",
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            metadata=self._job.metadata,
            files=images | {METADATA_NAME: self._files[METADATA_NAME]},
            totals={
                "tensors": len(layout.specs) - len(layout.object_leaves),
                "objects": len(layout.object_leaves),
                "tensor_bytes": layout.tensor_bytes,
                "file_bytes": self._total_bytes,
            },
            times_s={
                "captured": self._job.captured_s,
                "planned": self._planned_s,
                "staged": self._staged_s,
                "data_written": self._job.handle._elapsed(),
            },
            containers=self._job.capture.containers,
        )

    def _result(self, plan: SavePlan) -> SaveResult:
        layout = plan.layout
        return SaveResult(
            path=self._job.path,
            nbytes=self._total_bytes,
            tensor_bytes=layout.tensor_bytes,
            tensors=len(layout.specs) - len(layout.object_leaves),
            objects=len(layout.object_leaves),
            files={name: facts.nbytes for name, facts in self._files.items()},
            captured_s=self._job.captured_s,
            planned_s=self._planned_s,
            staged_s=self._staged_s,
            written_s=self._job.handle._elapsed(),
        )

    def _report(self, phase: Phase) -> None:
        handle = self._job.handle
        handle._report(
            ProgressEvent(phase, self._staged_bytes, self._written_bytes, self._total_bytes, handle._elapsed())
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """A chunk that holds, or will hold, the payload of the bytes ``start`` to ``stop`` of a file."""

    lease: Lease
    start: int
    stop: int
    pending: Pending


class _Later(Generic[T]):
    """A value that comes later, within the engine's loop."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._values: list[T] = []

    def set(self, value: T) -> None:
        self._values.append(value)
        self._event.set()

    async def get(self) -> T:
        await self._event.wait()
        return self._values[0]


class _Leases:
    """All leases of one save: on leaving, whatever still is out goes back, once nothing uses it any more."""

    def __init__(self, pool: ChunkPool) -> None:
        self._pool = pool
        self._out: list[Lease] = []
        self.pending: dict[Lease, Pending] = {}

    @property
    def available(self) -> bool:
        """Whether `acquire` would return at once."""
        return self._pool.available

    async def acquire(self) -> Lease:
        lease = await self._pool.acquire()
        self._out.append(lease)
        return lease

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        with anyio.CancelScope(shield=True):
            for lease in self._out:
                if not lease.released and lease in self.pending:
                    with contextlib.suppress(Exception):  # the failed copy has been reported where it was awaited
                        await self.pending[lease].wait()
                lease.release()


class _Router:
    """Sends pieces to the stager of the device that their tensors are on."""

    def __init__(self, layout: Layout, capture: Capture, tools: SaveTools) -> None:
        self._layout = layout
        self._capture = capture
        devices = {spec.device for spec in layout.specs if spec is not None} or {torch.device("cpu")}
        self._by_device = {device: tools.stager_for(device) for device in devices}
        self._files_left = len(layout.images)

    @property
    def stagers(self) -> list[Stager]:
        return list(self._by_device.values())

    async def issue(self, pieces: Sequence[Piece], chunk: Chunk) -> Pending:
        try:
            if len(self._by_device) == 1:
                (stager,) = self._by_device.values()
                return await stager.issue(pieces, chunk, self._capture, self._layout)
            return await self._issue_to_several(pieces, chunk)
        except (LayoutMismatchError, AiockptError):
            raise
        except Exception as exc:
            raise StageError(f"copying tensors into staging memory failed: {type(exc).__name__}: {exc}") from exc

    async def _issue_to_several(self, pieces: Sequence[Piece], chunk: Chunk) -> Pending:
        groups: dict[torch.device, list[Piece]] = defaultdict(list)
        for piece in pieces:
            spec = self._layout.specs[piece.leaf]
            if spec is not None:
                groups[spec.device].append(piece)
        issued = _All([])
        try:
            for device, group in groups.items():
                stager = self._by_device[device]
                issued.pending.append(await stager.issue(group, chunk, self._capture, self._layout))
        except BaseException:
            with anyio.CancelScope(shield=True):  # the chunk goes back: nothing may be on its way into it
                await issued.wait()
            raise
        return issued

    def last_issued(self, job: SaveJob) -> None:
        self._files_left -= 1
        if self._files_left == 0:
            job.issued.set()


class _All:
    """Several pending copies as one."""

    def __init__(self, pending: list[Pending]) -> None:
        self.pending = pending

    async def wait(self) -> None:
        for each in self.pending:
            await each.wait()
