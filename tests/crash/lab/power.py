r"""Replay a recording as if power had been lost after each call, and look whether all that was promised is there.

::

    calls = Tracer(root, with_data=True).run(child).calls        # or any other list of FileCall, from an empty root
    report = Replay(identify, scratch).run(calls, root)
    print(report, *report.findings, sep="\n")                    # no findings: nothing can be lost

``identify(path, name)`` is the caller's: it loads the checkpoint at a path, which was saved as ``name``, tells which
state it holds, by its label (see `tests.crash.lab.power_promises`), and raises if it holds none. It is called once for
each distinct content of each name, on a copy, for the others would say the same. Hidden names (``.aiockpt-...``)
are nobody's checkpoints, so states that differ in these alone count as one; but ``through_hidden`` looks at these too,
for storages that find what belongs at a path under such a name while it is being replaced.
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
    """Tell whether a name is no hidden one of an unfinished checkpoint."""
    return not name.startswith(HIDDEN)


def _all(_: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise that a power cut could break.

    Attributes:
        cut: after how many calls.
        call: the last of them.
        name: of which checkpoint.
        expected: what it might show.
        found: what it shows.
        lost: what did not reach the disk; of all states that show this, the one in which the least was lost.
        states: in how many states this was found.
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
    """What was tried, and found.

    Attributes:
        calls: how many calls were recorded.
        cuts: after how many of them power was lost, the beginning included.
        states: how many states of the disk were looked at.
        distinct: how many of these differ in what is shown.
        checked: how many different contents of checkpoints were loaded, in this and in earlier runs of the same replay.
        incomplete: at how many cuts only some of the permitted states were tried.
        findings: each different one once, with the first cut at which it comes.
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
    """Replays recordings of programs that save the same states; what was loaded once is not loaded again.

    Args:
        identify: see the module.
        scratch: a directory, empty, for copies of checkpoints; best one in memory.
        ordered: how the word of the file system is read; see `tests.crash.lab.disk`.
        bound: how many states are tried at each cut at most.
        seed: what those are drawn from that are tried where there are more.
        first_only: stop at the first state that breaks a promise.
        through_hidden: look for names that show nothing in copies of all that is hidden.
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
        """Lose power after each call.

        Args:
            calls: the recording.
            root: the directory that was recorded.
            disk: what they are asked of, which is changed; without, an empty one.
            promises: those that were made before; is changed.
        """
        disk = Disk(self._ordered) if disk is None else disk
        promises = Promises() if promises is None else promises
        tally = _Tally()
        for cut, call in enumerate((None, *calls)):
            if call is not None:
                disk.apply(call, root)
                promises.hear(call)
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
        """Tell what each of these names shows, those that show nothing left out."""
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
    """What a run has come to."""

    states: int = 0
    incomplete: int = 0
    digests: set[bytes] = field(default_factory=set)
    found: dict[tuple[str, str, tuple[str, ...]], Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Keep each kind of finding as it came first; there the least was lost."""
        key = finding.name, finding.found, finding.expected
        first = self.found.get(key)
        self.found[key] = finding if first is None else replace(first, states=first.states + 1)


def _lost(pending: Sequence[Pending], choice: Choice) -> tuple[str, ...]:
    return tuple(each.what for each, option in zip(pending, choice, strict=True) if option != WHOLE)
