"""The selection of contenders by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from benchmarks.harness.measure import Named

Contender = TypeVar("Contender", bound=Named)


def chosen(contenders: Sequence[Contender], only: str | None) -> list[Contender]:
    """Return the contenders whose names contain one of the comma-separated parts; all of them without ``only``.

    Raises:
        SystemExit: if no contender is left.
    """
    if not only:
        return list(contenders)
    parts = [part.strip().lower() for part in only.split(",") if part.strip()]
    selected = [each for each in contenders if any(part in each.name.lower() for part in parts)]
    if not selected:
        raise SystemExit(f"--only {only} leaves none of: {', '.join(each.name for each in contenders)}")
    return selected
