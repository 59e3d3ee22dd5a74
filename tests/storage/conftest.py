"""Threads for the calls of storages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiockpt.core.threads import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    group = Workers(8, "aiockpt-test")
    yield group
    group.close()
