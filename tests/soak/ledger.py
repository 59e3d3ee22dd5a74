"""The record of announced checkpoints in a soak, and the checks that they are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiockpt
from tests.soak.gauges import Gauge
from tests.soak.state import differences, state_of


@dataclass(slots=True, eq=False)
class Save:
    """One save, and its possible outcomes.

    Attributes:
        path: the path of the checkpoint.
        number: the number of its state.
        replaces: the number of the state to overwrite; None if there is none.
        may_fail: True if faults may make it fail.
        cut_off: True if its writer process may have been killed, so that its outcome is unknown.
        may_appear: True if it may be published after a timeout, because its commit hangs.
        torn: True if its tensors may have been changed before they were staged.
        cancelled: True if it was cancelled, perhaps too late.
    """

    path: Path
    number: int
    replaces: int | None
    may_fail: bool = False
    cut_off: bool = False
    may_appear: bool = False
    torn: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class Tally:
    """The results of a soak.

    Attributes:
        counts: the number of events, by name.
        lost: the announced checkpoints that are missing or changed.
        wrong: all other violated guarantees.
        leaks: the resources that were not released.
        gauges: the resources held after each round.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    gauges: list[Gauge] = field(default_factory=list)


class Ledger:
    """The number of the state at each path, or several candidates.

    Attributes:
        tally: the results.
        announced: the number of the state of each checkpoint.
        doubtful: the candidates at paths with an unknown state; None stands for a missing checkpoint.
        in_flight: the saves that have not ended.
        busy: the paths that a save, load or deletion is using.
        held: the paths of saves that have timed out while one of their threads may hang.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.announced: dict[Path, int] = {}
        self.doubtful: dict[Path, tuple[int | None, ...]] = {}
        self.in_flight: list[Save] = []
        self.busy: set[Path] = set()
        self.held: set[Path] = set()

    @property
    def free(self) -> list[Path]:
        """The checkpoints that are not in use, the oldest first."""
        return [path for path in self.announced if path not in self.busy | self.held]

    def count(self, what: str) -> None:
        """Count an event."""
        self.tally.counts[what] += 1

    def enter(self, save: Save, result: aiockpt.SaveResult) -> None:
        """Record a save that was announced as written."""
        self.count("written")
        where = Path(result.path)
        if where != save.path:
            self.count("written to the fallback")
        self.announced.pop(where, None)  # moves it to the end, as the newest one
        self.announced[where] = save.number

    def judge(self, error: aiockpt.AiockptError, save: Save) -> None:
        """Record a save that failed, and whether the failure was to be expected."""
        if isinstance(error, aiockpt.SaveSkippedError):
            kind, is_right = "skipped", True
        elif isinstance(error, aiockpt.SaveCancelledError):
            kind, is_right = "cancelled", save.cancelled
        elif isinstance(error, aiockpt.TornSnapshotError):
            kind, is_right = "torn", save.torn
        else:
            kind, is_right = "failed", save.may_fail
        self.count(kind)
        if not is_right:
            self.tally.wrong.append(f"{save}: {type(error).__name__}: {error} (cause: {error.__cause__!r})")
        if isinstance(error, aiockpt.SaveTimeoutError):
            self.held.add(save.path)
            if save.may_appear:
                self.doubtful[save.path] = (self.announced.pop(save.path, None), save.number)
                return
        if save.replaces is not None:
            if save.cut_off:
                self.doubtful[save.path] = (self.announced.pop(save.path), save.number)
        elif save.path.exists():
            if save.cut_off:
                self.count("published, but not announced")
                self.announced[save.path] = save.number
            else:
                self.tally.wrong.append(f"{save} is there in spite of {error!r}")

    def compare(self, path: Path, loaded: Any) -> None:
        """Compare a loaded state with the announced one."""
        self.count("loads")
        found = differences(state_of(self.announced[path]), loaded)
        if found:
            self.tally.lost.append(f"{path} of state {self.announced[path]}: {found}")

    async def check_all(self, directory: Path) -> None:
        """Load every recorded checkpoint, and look for unrecorded ones."""
        async with aiockpt.AsyncCheckpointer() as ckpt:
            for path, number in self.announced.items():
                await self._check(ckpt, path, (number,))
            for path, numbers in self.doubtful.items():
                await self._check(ckpt, path, numbers)
        there = {*directory.glob("step-*"), *directory.glob("fallback/*")}
        stray = there - self.announced.keys() - self.doubtful.keys()
        self.tally.wrong += [f"{path} is there, but was never announced" for path in stray]

    async def _check(self, ckpt: aiockpt.AsyncCheckpointer, path: Path, numbers: Sequence[int | None]) -> None:
        self.count("looked at in the end")
        if None in numbers and not path.exists():
            return
        try:
            loaded = await ckpt.load(path)
        except aiockpt.LoadError as exc:
            self.tally.lost.append(f"{path}: {exc}")
            return
        found = [differences(state_of(number), loaded) for number in numbers if number is not None]
        if all(found):
            self.tally.lost.append(f"{path} of state {numbers}: {found}")
