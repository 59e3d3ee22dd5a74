"""Restores: the newest step that is valid. Damaged ones are passed over, and never leave their bytes in the target."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.core.parameters import outer_stacklevel
from aiockpt.errors import (
    AiockptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DamagedCheckpointWarning,
    LoadError,
)
from aiockpt.manager.policies import Mode, ranked
from aiockpt.manager.requests import Restored, RestoreRequest, SkippedStep, StepChoice
from aiockpt.reading.info import TensorInfo

if TYPE_CHECKING:
    from aiockpt.manager.base import ManagerBase
    from aiockpt.manager.scan import StepInfo
    from aiockpt.storage.base import Stamp, Storage
    from aiockpt.telemetry.verification import VerifyReport

logger = logging.getLogger("aiockpt")

_MOST_NAMES = 1000
_MOST_LISTS = 20  # of a run whose steps are deleted or replaced while they are read


@dataclass(frozen=True, slots=True)
class _Gone:
    """A step was deleted or replaced while it was read, by this run or, beside a reader, by its owner."""

    path: str
    touched_by: str


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
                for info, _ in listed:  # an older one may be needed to undo the load of a newer one
                    reading.enter_context(run._retention.reading(info.step))
                found = await self._try(listed, touched_by)
            if not isinstance(found, _Gone):
                return found
            touched_by, last = found.touched_by, found.path
        raise CheckpointNotFoundError(
            f"the steps of {run.directory} were deleted faster than they could be read, {last} as the last one; let "
            f"the run keep more of them{_touched(touched_by)}"
        )

    async def _try(self, listed: Sequence[tuple[StepInfo, Stamp | None]], touched_by: str) -> Restored | _Gone | None:
        run = self.manager
        infos = [info for info, _ in listed]
        skipped: list[tuple[StepInfo, LoadError]] = []
        for at, (info, own) in enumerate(listed):
            try:
                judge = partial(self._judge, infos[at:], bool(touched_by))
                await run._led(f"the load of {info.path}", judge)
                await run._call("load", info.path, self.request.state_dict, **self.request.load_options())
            except (CorruptCheckpointError, CheckpointNotFoundError) as exc:
                if isinstance(exc, CorruptCheckpointError):
                    filled = bool(exc.placed or exc.partly_placed)
                    if await run._agree("the end of a failed restore", filled, any):
                        touched_by = info.path
                is_gone = partial(run._run, _is_gone, run._storage, info.path, own)
                if await run._led(f"the place of {info.path}", is_gone):
                    return _Gone(info.path, touched_by)
                if isinstance(self.choice, int):
                    raise
                skipped.append((info, exc))
                continue
            except BaseException as exc:
                if touched_by:
                    exc.add_note(f"tensors were filled by the load of {touched_by}, which failed")
                raise
            moved = await run._led("the damaged steps", partial(self._set_aside, skipped))
            if moved and run.leads:
                self._warn(info, moved)
            return Restored(info.step, info.path, info.metrics, info.metadata, moved)
        damaged = [(info, error) for info, error in skipped if isinstance(error, CorruptCheckpointError)]
        if damaged:
            raise _nothing_left(run.directory, damaged, touched_by)
        if touched_by:
            raise CheckpointNotFoundError(f"{run.directory} has no step any more{_touched(touched_by)}")
        return None

    # --- on rank 0 --------------------------------------------------------------------------------------

    def _listed(self) -> list[tuple[StepInfo, Stamp | None]]:
        """Return the steps to try, each with its stamp, which changes if the step is replaced."""
        return [(info, self.manager._scanner.stamp(info.path)) for info in self._candidates()]

    def _candidates(self) -> Sequence[StepInfo]:
        """Return the steps to try, the preferred one first."""
        directory, choice = self.manager.directory, self.choice
        try:
            infos = self.manager._scanner.scan(lenient=choice != "best")  # the load raises why a step can't be read
        except OSError as exc:
            raise AiockptError(f"the run {directory} can't be read: {exc}") from exc
        if choice == "latest":
            return infos[::-1]
        if choice == "best":
            found = ranked(infos, self.metric, self.mode)
            if infos and not found:
                raise CheckpointNotFoundError(f"no complete step of {directory} has the metric {self.metric!r}")
            return found
        found = [info for info in infos if info.step == choice]
        if not found:
            raise CheckpointNotFoundError(f"there is no step {choice} in {directory}")
        return found

    async def _judge(self, infos: Sequence[StepInfo], is_touched: bool) -> None:
        """Check the first step as far as it must be before the load; raise CorruptCheckpointError if it is damaged."""
        first, *older = infos
        found = await self.manager._inspect(first.path)
        if self.request.verify == "while":
            return
        if self.request.verify == "auto" and not is_touched and await self._can_be_undone(found, older):
            return
        report: VerifyReport = await self.manager._call("verify", first.path)
        unreadable = [problem for problem in report.errors if problem.kind == "unreadable"]
        if unreadable:  # the disk or a server failed, which does not prove that the checkpoint is damaged
            raise LoadError(f"{first.path} can't be read: {unreadable[0]}; nothing was changed")
        report.raise_if_bad()

    async def _can_be_undone(self, found: Mapping[str, Any], older: Sequence[StepInfo]) -> bool:
        """Return whether the next older step that opens would overwrite every tensor that this one fills."""
        for info in older:
            try:
                below = await self.manager._inspect(info.path)
            except (CorruptCheckpointError, CheckpointNotFoundError):
                continue
            except LoadError:  # it may be sound, but can't be read now
                return False
            return _covers(below, found)
        return False

    async def _set_aside(self, skipped: Sequence[tuple[StepInfo, LoadError]]) -> tuple[SkippedStep, ...]:
        """Rename the damaged steps, as an older one was restored in their place."""
        found = []
        for info, error in skipped:
            path = info.path
            if self.manager.writes and isinstance(error, CorruptCheckpointError):
                path = await self.manager._run(set_aside, self.manager._storage, path)
            found.append(SkippedStep(info.step, path, str(error)))
        return tuple(found)

    def _warn(self, info: StepInfo, skipped: tuple[SkippedStep, ...]) -> None:
        what = "; ".join(f"step {each.step}, which is now {each.path} ({each.reason})" for each in skipped)
        what = what.replace(self.manager._storage.below(self.manager.directory, ""), "")
        message = f"the run goes on from step {info.step} of {self.manager.directory}: {what}"
        warnings.warn(DamagedCheckpointWarning(message, skipped), stacklevel=outer_stacklevel())


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


def _is_gone(storage: Storage, path: str, own: Stamp | None) -> bool:
    """Return whether a step was deleted or replaced since it was listed."""
    now = storage.stamp(path)  # if none, though it is there, listing it again finds that out
    return now is None or now != own


def _covers(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    for key, info in above.items():
        other = below.get(key)
        if isinstance(info, TensorInfo) and isinstance(other, TensorInfo):
            if (other.shape, other.dtype) != (info.shape, info.dtype):
                return False
        elif type(other) is not type(info):  # also if it is not there: its load raises, and leaves what was filled
            return False
    return True


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
