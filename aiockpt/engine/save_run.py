"""One save on the engine's loop, with its ``save_timeout``: a thread that hangs must not stop the saves behind it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import SaveTimeoutError
from aiockpt.saving.pipeline import run_save

if TYPE_CHECKING:
    from aiockpt.engine.queue import SaveQueue
    from aiockpt.engine.resources import EngineResources
    from aiockpt.saving.job import SaveJob

_GRACE_S = 5.0  # for a cancelled save to end; after that a thread of it hangs

logger = logging.getLogger("aiockpt")


class SaveRun:
    """Runs a save to its end."""

    def __init__(self, job: SaveJob, queue: SaveQueue, resources: EngineResources, timeout_s: float | None) -> None:
        self._job = job
        self._queue = queue
        self._resources = resources
        self._timeout_s = timeout_s
        self._extra_threads = 0

    async def run(self) -> None:
        """Run the save, and cancel it at its timeout; when this returns, the next save has its turn."""
        job = self._job
        try:
            async with anyio.create_task_group() as tasks:
                if self._timeout_s is not None:
                    tasks.start_soon(self._watch, self._timeout_s)
                await run_save(job, self._resources.saves)
                tasks.cancel_scope.cancel()
        except BaseException as exc:
            job.fail(exc)
            raise
        finally:
            self._resources.io_workers.spare(-self._extra_threads)
            self._queue.remove(job)
            await job.turn.finish_in_order()
            job.drop_hooks()

    async def _watch(self, timeout_s: float) -> None:
        """Cancel the save when its time is over; if it does not end, kill the writer; then abandon the save."""
        job = self._job
        await job.turn.wait_for("reported")  # the time begins when the save before has ended
        await anyio.sleep(timeout_s)
        if self._is_committed():
            return
        what = f"the save of {job.path} was not done after save_timeout = {timeout_s:g} s and was given up"
        job.time_out(SaveTimeoutError(f"{what}; nothing of it is left"))
        grace_s = min(_GRACE_S, timeout_s)
        await anyio.sleep(grace_s / 2)
        if self._resources.writer is not None:
            self._resources.writer.kill()
        await anyio.sleep(grace_s / 2)
        if self._is_committed():
            return
        job.quarantine()
        job.settle(
            None,
            SaveTimeoutError(
                f"{what}; a thread of it hangs in the file system, and holds its memory until it returns. What was "
                "written is removed then, unless the system was just renaming it. Check the disk, and save elsewhere "
                "meanwhile"
            ),
        )
        job.turn.pass_phase("reported")
        logger.error("a thread of the save of %s hangs in the file system; saving goes on without it", job.path)
        if self._resources.saves.world() is None:  # else the ranks would get out of step
            self._abandon()

    def _is_committed(self) -> bool:
        """Return whether nothing can undo the save any more: only its post_commit hook is left."""
        return self._job.committed

    def _abandon(self) -> None:
        """Allow the next saves to go on, with as many threads as the save may block."""
        workers = self._resources.io_workers
        self._job.turn.finish()
        self._extra_threads = workers.count
        workers.spare(self._extra_threads)
        self._queue.abandon(self._job)
