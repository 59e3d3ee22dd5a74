"""What a `Tracer` can do to a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.crash.lab.calls import FileCall


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill processes with SIGKILL.

    Attributes:
        moment: before the call is carried out, or when it has been.
        whom: all processes, the first (that runs the function), the one that makes the call, or all but the first.
        nbytes: for "after" a call that writes: how many bytes it writes at most.
    """

    moment: Literal["before", "after"]
    whom: Literal["all", "first", "caller", "others"] = "all"
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Don't carry a call out, and answer it with an error number."""

    errno: int


@dataclass(frozen=True, slots=True)
class Short:
    """Let a call write fewer bytes than it wants; files opened for direct I/O take whole blocks, or answer EINVAL."""

    nbytes: int


Action = Kill | Fail | Short
Decide = Callable[[int, FileCall], Action | None]
