"""Replicas: each disk of a run whose hosts have disks of their own also has a copy of another one's files, behind.

The hosts pull: each copies the files of the disk before its own, in the order of their ids, as a ring. A replica is
like a mirror of one disk: a directory with the documents and some files of each step, published by a rename when all
are there and match their CRCs. It is below the id of the disk that it is of, so it belongs to one run, and counts for a
step only if its manifest is the step's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from aiockpt.errors import CorruptCheckpointError
from aiockpt.manager.mirror import LEFT_S, MirrorCopier, MirrorSettings, Tier
from aiockpt.manager.scan import is_unreadable
from aiockpt.manager.tiers import is_mirrored, replicated_disks

if TYPE_CHECKING:
    from aiockpt.engine.reports import Reports
    from aiockpt.manager.retention import Retention
    from aiockpt.manager.scan import StepInfo
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage

_FIRST_LOOK_S = 0.05
_LONGEST_LOOK_S = 10.0

logger = logging.getLogger("aiockpt")


def sources_of(disks: Iterable[str]) -> dict[str, str]:
    """Return by the id of each disk that of the disk whose files it has replicas of."""
    ordered = sorted(disks)
    return {disk: ordered[at - 1] for at, disk in enumerate(ordered)}


def replicas_of(source: Tier, storage: Storage, directory: str) -> Tier:
    """Return the replicas of a disk in the directory that another disk has for them."""
    return Tier(storage, storage.below(directory, source.disk), source.names, disk=source.disk)


class _ReplicaTask(MirrorCopier):
    done = "replicated"
    is_replica = True
    _instead = ""


class ReplicaCopies(_ReplicaTask):
    """Copies the files of one disk to another host, which runs this: what the disk has, the newest step first.

    What the disk has no more is deleted. So is what is left of disks that this host had replicas of before, once the
    run does not have the step any more.

    Args:
        source: the run on the disk of the other host.
        own: the run on the disk of this host.
        directory: where this host has a directory for the replicas of each disk.
        settings: ``bytes_per_s``, and ``locks``.
        reports: gets the events.
        damage: gets what can't be copied, as the other host's disk has damaged it: why, by the ids of saves.
        host: what the other host is called in that.
    """

    def __init__(
        self,
        source: Tier,
        own: Tier,
        directory: str,
        settings: MirrorSettings,
        reports: Reports,
        damage: dict[str, str],
        host: str,
    ) -> None:
        settings = replace(settings, newest_first=True)
        super().__init__(source, replicas_of(source, own.storage, directory), settings, reports)
        self._own_run, self._directory, self._damage, self._host = own, directory, damage, host
        self._source_steps: Sequence[StepInfo] = ()

    async def advance(self) -> bool:
        """Copy one step; return whether there may be more to do."""
        is_more = await super().advance()
        if not is_more:
            steps = await self.workers.run(partial(self._own_run.scanner.scan, lenient=True))
            run = {info.step: info for info in steps}
            self._note_damage(run)
            for tier in await self.workers.run(self._former):
                for info in await self.workers.run(partial(tier.scanner.scan, lenient=True)):
                    if info.step not in run and info.state != "unfinished":
                        await tier.storage.delete(info.path, workers=self.workers)
                await tier.storage.clean(tier.directory, older_than_s=LEFT_S, workers=self.workers)
        return is_more

    def _look(
        self, local: Sequence[StepInfo], mirror: Sequence[StepInfo], written: Mapping[int, SaveHandle]
    ) -> list[StepInfo]:
        self._source_steps = local
        return super()._look(local, mirror, written)

    def _note_damage(self, run: Mapping[int, StepInfo]) -> None:
        """Note what can't be copied; a step whose manifest is damaged is known by that of this host's part of it."""
        found = {save_id: f"on {self._host}, {error}" for save_id, error in self._state.damaged.items()}
        for info in self._source_steps:
            own = run.get(info.step)
            is_damaged = info.state == "damaged" and not is_unreadable(info)
            if is_damaged and own is not None and own.save_id:
                found[own.save_id] = f"on {self._host}, {info.path}: {info.problem}"
        for save_id in self._damage.keys() - found.keys():
            del self._damage[save_id]
        self._damage.update(found)

    def _former(self) -> list[Tier]:
        """Return the replicas of other disks, which this host had before."""
        storage, names = self._own_run.storage, self._own_run.names
        disks = [disk for disk in replicated_disks(storage, self._directory) if disk != self.here.disk]
        return [Tier(storage, storage.below(self._directory, disk), names, disk=disk) for disk in disks]

    def _to_delete(self, local: Sequence[StepInfo], mirror: Sequence[StepInfo]) -> list[StepInfo]:
        newest = max((info for info in local if info.state == "complete"), key=lambda info: info.step, default=None)
        if newest is None or not is_mirrored(newest, {info.step: info for info in mirror}):
            return []
        steps = {info.step for info in local}
        return [info for info in mirror if info.step not in steps and info.state != "unfinished"]


class ReplicaWatch(_ReplicaTask):
    """Finds out which steps all disks have replicas of; on rank 0, whose `SaveHandle.replicated` this completes.

    The newest of them is not deleted before a later one is replicated: else a host that is lost just then would take
    both with it.

    Args:
        here: the run, with all of its disks.
        there: the directory for replicas, for messages.
        replicas: those of each disk.
        reports: gets the events of failures.
        retention: deletes the steps of the run.
        damage: returns what the hosts have noted that they can't copy; see `ReplicaCopies`. Blocks; raises OSError.
    """

    def __init__(
        self,
        here: Tier,
        there: Tier,
        replicas: Sequence[Tier],
        reports: Reports,
        retention: Retention,
        damage: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__(here, there, MirrorSettings(locks=False), reports, retention)
        self._replicas, self._find_damage = replicas, damage
        self._held: int | None = None
        self._has_held = False
        self._is_seen = False  # what is looked at was seen just now
        self._reported: set[str] = set()  # the ids of damaged steps

    @property
    def knows_held(self) -> bool:
        """Whether the replicas were seen; until then no step must be deleted."""
        return self._has_held

    def held(self) -> set[int]:
        """Return the step of the run that must not be deleted now."""
        return set() if self._held is None else {self._held}

    def poke(self) -> None:
        """Look again, soon. From any thread; never raises."""
        self.pause_s = 0.0
        super().poke()

    def _steps_there(self) -> Sequence[StepInfo]:
        found = common_steps([tier.scanner.scan(lenient=True) for tier in self._replicas])
        self._state.damaged = {save_id: CorruptCheckpointError(why) for save_id, why in self._find_damage().items()}
        self._is_seen = True
        return found

    def _look(
        self, local: Sequence[StepInfo], mirror: Sequence[StepInfo], written: Mapping[int, SaveHandle]
    ) -> list[StepInfo]:
        is_seen, self._is_seen = self._is_seen, False
        for info in local:
            damage = self._state.damaged.get(info.save_id)
            if damage is not None and info.save_id not in self._reported:
                self._reported.add(info.save_id)
                logger.warning("step %d is not %s: %s", info.step, self.done, damage)
                self._report(info.path, 0.0, None, damage)
        missing = super()._look(local, mirror, written)
        waiting = self.promises.written  # of an earlier one, a disk may be gone that nobody can copy any more
        missing = [info for info in missing if info.step in waiting]
        nbytes, error = sum(info.nbytes for info in missing), None if is_seen else self.backlog.error
        steps = tuple(info.step for info in missing)
        self._state.backlog = replace(self.backlog, steps=steps, nbytes=nbytes, error=error)
        if not is_seen:
            return missing
        there = {info.step: info for info in mirror}
        replicated = [info.step for info in local if is_mirrored(info, there)]
        whole = [] if self.knows_held else [info.step for info in local if info.state == "complete"]
        before = self._held if self.knows_held else -1
        self._held = max(replicated or whole, default=self._held)
        self._has_held = True
        if self._held != before and self._retention is not None:
            self._retention.again()  # the one that was held before may be deleted from now on
        return missing

    async def _go_on(self, missing: Sequence[StepInfo], written: Mapping[int, SaveHandle]) -> bool:
        self.pause_s = min(max(_FIRST_LOOK_S, 2 * self.pause_s), _LONGEST_LOOK_S)
        return True


def common_steps(replicas: Sequence[Sequence[StepInfo]]) -> list[StepInfo]:
    """Return the steps of which all disks have complete replicas, of one save; ``nbytes`` are those of all."""
    by_step: dict[int, list[StepInfo]] = {}
    for infos in replicas:
        for info in infos:
            by_step.setdefault(info.step, []).append(info)
    return [
        replace(each[0], nbytes=sum(info.nbytes for info in each))
        for each in by_step.values()
        if len(each) == len(replicas) and len({info.save_id for info in each}) == 1
        if all(info.state == "complete" for info in each)
    ]
