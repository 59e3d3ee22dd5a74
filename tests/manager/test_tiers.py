"""The decisions about a run and its mirror: over random histories, no deletion leaves both without a complete step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiockpt import EverySeconds, EverySteps, KeepBest, KeepEvery, KeepLatest, KeepPolicy, StepInfo
from aiockpt.manager.policies import to_delete
from aiockpt.manager.tiers import backlog, copies_in_order, due_steps, is_mirrored, mirror_to_delete
from tests.manager.test_policies import POLICIES


def info(step: int, save_id: str = "", *, time: float = 0.0, state: Any = "complete", **metrics: float) -> StepInfo:
    return StepInfo(step, f"/run/{step}", state, time=time or step, metrics=metrics, save_id=save_id or f"id{step}")


# --- what is mirrored -----------------------------------------------------------------------------------


def steps(found: list[StepInfo]) -> list[int]:
    return [each.step for each in found]


def waiting(local: list[StepInfo], mirror: list[StepInfo], **options: Any) -> list[int]:
    keep = options.pop("keep", None)
    given: dict[str, Any] = {"due": {each.step for each in local}, "keep": keep, "mirror_keep": keep, "now": 1000.0}
    return steps(backlog(local, mirror, **given | options))


def test_oldest_first_and_what_is_there_is_not_mirrored_again() -> None:
    local = [info(step) for step in (1, 2, 3, 4)]
    assert waiting(local, [info(1), info(3)]) == [2, 4]
    assert waiting(local, local) == []
    assert waiting(local, [info(4, state="damaged")]) == [1, 2, 3, 4]


def test_steps_that_either_policy_would_delete_are_dropped() -> None:
    local = [info(step) for step in range(1, 8)]
    assert waiting(local, [], keep=KeepLatest(2)) == [6, 7]
    assert waiting(local, [], mirror_keep=KeepEvery(3)) == [3, 6, 7]
    assert waiting(local, [], keep=KeepLatest(2), protected={1, 4}) == [1, 4, 6, 7]
    assert waiting(local, [], keep=KeepLatest(2), mirror_keep=None, drops=False) == steps(local)


def test_best_step_is_not_dropped() -> None:
    local = [info(step, loss=abs(step - 2)) for step in range(1, 8)]
    assert waiting(local, [], keep=KeepBest(1, "loss")) == [2, 7]


def test_number_that_was_used_again() -> None:
    """The later save counts, in whichever tier it is."""
    old, new = info(5, "old", time=10.0), info(5, "new", time=20.0)
    assert waiting([new], [old]) == [5]
    assert waiting([old], [new]) == []
    assert [copy.is_mirror for copy in copies_in_order([new], [old])] == [False, True]
    assert [copy.is_mirror for copy in copies_in_order([old], [new])] == [True, False]
    assert [copy.is_mirror for copy in copies_in_order([old], [old])] == [False, True]


def test_steps_without_a_manifest_are_not_mirrored() -> None:
    assert waiting([StepInfo(1, "/run/1", "complete")], []) == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(None, {5, 10, 25, 30, 31}), (EverySteps(10), {10, 25, 30}), (EverySeconds(15), {5, 25})],
)
def test_due_steps(policy: Any, expected: set[int]) -> None:
    assert due_steps(policy, {step: float(step) for step in (5, 10, 25, 30, 31)}) == expected


def test_nothing_is_deleted_unless_the_committed_step_is_seen_there() -> None:
    mirror = [info(step) for step in (1, 2, 3)]
    assert steps(mirror_to_delete(KeepLatest(1), mirror, info(3), 0.0)) == [1, 2]
    assert mirror_to_delete(KeepLatest(1), mirror, info(4), 0.0) == []
    assert mirror_to_delete(KeepLatest(1), mirror, info(3, "another"), 0.0) == []
    assert steps(mirror_to_delete(KeepLatest(1), mirror, info(2), 0.0, {1})) == []


def test_order_of_a_restore() -> None:
    local, mirror = [info(1), info(3), info(4, state="damaged")], [info(1), info(2), info(4)]
    found = [(copy.info.step, copy.is_mirror) for copy in copies_in_order(local, mirror)]
    assert found == [(4, False), (4, True), (3, False), (2, True), (1, False), (1, True)]


# --- a model of a run -------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "save",
                "save",
                "save",
                "begin",
                "end",
                "fail",
                "prune",
                "pin",
                "unpin",
                "back",
                "restart",
                "lose",
                "again",
            ]
        ),
        st.integers(0, 5),
    ),
    max_size=60,
)


class Model:
    """A run whose saves, deletions and copies happen in any order."""

    def __init__(self, keep: KeepPolicy | None, mirror_keep: KeepPolicy | None, *, drops: bool) -> None:
        self.keep, self.mirror_keep, self.drops = keep, mirror_keep, drops
        self.local: dict[int, StepInfo] = {}
        self.mirror: dict[int, StepInfo] = {}
        self.pinned: set[int] = set()
        self.last: int | None = None
        self.last_mirrored: int | None = None
        self.copied: StepInfo | None = None
        self.step = self.clock = 0
        self.is_lost = False

    def of(self, tier: dict[int, StepInfo]) -> list[StepInfo]:
        return [tier[step] for step in sorted(tier)]

    @property
    def waiting(self) -> list[StepInfo]:
        return backlog(
            self.of(self.local),
            self.of(self.mirror),
            due=self.local,
            keep=self.keep,
            mirror_keep=self.mirror_keep,
            now=float(self.clock),
            protected=self.pinned | ({self.last} - {None}),
            drops=self.drops,
        )

    def save(self, number: int) -> None:
        self.clock += 1
        self.step += 1 + number
        self.local[self.step] = info(self.step, f"id{self.clock}", time=float(self.clock), loss=float(number))
        self.last, self.is_lost = self.step, False

    def prune(self, number: int) -> None:
        held = {self.copied.step} if self.copied else set()
        kept = {each.step for each in self.waiting} if not self.drops else set()
        protected = held | kept | self.pinned | ({self.last} - {None})
        for each in to_delete(self.keep, self.of(self.local), float(self.clock), protected):
            del self.local[each.step]

    def begin(self, number: int) -> None:
        if self.copied is None and self.waiting:
            self.copied = self.waiting[0]

    def end(self, number: int) -> None:
        copied, self.copied = self.copied, None
        if copied is None:
            return
        self.mirror[copied.step] = copied
        self.last_mirrored = copied.step
        protected = self.pinned | ({self.last, self.last_mirrored} - {None})
        for each in mirror_to_delete(self.mirror_keep, self.of(self.mirror), copied, float(self.clock), protected):
            del self.mirror[each.step]
            assert max(self.mirror) > each.step, "deleted before a newer one was there"

    def fail(self, number: int) -> None:
        self.copied = None

    def pin(self, number: int) -> None:
        self.pinned |= set(sorted(self.local)[number : number + 1])

    def unpin(self, number: int) -> None:
        self.pinned.clear()

    def back(self, number: int) -> None:
        """Go on from an older step; later ones stay."""
        if self.local:
            self.step = sorted(self.local)[number % len(self.local)]
            self.last = self.step

    def again(self, number: int) -> None:
        """Save a number again."""
        if self.local and self.copied is None:
            self.step = max(self.local) - 1
            self.save(0)

    def restart(self, number: int) -> None:
        self.copied, self.last, self.last_mirrored = None, None, None
        self.pinned.clear()

    def lose(self, number: int) -> None:
        """Lose the disk; the run goes on from the mirror."""
        if number == 0:
            self.restart(0)
            self.local.clear()
            self.is_lost, self.step = True, max(self.mirror, default=0)


@pytest.mark.slow
@given(OPERATIONS, st.none() | POLICIES, st.none() | POLICIES, st.booleans())
@settings(max_examples=300)
def test_no_deletion_leaves_both_tiers_without_a_step(
    operations: list[tuple[str, int]], keep: KeepPolicy | None, mirror_keep: KeepPolicy | None, drops: bool
) -> None:
    run = Model(keep, mirror_keep, drops=drops)
    for operation, number in operations:
        had = bool(run.mirror)
        getattr(run, operation)(number)
        assert run.mirror or not had, "the mirror lost its last step"
        assert run.local or run.is_lost or not run.clock, "the run lost its last step"
        missing = {each.step for each in run.waiting}
        there = dict(run.mirror)
        newest = max(run.local, default=None)
        for step in run.pinned & run.local.keys() | ({newest, run.last} - {None} & run.local.keys()):
            if step in run.local and not is_mirrored(run.local[step], there):
                later = step in there and there[step].time > run.local[step].time
                assert step in missing or later, "a step that must not be dropped was"
        if not drops and mirror_keep is None:
            assert missing >= run.local.keys() - there.keys()
    run.copied = None
    for _ in range(len(run.local)):  # left alone, it comes to an end
        run.begin(0)
        run.end(0)
    assert not run.waiting
