"""Saves that add files to a directory, which somebody else makes a checkpoint of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.errors import AiockptError, SaveError
from aiockpt.format.index import ItemRange
from aiockpt.planning.dcp_plan import DcpPlan
from aiockpt.saving.result import result_of
from aiockpt.saving.strategy import SaveStrategy, Transferred
from aiockpt.storage.local.storage import LocalStorage

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.planning.dcp_plan import DcpFormat
    from aiockpt.saving.handle import SaveResult
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import Transaction


class AppendSave(SaveStrategy):
    """Writes every leaf to files in a directory that is there, and says where each is.

    Args:
        job: the save; its path is the directory.
        form: how the files are laid out.
        planner: plans the files.
        compute: threads to plan in.
        io: threads to write in.
    """

    def __init__(self, job: SaveJob, form: DcpFormat, planner: LocalPlanner, compute: Workers, io: Workers) -> None:
        self._job = job
        self._form = form
        self._planner = planner
        self._compute = compute
        self._io = io
        self._transaction: Transaction | None = None

    async def plan(self) -> DcpPlan:
        """Lay everything out."""
        return await self._compute.run(self._planned)

    def _planned(self) -> DcpPlan:
        capture, form, planner = self._job.capture, self._form, self._planner
        offer = planner.propose(capture, form, again=True)
        if offer.summary is None and offer.plan is not None:
            return offer.plan
        survey = offer.summary
        if survey is None:
            raise RuntimeError("a planner has neither a plan nor a survey")
        return planner.lay_out(capture, form, survey, 0, range(len(survey.specs)))

    async def begin(self) -> Transaction:
        """Look that the directory can be written to."""
        storage = self._job.storage
        if not isinstance(storage, LocalStorage):
            raise SaveError("files can be added to directories only")
        self._transaction = storage.append_to(self._job.path, workers=self._io)
        return self._transaction

    async def finish(self, transferred: Transferred) -> SaveResult:
        """Make the files durable, and note where everything is."""
        plan = transferred.plan
        if self._transaction is None or not isinstance(plan, DcpPlan):
            raise RuntimeError("a save can't be finished before it has begun")
        await self._transaction.commit()
        places = self._job.places
        for image in plan.layout.images:
            for slot in image.slots:
                places[slot.leaf] = ItemRange(image.name, slot.offset, slot.framing.length)
        places.update(zip(plan.layout.objects, (place for _, place in plan.objects), strict=True))
        sizes = {name: facts.nbytes for name, facts in transferred.files.items()}
        return result_of(self._job, plan, sizes, transferred.times_s)

    async def fail(self, error: BaseException) -> BaseException:
        """Remove the files; should that fail too, say so on the error that led here."""
        if self._transaction is not None:
            try:
                await self._transaction.abort()
            except AiockptError as exc:
                error.add_note(str(exc))
        return error
