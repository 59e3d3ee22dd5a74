"""Process groups for the adapters, and torch's warning if there is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.ranks.conftest import server, world2, world4

__all__ = ["alone", "server", "world2", "world4"]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Torch warns about loads and saves without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
