"""Zygotes to fork from; tests are skipped where processes can't be traced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.lab import tracer
from tests.crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygotes() -> Iterator[tuple[Zygote, Zygote]]:
    """Yield two zygotes, which can work at the same time."""
    with Zygote() as one, Zygote() as other:
        if reason := one.call(tracer.why_not):
            pytest.skip(reason)
        yield one, other


@pytest.fixture
def zygote(zygotes: tuple[Zygote, Zygote]) -> Zygote:
    return zygotes[0]
