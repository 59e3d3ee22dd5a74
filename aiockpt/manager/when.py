"""When a run saves: policies that say whether a step is due. Pure, and without torch.

::

    EverySteps(100) | EverySeconds(600)
    WhenIdle()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from aiockpt.manager.policies import check_count, check_seconds


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts that decide whether a save is due.

    Attributes:
        step: the step that is asked about.
        previous: the step that was asked about before, or that was restored; None for the first of a new run.
        elapsed_s: the seconds since the last save of this run began, or since the run was opened.
        is_idle: whether no save is in flight.
    """

    step: int
    previous: int | None
    elapsed_s: float
    is_idle: bool


class SavePolicy(ABC):
    """Decides whether a save is due. Combine policies with ``|``.

    Attributes:
        by_step: whether the answer follows from the steps alone. It then is the same on every rank without a message.
    """

    by_step: bool = False

    @abstractmethod
    def is_due(self, facts: StepFacts) -> bool:
        """Return whether a save is due."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """Return a policy by which a save is due when it is by either."""
        return SaveAny((self, other)) if isinstance(other, SavePolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """A save is due at each multiple of ``n`` but 0, or at the first step that is asked about after it.

    Attributes:
        n: the distance in steps, at least 1.
    """

    n: int

    by_step = True

    def __post_init__(self) -> None:
        check_count(self, "n", self.n)

    def is_due(self, facts: StepFacts) -> bool:
        if facts.previous is None or facts.step <= facts.previous:
            return facts.step > 0 and facts.step % self.n == 0
        return facts.step // self.n > facts.previous // self.n


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """A save is due when the last one began so many seconds ago. With many ranks, the clock of rank 0 counts.

    Attributes:
        seconds: the distance in seconds, more than 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds(self, self.seconds)

    def is_due(self, facts: StepFacts) -> bool:
        return facts.elapsed_s >= self.seconds


@dataclass(frozen=True, slots=True)
class WhenIdle(SavePolicy):
    """A save is due whenever the one before it is written: as often as the disk allows."""

    def is_due(self, facts: StepFacts) -> bool:
        return facts.is_idle


@dataclass(frozen=True, slots=True)
class SaveAny(SavePolicy):
    """A save is due when it is by any of several policies; the same as ``|``.

    Attributes:
        policies: the policies.
    """

    policies: tuple[SavePolicy, ...]

    @property
    def by_step(self) -> bool:  # type: ignore[override]
        return all(policy.by_step for policy in self.policies)

    def is_due(self, facts: StepFacts) -> bool:
        return any(policy.is_due(facts) for policy in self.policies)


def split(policy: SavePolicy | None) -> tuple[SavePolicy, SavePolicy]:
    """Return the part of a policy that goes by the step alone, and the rest."""
    parts = _parts(policy)
    return SaveAny(tuple(p for p in parts if p.by_step)), SaveAny(tuple(p for p in parts if not p.by_step))


def _parts(policy: SavePolicy | None) -> list[SavePolicy]:
    if isinstance(policy, SaveAny):
        return [part for each in policy.policies for part in _parts(each)]
    return [] if policy is None else [policy]
