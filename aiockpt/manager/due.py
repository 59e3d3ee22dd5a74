"""When a run saves: by its policies, at its last step, and as a signal or a call asks for a last save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.manager.policies import SavePolicy, StepFacts, split
from aiockpt.manager.preemption import LastSaveRequests

if TYPE_CHECKING:
    from aiockpt.manager.preemption import Answer


class Due:
    """Whether a save is due, as far as this rank can tell; what all ranks agree on, it is told."""

    def __init__(self, policy: SavePolicy | None) -> None:
        if policy is not None and not isinstance(policy, SavePolicy):
            raise TypeError(f"save must be a policy such as EverySteps(100), not {policy!r}")
        self._by_step, self._by_facts = split(policy)
        self.requests = LastSaveRequests()  # those for a last save, on this rank
        self.is_stopping = False  # whether the ranks have agreed that the last step is reached
        self._previous: int | None = None  # the step that was asked about, or restored
        self._restored: int | None = None
        self._final: int | None = None  # the last step, as the caller has said
        self._calls_left = 1  # until the next exchange with the other ranks

    def is_over(self, step: int, *, is_last: bool) -> bool:
        """Return whether nothing is due any more: the run stops, or its last step is the one that was restored."""
        return self.is_stopping or (is_last and step == self._restored)

    def is_last(self, step: int) -> bool:
        """Return whether the save of this step is the last one of the run."""
        return self.is_stopping or step == self._final

    def ask(self, step: int, *, elapsed_s: float, is_idle: bool, is_last: bool) -> StepFacts:
        """Note that a step is asked about; return its facts, see `StepFacts`."""
        if is_last:
            self._final = step
        facts = StepFacts(step, self._previous, elapsed_s, is_idle)
        self._previous = step
        return facts

    def by_step(self, facts: StepFacts, *, is_last: bool) -> bool:
        """Return whether a save is due by what is the same on every rank."""
        return is_last or self._by_step.is_due(facts)

    def by_facts(self, facts: StepFacts) -> bool:
        """Return whether a save is due by what rank 0 alone decides."""
        return self._by_facts.is_due(facts)

    def counts_down(self) -> bool:
        """Count a call; return whether the ranks exchange messages only at a later one."""
        self._calls_left -= 1
        return self._calls_left > 0

    def answered(self, answer: Answer, *, by_step: bool) -> bool:
        """Note what the ranks have agreed on; return whether a save is due."""
        self._calls_left = answer.calls
        self.is_stopping |= answer.is_stopping
        return answer.is_due or (by_step and not answer.is_stopping)

    def go_on_from(self, step: int) -> None:
        """Note that a step was restored, from which the run goes on."""
        self._previous = self._restored = step
        self._final = None
