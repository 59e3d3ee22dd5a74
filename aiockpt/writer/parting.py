"""What the writer processes of several ranks need to agree when the trainers can't any more."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.planning.world_book import Written
    from aiockpt.world_publishing import WorldFacts

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
class Parting:
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


def sealed(secret: bytes, written: Written) -> bytes:
    """Make bytes of what a rank has written. Who does not know the secret can't make them."""
    data = pickle.dumps(written, pickle.HIGHEST_PROTOCOL)
    return hmac.digest(secret, data, hashlib.sha256) + data


def unsealed(secret: bytes, data: bytes) -> Written | None:
    """Read what a rank has written; None if the bytes are not, or not all, from somebody who knows the secret."""
    digest, rest = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not hmac.compare_digest(hmac.digest(secret, rest, hashlib.sha256), digest):
        return None
    written: Written = pickle.loads(rest)
    return written
