"""Fixtures for tests of the adapters: worlds of ranks, and filters for warnings of torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks.conftest import server, world2, world4

__all__ = ["alone", "server", "world2", "world4"]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Ignore torch's warnings about a missing process group and an existing checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        yield


@pytest.fixture
def alone_in_a_group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "s"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
