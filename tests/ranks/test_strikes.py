"""Passing faults of one rank at any step of a round: the save fails on all ranks, and the next one works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.strikes import KINDS, Counts, Strike, check, run_strikes
from tests.ranks.world import World


def test_one_fault_fails_one_save(tmp_path: Path) -> None:
    counts = run_strikes(full=False, folder=tmp_path, most=24)
    assert counts.wrong == []
    assert counts.lost == 0
    assert counts.struck >= 12
    assert counts.written + counts.failed == counts.saves


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        pytest.param(kind, victim, marks=() if victim == number % 2 * 2 else pytest.mark.full)
        for number, kind in enumerate(sorted(KINDS.keys() - {"stop"}))
        for victim in (0, 2)
    ],
)
def test_each_kind_of_fault_strikes(world3: World, tmp_path: Path, kind: str, victim: int) -> None:
    counts = Counts()
    for save in (0, 2):
        check(world3, tmp_path / str(save), Strike(kind, victim, save, 1), counts)
    assert counts.wrong == []
    assert counts.kinds[kind] >= (1 if kind == "store" else 2)


def test_a_rank_that_stops_for_longer_than_the_timeout_fails_the_save_on_all(tmp_path: Path) -> None:
    counts = Counts()
    with World(3) as world:
        check(world, tmp_path / "0", Strike("stop", 0, 2, 1), counts)
    assert counts.wrong == []
    assert counts.struck == 1
