"""Time spent, by kind of work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness.measure import Sample


class Clock:
    """Adds up the time of each kind of work.

    Attributes:
        spent: seconds for each kind.
    """

    def __init__(self) -> None:
        self.spent: Sample = {}

    def __call__(self, kind: str, work: Callable[..., Any], *args: Any) -> Any:
        """Call a function, and add the time it takes; return its result."""
        started = time.perf_counter()
        result = work(*args)
        self.spent[kind] = self.spent.get(kind, 0.0) + time.perf_counter() - started
        return result
