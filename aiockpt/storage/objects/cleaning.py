"""The fate of objects that no commit object names."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from aiockpt.format.names import HIDDEN
from aiockpt.storage.local.temp_dir import Liveness, liveness, read_ticket, this_process

if TYPE_CHECKING:
    from aiockpt.storage.objects.commit import Tomb

IN_FLIGHT_S = 300.0
"""No request of a dead process arrives later: longer than a client sends one again and again."""
RENEW_S = 10.0
"""How often the writer of a single object renews its claim."""
FENCE_S = 25.0
"""So long after it was renewed last, the writer calls off what it has sent: others wait longer, see `held_s`."""
_SILENT_S = 2.0
_MARK = HIDDEN[1:]

logger = logging.getLogger("aiockpt")

Action = Literal["keep", "discard", "remove"]


def decide(state: str, age_s: float, owners: Liveness, *, is_old: bool, grace_s: float, in_flight_s: float) -> Action:
    """Return what is done with the objects of a token that its commit object does not name.

    ========  ============================================================  ==========================================
    state     means                                                         action
    ========  ============================================================  ==========================================
    open      it is being written                                           discard, if its processes are dead
    publish   it is being published, or its publisher was killed before     remove, if its processes are dead, and no
              that, or another one before it could note the replacement     put of theirs can be in flight any more
    discard   it was not published, and not all of it could be removed      remove
    replaced  it was replaced or deleted                                    remove, ``grace_s`` seconds after that
    aside     it was set aside, under another name                          keep
    (none)    a process has gone on writing after the removal               remove, if it is dead
    ========  ============================================================  ==========================================

    ``state`` is the first word of the state, which it has for ``age_s`` seconds. If ``is_old``, processes of which
    nothing is known count as dead. After ``in_flight_s`` seconds no request of a dead process arrives.
    """
    is_left = owners == "dead" or (owners == "unknown" and is_old)
    if state == "open":
        return "discard" if is_left else "keep"
    wait_s = {"publish": max(in_flight_s, grace_s), "replaced": grace_s}.get(state, 0.0)
    is_over = is_left if state in ("publish", "") else state != "aside"
    return "remove" if is_over and age_s >= wait_s else "keep"


def held_s(tomb: Tomb, owner: Liveness) -> tuple[float, float]:
    """Return how long a tombstone keeps others from publishing: since it was written, and since its owner was dead.

    ======  ==============================================================  ==================  ==================
    tomb    the owner is about to send                                      since it was        since the owner
                                                                            written, or         was found dead
                                                                            renewed
    ======  ==============================================================  ==================  ==================
    put     an object in one request, under a condition: late, it fails     60 s                0 s
    parts   the end of an upload in parts, and meanwhile renews the claim   60 s                30 s
    delete  a deletion, again and again if the store does not answer        300 s               30 s
    ======  ==============================================================  ==================  ==================
    """
    written_s = IN_FLIGHT_S if tomb == "delete" else IN_FLIGHT_S / 5
    return written_s, math.inf if owner != "dead" else 0.0 if tomb == "put" else IN_FLIGHT_S / 10


class Waiting:
    """A wait of a save until another process has published or deleted something at its path; not a silent one."""

    def __init__(self, path: str) -> None:
        self._path, self._since_s = path, time.monotonic()

    def note(self) -> None:
        """Log once that it takes long."""
        if time.monotonic() - self._since_s > _SILENT_S:
            text = "the save of %s waits: a process publishes or deletes it, or was ended while it did so. At most %g s"
            logger.warning(text, self._path, IN_FLIGHT_S)
            self._since_s = math.inf


# --- tokens, and the processes that write below them ------------------------------------------------------


def token_name(ticket: str) -> str:
    """Return the name of the objects of a ticket: one without a dot, since they belong to the checkpoint."""
    return ticket[1:]


def ticket_of(name: str) -> str | None:
    """Return the ticket of a name; None if it is no name of a token."""
    return f".{name}" if name.startswith(_MARK) and read_ticket(f".{name}") is not None else None


def split_token(key: str) -> tuple[str, str]:
    """Return the token in a key, empty if there is none, and the rest."""
    names = key.split("/")
    for number, name in enumerate(names[:-1]):
        if ticket_of(name):
            return "/".join(names[: number + 1]) + "/", "/".join(names[number + 1 :])
    return "", key


def owners_of(token: str, found: Iterable[str]) -> Liveness:
    """Return whether a process lives that takes part: that of the token, and those that have said so."""
    return liveness_of([ticket_of(token.split("/")[-2]) or "", *holders(found)])


def holders(found: Iterable[str]) -> list[str]:
    """Return the tickets of the processes that have said that they take part."""
    return [name.removeprefix("held/") for name in found if name.startswith("held/")]


def liveness_of(tickets: Sequence[str]) -> Liveness:
    """Return whether one of several processes lives."""
    found = map(read_ticket, tickets)
    states = {liveness(None if each is None else each.owner, this_process()) for each in found}
    return "alive" if "alive" in states else "unknown" if "unknown" in states else "dead"
