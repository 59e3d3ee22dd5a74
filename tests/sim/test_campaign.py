"""Random programs: some hundreds here, and more with ``python -m benchmarks crash --full --part sim``."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.sim.programs import KNOWN, Program, programs, run

_numbers = itertools.count()


@pytest.mark.parametrize("name", KNOWN)
def test_known_programs(name: str, tmp_path: Path) -> None:
    """Each with several sequences of delays."""
    for seed in range(8):
        run(replace(KNOWN[name], seed=seed), tmp_path / str(seed))


@pytest.mark.timeout(1200)
@settings(max_examples=400, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
@given(program=programs)
def test_every_published_checkpoint_is_the_state_at_its_save(tmp_path: Path, program: Program) -> None:
    _counts.update(run(program, tmp_path / str(next(_numbers))))


_counts: Counter[str] = Counter()


def test_the_programs_are_not_all_alike() -> None:
    """Saves are published, also while the program goes on changing its tensors, are torn, and fail."""
    wanted = ("published", "published, though disturbed", "TornSnapshotError", "StageError")
    if _counts:  # the programs above have run
        assert all(_counts[what] > 0 for what in wanted), _counts
