"""Process groups for the adapters, and warnings that most of their tests are not about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.ranks.conftest import server, world2, world4

__all__ = ["alone", "server", "world2", "world4"]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Loads and saves without a process group, and saves over a checkpoint, warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        yield
