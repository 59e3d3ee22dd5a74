"""Programs that save are killed at every call: what was announced is there, and nothing in between is seen."""

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


def test_nothing_is_lost_wherever_a_program_is_killed(summary: Summary) -> None:
    wrong = [(outcome.point, outcome.call, outcome.problems) for outcome in summary.outcomes if outcome.problems]
    assert wrong == []


def test_there_are_many_kill_points_of_many_kinds(summary: Summary) -> None:
    assert len(summary.points) >= 200
    assert {point.scenario for point in summary.points} == SCENARIOS.keys()
    assert {name for name, _ in summary.kinds} >= CALLS
    assert summary.unfinished > len(summary.points) / 3  # or there was nothing for the next run to clean


def test_another_live_process_is_let_be(summary: Summary) -> None:
    assert summary.held >= 8
    assert summary.live_problems == []


# --- that it can fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_it_wrong_is_found_out(name: str, zygote: Zygote, tmp_path: Path) -> None:
    scenario, expected, near = BROKEN[name]
    points = [Point(name, near + away, "before") for away in (0, 1, -1, 2, -2, 3, 4, 5) if near + away >= 0]
    found: set[str] = set()
    while expected not in found:
        assert points, f"{expected} was not found out, but {found}"
        for outcome in zygote.call(run_points, tmp_path, name, [points.pop(0)], scenario):
            found |= {problem.kind for problem in outcome.problems}


def test_who_removes_what_is_being_written_is_found_out(zygote: Zygote, tmp_path: Path) -> None:
    held, problems = zygote.call(run_live, tmp_path, "careless", [8], CARELESS)
    assert held == 1
    assert {problem.kind for problem in problems} == {"live", "program"}


def test_what_may_be_found_follows_from_what_was_announced() -> None:
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
