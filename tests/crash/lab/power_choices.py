"""Selection of the states after a power cut to try: all if they are few, else some of each kind. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import TYPE_CHECKING

from tests.crash.lab.disk_files import LOST, WHOLE

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from tests.crash.lab.disk_names import Pending

Choice = tuple[int, ...]
"""The option that is left of each pending change, in their order."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The states to try for one cut.

    Attributes:
        chosen: the choices.
        complete: True if these are all permitted choices.
    """

    chosen: Sequence[Choice] = field(repr=False)
    complete: bool


def choose(pending: Sequence[Pending], *, bound: int, source: random.Random) -> Choices:
    """Choose the states of a disk to try.

    Args:
        pending: the changes that may be lost.
        bound: the maximum number of states; if more are permitted, those of `covering` and then random ones.
        source: the generator of the random ones.
    """
    every = list(islice(permitted(pending), bound + 1))
    if len(every) <= bound:
        return Choices(every, complete=True)
    chosen = dict.fromkeys(islice(covering(pending), bound))
    for _ in range(bound - len(chosen)):
        likely = source.random()
        drawn = (source.randrange(1, each.options) if source.random() < likely else LOST for each in pending)
        chosen[without_dependents(pending, tuple(drawn))] = None
    return Choices(list(chosen), complete=False)


def permitted(pending: Sequence[Pending]) -> Iterator[Choice]:
    """Yield every permitted choice once."""
    if not pending:
        yield ()
        return
    *earlier, last = pending
    for choice in permitted(earlier):
        possible = last.options if all(choice[needed] for needed in last.needs) else 1
        for option in range(possible):
            yield (*choice, option)


def covering(pending: Sequence[Pending]) -> Iterator[Choice]:
    """Yield a family of choices.

    It has: nothing left and everything left; each option of each change, with all others left and with all others lost;
    each prefix of the changes; each pair lost, and each pair left alone.
    """
    count = len(pending)
    none, every = [LOST] * count, [WHOLE] * count
    yield from (tuple(none), tuple(every))
    for at, each in enumerate(pending):
        for option in range(each.options):
            yield without_dependents(pending, _with(every, {at: option}))
            yield with_needs(pending, _with(none, {at: option}))
    for end in range(count):
        yield tuple(every[:end] + none[end:])
    for pair in combinations(range(count), 2):
        yield without_dependents(pending, _with(every, dict.fromkeys(pair, LOST)))
        yield with_needs(pending, _with(none, dict.fromkeys(pair, WHOLE)))


def without_dependents(pending: Sequence[Pending], choice: Choice) -> Choice:
    """Return a permitted choice: drop each change that needs a lost one."""
    left: list[int] = []
    for each, option in zip(pending, choice, strict=True):
        left.append(option if all(left[needed] for needed in each.needs) else LOST)
    return tuple(left)


def with_needs(pending: Sequence[Pending], choice: Choice) -> Choice:
    """Return a permitted choice: add each change that a change which is left needs."""
    left = list(choice)
    for at in reversed(range(len(left))):
        if left[at]:
            for needed in pending[at].needs:
                left[needed] = left[needed] or WHOLE
    return tuple(left)


def _with(choice: Iterable[int], options: dict[int, int]) -> Choice:
    return tuple(options.get(at, option) for at, option in enumerate(choice))
