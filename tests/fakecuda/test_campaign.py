"""Random programs: some hundreds here, and more with ``python -m tests.fakecuda.campaign``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakecuda import device as fake
from tests.fakecuda.campaign import find_mutant, run_programs
from tests.fakecuda.programs import KNOWN
from tests.fakecuda.runner import run

FOUND_SOON = ("the staging stream does not wait for save()", "a chunk is lent again before its copy")


@pytest.mark.parametrize("name", KNOWN)
def test_known_programs(name: str, tmp_path: Path) -> None:
    """Each with several sequences of delays, and on each kind of device."""
    for seed, kind in enumerate(["CUDA", "CUDA", *fake.POSES]):
        run(replace(KNOWN[name], seed=seed, kind=kind), tmp_path / str(seed))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", [0, 1000])
def test_every_published_checkpoint_is_the_state_at_its_save(first: int, tmp_path: Path) -> None:
    """Also of saves that are copied while the program goes on changing its tensors; enough of them are."""
    counts = run_programs(folder=tmp_path, number=100, first=first)
    assert not counts.wrong, counts.wrong[0]
    assert counts.published >= 100
    assert counts.overlapped >= counts.published // 8, counts
    assert counts.torn
    assert counts.ended


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FOUND_SOON)
def test_a_mutant_is_found(name: str, tmp_path: Path) -> None:
    """Those that a few programs show; the others: ``python -m tests.fakecuda.campaign --mutants``."""
    assert find_mutant(name, folder=tmp_path, number=100).wrong
