"""The actions of a `Tracer` on a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.crash.lab.calls import FileCall


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill processes with SIGKILL.

    Attributes:
        moment: before the call is carried out, or after it has returned.
        whom: all processes, the first (which runs the function), the one that makes the call, or all but the first.
        nbytes: for "after" a write: the maximum number of bytes that it writes.
    """

    moment: Literal["before", "after"]
    whom: Literal["all", "first", "caller", "others"] = "all"
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Skip a call, and return an error number from it."""

    errno: int


@dataclass(frozen=True, slots=True)
class Short:
    """Shorten a write; a file opened for direct I/O takes whole blocks only, and fails with EINVAL otherwise."""

    nbytes: int


Action = Kill | Fail | Short
Decide = Callable[[int, FileCall], Action | None]
