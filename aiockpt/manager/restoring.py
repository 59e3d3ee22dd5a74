"""Restores: the newest step that is valid. Damaged ones are passed over, and never leave their bytes in the target."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.core.importing import importing
from aiockpt.core.parameters import outer_stacklevel
from aiockpt.core.threads import DaemonThreads
from aiockpt.core.wording import some_of
from aiockpt.errors import (
    AiockptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DamagedCheckpointWarning,
    LoadError,
    MissingHostError,
)
from aiockpt.manager.policies import Mode, ranked
from aiockpt.manager.requests import Restored, RestoreRequest, SkippedStep, StepChoice
from aiockpt.manager.scan import is_unreadable
from aiockpt.manager.tiers import StepCopy, copies_in_order, other_run
from aiockpt.planning.filters import needed_with
from aiockpt.reading.info import TensorInfo

if TYPE_CHECKING:
    from concurrent.futures import Future

    from aiockpt.manager.base import ManagerBase
    from aiockpt.manager.scan import StepInfo
    from aiockpt.storage.base import Storage
    from aiockpt.storage.patched import Patches
    from aiockpt.telemetry.verification import Problem

logger = logging.getLogger("aiockpt")

_MOST_NAMES = 1000
_END_S = 5.0
_SHOWN = 10  # steps and metrics that an error lists
_ADVICE = re.compile(r"[.;,]( so)? use an older (checkpoint|one)\b.*", re.IGNORECASE | re.DOTALL)  # it is taken
_MOST_LISTS = 20  # of a run whose steps are deleted or replaced while they are read


@dataclass(frozen=True, slots=True)
class _Gone:
    """A step was deleted or replaced while it was read, by this run or, beside a reader, by its owner."""

    path: str
    touched_by: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The place that a step is read from; ``repaired`` are the keys, or files, that come from the mirror."""

    storage: Storage
    path: str
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore whose arguments were checked.

    A load fills tensors in place while it reads, and finds the damage of an item when it has read it. So a step is
    loaded in place without further ado only if an older step could undo that: one that opens, and has everything that
    is in it, tensors of the same shape and dtype. Otherwise, and after a load that has placed something, all of a step
    is verified before the load begins.
    """

    manager: ManagerBase
    request: RestoreRequest
    choice: StepChoice
    metric: str
    mode: Mode

    async def run(self) -> Restored | None:
        """Restore; return the step, or None if the run has none."""
        run = self.manager
        # Paths: of the step whose failed load had filled tensors; of the last step that was gone.
        touched_by = last = ""
        for _ in range(_MOST_LISTS):
            listed = await run._led(f"the steps of {run.directory}", partial(run._run, self._listed))
            with contextlib.ExitStack() as reading:
                for each in listed:  # an older one may be needed to undo the load of a newer one
                    reading.enter_context(run._retention.reading(each.info.step))
                found = await self._try(listed, touched_by)
            if not isinstance(found, _Gone):
                return found
            touched_by, last = found.touched_by, found.path
        raise CheckpointNotFoundError(
            f"the steps of {run.directory} were deleted faster than they could be read, {last} as the last one; let "
            f"the run keep more of them{_touched(touched_by)}"
        )

    async def _try(self, listed: Sequence[StepCopy], touched_by: str) -> Restored | _Gone | None:
        run = self.manager
        skipped: list[tuple[StepCopy, LoadError]] = []
        for at, each in enumerate(listed):
            has_copy = each.repairs is not None or any(map(each.is_copy_of, listed[at + 1 : at + 2]))
            place = _Place(run._storage_at(is_mirror=each.is_mirror), each.info.path)
            try:
                if each.repairs is not None:
                    place = await self._patched(each.repairs, each)
                    if not place.repaired:
                        continue
                judge = partial(self._judge, place, listed[at + 1 :], bool(touched_by))
                await run._led(f"the load of {each.info.path}", judge)
                options, left = self.request.load_options(), list[str]()
                if each.info.filters and self.request.keys is None and self.request.strict is True:
                    options |= {"strict": needed_with(each.info.filters), "missing": left}
                await run._port.load(place.path, self.request.state_dict, place.storage, options)
            except LoadError as exc:
                is_damaged = isinstance(exc, CorruptCheckpointError | CheckpointNotFoundError)
                # Unreadable, but there is a copy; or on a host that is gone, so that the newest step counts that the
                # mirror has.
                is_away = isinstance(exc, MissingHostError) and run._mirror_tier is not None
                if not is_damaged and not is_away and not (has_copy and type(exc) is LoadError):
                    _note(exc, touched_by)
                    raise
                if not isinstance(exc, CheckpointNotFoundError):
                    filled = bool(exc.placed or exc.partly_placed)
                    if await run._agree("the end of a failed restore", filled, any):
                        touched_by = each.info.path
                if await run._led(f"the place of {each.info.path}", partial(run._run, self._is_gone, each)):
                    return _Gone(each.info.path, touched_by)
                if each.repairs is not None:  # all of it comes from the mirror, next
                    continue
                if isinstance(self.choice, int) and at + 1 == len(listed):
                    raise
                skipped.append((each, exc))
                continue
            except BaseException as exc:
                _note(exc, touched_by)
                raise
            moved = await run._led("the damaged steps", partial(self._set_aside, each, skipped))
            if moved:
                await run._settle_disks(renames=True)
            if moved and run.leads:
                self._warn(each, moved)
            info = each.info
            run._run_id = info.run_id or run._run_id
            if self.request.missing is not None:
                self.request.missing.extend(left)
            return Restored(info.step, info.path, info.metrics, info.metadata, moved, place.repaired, tuple(left))
        if isinstance(self.choice, int) and skipped:
            raise skipped[-1][1]
        damaged = [(each.info, error) for each, error in skipped if isinstance(error, CorruptCheckpointError)]
        if damaged:
            raise _nothing_left(run.directory, damaged, touched_by)
        for _, error in skipped:
            if isinstance(error, MissingHostError):
                raise error
        if touched_by:
            raise CheckpointNotFoundError(f"{run.directory} has no step any more{_touched(touched_by)}")
        return None

    async def _patched(self, damaged: StepCopy, copy: StepCopy) -> _Place:
        """Return the damaged copy of a step, with what it has damaged from another copy: all ranks the same."""
        run = self.manager
        find = partial(self._damage, damaged)
        patches, repaired = await run._led(f"the damage of {damaged.info.path}", find)
        here, other = run._storage_at(is_mirror=False), run._storage_at(is_mirror=copy.is_mirror)
        if not patches:
            return _Place(other, copy.info.path)
        here = here if run._disks is None else run._disks.storage.partial()
        with importing():
            from aiockpt.storage.patched import PatchedStorage

        patched = PatchedStorage(here, other, copy.info.path, patches)
        return _Place(patched, damaged.info.path, repaired)

    # --- on rank 0 --------------------------------------------------------------------------------------

    def _listed(self) -> list[StepCopy]:
        """Return the copies of steps to try, the preferred one first."""
        run, choice = self.manager, self.choice
        tier = run._mirror_tier
        scanner = None if tier is None else tier.new_scanner()  # of its own, as the thread: it may hang
        threads = DaemonThreads(1, "aiockpt-mirror")
        # One step that can't be read hides no other: its load raises why. But the best one may be among those.
        is_lenient = choice != "best"
        looking = None if scanner is None else threads.submit(scanner.scan, lenient=is_lenient)
        try:
            infos = run._scanner.scan(lenient=is_lenient)
            mirror = () if looking is None else self._mirrored(looking, infos)
            if not infos and not mirror:
                run._check_exists(run._tier, *([] if tier is None else [tier]))
        except CheckpointNotFoundError:
            raise
        except OSError as exc:
            raise AiockptError(f"the run {run.directory} can't be read: {exc}") from exc
        finally:
            threads.end(_END_S if looking is None or looking.done() else 0.0)
        found: list[StepCopy] = []
        for copy in copies_in_order(infos, mirror, self._chosen):
            at = scanner if copy.is_mirror and scanner is not None else run._scanner
            listed = replace(copy, stamp=at.stamp(copy.info.path))
            if found and found[-1].is_copy_of(listed):
                found.append(replace(listed, repairs=found[-1]))
            found.append(listed)
        return found

    def _is_gone(self, listed: StepCopy) -> bool:
        """Return whether a step, or the copy that it repairs, was deleted or replaced since it was listed."""
        now = self.manager._storage_at(is_mirror=listed.is_mirror).stamp(listed.info.path)
        # If none, though it is there, listing it again finds that out.
        return now is None or now != listed.stamp or (listed.repairs is not None and self._is_gone(listed.repairs))

    def _mirrored(self, looking: Future[tuple[StepInfo, ...]], infos: Sequence[StepInfo]) -> Sequence[StepInfo]:
        """Return the steps of the mirror; if the run has steps itself, those that can't be read are left out."""
        run = self.manager
        where = "" if run._mirror_tier is None else run._mirror_tier.directory
        has_it = any(info.state == "complete" and self.choice in (info.step, "latest", "best") for info in infos)
        try:
            found = looking.result(run._mirror_patience_s)
        except (OSError, AiockptError) as exc:
            why = str(exc) or f"it did not answer within {run._mirror_patience_s:g} s"
            if not has_it:
                lacks = f"step {self.choice}" if isinstance(self.choice, int) else "step that is whole"
                raise LoadError(
                    f"the mirror {where} can't be read, and {run.directory} has no {lacks}: {why}. Nothing was "
                    "restored: try again, or pass mirror=None to begin without it"
                ) from exc
            logger.warning("the mirror %s can't be read, so its steps are left out: %s", where, why)
            return ()
        if text := other_run(run.directory, infos, where, found):
            raise LoadError(f"{text}. Nothing was restored")
        unreadable = [each for each in found if has_it and is_unreadable(each)]
        for each in unreadable:
            logger.warning("step %d of the mirror %s is left out: %s", each.step, where, each.problem)
        return [each for each in found if each not in unreadable]

    def _chosen(self, infos: Sequence[StepInfo]) -> Sequence[StepInfo]:
        """Return the steps to try, the preferred one first."""
        directory, choice = self.manager.directory, self.choice
        if choice == "latest":
            return infos[::-1]
        if choice == "best":
            found = ranked(infos, self.metric, self.mode)
            if infos and not found:
                known = some_of(sorted({metric for info in infos for metric in info.metrics}), _SHOWN) or "none"
                raise CheckpointNotFoundError(
                    f"no complete step of {directory} has the metric {self.metric!r}; there are: {known}"
                )
            return found
        found = [info for info in infos if info.step == choice]
        if not found:
            known = some_of([str(info.step) for info in infos[::-1]], _SHOWN) or "none"
            raise CheckpointNotFoundError(f"there is no step {choice} in {directory}; there are: {known}")
        return found

    async def _damage(self, damaged: StepCopy) -> tuple[Patches, tuple[str, ...]]:
        """Return which bytes of a copy are damaged or can't be read, and the keys or files that they belong to.

        Nothing, if that can't be said.
        """
        storage, path = self.manager._storage_at(is_mirror=False), damaged.info.path
        infos: Mapping[str, Any] = {}
        if (disks := self.manager._disks) is not None:
            missing = await self.manager._run(disks.storage.missing, path)
            if missing:  # the rest is not read twice: the load checks it
                return dict.fromkeys(missing), missing
        try:
            report = await self.manager._port.verify(path, storage)
        except LoadError:
            return {}, ()
        with contextlib.suppress(LoadError):  # it can't be opened: whole files
            infos = await self.manager._port.inspect(path, storage)
        return _patches_of(report.errors, infos)

    async def _judge(self, place: _Place, older: Sequence[StepCopy], is_touched: bool) -> None:
        """Check a step as far as it must be before the load; raise CorruptCheckpointError if it is damaged."""
        found = await self.manager._port.inspect(place.path, place.storage)
        if self.request.verify == "while":
            return
        if self.request.verify == "auto" and not is_touched and await self._can_be_undone(found, older):
            return
        report = await self.manager._port.verify(place.path, place.storage)
        unreadable = [problem for problem in report.errors if problem.kind == "unreadable"]
        if unreadable:  # the disk or a server failed, which does not prove that the checkpoint is damaged
            raise LoadError(f"{place.path} can't be read: {unreadable[0]}; nothing was changed")
        report.raise_if_bad()

    async def _can_be_undone(self, found: Mapping[str, Any], older: Sequence[StepCopy]) -> bool:
        """Return whether the next older step that opens would overwrite every tensor that this one fills."""
        for each in older:
            try:
                storage = self.manager._storage_at(is_mirror=each.is_mirror)
                below = await self.manager._port.inspect(each.info.path, storage)
            except (CorruptCheckpointError, CheckpointNotFoundError):
                continue
            except LoadError:  # it may be sound, but can't be read now
                return False
            return _covers(below, found)
        return False

    async def _set_aside(
        self, restored: StepCopy, skipped: Sequence[tuple[StepCopy, LoadError]]
    ) -> tuple[SkippedStep, ...]:
        """Rename the damaged steps of the run's directory, as an older one, or a copy, was restored in their place."""
        found = []
        for each, error in skipped:
            path = each.info.path
            is_lost = isinstance(error, CorruptCheckpointError)
            is_lost |= isinstance(error, MissingHostError) and each.info.step != restored.info.step
            if self.manager.writes and is_lost and not each.is_mirror:
                path = await self.manager._run(set_aside, self.manager._storage, path)
            found.append(SkippedStep(each.info.step, path, _ADVICE.sub("", str(error))))
        return tuple(found)

    def _described(self, skipped: SkippedStep) -> str:
        is_renamed = not skipped.path.endswith(f"/{self.manager._names.name_of(skipped.step)}")
        where = f"which is now {skipped.path}" if is_renamed else f"of which {skipped.path} is passed over"
        return f"step {skipped.step}, {where} ({skipped.reason})"

    def _warn(self, restored: StepCopy, skipped: tuple[SkippedStep, ...]) -> None:
        what = "; ".join(map(self._described, skipped))
        what = what.replace(self.manager._storage.below(self.manager.directory, ""), "")
        by = f", of which {restored.info.path} is a copy" if restored.is_mirror else ""
        message = f"the run goes on from step {restored.info.step} of {self.manager.directory}{by}: {what}"
        warnings.warn(DamagedCheckpointWarning(message, skipped), stacklevel=outer_stacklevel())


def _patches_of(problems: Sequence[Problem], infos: Mapping[str, Any]) -> tuple[Patches, tuple[str, ...]]:
    """Return the damaged runs of bytes, and the keys or files that they belong to; nothing for damage of no file."""
    patches: dict[str, list[tuple[int, int]] | None] = {}
    names: dict[str, None] = {}
    # The CRC of a file says less than those of its items.
    for problem in sorted(problems, key=lambda problem: problem.kind == "file crc"):
        if not problem.file:
            return {}, ()
        info, at = infos.get(problem.key or ""), problem.offset
        places = info.chunks if isinstance(info, TensorInfo) else ()
        place = next(
            (
                each
                for each in places
                if at is not None and each.file == problem.file and 0 <= at - each.offset < each.nbytes
            ),
            None,
        )
        if place is not None:
            names[problem.key or ""] = None
            known = patches.setdefault(problem.file, [])
            if known is not None:
                known.append((place.offset, place.offset + place.nbytes))
        elif problem.kind != "file crc" or problem.file not in patches:
            names[problem.file] = None
            patches[problem.file] = None
    return patches, tuple(names)


def set_aside(storage: Storage, path: str) -> str:
    """Rename a damaged step to ``step-00000100.damaged``, or with a number if that exists; return its path.

    If that fails, it is logged, and the step keeps its name.
    """
    _, name = storage.split(path)
    try:
        return storage.set_aside(
            path, [f"{name}.damaged", *(f"{name}.damaged-{each}" for each in range(1, _MOST_NAMES))]
        )
    except OSError as exc:
        logger.warning("the damaged checkpoint %s can't be renamed: %s; saving that step again fails", path, exc)
        return path


def _covers(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    for key, info in above.items():
        other = below.get(key)
        if isinstance(info, TensorInfo) and isinstance(other, TensorInfo):
            if (other.shape, other.dtype) != (info.shape, info.dtype):
                return False
        elif type(other) is not type(info):  # also if it is not there: its load raises, and leaves what was filled
            return False
    return True


def _note(error: BaseException, touched_by: str) -> None:
    if touched_by:
        error.add_note(f"tensors were filled by the load of {touched_by}, which failed")


def _touched(by: str) -> str:
    return f"; tensors of the target were filled by a load that failed, of {by}" if by else ""


def _nothing_left(
    directory: str, skipped: Sequence[tuple[StepInfo, LoadError]], touched_by: str
) -> CorruptCheckpointError:
    newest, error = skipped[0]
    older = len(skipped) - 1
    others = f", and so are {older} older ones" if older > 1 else ", and so is the older one" if older else ""
    touched = _touched(touched_by) or "; nothing was changed"
    made = CorruptCheckpointError(
        f"no step of {directory} can be restored: step {newest.step} is damaged ({error}){others}{touched}. They keep "
        "their names. Restore a copy, or move them away to begin anew"
    )
    made.__cause__ = error
    return made
