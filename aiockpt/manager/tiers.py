"""Decisions about the tiers of a run: its directory and its mirror. Without torch.

A step of a tier is known by its number and its `StepInfo.save_id`: copies with the same one are interchangeable. A
number may be used again, as after going back to an older step; then what was saved later counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from aiockpt.core.dataclasses import dataclass
from aiockpt.manager.policies import KeepPolicy, SavePolicy, StepFacts, select, to_delete
from aiockpt.manager.scan import StepScanner

if TYPE_CHECKING:
    from aiockpt.manager.scan import StepInfo, StepNames
    from aiockpt.storage.base import Stamp, Storage


class Tier:
    """A directory with steps."""

    def __init__(self, storage: Storage, directory: str, names: StepNames) -> None:
        self.storage, self.directory, self.names = storage, directory, names
        self.scanner = StepScanner(storage, directory, names)

    def new_scanner(self) -> StepScanner:
        """Return a scanner of its own, for another thread than one that may hang."""
        return StepScanner(self.storage, self.directory, self.names, known=self.scanner)

    def path_of(self, step: int) -> str:
        """Return the path of a step, whether it exists or not."""
        return self.storage.below(self.directory, self.names.name_of(step))


@dataclass(frozen=True, slots=True)
class StepCopy:
    """A step as one tier has it."""

    info: StepInfo
    is_mirror: bool
    stamp: Stamp | None = None  # changes if it is replaced
    repairs: StepCopy | None = None  # the damaged copy that is tried once more with what it lacks from this one

    def is_copy_of(self, other: StepCopy) -> bool:
        """Return whether another one, of the mirror, has the same bytes as this one of the run's directory."""
        ids = {self.info.save_id, other.info.save_id}
        is_one = self.info.step == other.info.step and len(ids) == 1 and "" not in ids
        return is_one and other.is_mirror and not self.is_mirror


def due_steps(policy: SavePolicy | None, times: Mapping[int, float]) -> set[int]:
    """Return the steps that a policy mirrors, of all that were saved, by when; None: all."""
    found: set[int] = set()
    previous: int | None = None
    last_s = -math.inf
    for step, time_s in sorted(times.items()):
        if policy is None or policy.is_due(StepFacts(step, previous, time_s - last_s, is_idle=True)):
            found.add(step)
            last_s = time_s
        previous = step
    return found


def is_mirrored(info: StepInfo, mirrored: Mapping[int, StepInfo]) -> bool:
    """Return whether the mirror has this very step, whole."""
    there = mirrored.get(info.step)
    return there is not None and there.state == "complete" and there.save_id == info.save_id


def other_run(directory: str, local: Iterable[StepInfo], mirror_directory: str, mirror: Iterable[StepInfo]) -> str:
    """Return the text of an error if a mirror has the steps of another run; empty if not, or if they don't say so."""
    ours, theirs = ({info.run_id: info.step for info in infos if info.run_id} for infos in (local, mirror))
    if not ours or not theirs or ours.keys() & theirs.keys():
        return ""
    return (
        f"the mirror {mirror_directory} has step {max(theirs.values())} of another run than {directory}, whose steps "
        "would replace that one's: pass another mirror= for this run. To go on with the other one, restore it from its "
        "mirror into a directory without steps"
    )


def backlog(
    local: Iterable[StepInfo],
    mirror: Iterable[StepInfo],
    *,
    due: Collection[int],
    keep: KeepPolicy | None,
    mirror_keep: KeepPolicy | None,
    now: float,
    protected: Collection[int] = (),
    drops: bool = True,
) -> list[StepInfo]:
    """Return the steps that are to be mirrored, in their order: the oldest first, so that an end leaves no gaps.

    Steps that the policy of the mirror would delete are dropped, and with ``drops`` those that the run would delete,
    unless they are the newest, or protected: when the mirror is behind, it catches up with what will stay.
    """
    whole = {info.step: info for info in local if info.state == "complete"}
    there = {info.step: info for info in mirror if info.state == "complete"}
    missing = {
        step: info
        for step, info in whole.items()
        if step in due
        and info.save_id
        and not is_mirrored(info, there)
        and (step not in there or there[step].time <= info.time)
    }
    kept = select(keep if drops else None, whole.values(), now).keys()
    stays = {
        *protected,
        max(whole, default=-1),
        *(kept & select(mirror_keep, (there | missing).values(), now).keys()),
    }
    return [missing[step] for step in sorted(missing) if step in stays]


def mirror_to_delete(
    mirror_keep: KeepPolicy | None,
    mirror: Sequence[StepInfo],
    committed: StepInfo,
    now: float,
    protected: Collection[int] = (),
) -> list[StepInfo]:
    """Return the steps to delete from the mirror, after one was committed there; see `to_delete`.

    None, unless the mirror shows that one as complete. The newest always stays.
    """
    if not is_mirrored(committed, {info.step: info for info in mirror}):
        return []
    return to_delete(mirror_keep, mirror, now, {*protected, committed.step})


def copies_in_order(
    local: Sequence[StepInfo],
    mirror: Sequence[StepInfo],
    order: Callable[[Sequence[StepInfo]], Sequence[StepInfo]] = lambda infos: infos[::-1],
) -> list[StepCopy]:
    """Return the copies of all steps, in the order in which a restore tries them.

    Of one step those of the run's directory come first, as they are nearer, unless the mirror has one that was saved
    later. ``order`` takes one copy of each step, by number, and returns those to try, the preferred one first.
    """
    copies: dict[int, list[StepCopy]] = {}
    for is_mirror, infos in ((False, local), (True, mirror)):
        for info in infos:
            copies.setdefault(info.step, []).append(StepCopy(info, is_mirror))
    for each in copies.values():
        if len(each) > 1 and len({copy.info.save_id for copy in each} - {""}) > 1:
            each.sort(key=lambda copy: -copy.info.time)  # stable
    whole = {step: next((c for c in each if c.info.state == "complete"), each[0]) for step, each in copies.items()}
    return [copy for info in order([whole[step].info for step in sorted(whole)]) for copy in copies[info.step]]
