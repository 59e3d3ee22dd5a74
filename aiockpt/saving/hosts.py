"""Saves to the own disks of several hosts: the lowest rank of each host begins and publishes on the disk of its host.

A host's part of a checkpoint is a transaction of its own. The save has the rounds of every save of several ranks, and
two more, so that all disks publish or none does:

==========  ==========================================================  ============================================
before the  each rank                                                   rank 0 then
round       (its lowest on a host, for what is on the disk)
==========  ==========================================================  ============================================
1           begins                                                      plans, and sends each rank its ticket
2           writes its files                                            encodes the documents
3           writes the documents                                        has nothing to do: all disks can publish now
4           publishes, on all disks but rank 0's                        publishes on its own: now the checkpoint counts
==========  ==========================================================  ============================================

If one fails, all do: what is not published is removed by its host, and so is what is, once rank 0 has said that it does
not count. If rank 0 can't say so, as it is gone, then a part without that of rank 0's disk does not count either; what
opens the run next removes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from aiockpt.errors import (
    AiockptError,
    CheckpointExistsError,
    CommitUncertainError,
    CoordinationError,
    WriteError,
)
from aiockpt.format.manifest.manifest import DiskFacts, with_disks
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.planning.collective.messages import PlanRequest, RankAssignment, Written
from aiockpt.saving.collective import CollectiveSave, GlobalSave
from aiockpt.storage.base import Document, SharedTransaction, room_coming, shared_storage
from aiockpt.storage.faults import errors

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.planning.planner import FileFormat, Summary
    from aiockpt.saving.collective import CollectiveResources
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.hosts import HostChange, HostDisks

    _Request = tuple[PlanRequest, str | None]
    """A message of the first round, with the ticket of what was begun; None: another rank of the host has."""


class HostsGlobalSave(GlobalSave):
    """Rank 0's part in one save to the disks of several hosts."""

    def __init__(
        self, job: SaveJob, file_format: FileFormat, world: CollectiveResources, compute: Workers, io: Workers
    ) -> None:
        super().__init__(job, file_format, world, compute, io)
        self.hosts = cast("HostDisks", job.storage)
        job.storage = self.hosts.own.storage  # what this rank writes, it writes there
        self._summaries: list[Summary] = []

    async def decide_for_hosts(self, asked: Sequence[_Request]) -> list[tuple[RankAssignment, list[HostChange]]]:
        """Do as `decide`; each rank gets the ticket of what was begun on its disk, and what there is to change."""
        ranks = self.hosts.ranks
        if not self._job.overwrite:
            await self._io.run(self._check_free)
        tickets = {disk: ticket for disk, (_, ticket) in zip(ranks, asked, strict=True) if ticket is not None}
        assignments = await self.decide([request for request, _ in asked])
        changes = self.hosts.decided()
        return [
            (given if given.ticket is None else replace(given, ticket=tickets[disk]), changes)
            for given, disk in zip(assignments, ranks, strict=True)
        ]

    def _check_free(self) -> None:
        """Raise CheckpointExistsError if all disks together have something at the path. Blocks."""
        path = self._job.path
        with errors(WriteError, f"look at {path} on all disks"):
            try:
                self.hosts.look(path).close()
            except FileNotFoundError:
                return
        raise CheckpointExistsError(f"{path} exists; pass overwrite=True to replace it")

    async def _begin(self, path: str, *, overwrite: bool) -> str:
        """Return the ticket of what this rank has begun before the round."""
        if self.transaction is None:
            raise RuntimeError("rank 0 has not begun")
        return self.transaction.ticket

    async def gather(self, results: Sequence[Written]) -> list[Mapping[str, Document]]:
        """Check what all ranks have written; return the documents, for the lowest rank of each host."""
        documents, self._summaries = await self._documents(results)
        ranks = self.hosts.ranks
        files: dict[str, set[str]] = {disk.id: set() for disk in self.hosts.disks}
        for disk, written in zip(ranks, results, strict=True):
            files[disk].update(written.files)
        facts = [DiskFacts(disk.id, disk.host, frozenset(files[disk.id])) for disk in self.hosts.disks]
        manifest = await self._compute.run(with_disks, bytes(documents[MANIFEST_NAME]), facts)
        whole = {**documents, MANIFEST_NAME: manifest}
        lowest = {disk: rank for rank, disk in reversed(list(enumerate(ranks)))}
        return [whole if lowest[disk] == rank else {} for rank, disk in enumerate(ranks)]

    async def note_written(self, results: Sequence[None]) -> Sequence[None]:
        """Do nothing: every disk has all that is to be published."""
        return results

    async def publish_last(self, results: Sequence[None]) -> list[Summary]:
        """Publish on this host's disk, as all others have published."""
        transaction, _ = self._begun
        try:
            await transaction.commit()
        except Warning:  # the program turns warnings into errors
            raise
        except Exception as exc:
            try:
                may_count = await transaction.status() == "published"
            except WriteError:
                may_count = True
            if may_count:
                raise CommitUncertainError(f"{exc}. {self._job.path} may be published all the same") from exc
            raise
        return self._summaries


class HostsSave(CollectiveSave):
    """A save to the own disks of several hosts."""

    _global: HostsGlobalSave
    _own: SharedTransaction | None = None  # on this host's disk, of its lowest rank
    _is_published = False

    def _lead(self) -> HostsGlobalSave:
        return HostsGlobalSave(self._job, self._file_format, self._world, self._compute, self._io)

    async def _round(self, value: Any, decide: Any) -> Any:
        return await self._world.coordinator.round(self._call, self._operation, value, decide, self._global.undo)

    async def _first_round(self, request: PlanRequest | BaseException) -> RankAssignment:
        mine: _Request | BaseException
        try:
            mine = (request, await self._begin_own()) if isinstance(request, PlanRequest) else request
        except Exception as exc:  # goes to all ranks, this one among them
            mine = exc
        try:
            assignment, changes = await self._round(mine, self._global.decide_for_hosts)
        except BaseException as exc:
            await self._take_back(exc)
            raise
        room = self._global.hosts.accept(changes)
        if room is not None and room_coming.get() is None:
            room_coming.set(room)
        given: RankAssignment = assignment
        return given

    async def _begin_own(self) -> str | None:
        """Begin on this host's disk, if this is its lowest rank; return the ticket."""
        job = self._job
        if not self._global.hosts.serves:
            return None
        if self._own is None:
            # A part that does not count may be there. If something else is, rank 0 finds it.
            overwrite = job.overwrite or await self._io.run(job.storage.stamp, job.path) is not None
            storage = shared_storage(job.storage)
            self._own = await storage.begin(job.path, overwrite=overwrite, workers=self._io)
            if self._world.coordinator.leads:
                self._global.transaction = self._own
        return self._own.ticket

    async def _last_round(self, mine: Written | BaseException) -> Summary:
        await self._job.turn.wait_for("over")
        self._over = True
        try:
            documents = await self._round(mine, self._global.gather)
            await self._round(await _outcome(self._write_documents(documents)), self._global.note_written)
            summary: Summary = await self._round(await _outcome(self._publish()), self._global.publish_last)
        except BaseException as exc:
            await self._take_back(exc)
            raise
        finally:
            if self._own is not None:
                await self._own.release()
        return summary

    async def _write_documents(self, documents: Mapping[str, Document]) -> None:
        """Write the documents to this host's disk, once what was to be deleted there is: it may have the same path."""
        if self._own is not None:
            await self._io.run(self._global.hosts.wait)
            await self._own.write_files(documents)

    async def _publish(self) -> None:
        """Publish on this host's disk, unless that is the one of rank 0."""
        if self._own is None or self._world.coordinator.leads:
            return
        await self._own.commit()
        self._is_published = True

    async def _take_back(self, error: BaseException) -> None:
        """Remove this host's part of a save that has failed; add a note of what stays to the error."""
        coordinator, own = self._world.coordinator, self._own
        if coordinator.leads:  # the round has done so
            return
        await self._leave(error)
        if own is None:
            return
        try:
            if not self._is_published:
                await own.abort()
            elif isinstance(error, AiockptError) and not isinstance(error, CoordinationError | CommitUncertainError):
                await self._job.storage.delete(self._job.path, workers=self._io)  # else it may count
        except AiockptError as exc:
            error.add_note(f"{self._global.hosts.own} may have its part until the run is opened again: {exc}")


async def _outcome(work: Awaitable[None]) -> Exception | None:
    """Return the error of what this rank does before a round; all ranks raise it then."""
    try:
        await work
    except Exception as exc:
        return exc
    return None
