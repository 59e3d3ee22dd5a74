"""The checkpoints that may and must be in a directory after a crash, from the announcements before it.

A traced program announces its saves with marks: ``begin NAME STEP`` before it calls `save`, ``staged NAME STEP`` and
``written NAME STEP`` when these futures are done, ``deleting NAME`` and ``deleted NAME`` around `delete`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Allowed = dict[str, set[int | None]]
"""For each name the allowed steps, one of which must be found; with None among them the name may also be missing."""


def allowed_after(marks: Iterable[str], before: Mapping[str, int], *, promise: str = "written") -> Allowed:
    """Return the allowed states.

    Args:
        marks: the announcements, in their order.
        before: the initial checkpoints and their steps.
        promise: the announcement from which on the save must be found.
    """
    # For each name the last guaranteed state, then the states that may have replaced it since, in the order of calls.
    states: dict[str, list[int | None]] = {name: [step] for name, step in before.items()}
    for mark in marks:
        word, name, *rest = mark.split()
        known = states.setdefault(name, [None])
        if word in ("begin", "deleting"):
            known.append(int(rest[0]) if rest else None)
        elif word == "deleted":
            del known[: known.index(None, 1)]
        elif word == promise or word == "written":
            step = int(rest[0])
            if step in known:
                del known[: known.index(step)]
    return {name: set(known) for name, known in states.items()}
