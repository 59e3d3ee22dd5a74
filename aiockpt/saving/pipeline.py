"""The save pipeline: plan, stage, write, commit. The only module that knows both staging and storage."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from aiockpt.errors import CommitError, SaveCancelledError, SaveError, TornSnapshotError, WriteError
from aiockpt.planning.dcp_plan import DcpFormat, DcpPlan
from aiockpt.planning.encoding import codings_of
from aiockpt.saving.append import AppendSave
from aiockpt.saving.collective import CollectiveSave
from aiockpt.saving.handle import Phase, ProgressEvent
from aiockpt.saving.hooks import run_hook
from aiockpt.saving.local import LocalSave
from aiockpt.saving.staging_session import LeaseScope, StagerRouter, StagingChunk
from aiockpt.saving.strategy import Transferred
from aiockpt.staging.base import Done, LayoutMismatchError
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk, WriterThreads
from aiockpt.writing.process.client import RemoteWriter, WriteOrder
from aiockpt.writing.process.error_transport import as_save_error, unwrapped

if TYPE_CHECKING:
    import torch

    from aiockpt.core.threads import Workers
    from aiockpt.options import Hook
    from aiockpt.planning.layout import FileImage
    from aiockpt.planning.planner import Planner, SavePlan
    from aiockpt.saving.collective_leader import CollectiveResources
    from aiockpt.saving.handle import SaveResult
    from aiockpt.saving.job import SaveJob
    from aiockpt.saving.strategy import SaveStrategy
    from aiockpt.staging.base import Stager
    from aiockpt.staging.pool import ChunkPool
    from aiockpt.writing.file_writer import ChunkWriter
    from aiockpt.writing.process.supervisor import WriterHost

logger = logging.getLogger("aiockpt")

Put = Callable[[StagingChunk], Awaitable[None]]
Transfer = Callable[["SavePlan", "SaveJob | None", "ChunkWriter"], Awaitable[None]]


@dataclass(frozen=True)
class SaveTools:
    """What the engine lends to every save.

    ``world`` where there are other ranks to save with, ``writer`` where another process is to write.
    """

    pool: ChunkPool
    planner: Planner
    copy_workers: Workers
    io_workers: Workers
    seal_workers: Workers
    stager_for: Callable[[torch.device], Stager]
    reserve: Callable[[int], None]
    world: Callable[[], CollectiveResources | None]
    writer: WriterHost | None = None


async def run_save(job: SaveJob, tools: SaveTools, previous: SaveJob | None) -> None:
    """Run one save to its end, whatever that is; never raises."""
    error: BaseException | None = None
    result: SaveResult | None = None
    try:
        with job.scope:
            if job.cancel_asked:
                job.scope.cancel()
            result = await _Save(job, tools, previous, _course_of(job, tools, previous)).run()
        if result is None:
            error = job.verdict or SaveCancelledError(f"the save of {job.path} was cancelled; nothing of it is left")
    except BaseException as exc:  # delivered to whoever waits, never dropped
        error = as_save_error(exc)
    finally:
        job.settle(result, error)


async def let_pass_in_turn(job: SaveJob, previous: SaveJob | None) -> None:
    """Let the saves behind one that is over go on, but none of them past those before it. Not to be cancelled."""
    if previous is not None:
        await previous.planned.wait()
        job.planned.set()
        await previous.staging_over.wait()
        job.staging_over.set()
        await previous.over.wait()
    job.let_pass()


def _course_of(job: SaveJob, tools: SaveTools, previous: SaveJob | None) -> SaveStrategy:
    """Tell whether a save is made alone or with other ranks."""
    world = tools.world()
    if world is None and job.part is None:
        return LocalSave(job, tools.planner, tools.copy_workers, tools.io_workers)
    form = job.form if job.form is not None else DcpFormat(tools.io_workers.count)
    if isinstance(form, DcpFormat) and job.part is not None:
        return AppendSave(job, form, job.part, tools.copy_workers, tools.io_workers)
    if world is None or not isinstance(form, DcpFormat):
        raise SaveError(
            f"format={form.name!r} is for one process: pass process_group=None and whole tensors, on one rank"
        )
    return CollectiveSave(job, form, world, previous, tools.copy_workers, tools.io_workers)


def _keep() -> None:
    """Give nothing back yet: it may have to be written once more."""


class _Save:
    """The course of one save."""

    _leases: LeaseScope

    def __init__(self, job: SaveJob, tools: SaveTools, previous: SaveJob | None, course: SaveStrategy) -> None:
        self._job = job
        self._tools = tools
        self._course = course
        self._previous = previous
        self._staged_bytes = 0
        self._written_bytes = 0
        self._total_bytes = 0
        self._planned_s = 0.0
        self._staged_s = 0.0
        self._images_left = 0
        self._writing: ChunkWriter | None = None
        self._plan: SavePlan | None = None
        self._keeps = False
        self._parts: list[tuple[int, FilledChunk]] = []

    async def run(self) -> SaveResult:
        previous, self._previous = self._previous, None
        job = self._job
        async with LeaseScope(self._tools.pool) as self._leases:
            job.quarantine = self._set_apart
            try:
                return await self._planned(previous)
            except BaseException as exc:
                if job.fallback is None or not self._is_storage_failure(exc):
                    raise
                return await self._divert(unwrapped(exc), job.fallback, previous)

    async def _planned(self, previous: SaveJob | None) -> SaveResult:
        """Plan, and carry it out; plan once more if the kept layout turns out not to fit."""
        if not self._course.plans_anew:
            return await self._attempt(previous)
        try:
            return await self._attempt(previous)
        except* LayoutMismatchError as group:
            mismatch = as_save_error(group)
        # A tensor is not what the kept layout says, though it has the same name: plan from the beginning.
        self._course.forget()
        try:
            return await self._attempt(previous)
        except* LayoutMismatchError:
            raise TornSnapshotError(
                f"{mismatch.__cause__} changed its shape, dtype or device while {self._job.path} was being saved; "
                "await `staged` before changing tensors"
            ) from None

    async def _attempt(self, previous: SaveJob | None) -> SaveResult:
        await self._leases.give_back()
        self._staged_bytes = self._written_bytes = 0
        self._parts.clear()
        begin = time.perf_counter()
        self._plan = plan = await self._course.plan()
        self._job.planned.set()
        self._planned_s = time.perf_counter() - begin
        self._total_bytes = plan.layout.nbytes
        self._report("planned")
        return await self._carry_out(plan, previous, self._transfer)

    async def _carry_out(self, plan: SavePlan, previous: SaveJob | None, transfer: Transfer) -> SaveResult:
        """Write what was planned, and publish it; or leave nothing of it."""
        job, course = self._job, self._course
        try:
            self._writing = writing = self._writing_of(plan, previous)
            await transfer(plan, previous, writing)
            # A cancellation that came while the copies were checked has ended the writing, and nothing else yet.
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._report("written")
            if previous is not None:  # which may be on its second way
                await previous.over.wait()
            if job.pre_commit is not None:
                await self._tools.io_workers.run(run_hook, job.pre_commit, job.path, "pre_commit", job.origin)
                await anyio.lowlevel.checkpoint_if_cancelled()
            with anyio.CancelScope(shield=True):  # from here on it is done or undone, not half
                result = await course.finish(Transferred(plan, writing.files, writing.crcs, self._times_s(), writing))
                await writing.over()
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                if self._writing is not None:
                    await self._writing.abandon()
                error = await course.fail(unwrapped(exc))
            if error is unwrapped(exc):
                raise
            raise error from error.__cause__
        self._report("committed")
        job.committed = True
        return result if job.post_commit is None else await self._after(result, job.post_commit)

    def _set_apart(self) -> None:
        """Set apart what a hanging thread holds, and let it publish nothing when it comes back."""
        self._leases.quarantine()
        if self._writing is not None:
            self._writing.revoke()

    def _is_storage_failure(self, error: BaseException) -> bool:
        job = self._job
        is_called_off = job.verdict is not None or job.scope.cancel_called
        return isinstance(unwrapped(error), (WriteError, CommitError)) and not is_called_off

    async def _divert(self, error: BaseException, fallback: str, previous: SaveJob | None) -> SaveResult:
        """Save to the other path what could not be saved to the one that was asked for.

        While it is not staged, from the tensors, which have not changed; else from staging memory.
        """
        job = self._job
        is_staged = job.copied
        if not (self._parts if is_staged else job.rewind()):
            error.add_note(f"it was too late to save it to {fallback}: more staging_bytes would keep what is staged")
            raise error
        job.path, job.spoilt = fallback, error
        job.overwrite = False  # of what is there nobody has said that it may be replaced
        logger.warning("%s; it is saved to %s instead", error, fallback)
        try:
            if is_staged and self._plan is not None:
                self._written_bytes = 0
                result = await self._carry_out(self._plan, previous, self._transfer_again)
            else:
                result = await self._planned(previous)
        except BaseException as worse:
            if not isinstance(unwrapped(worse), Exception):
                raise
            error.add_note(f"nor could it be saved to {fallback}: {unwrapped(worse)}")
            raise error from error.__cause__
        return replace(result, spoilt=error)

    async def _after(self, result: SaveResult, hook: Hook) -> SaveResult:
        """Run what comes after the commit; it can't undo that."""
        try:
            await self._tools.io_workers.run(run_hook, hook, self._job.path, "post_commit", self._job.origin)
        except SaveError as exc:
            logger.exception("%s is published all the same", self._job.path)
            return replace(result, post_commit_error=exc)
        return result

    async def _transfer(self, plan: SavePlan, previous: SaveJob | None, writing: ChunkWriter) -> None:
        """Stage and write all files. Staging waits for nothing but staging memory."""
        job = self._job
        layout = plan.layout
        if previous is not None:
            await previous.staging_over.wait()
        self._tools.reserve(self._total_bytes)
        router = StagerRouter(layout, job.capture, self._tools.stager_for)
        job.stagers = router.stagers
        self._images_left = len(layout.images)
        if not layout.images:
            job.issued.set()
        # So many files at a time, in order, as they are written.
        turn = anyio.Semaphore(self._tools.io_workers.count)
        leases = self._leases
        self._keeps = job.fallback is not None and self._tools.pool.in_reach >= self._chunks_of(plan)
        async with anyio.create_task_group() as tasks:
            writing.start(tasks)
            async with anyio.create_task_group() as staging:
                for number, image in enumerate(layout.images):
                    put = partial(self._pass_on, writing, number)
                    staging.start_soon(self._stage, image, router, leases, put, partial(writing.end, number), turn)
            await self._tools.copy_workers.run(job.check_for_changes)
            self._staged_s = job.handle._elapsed()
            await self._hand_over(plan, writing)

    async def _hand_over(self, plan: SavePlan, writing: ChunkWriter) -> None:
        """Let the writing have what is left to do, and tell that all is copied."""
        job = self._job
        await writing.hand_over(self._prepared(plan))
        if not job.handle.staged.done():
            job.capture.release()
            job.staging_over.set()
            self._report("staged")
            job.handle.staged._settle(None)

    def _chunks_of(self, plan: SavePlan) -> int:
        step = self._tools.pool.chunk_bytes
        return sum(max(1, -(-image.nbytes // step)) for image in plan.layout.images)

    async def _transfer_again(self, plan: SavePlan, previous: SaveJob | None, writing: ChunkWriter) -> None:
        """Write all files from the staging memory that was kept."""
        async with anyio.create_task_group() as tasks:
            writing.start(tasks)
            for number, part in self._parts:
                await writing.put(number, part)
            for number in range(len(plan.layout.images)):
                writing.end(number)
            await self._hand_over(plan, writing)

    def _prepared(self, plan: SavePlan) -> CommitInputs:
        """Say what is left to do when the files are written."""
        job, course = self._job, self._course
        return CommitInputs(
            ending=partial(course.ending, plan),
            times_s=self._times_s(),
            started=job.started,
            waits=job.pre_commit is not None,
            check=job.check_verdict,
            parting=partial(course.parting, plan),
        )

    def _writing_of(self, plan: SavePlan, previous: SaveJob | None) -> ChunkWriter:
        job, layout = self._job, plan.layout
        names = [""] if plan.is_single_file else [image.name for image in layout.images]
        codings = None
        if job.is_transformed and isinstance(plan, DcpPlan):
            codings = codings_of(plan, job.compression, job.transforms)
        if self._tools.writer is not None and job.part is None:
            order = WriteOrder(
                path=job.path,
                storage=job.storage,
                overwrite=job.overwrite,
                names=names,
                layout=layout,
                heads=plan.heads,
                started=job.started,
                ticket=self._course.ticket,
                codings=codings,
                again=job.spoilt is not None,
            )
            return RemoteWriter(self._tools.writer, order, self._wrote, self._tools.io_workers)

        async def turn() -> None:
            if previous is not None:
                await previous.over.wait()

        tools = WriterThreads(self._tools.seal_workers, self._tools.io_workers)
        return FileWriter(layout.images, plan.heads, names, tools, self._course.begin, turn, self._wrote, codings)

    def _wrote(self, nbytes: int) -> None:
        self._written_bytes += nbytes
        self._report("writing")

    async def _stage(
        self,
        image: FileImage,
        router: StagerRouter,
        leases: LeaseScope,
        put: Put,
        end: Callable[[], None],
        turn: anyio.Semaphore,
    ) -> None:
        """Fill the chunks of one file, in order, as the pool gives them out."""
        try:
            async with turn:
                await self._fill(image, router, leases, put)
        finally:
            end()

    async def _fill(self, image: FileImage, router: StagerRouter, leases: LeaseScope, put: Put) -> None:
        step, pace = self._tools.pool.chunk_bytes, self._job.pace
        before: StagingChunk | None = None
        for start in range(0, max(image.nbytes, 1), step):
            stop = min(start + step, image.nbytes)
            is_done = before is not None and isinstance(before.pending, Done)
            if before is not None and (is_done or pace.is_held or not leases.available):
                # Never wait for a chunk while holding one that could be written and given back.
                await put(before)
                before = None
            await pace.acquire(stop - start)
            lease = await leases.acquire()
            filled = StagingChunk(lease, start, stop, await router.issue(image.pieces(start, stop), lease.chunk))
            leases.pending[lease] = filled.pending
            if stop == image.nbytes:
                self._images_left -= 1
                if self._images_left == 0:
                    self._job.issued.set()
            if before is not None:
                await put(before)
            before = filled
        if before is not None:
            await put(before)

    async def _pass_on(self, writing: ChunkWriter, number: int, filled: StagingChunk) -> None:
        await filled.pending.wait()
        self._staged_bytes += filled.stop - filled.start
        self._report("staging")
        lease = filled.lease
        chunk = lease.chunk
        release = _keep if self._keeps else lease.release
        part = FilledChunk(chunk.view, filled.start, filled.stop, release, chunk.number)
        if self._keeps:
            self._parts.append((number, part))
        await writing.put(number, part)

    def _times_s(self) -> dict[str, float]:
        return {"captured": self._job.captured_s, "planned": self._planned_s, "staged": self._staged_s}

    def _report(self, phase: Phase) -> None:
        handle = self._job.handle
        handle._report(
            ProgressEvent(phase, self._staged_bytes, self._written_bytes, self._total_bytes, handle._elapsed())
        )
