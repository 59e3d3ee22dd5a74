"""Saves of one process, which agrees with nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.errors import AiockptError
from aiockpt.saving.result import ending_of, result_of
from aiockpt.saving.strategy import SaveStrategy, Transferred

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.planning.planner import Planner, SavePlan
    from aiockpt.saving.handle import SaveResult
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import Transaction
    from aiockpt.writing.commit import CommitDocuments


class LocalSave(SaveStrategy):
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
        self._planner.invalidate()

    async def begin(self) -> Transaction:
        """Begin the transaction."""
        job = self._job
        self._transaction = await job.storage.begin(job.path, overwrite=job.overwrite, workers=self._io)
        return self._transaction

    async def ending(self, plan: SavePlan) -> CommitDocuments | None:
        """Encode the manifest and what makes it a checkpoint of its format."""
        return await self._io.run(ending_of, self._job, plan)

    async def finish(self, transferred: Transferred) -> SaveResult:
        """Publish what was written."""
        sizes = await transferred.writing.publish()
        return result_of(self._job, transferred.plan, sizes, transferred.times_s)

    async def fail(self, error: BaseException) -> BaseException:
        """Remove what was written; should that fail too, say so on the error that led here."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            try:
                await transaction.abort()
            except AiockptError as exc:
                error.add_note(str(exc))
        return error
