"""A transform that encrypts, for tests: light to import, for the writer process does so too."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_BLOCK = 1 << 12


class _Stream:
    """XORs bytes with a keystream, which depends on where they are in the item."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._at = 0

    def update(self, data: memoryview, most: int | None = None) -> bytes:
        begin, self._at = self._at, self._at + len(data)
        blocks = range(begin // _BLOCK, -(-self._at // _BLOCK))
        stream = b"".join(hashlib.shake_256(self._key + n.to_bytes(8, "little")).digest(_BLOCK) for n in blocks)
        stream = stream[begin % _BLOCK :][: len(data)]
        both = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
        return both.to_bytes(len(data), "little")

    def finish(self, most: int | None = None) -> bytes:
        return b""


@dataclass(frozen=True)
class Keystream:
    """Encrypts with a key."""

    key: bytes
    descriptor: str = "test-keystream/1"

    def encoder(self) -> _Stream:
        return _Stream(self.key)

    def decoder(self) -> _Stream:
        return _Stream(self.key)
