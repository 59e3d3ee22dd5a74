"""Strong hashes of payloads, by which an item is known to be that of an earlier checkpoint.

xxh3_128 takes less time than the CRC-32. It is safe against accidents, not against an attacker.
"""

from __future__ import annotations

from typing import Protocol

from aiockpt.errors import AiockptError

ALGORITHM = "xxh3_128"
"""The name of the column in the index."""
DIGITS = 32


class PayloadHash(Protocol):
    """A hash of bytes that come in pieces."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes; releases the GIL for long ones."""

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far."""


class NewHash(Protocol):
    """Begins a hash, with some bytes or without."""

    def __call__(self, data: memoryview | bytes = b"", /) -> PayloadHash: ...


def require_hash() -> NewHash:
    """Return the function that begins a hash. Imports its package, so call it in the caller's thread.

    Raises:
        AiockptError: the package is missing.
    """
    try:
        import xxhash
    except ImportError as exc:
        raise AiockptError(
            "hashes=True and base= need the package xxhash, which is missing: pip install 'aiockpt[delta]'"
        ) from exc
    new_hash: NewHash = xxhash.xxh3_128
    return new_hash
