"""The retention policies, compared with a simple model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import (
    EverySeconds,
    EverySteps,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepIf,
    KeepLatest,
    KeepPolicy,
    KeepWithin,
    SaveAny,
    StepFacts,
    StepInfo,
)
from aiockpt.manager.policies import as_policy, metric_of, ranked, select, split, to_delete

NOW = 1000.0


def info(step: int, state: str = "complete", time: float = 0.0, **metrics: float) -> StepInfo:
    return StepInfo(step, f"/run/step-{step:08d}", state, time=time, metrics=metrics)  # type: ignore[arg-type]


INFOS = st.dictionaries(
    st.integers(0, 60),
    st.tuples(
        st.sampled_from(["complete", "complete", "complete", "damaged", "unfinished"]),
        st.sampled_from([NOW, NOW - 10, NOW - 100]),
        st.sampled_from([{}, {"loss": 1.0}, {"loss": 2.0}, {"loss": math.nan}, {"loss": -1.5}, {"acc": 3.0}]),
    ),
    max_size=12,
).map(lambda found: [info(step, state, time, **metrics) for step, (state, time, metrics) in sorted(found.items())])

LEAVES = st.one_of(
    st.integers(1, 4).map(KeepLatest),
    st.integers(1, 20).map(KeepEvery),
    st.sampled_from([5.0, 50.0]).map(KeepWithin),
    st.builds(KeepBest, st.integers(1, 3), st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"])),
    st.integers(2, 5).map(lambda n: KeepIf(lambda each: each.step % n == 1)),
)
POLICIES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a, b: a & b, inner, inner)),
)


def keeps(policy: KeepPolicy, infos: list[StepInfo]) -> set[int]:
    """Return the steps that the model keeps; it judges each step on its own."""
    kind = type(policy).__name__
    if kind == "KeepAny":
        return set().union(*(keeps(each, infos) for each in policy.policies))
    if kind == "KeepAll":
        return set.intersection(*(keeps(each, infos) for each in policy.policies))
    kept = set()
    for each in infos:
        later = [other for other in infos if other.step > each.step]
        if kind == "KeepLatest":
            is_kept = len(later) < policy.n
        elif kind == "KeepEvery":
            is_kept = each.step % policy.steps == 0
        elif kind == "KeepWithin":
            is_kept = each.time >= NOW - policy.seconds
        elif kind == "KeepIf":
            is_kept = policy.predicate(each)
        else:
            mine = each.metrics.get(policy.metric, math.nan)
            values = [(other.step, other.metrics.get(policy.metric, math.nan)) for other in infos]
            if policy.mode == "max":
                mine, values = -mine, [(step, -value) for step, value in values]
            better = [step for step, value in values if value < mine or (value == mine and step > each.step)]
            is_kept = not math.isnan(mine) and len(better) < policy.n
        if is_kept:
            kept.add(each.step)
    return kept


@given(INFOS, POLICIES, st.sets(st.integers(0, 60), max_size=3))
def test_policies_keep_what_the_model_keeps(infos: list[StepInfo], policy: KeepPolicy, protected: set[int]) -> None:
    complete = [each for each in infos if each.state == "complete"]
    kept = select(policy, infos, NOW)
    assert set(kept) == keeps(policy, complete)
    assert all(reasons and all(reasons) for reasons in kept.values())
    deleted = [each.step for each in to_delete(policy, infos, NOW, protected)]
    newest = {each.step for each in complete[-1:]}
    assert deleted == sorted({each.step for each in complete} - set(kept) - protected - newest)


@given(INFOS, POLICIES)
def test_order_of_infos_does_not_matter(infos: list[StepInfo], policy: KeepPolicy) -> None:
    assert to_delete(policy, infos[::-1], NOW) == to_delete(policy, infos, NOW)


def test_reasons_name_the_policies() -> None:
    infos = [info(step, loss=float(step)) for step in (10, 20, 30)]
    keep = as_policy([KeepLatest(1), KeepBest(1, "loss"), KeepEvery(10) & KeepLatest(2)])
    assert select(keep, infos, NOW) == {
        30: ["KeepLatest(1)", "KeepEvery(10) & KeepLatest(2)"],
        10: ["KeepBest(1, 'loss')"],
        20: ["KeepEvery(10) & KeepLatest(2)"],
    }
    assert repr(KeepBest(2, "acc", "max")) == "KeepBest(2, 'acc', 'max')"
    assert repr(KeepEvery(2) & (KeepLatest(1) | KeepWithin(60))) == "KeepEvery(2) & (KeepLatest(1) | KeepWithin(60))"


def test_without_a_policy_all_steps_are_kept() -> None:
    infos = [info(1), info(2)]
    assert as_policy(None) is None
    assert set(select(None, infos, NOW)) == {1, 2}
    assert to_delete(None, infos, NOW) == []


def test_newest_complete_step_is_never_deleted() -> None:
    assert [each.step for each in to_delete(KeepAny(()), [info(1), info(2), info(3, "damaged")], NOW)] == [1]


def test_ranking_ignores_nan() -> None:
    infos = [
        info(1, loss=2.0),
        info(2, loss=math.nan),
        info(3, loss=1.0),
        info(4, loss=1.0),
        info(5),
        info(6, loss=math.inf),
    ]
    assert [each.step for each in ranked(infos, "loss")] == [4, 3, 1, 6]
    assert [each.step for each in ranked(infos, "loss", "max")] == [6, 1, 4, 3]
    assert metric_of(KeepLatest(1) | (KeepEvery(3) & KeepBest(1, "loss", "max"))) == ("loss", "max")
    assert metric_of(KeepLatest(1)) is None


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: KeepLatest(0), ValueError),
        (lambda: KeepLatest(True), TypeError),
        (lambda: KeepLatest(1.5), TypeError),  # type: ignore[arg-type]
        (lambda: KeepEvery(-1), ValueError),
        (lambda: KeepWithin(0), ValueError),
        (lambda: KeepWithin(math.nan), ValueError),
        (lambda: KeepBest(1, "loss", "least"), ValueError),  # type: ignore[arg-type]
        (lambda: KeepBest(1, 3), TypeError),  # type: ignore[arg-type]
        (lambda: KeepIf(3), TypeError),  # type: ignore[arg-type]
        (lambda: as_policy([]), ValueError),  # ambiguous: keep all steps, or none
        (lambda: as_policy([3]), TypeError),  # type: ignore[list-item]
        (lambda: as_policy("KeepLatest"), TypeError),  # type: ignore[arg-type]
        (lambda: KeepLatest(1) | 3, TypeError),  # type: ignore[operator]
    ],
)
def test_invalid_policies_raise_in_the_constructor(make, kind) -> None:
    with pytest.raises(kind):
        make()


def test_split_separates_policies_by_step() -> None:
    by_step, rest = split(EverySteps(2) | (EverySeconds(1) | EverySteps(3)))
    assert by_step.is_due(StepFacts(2, 1, 0.0, False))
    assert by_step.is_due(StepFacts(3, 2, 0.0, False))
    assert not rest.is_due(StepFacts(6, 1, 0.0, False))
    assert rest.is_due(StepFacts(1, 0, 1.0, False))
    assert split(None) == (SaveAny(()), SaveAny(()))
    assert not SaveAny(()).is_due(StepFacts(2, 0, 1e9, True))
