"""The policies that decide when a save is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import EverySeconds, EverySteps, StepFacts, WhenIdle


def facts(step: int, previous: int | None = None, elapsed_s: float = 0.0, is_idle: bool = False) -> StepFacts:
    return StepFacts(step, previous, elapsed_s, is_idle)


@given(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1))
def test_each_multiple_is_due_once_for_any_sequence_of_steps(n: int, distances: list[int]) -> None:
    step, previous = -1, None
    for distance in distances:
        step += distance
        passed = [
            m
            for m in range(1, step + 1)
            if m % n == 0 and ((previous is None and m == step) or (previous is not None and m > previous))
        ]
        assert EverySteps(n).is_due(facts(step, previous)) == bool(passed)
        previous = step


def test_step_zero_is_not_due() -> None:
    assert not EverySteps(1).is_due(facts(0))
    assert EverySteps(1).is_due(facts(1, 0))


def test_after_going_back_only_multiples_are_due() -> None:
    assert not EverySteps(10).is_due(facts(5, 25))
    assert EverySteps(10).is_due(facts(10, 25))


def test_every_seconds_and_when_idle() -> None:
    assert not EverySeconds(600).is_due(facts(1, 0, 599.9))
    assert EverySeconds(600).is_due(facts(1, 0, 600.0))
    assert WhenIdle().is_due(facts(1, 0, 0.0, True))
    assert not WhenIdle().is_due(facts(1, 0, 1e9, False))


def test_union_of_policies() -> None:
    policy = EverySteps(100) | EverySeconds(600) | WhenIdle()
    assert policy.is_due(facts(100, 99))
    assert policy.is_due(facts(101, 100, 700.0))
    assert policy.is_due(facts(101, 100, 0.0, True))
    assert not policy.is_due(facts(101, 100))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda: EverySteps(0), ValueError), (lambda: EverySteps(2.0), TypeError), (lambda: EverySeconds(-1), ValueError)],
)
def test_invalid_policies_raise(make, kind) -> None:
    with pytest.raises(kind):
        make()
