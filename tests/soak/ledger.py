"""What was announced in a soak, and whether it is there."""

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
    """One save, and what may become of it.

    Attributes:
        path: where it goes.
        number: that of its state.
        replaces: the number of the state that it is to overwrite; None where nothing is.
        may_fail: faults may come in its way.
        cut_off: its writer may be killed, so that nobody knows what it has done.
        may_appear: it may be published after it was given up, for it hung in that.
        torn: its tensors were changed too early, perhaps.
        cancelled: it was called off, perhaps too late.
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
    """What has happened.

    Attributes:
        counts: how often, by name.
        lost: what was announced, and is not there as it was.
        wrong: what else should not have happened.
        leaks: what was not given back.
        gauges: what was held after each round.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    gauges: list[Gauge] = field(default_factory=list)


class Ledger:
    """For each path the number of the state that is there, or those of which one is.

    Attributes:
        tally: what has happened.
        announced: the number of the state of each checkpoint.
        doubtful: where it can't be told which one is there; None stands for nothing.
        in_flight: saves that are not over.
        busy: paths that something is going on with.
        held: paths of saves that were given up, while a thread of theirs may hang.
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
        """The checkpoints that nothing is going on with, the oldest first."""
        return [path for path in self.announced if path not in self.busy | self.held]

    def count(self, what: str) -> None:
        """Note that something has happened."""
        self.tally.counts[what] += 1

    def enter(self, save: Save, result: aiockpt.SaveResult) -> None:
        """Note what was announced."""
        self.count("written")
        where = Path(result.path)
        if where != save.path:
            self.count("written to the fallback")
        self.announced.pop(where, None)  # it is the newest one now
        self.announced[where] = save.number

    def judge(self, error: aiockpt.AiockptError, save: Save) -> None:
        """Note a save that came to nothing, and tell whether that was right."""
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
                self.tally.wrong.append(f"{save} is there, though {error!r}")

    def compare(self, path: Path, loaded: Any) -> None:
        """Check what was loaded."""
        self.count("loads")
        found = differences(state_of(self.announced[path]), loaded)
        if found:
            self.tally.lost.append(f"{path} of state {self.announced[path]}: {found}")

    async def look_at_all(self, directory: Path) -> None:
        """Load everything that is to be there, and look for what is not."""
        async with aiockpt.AsyncCheckpointer() as ckpt:
            for path, number in self.announced.items():
                await self._look_at(ckpt, path, (number,))
            for path, numbers in self.doubtful.items():
                await self._look_at(ckpt, path, numbers)
        there = {*directory.glob("step-*"), *directory.glob("fallback/*")}
        stray = there - self.announced.keys() - self.doubtful.keys()
        self.tally.wrong += [f"{path} is there, and nobody announced it" for path in stray]

    async def _look_at(self, ckpt: aiockpt.AsyncCheckpointer, path: Path, numbers: Sequence[int | None]) -> None:
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
