"""What stands around a tensor's bytes in an item."""

from __future__ import annotations

import struct
from dataclasses import dataclass

CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Framing:
    """What stands around a payload of ``nbytes`` bytes in an item.

    Attributes:
        prefix: the bytes before the payload.
        suffix: the bytes after it, with zero in place of the payload's CRC.
        crc_at: the offsets in ``suffix`` where that CRC-32 belongs, as little-endian uint32; none for no bytes.
        nbytes: the length of the payload in bytes.
    """

    prefix: bytes
    suffix: bytes
    crc_at: tuple[int, ...]
    nbytes: int

    @property
    def length(self) -> int:
        """The length of the whole item in bytes."""
        return len(self.prefix) + self.nbytes + len(self.suffix)

    def sealed_suffix(self, crc: int) -> bytes:
        """Give the suffix with the payload's CRC-32 filled in."""
        suffix = bytearray(self.suffix)
        for at in self.crc_at:
            CRC.pack_into(suffix, at, crc)
        return bytes(suffix)
