"""Saves of one process, which agrees with nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.course import Course, Transferred
from aiockpt.ending import complete
from aiockpt.errors import AiockptError
from aiockpt.save_summary import ending_of, result_of

if TYPE_CHECKING:
    from aiockpt.handle import SaveResult
    from aiockpt.job import SaveJob
    from aiockpt.planning.planner import Planner
    from aiockpt.planning.plans import SavePlan
    from aiockpt.storage.base import Transaction
    from aiockpt.threads import Workers


class AloneCourse(Course):
    """Plans, begins and commits a save by itself.

    Args:
        job: the save.
        planner: plans, and keeps layouts.
        compute: threads to plan in.
        io: threads to write in.
    """

    plans_anew = True

    def __init__(self, job: SaveJob, planner: Planner, compute: Workers, io: Workers) -> None:
        self._job = job
        self._planner = planner
        self._compute = compute
        self._io = io
        self._transaction: Transaction | None = None

    async def plan(self) -> SavePlan:
        """Plan all that was captured."""
        return await self._compute.run(self._planner.plan, self._job.capture, self._job.form)

    def forget(self) -> None:
        """Drop the kept layouts."""
        self._planner.forget()

    async def begin(self) -> Transaction:
        """Begin the transaction."""
        job = self._job
        self._transaction = await job.storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        return self._transaction

    async def finish(self, transferred: Transferred) -> SaveResult:
        """Write the manifest and what makes it a checkpoint of its format, and publish it."""
        transaction = self._transaction
        if transaction is None:
            raise RuntimeError("a save can't be finished before it has begun")
        plan = transferred.plan
        ending = await self._io.run(ending_of, self._job, plan)
        times_s = {**transferred.times_s, "data_written": self._job.handle._elapsed()}
        sizes = await complete(transaction, ending, transferred.files, transferred.crcs, times_s, self._io)
        return result_of(self._job, plan, sizes, transferred.times_s)

    async def fail(self, error: BaseException) -> BaseException:
        """Remove what was written; should that fail too, say so on the error that led here."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            try:
                await transaction.abort()
            except AiockptError as exc:
                error.add_note(str(exc))
        return error
