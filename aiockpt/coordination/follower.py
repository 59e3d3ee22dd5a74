"""Another rank's side of a lane: bring rank 0 a message, get its answer. Blocking, for the lane's thread."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiockpt.coordination.leader import CONNECT_S, WORD_S
from aiockpt.coordination.outcome import coordination_failure, gone_text, late_text
from aiockpt.coordination.pair_channel import TRANSFER_S, Link, LinkBrokenError, LinkTimeoutError
from aiockpt.coordination.rendezvous import appears, put
from aiockpt.coordination.store_keys import NO_LINK, Left, key, sealed, word_in
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from aiockpt.coordination.rendezvous import RankAddress, Rendezvous

DECIDE_S = 1800.0
"""How long rank 0 may take to decide, when all have come. It may be publishing a checkpoint on slow storage. When
its process ends this is noticed at once, so the limit is for a rank 0 that has frozen or can't be reached."""


class Follower:
    """Asks rank 0.

    It waits as long for rank 0 to come as rank 0 waits for it. For the answer it waits longer, by the time that
    rank 0 may wait for the other ranks and then take to decide.

    Args:
        place: this rank's place in the group.
        meeting: the lane's way to rank 0.
        timeout_s: how long a round waits for rank 0 to come.
        gone: holds 0 once rank 0 is known to be gone, and how to name it; added to.
    """

    def __init__(self, place: RankAddress, meeting: Rendezvous, *, timeout_s: float, gone: dict[int, str]) -> None:
        self._rank = place.rank
        self._introduced = place.introduced()
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._come_s = timeout_s + min(timeout_s, CONNECT_S)  # it may be making links with others first
        self._answer_s = timeout_s + TRANSFER_S + DECIDE_S
        self._gone = gone
        self._leader = place.named(0)
        self._generation = 0
        self._link: Link | None = None

    def ask(self, what: str, message: bytes) -> bytes:
        """Bring a message to rank 0 and wait for its answer.

        Args:
            what: what this rank is at.
            message: for rank 0.

        Raises:
            CoordinationError: rank 0 is gone or does not come.
        """
        while True:
            try:
                reply = self._try(what, message)
            except LinkTimeoutError as exc:
                raise self._give_up(what) from exc
            except RuntimeError as exc:  # the store's
                self._link = None
                raise CoordinationError(
                    f"the store of the process group failed during {what}: {exc}; it is served by rank 0 or by the "
                    f"launcher of the job, which may have ended"
                ) from exc
            if reply is not None:
                return reply

    def close(self) -> None:
        """Drop the link."""
        self._link = None

    def _try(self, what: str, message: bytes) -> bytes | None:
        """Ask once; None when rank 0 has meanwhile ended another round, which this rank has left out."""
        link = self._link or self._knock()
        if link is None:
            return self._word(what)
        self._link = link
        try:
            link.expect()
            link.post(message).wait(self._come_s)
            return link.take(self._answer_s)
        except LinkBrokenError as exc:
            self._link = None
            if self._was_missed():
                return self._word(what)
            self._gone[0] = self._leader
            raise CoordinationError(gone_text(self._leader, what)) from exc

    def _knock(self) -> Link | None:
        """Ask rank 0 for a link; None when it has ended a round without this rank."""
        self._generation += 1
        store = self._meeting.store
        put(store, key("knock", self._rank, self._generation), self._introduced.encode())
        answer = key("open", self._rank, self._generation)
        if not appears(store, answer, self._come_s):
            raise LinkTimeoutError("no link was opened")
        told = store.get(answer)
        if told == NO_LINK:
            return None
        self._leader = told.decode()
        try:
            limit_s = min(self._timeout_s, CONNECT_S)
            return self._meeting.link(self._rank, self._generation, side=1, timeout_s=limit_s)
        except LinkBrokenError as exc:
            raise LinkTimeoutError("the link could not be made") from exc

    def _was_missed(self) -> bool:
        try:
            return appears(self._meeting.store, key("missed", self._rank, self._generation), WORD_S)
        except RuntimeError:
            return False  # the store has ended with rank 0

    def _word(self, what: str) -> bytes | None:
        """Wait for what rank 0 told the others; None when that was about something else."""
        letter = key("word", self._rank, self._generation)
        if not appears(self._meeting.store, letter, self._answer_s):
            raise LinkTimeoutError("rank 0 left no word")
        word = word_in(self._meeting.store.get(letter))
        return word.reply if word.what == what else None

    def _give_up(self, what: str) -> CoordinationError:
        """Leave the round in a way that rank 0 can find out."""
        self._link = None
        trouble = coordination_failure(0, late_text(self._leader, what, self._timeout_s))
        with contextlib.suppress(RuntimeError):  # without the store rank 0 takes this rank for gone
            put(self._meeting.store, key("left", self._rank, self._generation), sealed(Left(what, trouble)))
        return CoordinationError(trouble.message)
