"""The quick form of ``python -m benchmarks soak``: no checkpoint is lost, and no resource leaks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.soak.course import Soak
from tests.soak.gauges import growth_bytes

GROWTH_BYTES = 16 << 20


@pytest.mark.slow
@pytest.mark.asyncio
async def test_soak(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aiockpt")
    soak = Soak(tmp_path, seed=1)
    await soak.run(70, per_round=7, seconds=6.0, warm_up=3)
    tally = soak.tally
    assert tally.lost == []
    assert tally.wrong == []
    assert tally.leaks == []
    assert growth_bytes(tally.gauges) < GROWTH_BYTES
    for what in ("written", "failed", "cancelled", "torn", "loads", "deletions", "faults"):
        assert tally.counts[what] > 0, what
