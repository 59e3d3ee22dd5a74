"""Which of the states that a power cut permits are tried: all where they are few, else some of each kind. Pure."""

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
"""What is left of each pending change, in their order: an option of each."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What is tried for one cut.

    Attributes:
        chosen: what is left of each pending change.
        complete: nothing else is permitted.
    """

    chosen: Sequence[Choice] = field(repr=False)
    complete: bool


def choose(pending: Sequence[Pending], *, bound: int, source: random.Random) -> Choices:
    """Choose the states of a disk to try.

    Args:
        pending: the changes that may be lost.
        bound: up to so many states are tried; where more are permitted, those of `covering` and random ones.
        source: what random ones are drawn from.
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
    """Give every choice that is permitted, once."""
    if not pending:
        yield ()
        return
    *earlier, last = pending
    for choice in permitted(earlier):
        possible = last.options if all(choice[needed] for needed in last.needs) else 1
        for option in range(possible):
            yield (*choice, option)


def covering(pending: Sequence[Pending]) -> Iterator[Choice]:
    """Give a family of choices.

    None and all; each change lost and each left alone, in each of its options; those up to each moment; each two
    lost, and each two left alone.
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
    """Make a choice permitted: what needs something that is lost is lost as well."""
    left: list[int] = []
    for each, option in zip(pending, choice, strict=True):
        left.append(option if all(left[needed] for needed in each.needs) else LOST)
    return tuple(left)


def with_needs(pending: Sequence[Pending], choice: Choice) -> Choice:
    """Make a choice permitted: what is needed by something that is left is left as well."""
    left = list(choice)
    for at in reversed(range(len(left))):
        if left[at]:
            for needed in pending[at].needs:
                left[needed] = left[needed] or WHOLE
    return tuple(left)


def _with(choice: Iterable[int], options: dict[int, int]) -> Choice:
    return tuple(options.get(at, option) for at, option in enumerate(choice))
