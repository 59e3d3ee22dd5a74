"""What rank 0 and another rank leave for each other in the store while there is no link between them.

A link between rank 0 and rank k has a generation, a number that grows with each link that rank k asks for::

    knock/k/g    rank k asks for a link; its host and process
    open/k/g     rank 0 takes it, and names its own host and process; or says that it has ended the round without k
    missed/k/g   rank 0 has given up waiting for k, and the link with it
    word/k/g     what rank 0 would have answered in the round that k missed, and what it was about
    left/k/g     rank k has given up waiting for rank 0, and the link with it; and what it was at

A rank that comes late finds the word and fails, or succeeds, as the others did. A rank that has left out a call
finds that the word is about something else, and joins the round that is on now. So numbers of rounds need not be
kept in step.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from aiockpt.coordination.base import RemoteError

Letter = Literal["knock", "open", "missed", "word", "left"]
NO_LINK = b"-"
"""In ``open``: the round has ended without this rank; see ``word``."""


def key(letter: Letter, rank: int, generation: int) -> str:
    """Name a letter."""
    return f"{letter}/{rank}/{generation}"


class Word(NamedTuple):
    """What the others were told in a round that a rank has missed.

    Attributes:
        what: what they were at.
        reply: the message that was for this rank.
    """

    what: str
    reply: bytes


class Left(NamedTuple):
    """A rank has given up waiting for rank 0.

    Attributes:
        what: what it was at.
        trouble: what it told its caller.
    """

    what: str
    trouble: RemoteError


def sealed(content: tuple[object, ...]) -> bytes:
    """Make bytes of a letter."""
    return pickle.dumps(tuple(content))


def word_in(letter: bytes) -> Word:
    """Read a word."""
    return Word(*pickle.loads(letter))


def left_in(letter: bytes) -> Left:
    """Read who has left."""
    what, trouble = pickle.loads(letter)
    return Left(what, trouble)
