"""What may and must be found in a directory after a crash, from what was announced before it.

A traced program marks what it does: ``begin NAME STEP`` before it calls `save`, ``staged NAME STEP`` and ``written NAME
STEP`` when these have come, ``deleting NAME`` and ``deleted NAME`` around `delete`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Allowed = dict[str, set[int | None]]
"""For each name the steps of which one must be found there; None: it may also be that there is nothing."""


def allowed_after(marks: Iterable[str], before: Mapping[str, int], *, promise: str = "written") -> Allowed:
    """Give what may be found.

    Args:
        marks: what was announced, in its order.
        before: the checkpoints that were there at the beginning, and their steps.
        promise: which announcement is one: from then on the save must be found.
    """
    # Every state that a name may be in: what is sure, then what may have come since, in the order of the calls.
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
