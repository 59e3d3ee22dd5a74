r"""Replay a recording with a power cut after each call, and check that every promised checkpoint survives.

::

    calls = Tracer(root, with_data=True).run(child).calls        # or any list of FileCall, recorded from an empty root
    report = Replay(identify, scratch).run(calls, root)
    print(report, *report.findings, sep="\n")                    # no findings: no power cut breaks a promise

The caller provides ``identify(path, name)``: load the checkpoint at a path, which was saved as ``name``, and return the
label of its state (see `tests.crash.lab.power_promises`), or raise if it is none. It is called once for each distinct
content of each name, on a copy. Hidden names (``.aiockpt-...``) are not checkpoints, so states that differ only in
these count as one. With ``through_hidden`` hidden names count as well: some storages, while they replace a checkpoint,
find it under a hidden name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aiockpt.format.names import HIDDEN
from tests.crash.lab.disk import Disk
from tests.crash.lab.disk_files import WHOLE
from tests.crash.lab.power_choices import choose
from tests.crash.lab.power_judge import Judge
from tests.crash.lab.power_promises import GONE, Promises

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.crash.lab.calls import FileCall
    from tests.crash.lab.disk_names import Folder, Pending
    from tests.crash.lab.power_choices import Choice
    from tests.crash.lab.power_judge import Identify


def is_shown(name: str) -> bool:
    """Return whether a name is not the hidden name of an unfinished checkpoint."""
    return not name.startswith(HIDDEN)


def _all(_: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise that a power cut could break.

    Attributes:
        cut: the number of calls before the power cut.
        call: the last of these calls.
        name: the name of the checkpoint.
        expected: the labels that the name may show.
        found: the label that it shows.
        lost: the changes that did not reach the disk, in the first state found; states are tried with the fewest
            lost changes first.
        states: the number of states with this finding.
    """

    cut: int
    call: FileCall | None
    name: str
    expected: tuple[str, ...]
    found: str
    lost: tuple[str, ...]
    states: int = 1

    def __str__(self) -> str:
        call = "nothing" if self.call is None else f"{self.call.name} {self.call.path} {self.call.to}".rstrip()
        lost = "; ".join(self.lost) or "nothing"
        return (
            f"power lost after call {self.cut} ({call}): {self.name} should show {' or '.join(self.expected)} "
            f"and shows {self.found}. Not on the disk: {lost}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a replay.

    Attributes:
        calls: the number of recorded calls.
        cuts: the number of simulated power cuts, including the one before the first call.
        states: the number of states of the disk that were tried.
        distinct: how many of these states differ under shown names.
        checked: the number of distinct checkpoint contents that were loaded, also in earlier runs of the same replay.
        incomplete: the number of cuts at which only some of the permitted states were tried.
        findings: the distinct findings, each with the first cut at which it occurs.
    """

    calls: int = 0
    cuts: int = 0
    states: int = 0
    distinct: int = 0
    checked: int = 0
    incomplete: int = 0
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return (
            f"{self.calls} calls, {self.cuts} cuts, {self.states} states, {self.distinct} distinct, "
            f"{self.checked} contents loaded, {self.incomplete} cuts in part, lost: {len(self.findings)}"
        )


class Replay:
    """Replays of recordings of programs that save the same states; each distinct content is loaded only once.

    Args:
        identify: see the module.
        scratch: an empty directory for copies of checkpoints; preferably in memory.
        ordered: the durability mode; see `tests.crash.lab.disk`.
        bound: the maximum number of states to try at each cut.
        seed: the seed of the random states that are tried if more than ``bound`` are permitted.
        first_only: stop at the first state that breaks a promise.
        through_hidden: for names that show nothing, also call ``identify`` beside copies of all hidden names.
    """

    def __init__(
        self,
        identify: Identify,
        scratch: str,
        *,
        ordered: bool = False,
        bound: int = 1000,
        seed: int = 0,
        first_only: bool = False,
        through_hidden: bool = False,
    ) -> None:
        self._judge = Judge(identify, scratch, through_hidden=through_hidden)
        self._matters = _all if through_hidden else is_shown
        self._ordered = ordered
        self._bound = bound
        self._first_only = first_only
        self._source = random.Random(seed)
        self._right: set[tuple[bytes, object]] = set()

    def run(
        self, calls: Sequence[FileCall], root: str, *, disk: Disk | None = None, promises: Promises | None = None
    ) -> Report:
        """Simulate a power cut before the first call and after each call.

        Args:
            calls: the recording.
            root: the directory that was recorded.
            disk: the disk to apply the calls to, changed in place; by default an empty one.
            promises: the promises made before the recording, changed in place.
        """
        disk = Disk(self._ordered) if disk is None else disk
        promises = Promises() if promises is None else promises
        tally = _Tally()
        for cut, call in enumerate((None, *calls)):
            if call is not None:
                disk.apply(call, root)
                promises.apply(call)
            self._lose_power(disk, promises, (cut, call), tally)
            if tally.found and self._first_only:
                break
        return Report(
            calls=len(calls),
            cuts=cut + 1,
            states=tally.states,
            distinct=len(tally.digests),
            checked=self._judge.checked,
            incomplete=tally.incomplete,
            findings=tuple(tally.found.values()),
        )

    def shows(self, content: Folder, names: Iterable[str]) -> dict[str, str]:
        """Return the label of each of these names, without the names that show nothing."""
        return self._judge.labels(content, names)

    def _lose_power(self, disk: Disk, promises: Promises, where: tuple[int, FileCall | None], tally: _Tally) -> None:
        pending = disk.pending(self._matters)
        choices = choose(pending, bound=self._bound, source=self._source)
        tally.incomplete += not choices.complete
        expected = promises.names
        for choice in sorted(choices.chosen, key=lambda choice: len(_lost(pending, choice))):
            content = disk.left({each.key: option for each, option in zip(pending, choice, strict=True)}, self._matters)
            tally.states += 1
            tally.digests.add(content.digest)
            if (content.digest, expected) in self._right:
                continue
            wrong = self._judge.wrong(content, dict(expected))
            for name, shown in wrong:
                tally.add(Finding(*where, name, dict(expected).get(name, (GONE,)), shown, _lost(pending, choice)))
            if not wrong:
                self._right.add((content.digest, expected))
            elif self._first_only:
                return


@dataclass(slots=True)
class _Tally:
    """The counts and findings of one run."""

    states: int = 0
    incomplete: int = 0
    digests: set[bytes] = field(default_factory=set)
    found: dict[tuple[str, str, tuple[str, ...]], Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Count a finding; keep the first one of its kind, in which the fewest changes were lost."""
        key = finding.name, finding.found, finding.expected
        first = self.found.get(key)
        self.found[key] = finding if first is None else replace(first, states=first.states + 1)


def _lost(pending: Sequence[Pending], choice: Choice) -> tuple[str, ...]:
    return tuple(each.what for each, option in zip(pending, choice, strict=True) if option != WHOLE)
