"""Restores: the newest step that is valid. Damaged ones are passed over, and never leave their bytes in the target."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, replace
from aiockpt.core.lazy import importing
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
from aiockpt.manager.requests import Restored, RestoreRequest, SkippedStep
from aiockpt.manager.scan import is_unreadable
from aiockpt.manager.tiers import StepCopy, copies_in_order, other_run
from aiockpt.planning.filters import needed_with
from aiockpt.reading.info import TensorInfo

if TYPE_CHECKING:
    from concurrent.futures import Future

    from aiockpt.manager.retention import Retention
    from aiockpt.manager.run import RunDirectory
    from aiockpt.manager.scan import StepInfo
    from aiockpt.storage.base import Stamp, Storage
    from aiockpt.storage.patched import Patches
    from aiockpt.telemetry.verification import Problem

logger = logging.getLogger("aiockpt")

_MOST_NAMES = 1000
_END_S = 5.0
_SHOWN = 10  # steps and metrics that an error lists
_ADVICE = re.compile(r"[.;,]( so)? use an older (checkpoint|one)\b.*", re.IGNORECASE | re.DOTALL)  # it is taken
_NEWEST = 4  # complete steps of a run that are looked at first: a restore of the latest needs no more, most likely
_MOST_LISTS = 20  # of a run whose steps are deleted or replaced while they are read


@dataclass(frozen=True, slots=True)
class _Relist:
    """The steps have to be listed again."""

    touched_by: str  # see `Restore.perform`
    gone: str = ""  # the step that its owner has deleted or replaced while it was read; empty: no listed one is whole


class _Place(NamedTuple):
    """The place that a step is read from."""

    storage: Storage
    path: str
    repaired: tuple[str, ...] = ()  # the keys, or files, that come from the mirror
    left: Sequence[str] = ()  # the keys that the step was saved without, once it is loaded


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore whose arguments were checked.

    A load fills tensors in place while it reads, and finds the damage of an item when it has read it. So a step is
    loaded in place without further ado only if an older step could undo that: one that opens, and has everything that
    is in it, tensors of the same shape and dtype. Otherwise, and after a load that has placed something, all of a step
    is verified before the load begins.
    """

    run: RunDirectory
    retention: Retention
    request: RestoreRequest
    metric: str
    mode: Mode

    async def perform(self) -> Restored | None:
        """Restore; return the step, or None if the run has none."""
        run = self.run
        # Paths: of the step whose failed load had filled tensors; of the last step that was gone.
        touched_by = last = ""
        newest = _NEWEST
        for _ in range(_MOST_LISTS):
            find = partial(run.call, self._listed, newest)
            listed, has_all = await run.led(f"the steps of {run.directory}", find)
            # An older one may be needed to undo the load of a newer one.
            with self.retention.reading(*(copy.info.step for copy in listed)):
                outcome = await self._try(listed, touched_by, has_all=has_all)
            if not isinstance(outcome, _Relist):
                return outcome
            touched_by, last = outcome.touched_by, outcome.gone or last
            newest = newest if outcome.gone else 0
        raise CheckpointNotFoundError(
            f"the steps of {run.directory} were deleted faster than they could be read, {last} as the last one; let "
            f"the run keep more of them{_touched(touched_by)}"
        )

    async def _try(self, listed: Sequence[StepCopy], touched_by: str, *, has_all: bool) -> Restored | _Relist | None:
        """Load the first copy that can be; ``has_all``: no older steps were left out."""
        run = self.run
        skipped: list[tuple[StepCopy, LoadError]] = []
        for number, copy in enumerate(listed, 1):
            older = listed[number:]
            try:
                loaded = await self._load(copy, older, is_touched=bool(touched_by))
            except LoadError as exc:
                if not self._may_go_on(exc, copy, older):
                    _note(exc, touched_by)
                    raise
                if await self._has_filled(exc):
                    touched_by = copy.info.path
                if await run.led(f"the place of {copy.info.path}", partial(run.call, self._is_gone, copy)):
                    return _Relist(touched_by, copy.info.path)
                if copy.repairs is not None:  # all of it comes from the mirror, next
                    continue
                if isinstance(self.request.step, int) and not older:
                    raise
                skipped.append((copy, exc))
            except BaseException as exc:
                _note(exc, touched_by)
                raise
            else:
                if loaded is not None and await self._is_another(copy):
                    return _Relist(copy.info.path, copy.info.path)
                if loaded is not None:
                    return await self._restored(copy, loaded, skipped)
        if not has_all:
            return _Relist(touched_by)
        self._raise_if_damaged(skipped, touched_by)
        return None

    async def _load(self, copy: StepCopy, older: Sequence[StepCopy], *, is_touched: bool) -> _Place | None:
        """Load a copy, or what is damaged of one with the rest from another; None if it has nothing to repair."""
        run, request = self.run, self.request
        place = _Place(run.tiers.storage_at(is_mirror=copy.is_mirror), copy.info.path)
        if copy.repairs is not None:
            place = await self._patched(copy.repairs, copy)
            if not place.repaired:
                return None
        await run.led(f"the load of {copy.info.path}", partial(self._judge, place, older, is_touched))
        options, left = request.load_options(), list[str]()
        if copy.info.filters and request.keys is None and request.strict is True:
            options |= {"strict": needed_with(copy.info.filters), "missing": left}
        await run.waited(run.checkpointer.load(place.path, request.state_dict, storage=place.storage, **options))
        return place._replace(left=left)

    def _may_go_on(self, error: LoadError, copy: StepCopy, older: Sequence[StepCopy]) -> bool:
        """Return whether another copy, or an older step, is tried when the load of a copy has failed.

        That is so if it is damaged or gone; if it can't be read, but there is another copy of it; and if it is on a
        host that is gone, as then the newest step counts that the mirror has.
        """
        if isinstance(error, CorruptCheckpointError | CheckpointNotFoundError):
            return True
        if isinstance(error, MissingHostError):
            return self.run.tiers.mirror is not None
        has_copy = copy.repairs is not None or any(map(copy.is_copy_of, older[:1]))
        return has_copy and type(error) is LoadError

    async def _has_filled(self, error: LoadError) -> bool:
        """Return whether a load that has failed had filled tensors of the target, on any rank."""
        if isinstance(error, CheckpointNotFoundError):
            return False
        return await self.run.agree("the end of a failed restore", bool(error.placed or error.partly_placed), any)

    async def _is_another(self, copy: StepCopy) -> bool:
        """Return whether a step that was loaded may be another save than was listed: another process may replace it."""
        find = partial(self.run.call, self._is_replaced, copy)
        return not self.run.locks and await self.run.led(f"the save at {copy.info.path}", find)

    async def _restored(
        self, copy: StepCopy, loaded: _Place, skipped: Sequence[tuple[StepCopy, LoadError]]
    ) -> Restored:
        """Set the damaged steps aside, as another one was loaded in their place, and warn of them."""
        run, info = self.run, copy.info
        moved = await run.led("the damaged steps", partial(self._set_aside, copy, skipped))
        if moved:
            await run.settle_disks()
        if moved and run.leads:
            self._warn(copy, moved)
        run.id = info.run_id or run.id
        if self.request.missing is not None:
            self.request.missing.extend(loaded.left)
        left = tuple(loaded.left)
        return Restored(info.step, info.path, info.metrics, info.metadata, moved, loaded.repaired, left)

    def _raise_if_damaged(self, skipped: Sequence[tuple[StepCopy, LoadError]], touched_by: str) -> None:
        """Raise the error of a restore that has found no step to load, unless the run has none."""
        if isinstance(self.request.step, int) and skipped:
            raise skipped[-1][1]
        damaged = [(copy.info, error) for copy, error in skipped if isinstance(error, CorruptCheckpointError)]
        if damaged:
            raise _nothing_left(self.run.directory, damaged, touched_by)
        for _, error in skipped:
            if isinstance(error, MissingHostError):
                raise error
        if touched_by:
            raise CheckpointNotFoundError(f"{self.run.directory} has no step any more{_touched(touched_by)}")

    async def _patched(self, damaged: StepCopy, copy: StepCopy) -> _Place:
        """Return the damaged copy of a step, with what it has damaged from another copy: all ranks the same."""
        run, tiers = self.run, self.run.tiers
        find = partial(self._damage, damaged)
        patches, repaired = await run.led(f"the damage of {damaged.info.path}", find)
        here, other = tiers.run.storage, tiers.storage_at(is_mirror=copy.is_mirror)
        if not patches:
            return _Place(other, copy.info.path)
        here = here if tiers.disks is None else tiers.disks.storage.partial()
        with importing():
            from aiockpt.storage.patched import PatchedStorage

        patched = PatchedStorage(here, other, copy.info.path, patches)
        return _Place(patched, damaged.info.path, repaired)

    # --- on rank 0 --------------------------------------------------------------------------------------

    def _listed(self, newest: int) -> tuple[list[StepCopy], bool]:
        """Return the copies of steps to try, the preferred one first, and whether these are all.

        If they are not, they are those of so many ``newest`` complete steps. All are looked at where others have to be
        compared with them, and once where retention will look at all anyhow.
        """
        run, choice = self.run, self.request.step
        tier = run.tiers.mirror
        if choice != "latest" or tier is not None or (self.retention.keep is not None and not run.scanner.has_seen_all):
            newest = 0
        scanner = None if tier is None else tier.new_scanner()  # of its own, as the thread: it may hang
        threads = DaemonThreads(1, "aiockpt-mirror")
        # One step that can't be read hides no other: its load raises why. But the best one may be among those.
        is_lenient = choice != "best"
        looking = None if scanner is None else threads.submit(scanner.scan, lenient=is_lenient)
        try:
            infos = run.scanner.scan(lenient=is_lenient, newest=newest)
            mirror = () if looking is None else self._mirrored(looking, infos)
            if not infos and not mirror:
                run.check_exists(run.tiers.run, *([] if tier is None else [tier]))
        except CheckpointNotFoundError:
            raise
        except OSError as exc:
            raise AiockptError(f"the run {run.directory} can't be read: {exc}") from exc
        finally:
            threads.end(_END_S if looking is None or looking.done() else 0.0)
        found: list[StepCopy] = []
        for copy in copies_in_order(infos, mirror, self._chosen):
            at = scanner if copy.is_mirror and scanner is not None else run.scanner
            listed = replace(copy, stamp=at.stamp(copy.info.path))
            if found and found[-1].is_copy_of(listed):
                found.append(replace(listed, repairs=found[-1]))
            found.append(listed)
        return found, not newest or sum(info.state == "complete" for info in infos) < newest

    def _is_gone(self, listed: StepCopy) -> bool:
        """Return whether a step, or the copy that it repairs, was deleted or replaced since it was listed."""
        now = self._stamp_of(listed)
        # If none, though it is there, listing it again finds that out.
        return now is None or now != listed.stamp or (listed.repairs is not None and self._is_gone(listed.repairs))

    def _is_replaced(self, listed: StepCopy) -> bool:
        return self._stamp_of(listed) not in {None, listed.stamp}

    def _stamp_of(self, listed: StepCopy) -> Stamp | None:
        return self.run.tiers.storage_at(is_mirror=listed.is_mirror).stamp(listed.info.path)

    def _mirrored(self, looking: Future[tuple[StepInfo, ...]], infos: Sequence[StepInfo]) -> Sequence[StepInfo]:
        """Return the steps of the mirror; if the run has steps itself, those that can't be read are left out."""
        run, tiers = self.run, self.run.tiers
        where = "" if tiers.mirror is None else tiers.mirror.directory
        patience_s = 0.0 if tiers.options is None else tiers.options.timeout
        has_it = any(info.state == "complete" and self.request.step in (info.step, "latest", "best") for info in infos)
        try:
            found = looking.result(patience_s)
        except (OSError, AiockptError) as exc:
            why = str(exc) or f"it did not answer within {patience_s:g} s"
            if not has_it:
                lacks = f"step {self.request.step}" if isinstance(self.request.step, int) else "step that is whole"
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
        directory, choice = self.run.directory, self.request.step
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
        run, storage, path = self.run, self.run.tiers.run.storage, damaged.info.path
        infos: Mapping[str, Any] = {}
        if (disks := run.tiers.disks) is not None:
            missing = await run.call(disks.storage.missing, path)
            if missing:  # the rest is not read twice: the load checks it
                return dict.fromkeys(missing), missing
        try:
            report = await run.waited(run.checkpointer.verify(path, storage=storage))
        except LoadError:
            return {}, ()
        with contextlib.suppress(LoadError):  # it can't be opened: whole files
            infos = await run.inspect(path, storage)
        return _patches_of(report.errors, infos)

    async def _judge(self, place: _Place, older: Sequence[StepCopy], is_touched: bool) -> None:
        """Check a step as far as it must be before the load; raise CorruptCheckpointError if it is damaged."""
        found = await self.run.inspect(place.path, place.storage)
        if self.request.verify_when == "while":
            return
        if self.request.verify_when == "auto" and not is_touched and await self._can_be_undone(found, older):
            return
        report = await self.run.waited(self.run.checkpointer.verify(place.path, storage=place.storage))
        unreadable = [problem for problem in report.errors if problem.kind == "unreadable"]
        if unreadable:  # the disk or a server failed, which does not prove that the checkpoint is damaged
            raise LoadError(f"{place.path} can't be read: {unreadable[0]}; nothing was changed")
        report.raise_if_bad()

    async def _can_be_undone(self, found: Mapping[str, Any], older: Sequence[StepCopy]) -> bool:
        """Return whether the next older step that opens would overwrite every tensor that this one fills."""
        for each in older:
            try:
                storage = self.run.tiers.storage_at(is_mirror=each.is_mirror)
                below = await self.run.inspect(each.info.path, storage)
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
            if self.run.writes and is_lost and not each.is_mirror:
                path = await self.run.call(set_aside, self.run.tiers.run.storage, path)
            found.append(SkippedStep(each.info.step, path, _ADVICE.sub("", str(error))))
        return tuple(found)

    def _described(self, skipped: SkippedStep) -> str:
        is_renamed = not skipped.path.endswith(f"/{self.run.tiers.run.names.name_of(skipped.step)}")
        where = f"which is now {skipped.path}" if is_renamed else f"of which {skipped.path} is passed over"
        return f"step {skipped.step}, {where} ({skipped.reason})"

    def _warn(self, restored: StepCopy, skipped: tuple[SkippedStep, ...]) -> None:
        what = "; ".join(map(self._described, skipped))
        what = what.replace(self.run.tiers.run.storage.below(self.run.directory, ""), "")
        by = f", of which {restored.info.path} is a copy" if restored.is_mirror else ""
        message = f"the run goes on from step {restored.info.step} of {self.run.directory}{by}: {what}"
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
