"""One file of the disk model: its durable content, and the changes that a power cut may lose."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCKS: Final = (512, 4096)
LOST: Final = 0
WHOLE: Final = 1


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a file, and their digest."""

    data: bytes = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> Content:
        """Return these bytes with their digest."""
        return cls(data, hashlib.blake2b(data, digest_size=16).digest())


@dataclass(frozen=True, slots=True)
class Effect:
    """The part of a change that reached the disk.

    Attributes:
        what: a description of this part.
        offset: the offset of ``data`` in the file, in bytes.
        data: the bytes that reached the disk.
        grows_to: the minimum size of the file afterwards, in bytes; ranges never written are zeros.
        sized: the exact size of the file afterwards, in bytes; None if the change does not set one.
    """

    what: str
    offset: int = 0
    data: bytes = field(default=b"", repr=False)
    grows_to: int = 0
    sized: int | None = None

    def apply(self, content: bytearray) -> None:
        """Apply this part to a file's content, in place."""
        if self.sized is not None:
            del content[self.sized :]
        end = max(self.grows_to, self.sized or 0, self.offset + len(self.data) if self.data else 0)
        content.extend(bytes(max(0, end - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data


@dataclass(frozen=True, slots=True)
class DataChange:
    """A write or a change of size that is not durable yet.

    Attributes:
        key: the number of this change among all changes of its disk.
        options: the possible effects after a power cut; the first is none, the second the whole change.
    """

    key: int
    options: tuple[Effect, ...]

    @property
    def what(self) -> str:
        """A description of the whole change."""
        return self.options[WHOLE].what

    @classmethod
    def resize(cls, key: int, nbytes: int) -> DataChange:
        """Return a change to an exact size."""
        return cls(key, (Effect(f"not the size {nbytes}"), Effect(f"the size {nbytes}", sized=nbytes)))

    @classmethod
    def grow(cls, key: int, nbytes: int) -> DataChange:
        """Return a change to a minimum size."""
        return cls(key, (Effect(f"not the size {nbytes}"), Effect(f"the size {nbytes}", grows_to=nbytes)))

    @classmethod
    def write(cls, key: int, offset: int, data: bytes, borders: Callable[[int, int], Sequence[int]]) -> DataChange:
        """Return a write: lost, whole, the new size without the bytes, or torn at each border with either side kept."""
        end = offset + len(data)
        span = f"bytes {offset} to {end}"
        options = [
            Effect(f"nothing of {span}"),
            Effect(span, offset, data, end),
            Effect(f"of {span} the size alone", grows_to=end),
        ]
        for border in borders(offset, end):
            before, behind = data[: border - offset], data[border - offset :]
            options += [
                Effect(f"of {span} those before {border}", offset, before, border),
                Effect(f"of {span} those before {border} and the size", offset, before, end),
                Effect(f"of {span} those from {border} on", border, behind, end),
            ]
        return cls(key, tuple(options))


def block_borders(offset: int, end: int, *, blocks: Sequence[int] = BLOCKS, each: int = 3) -> list[int]:
    """Return block boundaries inside a range: for each block size the first, the last and some between.

    Args:
        offset: the beginning of the range, in bytes.
        end: the end of the range, in bytes.
        blocks: the sizes that a disk writes atomically, in bytes.
        each: the maximum number of boundaries for each size.
    """
    found: set[int] = set()
    for block in blocks:
        inside = range(offset // block * block + block, end, block)
        steps = min(each, len(inside))
        found.update(inside[round(step * (len(inside) - 1) / max(1, steps - 1))] for step in range(steps))
    return sorted(found)


class File:
    """A file of a `Disk`: its durable content, and the changes since.

    Attributes:
        changes: the changes that may be lost, oldest first.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._durable = Content.of(data)
        self.changes: list[DataChange] = []
        # Bounded, because a power cut can leave thousands of large contents.
        self._left = functools.lru_cache(maxsize=64)(self._after)

    def add(self, change: DataChange) -> None:
        """Append a change that is not durable yet."""
        self.changes.append(change)
        self._left.cache_clear()

    def sync(self) -> None:
        """Make all changes durable."""
        self._durable = self.left([WHOLE] * len(self.changes))
        self.changes.clear()

    def left(self, options: Sequence[int]) -> Content:
        """Return the content if this option of each change is left."""
        return self._left(tuple(options))

    def live(self) -> Content:
        """Return the content that a running program sees."""
        return self.left([WHOLE] * len(self.changes))

    def _after(self, options: tuple[int, ...]) -> Content:
        if not any(options):
            return self._durable
        content = bytearray(self._durable.data)
        for change, option in zip(self.changes, options, strict=True):
            change.options[option].apply(content)
        return Content.of(bytes(content))
