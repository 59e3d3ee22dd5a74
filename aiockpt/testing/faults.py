"""Planned and random faults of the steps of saves and loads. Values, and pure decisions."""

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
    """A planned fault.

    Attributes:
        step: the step that fails; see `aiockpt.storage.wrapper.Step`.
        error: the error of the file system. Any other exception than an OSError is raised as it is, such as a
            MemoryError. None: the step does not fail, but is slow, or a read is short.
        nth: the first occurrence that fails, counted from 1, of those whose name matches.
        times: how many occurrences fail; None for all from there on.
        name: the file or path, as a pattern in which * stands for any text.
        delay_s: how much longer the step takes, in seconds.
        short_bytes: for "read": the file seems to end after so many bytes of the range.
    """

    step: str
    error: Exception | None = None
    nth: int = 1
    times: int | None = 1
    name: str = "*"
    delay_s: float = 0.0
    short_bytes: int | None = None

    def concerns(self, step: str, name: str) -> bool:
        """Return whether it is for this step and name."""
        return step == self.step and fnmatchcase(name, self.name)

    def strikes(self, occurrence: int) -> bool:
        """Return whether this occurrence, counted from 1, fails."""
        return occurrence >= self.nth and (self.times is None or occurrence < self.nth + self.times)


@dataclass(frozen=True, slots=True)
class Chances:
    """Random faults, the same ones each time for the same seed and order of steps.

    Attributes:
        of: for each step the probability that it fails.
        seed: of the random numbers.
        numbers: the error numbers to choose from.
    """

    of: Mapping[str, float]
    seed: int = 0
    numbers: Sequence[int] = field(default=(errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE))

    def draw(self, step: str, source: random.Random) -> OSError | None:
        """Return the error of a step, or None if it does not fail."""
        if step not in self.of or source.random() >= self.of[step]:
            return None
        number = source.choice(self.numbers)
        return OSError(number, os.strerror(number))
