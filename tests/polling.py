"""Wait for what no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Ask again and again until a condition holds; raise AssertionError if it does not in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {limit_s} s"
        time.sleep(0.005)
