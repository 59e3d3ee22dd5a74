"""Programs are killed at every call of a save: announced checkpoints are there, and unfinished ones are not visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import campaign
from tests.crash.broken import BROKEN, CARELESS
from tests.crash.campaign import Summary
from tests.crash.matrix import Point, run_live, run_points
from tests.crash.promises import allowed_after
from tests.crash.scenarios import SCENARIOS
from tests.crash.zygote import Zygote

CALLS = {"create", "write", "truncate", "allocate", "sync", "rename", "exchange", "unlink", "mkdir", "rmdir"}


@pytest.fixture(scope="module")
def summary(zygotes: tuple[Zygote, Zygote], tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return campaign.run(zygotes, tmp_path_factory.mktemp("matrix"))


@pytest.mark.slow
def test_no_checkpoint_is_lost_at_any_kill_point(summary: Summary) -> None:
    wrong = [(outcome.point, outcome.call, outcome.problems) for outcome in summary.outcomes if outcome.problems]
    assert wrong == []


@pytest.mark.slow
def test_kill_points_cover_every_scenario_and_every_kind_of_call(summary: Summary) -> None:
    assert len(summary.points) >= 150
    assert {point.scenario for point in summary.points} == SCENARIOS.keys()
    assert {name for name, _ in summary.kinds} >= CALLS
    assert summary.unfinished > len(summary.points) / 3  # else the next run had nothing to clean


@pytest.mark.slow
def test_files_of_a_live_process_are_left_alone(summary: Summary) -> None:
    assert summary.held >= 8
    assert summary.live_problems == []


# --- bugs are detected ------------------------------------------------------------------------------------


@pytest.mark.main
@pytest.mark.parametrize("name", BROKEN)
def test_a_program_with_a_crash_bug_is_detected(name: str, zygote: Zygote, tmp_path: Path) -> None:
    scenario, expected, near = BROKEN[name]
    points = [Point(name, near + away, "before") for away in (0, 1, -1, 2, -2, 3, 4, 5) if near + away >= 0]
    found: set[str] = set()
    while expected not in found:
        assert points, f"the kind of problem should be {expected}, but is one of {found}"
        for outcome in zygote.call(run_points, tmp_path, name, [points.pop(0)], scenario):
            found |= {problem.kind for problem in outcome.problems}


def test_removing_the_files_of_a_live_process_is_detected(zygote: Zygote, tmp_path: Path) -> None:
    held, problems = zygote.call(run_live, tmp_path, "careless", [8], CARELESS)
    assert held == 1
    assert {problem.kind for problem in problems} == {"live", "program"}


def test_allowed_states_follow_from_the_announcements() -> None:
    before = {"old": 1}
    assert allowed_after([], before) == {"old": {1}}
    assert allowed_after(["begin old 2", "begin new 3"], before) == {"old": {1, 2}, "new": {None, 3}}
    announced = ["begin old 2", "begin old 3", "staged old 2", "staged old 3"]
    assert allowed_after(announced, before) == {"old": {1, 2, 3}}
    assert allowed_after(announced, before, promise="staged") == {"old": {3}}
    assert allowed_after([*announced, "written old 2"], before) == {"old": {2, 3}}
    assert allowed_after(["deleting old"], before) == {"old": {1, None}}
    assert allowed_after(["deleting old", "deleted old"], before) == {"old": {None}}
    assert allowed_after(["begin c 1", "written c 1", "deleting c", "deleted c", "begin c 2"], {}) == {"c": {None, 2}}
