"""The save pipeline: plan, stage, write, commit. The only module that knows both staging and writing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import logging
import math
import os
import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from aiockpt.core.spans import record_to, span
from aiockpt.core.threads import SHORT_ITEMS, Duty, Origin
from aiockpt.errors import (
    AiockptError,
    CommitError,
    CommitUncertainError,
    SaveError,
    WriteError,
    unwrapped,
)
from aiockpt.planning.dcp_plan import DcpFormat, DcpPlan
from aiockpt.planning.encoding import codings_of
from aiockpt.saving.job import AppendSpec, PartSpec
from aiockpt.saving.staging_session import Leases, StagerRouter, StagingChunk
from aiockpt.saving.strategy import AppendSave, LocalSave, PartSave
from aiockpt.staging.base import Fill, LayoutMismatchError
from aiockpt.storage.base import room_coming
from aiockpt.telemetry.progress import ProgressEvent, SavePhase
from aiockpt.telemetry.timeline import Recording
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk, WriterThreads
from aiockpt.writing.process.messages import as_save_error

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from aiockpt.engine.resources import EngineResources
    from aiockpt.options import CommitHook
    from aiockpt.planning.layout import FileImage
    from aiockpt.planning.planner import SavePlan
    from aiockpt.saving.job import SaveJob
    from aiockpt.staging.pool import Lease
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.saves import SaveResult
    from aiockpt.writing.process.client import RemoteWriter

    Writer = FileWriter | RemoteWriter
    FillWriter = Callable[[SavePlan, Writer], Awaitable[None]]
    Put = Callable[[StagingChunk], Awaitable[None]]

logger = logging.getLogger("aiockpt")


def _strategy_for(job: SaveJob, tools: EngineResources, leases: Leases) -> LocalSave:
    """Choose how a save is planned and committed."""
    world, spec, alone = tools.world(), job.spec, (tools.planner, tools.copy_workers, tools.io_workers)
    if isinstance(spec, AppendSpec):
        return AppendSave(job, spec, tools.copy_workers, tools.io_workers)
    if not (spec.copies or spec.is_refusal):
        from aiockpt.saving.joint import JointSave  # imported already, by the thread that has begun the transaction

        return JointSave(job, None if world is None else world.coordinator, *alone)
    if spec.delta is not None:
        from aiockpt.saving.delta import DeltaSave  # imported already, by the thread that has submitted the save

        return DeltaSave(job, spec.delta, tools, leases)
    if isinstance(spec, PartSpec) and spec.call is None:
        return PartSave(job, *alone)
    if world is None:
        return LocalSave(job, *alone)
    file_format = spec.file_format if spec.file_format is not None else DcpFormat(tools.io_workers.count)
    if job.storage.traits.is_divided:
        from aiockpt.saving.hosts import HostsSave  # imported already, by the manager

        return HostsSave(job, file_format, world, tools.copy_workers, tools.io_workers)
    from aiockpt.saving.collective import CollectiveSave  # imported already, by the thread that met the other ranks

    return CollectiveSave(job, file_format, world, tools.copy_workers, tools.io_workers)


class SavePipeline:
    """One save, from its snapshot to its result."""

    _strategy: LocalSave  # since it runs
    _share_of_pool: int  # of one file that is being staged, in chunks

    def __init__(self, job: SaveJob, tools: EngineResources) -> None:
        self._job = job
        self._tools = tools
        self._staged_bytes = self._written_bytes = 0
        self._leases = Leases(tools.pool)
        self._planned_s = 0.0
        self._staged_s = 0.0
        self._plan: SavePlan | None = None
        self._writer: Writer | None = None
        self._images_left = 0
        self._is_committing = False
        self._keeps_chunks = False  # for a second attempt, at the fallback
        self._kept: list[tuple[int, FilledChunk]] = []

    async def run(self) -> None:
        """Run until the save has ended in any way. Never raises: the futures of the save get the outcome."""
        job = self._job
        error: BaseException | None = None
        result: SaveResult | None = None
        record_to(job.spans)
        room_coming.set(job.room_coming)
        try:
            with job.scope:
                if job.cancel_asked:
                    job.scope.cancel()
                self._strategy = _strategy_for(job, self._tools, self._leases)
                result = await self._save_somewhere()
            if result is None:  # the scope has absorbed its own cancellation
                error = job.cancellation
        except BaseException as exc:  # delivered to the waiters, never dropped
            error = as_save_error(exc)
            is_full = job.room_coming is not None and os.strerror(errno.ENOSPC) in str(error)
            if is_full and (self._tools.writer is not None or self._tools.world() is not None):
                error.add_note(
                    "a writer process, and ranks other than rank 0, do not wait for the steps that are being deleted: "
                    "have room for two steps more than are kept"
                )
        finally:
            job.settle(result, error)

    def quarantine(self) -> None:
        """Set the chunks of a hanging thread apart, and keep it from publishing when it returns."""
        self._leases.quarantine()
        self.revoke()

    def revoke(self) -> bool:
        """Keep a hanging thread from publishing when it returns; return whether it may be doing so. From any thread."""
        if self._writer is not None:
            self._writer.revoke()
        return self._is_committing

    async def _save_somewhere(self) -> SaveResult:
        """Save to the path, or to the fallback if the storage fails there."""
        job = self._job
        try:
            return await self._save()
        except BaseException as exc:
            error = unwrapped(exc)
            if job.spec.fallback is None or not isinstance(error, WriteError | CommitError):
                raise
            return await self._save_to_fallback(error, *job.spec.fallback)
        finally:
            await self._leases.give_back()

    async def _save(self) -> SaveResult:
        """Plan and save; plan once more if the kept layout turns out not to fit the tensors."""
        if not self._strategy.can_replan:
            return await self._save_as_planned()
        try:
            return await self._save_as_planned()
        except* LayoutMismatchError:
            pass
        # A tensor has another shape or dtype than in the kept layout, though it has the same name.
        self._strategy.invalidate_plan()
        try:
            return await self._save_as_planned()
        except* LayoutMismatchError as group:
            raise self._job.torn_by(unwrapped(group)) from None

    async def _save_as_planned(self, plan: SavePlan | None = None) -> SaveResult:
        await self._leases.give_back()  # of an earlier attempt: with a small pool, they may be all there is
        self._kept.clear()
        begin = time.perf_counter()
        if plan is None:
            with span("plan"):
                self._plan = plan = await self._strategy.plan()
        self._planned_s = time.perf_counter() - begin
        # No cancellation in between: other ranks that have planned with this one wait for what becomes of it.
        return await self._write_and_commit(plan, self._stage_planned)

    async def _stage_planned(self, plan: SavePlan, writer: Writer) -> None:
        await self._job.turn.wait_for("planned")  # else one without other ranks would let the next one overtake
        self._job.turn.pass_milestone("planned")
        self._staged_bytes = self._written_bytes = 0
        self._report("planned")
        await self._stage(plan, writer)

    async def _write_and_commit(self, plan: SavePlan, fill: FillWriter) -> SaveResult:
        """Write all files and publish them, or remove them. Every save takes this course.

        ``fill`` puts every chunk to the writer: from the tensors, or from staging memory that was kept.
        """
        job, strategy = self._job, self._strategy
        try:
            self._writer = writer = self._writer_for(plan)
            await fill(plan, writer)  # ends when every file is written
            # A cancellation that came while the copies were checked has ended the writing, but `fill` has returned: a
            # call in a worker thread is awaited to its end, and raises no cancellation.
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._report("written")
            await job.turn.wait_for("over")  # the save before may be on its way to the fallback
            if (hook := job.spec.options.pre_commit) is not None:
                more = strategy.hook_arguments()
                await self._run_hook(hook, "pre_commit", *(more if _takes_two(hook) else ()))
                await anyio.lowlevel.checkpoint_if_cancelled()  # the hook's thread was awaited to its end
            result = await self._commit(plan, writer)
        except BaseException as exc:
            self._is_committing = isinstance(unwrapped(exc), CommitUncertainError)
            with anyio.CancelScope(shield=True):
                if self._writer is not None:  # first: it must not write to files that `fail` removes
                    await self._writer.abandon()
                error = await strategy.fail(unwrapped(exc))
            if error is unwrapped(exc):
                raise
            raise error from error.__cause__
        self._report("committed")
        job.committed = True
        result = replace(result, recording=Recording((*job.spans, *writer.spans), job.spec.started))
        after = job.spec.options.post_commit
        return result if after is None else await self._after(result, after)

    async def _commit(self, plan: SavePlan, writer: Writer) -> SaveResult:
        """Publish, or not: a commit is done or undone as a whole, whatever is cancelled meanwhile."""
        with anyio.CancelScope(shield=True):
            self._is_committing = True
            with span("commit"):
                result = await self._strategy.commit(plan, writer, self._times_s())
            await writer.close()
        return result

    # --- writing ------------------------------------------------------------------------------------

    def _writer_for(self, plan: SavePlan) -> Writer:
        job, layout, tools = self._job, plan.layout, self._tools
        names = ["" if plan.is_single_file else image.name for image in layout.images]
        codings = None
        if job.spec.is_transformed and isinstance(plan, DcpPlan):
            codings = codings_of(plan, job.spec.compression, job.spec.transforms)
        if tools.writer is not None and job.spec.copies and not isinstance(job.spec, AppendSpec):
            from aiockpt.writing.process import messages  # imported already, by `shared_memory`
            from aiockpt.writing.process.client import RemoteWriter

            order = messages.Begin(
                save=next(tools.writer.save_numbers),
                path=job.path,
                storage=pickle.dumps(job.storage),
                overwrite=job.overwrite,
                names=names,
                heads=plan.heads,
                codings=None if codings is None else pickle.dumps(codings),
                again=job.fallback_error is not None,
            )
            return RemoteWriter(tools.writer, order, job.storage, layout, self._wrote, tools.io_workers)
        threads = WriterThreads(tools.seal_workers, tools.io_workers)
        after = job.turn.before_is_over
        hashing = self._strategy.hashing(plan)
        return FileWriter(
            layout.images, plan.heads, names, threads, after=after, count=self._wrote, codings=codings, hashing=hashing
        )

    def _wrote(self, nbytes: int) -> None:
        """Count bytes that a file has taken."""
        self._written_bytes += nbytes
        self._report("writing")

    def _report(self, phase: SavePhase) -> None:
        handle, total_bytes = self._job.handle, 0 if self._plan is None else self._plan.layout.nbytes
        figures = (self._written_bytes, total_bytes, handle._elapsed(), self._staged_bytes)
        handle._report(ProgressEvent("save", handle.path, phase, *figures))

    async def _begin(self, writer: Writer) -> None:
        """Begin the transaction, while tensors are staged already: a file server may take long to answer."""
        if isinstance(writer, FileWriter):
            writer.begin(await self._strategy.begin())
        else:
            await writer.begin(await self._strategy.ticket())

    async def _hand_over(self, plan: SavePlan, writer: Writer) -> None:
        """Pass the writer everything that the commit needs, and announce that everything is staged."""
        if not writer.outlives_trainer:
            self._announce_staged()
        documents = await self._strategy.documents(plan)
        spec = self._job.spec
        inputs = CommitInputs(documents, self._times_s(), spec.started, waits=spec.options.pre_commit is not None)
        await writer.hand_over(inputs)
        if writer.outlives_trainer:  # from now on the save survives this process, which `staged` promises
            self._announce_staged()

    def _times_s(self) -> dict[str, float]:
        return {"captured": self._job.captured_s, "planned": self._planned_s, "staged": self._staged_s}

    def _announce_staged(self) -> None:
        job = self._job
        if not job.handle.staged.done():
            job.snapshot.release()  # first: once `staged` has come, the save holds no tensor any more
            job.turn.pass_milestone("staged")
            self._report("staged")
            job.settle_staged()

    # --- staging ------------------------------------------------------------------------------------

    async def _stage(self, plan: SavePlan, writer: Writer) -> None:
        """Copy every tensor into chunks, in the order of the files, and put them to the writer."""
        job, layout = self._job, plan.layout
        await job.turn.wait_for("staged")
        router = StagerRouter(layout, job.snapshot, self._tools.stager_for)
        job.consistency.stagers = router.stagers
        self._images_left = len(layout.images)
        if not layout.images:
            job.consistency.issued.set()
        # As many files at a time as the writer has open, in the same order: else the chunks of later files, which the
        # writer does not take yet, could be all of the pool while the first file waits for one.
        turn = anyio.Semaphore(self._tools.io_workers.count)
        pool = self._tools.pool
        chunks = sum(max(1, -(-image.nbytes // pool.chunk_bytes)) for image in layout.images)
        if job.spec.copies:  # else it has what its parts need
            self._tools.growth.reserve(layout.nbytes, chunks)
        self._share_of_pool = max(1, pool.in_reach // max(1, min(len(layout.images), self._tools.io_workers.count)))
        self._keeps_chunks = job.spec.fallback is not None and pool.in_reach >= chunks
        async with anyio.create_task_group() as tasks:
            writer.start(tasks)
            tasks.start_soon(self._begin, writer)
            # A group of its own: it ends with the last copy, while the outer one goes on writing.
            async with anyio.create_task_group() as staging:
                for number, image in enumerate(layout.images):
                    staging.start_soon(self._stage_file, number, image, router, writer, turn)
            # In a thread: to read 100,000 version counters takes 28 ms, during which the loop would do nothing else.
            # What was copied at the call needs no look.
            snapshot = job.snapshot
            is_short = len(snapshot.tensors) == len(snapshot.eager) + len(snapshot.structure.objects) <= SHORT_ITEMS
            await self._tools.copy_workers.run_unless(is_short, job.consistency.check_for_changes)
            self._staged_s = job.handle._elapsed()
            await self._hand_over(plan, writer)

    async def _stage_file(
        self, number: int, image: FileImage, router: StagerRouter, writer: Writer, turn: anyio.Semaphore
    ) -> None:
        """Fill the chunks of one file, in order, as the pool gives them out."""
        put = partial(self._put, writer, number)
        try:
            async with turn:
                if not router.is_async:
                    await self._fill_chunks(image, router, put, at_once=1)
                    return
                # In a task of its own, copies are awaited while further ones are enqueued: as far as there are chunks,
                # a fence has to wait for no copy.
                issued, copied = anyio.create_memory_object_stream[StagingChunk](math.inf)

                async def pass_on(chunk: StagingChunk) -> None:
                    with contextlib.suppress(anyio.BrokenResourceError):  # the other task has failed, which ends this
                        issued.send_nowait(chunk)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_put_all, copied, put)
                    with issued:
                        await self._fill_chunks(image, router, pass_on, at_once=self._share_of_pool)
        finally:
            writer.end(number)

    async def _fill_chunks(self, image: FileImage, router: StagerRouter, pass_on: Put, *, at_once: int) -> None:
        """Issue the copies of one file: those of the first chunk alone, so that writing begins, then of more at once.

        One thread enqueues them, which takes the GIL once for each time, and meets less Python of other threads the
        sooner it is done.
        """
        step, throttle, leases = self._tools.pool.chunk_bytes, self._job.throttle, self._leases
        ranges = [(start, min(start + step, image.nbytes)) for start in range(0, max(image.nbytes, 1), step)]
        done = 0
        while done < len(ranges):
            batch: list[tuple[Lease, int, int]] = []
            for start, stop in ranges[done : done + (at_once if done else 1)]:
                if not batch:
                    await throttle.acquire(stop - start)
                    batch.append((await leases.acquire(), start, stop))
                    continue
                # No wait for a chunk while this task has some that nothing fills: all tasks might do so.
                if throttle.is_held or (lease := leases.acquire_nowait()) is None:
                    break
                await throttle.acquire(stop - start)
                batch.append((lease, start, stop))
            with span("stage", batch[-1][2] - batch[0][1], image.name):
                pending = await router.issue([Fill(lease.chunk, image.pieces(*ends)) for lease, *ends in batch])
            done += len(batch)
            filled = [StagingChunk(*taken, copies) for taken, copies in zip(batch, pending, strict=True)]
            # In case this fails or is cancelled.
            leases.pending.update((staged.lease, staged.pending) for staged in filled)
            if done == len(ranges):
                self._images_left -= 1
                if self._images_left == 0:
                    self._job.consistency.issued.set()
            for staged in filled:
                await pass_on(staged)

    async def _put(self, writer: Writer, number: int, staged: StagingChunk) -> None:
        """Wait for the copy, and put the chunk to the writer."""
        await staged.pending.wait()
        self._staged_bytes += staged.stop - staged.start
        self._report("staging")
        lease = staged.lease
        release = _keep if self._keeps_chunks else lease.release
        chunk = FilledChunk(lease.chunk.view, staged.start, staged.stop, release, lease.chunk.number)
        if self._keeps_chunks:
            self._kept.append((number, chunk))
        await writer.put(number, chunk)

    # --- failures, and what comes after -------------------------------------------------------------

    async def _save_to_fallback(self, error: BaseException, storage: Storage, fallback: str) -> SaveResult:
        """Save to the fallback what could not be saved to the path that was asked for.

        If everything is staged, from staging memory; before that from the tensors, which have not changed.
        """
        job, strategy = self._job, self._strategy
        job.storage = storage
        is_staged, hindrance = job.consistency.copied, None
        if job.spec.is_refusal:
            hindrance = "the save was refused at the call"
        elif job.consistency.abort_error is not None or job.scope.cancel_called:
            hindrance = "the save was called off"
        elif not (self._kept if is_staged else job.consistency.reset_for_restage()):
            hindrance = f"it was too late to save it to {fallback}: more staging_bytes would keep what is staged"
        try:
            with anyio.CancelScope(shield=True):  # several ranks agree on it
                fallback = await strategy.fall_back(fallback, hindrance, is_planned=self._plan is not None)
        except AiockptError as exc:
            error.add_note(str(exc))
            raise error from error.__cause__
        job.path, job.fallback_error = fallback, error
        job.overwrite = False  # the caller has allowed to replace what is at the path, not what is at the fallback
        logger.warning("%s; it is saved to %s instead", error, fallback)
        try:
            if is_staged and self._plan is not None:
                self._written_bytes = 0  # the chunks go to another writer
                result = await self._write_and_commit(self._plan, self._write_again)
            elif strategy.can_replan:
                result = await self._save()
            else:  # of several ranks, some may have staged by this plan
                result = await self._save_as_planned(self._plan)
        except BaseException as worse:
            if not isinstance(unwrapped(worse), Exception):  # a cancellation
                raise
            error.add_note(f"nor could it be saved to {fallback}: {unwrapped(worse)}")
            raise error from error.__cause__
        return replace(result, fallback_error=error)

    async def _write_again(self, plan: SavePlan, writer: Writer) -> None:
        """Put the chunks that were kept to another writer."""
        async with anyio.create_task_group() as tasks:
            writer.start(tasks)
            tasks.start_soon(self._begin, writer)
            for number, chunk in self._kept:
                await writer.put(number, chunk)
            for number in range(len(plan.layout.images)):
                writer.end(number)
            await self._hand_over(plan, writer)

    async def _run_hook(self, hook: Callable[..., object], moment: str, *more: object) -> None:
        await self._tools.io_workers.run(_run_hook, hook, moment, self._job.origin, self._job.path, *more)

    async def _after(self, result: SaveResult, hook: CommitHook) -> SaveResult:
        """Run the post_commit hook, which can't undo the commit."""
        try:
            await self._run_hook(hook, "post_commit", *([result] if _takes_two(hook) else []))
        except SaveError as exc:
            logger.exception("%s is published all the same", self._job.path)
            return replace(result, post_commit_error=exc)
        return result


async def _put_all(copied: MemoryObjectReceiveStream[StagingChunk], put: Put) -> None:
    with copied:
        async for chunk in copied:
            await put(chunk)


def _keep() -> None:
    """Keep the chunk: it may have to be written once more."""


# --- hooks --------------------------------------------------------------------------------------------


def _takes_two(hook: CommitHook) -> bool:
    """Return whether a hook has two parameters without defaults: the path, and the result or the directory."""
    with contextlib.suppress(TypeError, ValueError):  # of a builtin, say, nothing is known
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [taken for taken in inspect.signature(hook).parameters.values() if taken.default is taken.empty]
        return len([taken for taken in needed if taken.kind in kinds]) == 2
    return False


def _run_hook(hook: Callable[..., object], moment: str, origin: Origin, path: str, *more: object) -> None:
    """Call a hook, and await what it returns in an event loop of its own. Blocks."""
    try:
        with Duty(origin, "saves", f"the {moment} hook of {path}"):
            value = hook(path, *more)
            if inspect.isawaitable(value):
                asyncio.run(_awaited(value))
    except BaseException as exc:  # SystemExit of a hook fails the save; it must not end the engine's loop
        raise SaveError(f"the {moment} hook of {path} failed: {type(exc).__name__}: {exc}") from exc


async def _awaited(value: Awaitable[Any]) -> None:
    await value  # asyncio.run takes coroutines only, and a hook may return any awaitable
