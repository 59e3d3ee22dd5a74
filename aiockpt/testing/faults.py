"""Which steps of a save or a load are to fail, and how. Values, and pure decisions."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Fault:
    """One that is planned.

    Attributes:
        step: where; see `aiockpt.storage.wrapper.Step`.
        error: what the file system says. Another exception than an OSError is raised as it is, such as a MemoryError.
            None: nothing fails, so that it is slow, or a short read.
        nth: from which occurrence on, counted from 1, of those with such a name.
        times: how many occurrences; None for all from there on.
        name: the file or path, as a pattern in which * stands for any text.
        delay_s: how long the step takes more, in seconds.
        short_bytes: of "read": the file seems to end behind so many bytes of what is asked for.
    """

    step: str
    error: Exception | None = None
    nth: int = 1
    times: int | None = 1
    name: str = "*"
    delay_s: float = 0.0
    short_bytes: int | None = None

    def concerns(self, step: str, name: str) -> bool:
        """Tell whether it is for such a step."""
        return step == self.step and fnmatchcase(name, self.name)

    def strikes(self, occurrence: int) -> bool:
        """Tell whether it strikes at this one of those that it is for."""
        return occurrence >= self.nth and (self.times is None or occurrence < self.nth + self.times)


@dataclass(frozen=True, slots=True)
class Chances:
    """Faults at random, the same ones each time for the same seed and order of steps.

    Attributes:
        of: for each step the probability that it fails.
        seed: what they are drawn from.
        numbers: the error numbers to choose from.
    """

    of: Mapping[str, float]
    seed: int = 0
    numbers: Sequence[int] = field(default=(errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE))

    def draw(self, step: str, source: random.Random) -> OSError | None:
        """Draw whether a step fails; give what the file system says then."""
        if step not in self.of or source.random() >= self.of[step]:
            return None
        number = source.choice(self.numbers)
        return OSError(number, os.strerror(number))
