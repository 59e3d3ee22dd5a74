"""Worked example of a transform: every item is encrypted with ChaCha20-Poly1305, in sealed pieces.

A stored item is a random salt, then pieces, each with a tag of its own. Each item has its own key, derived from the
salt, so no nonce is used twice with one key. The nonce of a piece holds its number and whether it is the last one, so
no piece can be removed, added or moved.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PIECE_BYTES = 64 << 10
_TAG_BYTES = 16
_SALT_BYTES = 16


def _cipher(key: bytes, salt: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(SHA256(), length=32, salt=salt, info=b"item").derive(key))


def _nonce(number: int, *, is_last: bool) -> bytes:
    return struct.pack("<Q?3x", number, is_last)


@dataclass(frozen=True)
class ChaCha20:
    """Transform that encrypts with a key of 32 bytes."""

    key: bytes = field(repr=False)
    descriptor: str = "example.chacha20/1"

    def encoder(self) -> _Encoder:
        return _Encoder(self.key)

    def decoder(self) -> _Decoder:
        return _Decoder(self.key)


class _Encoder:
    def __init__(self, key: bytes) -> None:
        salt = os.urandom(_SALT_BYTES)
        self._cipher = _cipher(key, salt)
        self._out = salt  # goes before the first piece
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
        nonce = _nonce(self._number, is_last=is_last)
        self._out += self._cipher.encrypt(nonce, bytes(self._held[:nbytes]), None)
        del self._held[:nbytes]
        self._number += 1

    def _taken(self) -> bytes:
        out, self._out = self._out, b""
        return out


class _Decoder:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher: ChaCha20Poly1305 | None = None
        self._held = bytearray()
        self._number = 0

    def update(self, data: memoryview, most: int) -> bytes:
        self._held += data
        if self._cipher is None:
            if len(self._held) < _SALT_BYTES:
                return b""
            self._cipher = _cipher(self._key, bytes(self._held[:_SALT_BYTES]))
            del self._held[:_SALT_BYTES]
        made = []
        while len(self._held) > PIECE_BYTES + _TAG_BYTES:
            made.append(self._open(PIECE_BYTES + _TAG_BYTES, is_last=False))
        return b"".join(made)

    def finish(self, most: int) -> bytes:
        return self._open(len(self._held), is_last=True)

    def _open(self, nbytes: int, *, is_last: bool) -> bytes:
        if self._cipher is None:
            raise ValueError("an encrypted item ends within its salt")
        nonce = _nonce(self._number, is_last=is_last)
        made = self._cipher.decrypt(nonce, bytes(self._held[:nbytes]), None)
        del self._held[:nbytes]
        self._number += 1
        return made
