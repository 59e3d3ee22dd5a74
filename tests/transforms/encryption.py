"""The worked example of a transform: every item is encrypted with ChaCha20-Poly1305, in sealed pieces.

A stored item is a random beginning of all its nonces, then pieces, each with a tag of its own. The nonce of a piece
counts the pieces and says whether it is the last, so that none can be left out, added, or put elsewhere.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

PIECE_BYTES = 64 << 10
_TAG_BYTES = 16
_START_BYTES = 7


def _nonce(start: bytes, number: int, *, is_last: bool) -> bytes:
    return start + struct.pack("<I?", number, is_last)


@dataclass(frozen=True)
class ChaCha20:
    """Encrypts with a key of 32 bytes."""

    key: bytes = field(repr=False)
    descriptor: str = "example.chacha20/1"

    def encoder(self) -> _Encoder:
        return _Encoder(self.key)

    def decoder(self) -> _Decoder:
        return _Decoder(self.key)


class _Encoder:
    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._start = os.urandom(_START_BYTES)
        self._out = self._start  # goes before the first piece
        self._held = bytearray()
        self._number = 0

    def update(self, data: memoryview) -> bytes:
        self._held += data
        while len(self._held) > PIECE_BYTES:  # the last piece waits for `finish`
            self._seal(PIECE_BYTES, is_last=False)
        return self._taken()

    def finish(self) -> bytes:
        self._seal(len(self._held), is_last=True)
        return self._taken()

    def _seal(self, nbytes: int, *, is_last: bool) -> None:
        nonce = _nonce(self._start, self._number, is_last=is_last)
        self._out += self._cipher.encrypt(nonce, bytes(self._held[:nbytes]), None)
        del self._held[:nbytes]
        self._number += 1

    def _taken(self) -> bytes:
        out, self._out = self._out, b""
        return out


class _Decoder:
    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._start = b""
        self._held = bytearray()
        self._number = 0

    def update(self, data: memoryview, most: int) -> bytes:
        self._held += data
        if not self._start:
            if len(self._held) < _START_BYTES:
                return b""
            self._start = bytes(self._held[:_START_BYTES])
            del self._held[:_START_BYTES]
        made = []
        while len(self._held) > PIECE_BYTES + _TAG_BYTES:
            made.append(self._open(PIECE_BYTES + _TAG_BYTES, is_last=False))
        return b"".join(made)

    def finish(self, most: int) -> bytes:
        return self._open(len(self._held), is_last=True)

    def _open(self, nbytes: int, *, is_last: bool) -> bytes:
        nonce = _nonce(self._start, self._number, is_last=is_last)
        made = self._cipher.decrypt(nonce, bytes(self._held[:nbytes]), None)
        del self._held[:nbytes]
        self._number += 1
        return made
