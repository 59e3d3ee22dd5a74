"""What the writer processes of several ranks need to agree when the trainers can't any more."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.planning.collective.messages import Written
    from aiockpt.writing.collective_commit import WorldFacts

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Leadership:
    """What rank 0 knows besides.

    Attributes:
        book: the plan of all ranks, pickled; None if each has decided alone what it writes.
        facts: what else there is to say in the checkpoint.
        overwrite: replace what is at the path.
    """

    book: bytes | None = field(repr=False)
    facts: WorldFacts
    overwrite: bool


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """What one rank's writer process needs.

    Attributes:
        rank: the rank.
        ranks: how many there are.
        secret: what they know each other by.
        written: what the rank is to say that it has written, but for the files.
        leadership: on rank 0.
    """

    rank: int
    ranks: int
    secret: bytes = field(repr=False)
    written: Written
    leadership: Leadership | None


def part_name(rank: int) -> str:
    """Name the word in which a rank's writer says what it has written."""
    return f"part-{rank}"


def sealed(secret: bytes, rank: int, written: Written) -> bytes:
    """Make bytes of what a rank has written. Who does not know the secret can't make them."""
    data = pickle.dumps(written, pickle.HIGHEST_PROTOCOL)
    return _digest(secret, rank, data) + data


def unsealed(secret: bytes, rank: int, data: bytes) -> Written | None:
    """Read what a rank has written.

    Nothing of it is unpickled before it is known who made it.

    Args:
        secret: of this save.
        rank: whose word it should be.
        data: the word.

    Returns:
        None if the bytes are not, or not all, from somebody who knows the secret, or are the word of another rank.
    """
    view = memoryview(data)  # it may be long, and not worth a copy
    digest, rest = view[:_DIGEST_BYTES], view[_DIGEST_BYTES:]
    if not hmac.compare_digest(_digest(secret, rank, rest), digest):
        return None
    written: Written = pickle.loads(rest)
    return written


def _digest(secret: bytes, rank: int, data: bytes | memoryview) -> bytes:
    # With the name, so that one rank's word can't be put in the place of another's.
    made = hmac.new(secret, f"{part_name(rank)}\n".encode(), hashlib.sha256)
    made.update(data)
    return made.digest()
