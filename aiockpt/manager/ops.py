"""The steps of a manager's work that wait: its decisions are generators that yield these and are sent the answers.

The async manager awaits each, the blocking one calls it; what is decided in between is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiockpt.engine.requests import StateDict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """Load a checkpoint into a state."""

    path: str
    state: StateDict
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify a checkpoint; the answer is its `VerifyReport`."""

    path: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """Open a checkpoint, which checks its structure and the sizes of its files; the answer describes its keys."""

    path: str


@dataclass(frozen=True, slots=True)
class Agree:
    """Agree with the other ranks; see `EngineAccess.agree`."""

    what: str
    value: object
    decide: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """Wait until a save would not find the checkpointer busy."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Remove what killed processes have left in a directory."""

    directory: str


@dataclass(frozen=True, slots=True)
class Run:
    """Call a function that blocks; the async manager does so in a thread."""

    function: Callable[[], Any]


Op = Load | Verify | Inspect | Agree | Ready | Clean | Run
Steps = Generator[Op, Any, T]


def of_rank_0(values: Sequence[Any]) -> Any:
    """Return the value of rank 0, for `Agree`."""
    return values[0]
