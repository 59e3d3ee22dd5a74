"""Facts about the machine."""

from __future__ import annotations

import pytest

from aiockpt.core import machine


@pytest.mark.parametrize(
    ("ranks", "share"), [(None, 500), ("1", 500), ("8", 62), ("0", 500), ("-3", 500), ("", 500), ("x", 500)]
)
def test_the_ranks_of_a_machine_share_its_memory(ranks, share, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask at the same moment, before any of them has taken its part."""
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 1000)
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert machine.memory_share_bytes() == share
