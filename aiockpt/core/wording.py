"""Parts of messages, and the order of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def a(noun: str) -> str:
    """Return a noun with its article."""
    return f"an {noun}" if noun[:1] in "aeiouAEIOU" else f"a {noun}"


def time_text(time_s: float) -> str:
    """Return a time in seconds as in `time.time` as text, in the zone of this machine, which it names."""
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "seconds")


def naturally(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders step-90 before step-1000."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"([0-9]+)", name)]
