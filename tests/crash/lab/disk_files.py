"""What a power cut may leave of one file: its durable content, and changes that nobody has made durable."""

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
    """The bytes of a file, and what tells them from others."""

    data: bytes = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> Content:
        """Digest the bytes."""
        return cls(data, hashlib.blake2b(data, digest_size=16).digest())


@dataclass(frozen=True, slots=True)
class Effect:
    """What of a change reached the disk.

    Attributes:
        what: says it in words.
        offset: where in the file ``data`` belongs, in bytes.
        data: the bytes that came to the disk.
        grows_to: the file then has this size at least, in bytes; zeros where nothing was ever written.
        sized: the file then has just this size, in bytes; None where the change leaves that open.
    """

    what: str
    offset: int = 0
    data: bytes = field(default=b"", repr=False)
    grows_to: int = 0
    sized: int | None = None

    def apply(self, content: bytearray) -> None:
        """Change a file's content."""
        if self.sized is not None:
            del content[self.sized :]
        end = max(self.grows_to, self.sized or 0, self.offset + len(self.data) if self.data else 0)
        content.extend(bytes(max(0, end - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data


@dataclass(frozen=True, slots=True)
class DataChange:
    """A write, or a new size, on its way to the disk.

    Attributes:
        key: its number among all changes of its disk.
        options: what may be left of it after a power cut; the first is nothing, the second all.
    """

    key: int
    options: tuple[Effect, ...]

    @property
    def what(self) -> str:
        """The change in words."""
        return self.options[WHOLE].what

    @classmethod
    def resize(cls, key: int, nbytes: int) -> DataChange:
        """Give a file a new size: done or not."""
        return cls(key, (Effect(f"not the size {nbytes}"), Effect(f"the size {nbytes}", sized=nbytes)))

    @classmethod
    def grow(cls, key: int, nbytes: int) -> DataChange:
        """Let a file have a size at least: done or not."""
        return cls(key, (Effect(f"not the size {nbytes}"), Effect(f"the size {nbytes}", grows_to=nbytes)))

    @classmethod
    def write(cls, key: int, offset: int, data: bytes, borders: Callable[[int, int], Sequence[int]]) -> DataChange:
        """Write bytes: lost, whole, a size without bytes, or torn at each of these borders, on either side."""
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
    """Choose borders of blocks inside a range: of each size of block the first, the last and some between.

    Args:
        offset: where the range begins, in bytes.
        end: where it ends.
        blocks: what a disk writes at once, in bytes.
        each: how many at most of each size.
    """
    found: set[int] = set()
    for block in blocks:
        inside = range(offset // block * block + block, end, block)
        steps = min(each, len(inside))
        found.update(inside[round(step * (len(inside) - 1) / max(1, steps - 1))] for step in range(steps))
    return sorted(found)


class File:
    """A file of a `Disk`: what is durable, and the changes since.

    Attributes:
        changes: those that may be lost, in their order.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._durable = Content.of(data)
        self.changes: list[DataChange] = []
        self._left = functools.lru_cache(maxsize=64)(self._after)  # contents are large, and a cut may leave thousands

    def add(self, change: DataChange) -> None:
        """Change it."""
        self.changes.append(change)
        self._left.cache_clear()

    def sync(self) -> None:
        """Make all of it durable."""
        self._durable = self.left([WHOLE] * len(self.changes))
        self.changes.clear()

    def left(self, options: Sequence[int]) -> Content:
        """Give what is left when this remained of each change."""
        return self._left(tuple(options))

    def live(self) -> Content:
        """Give what a running program sees."""
        return self.left([WHOLE] * len(self.changes))

    def _after(self, options: tuple[int, ...]) -> Content:
        if not any(options):
            return self._durable
        content = bytearray(self._durable.data)
        for change, option in zip(self.changes, options, strict=True):
            change.options[option].apply(content)
        return Content.of(bytes(content))
