"""What a transform of stored items is: bytes in, other bytes out, and the way back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

_DESCRIPTOR = re.compile(r"[^/\s\0]{1,200}/[^/\s\0]{1,50}")


class Encoder(Protocol):
    """Turns the bytes of one item into those that are stored."""

    def update(self, data: memoryview) -> bytes | memoryview:
        """Take the next bytes of the item, which may not be kept; give what can be stored by now."""

    def finish(self) -> bytes | memoryview:
        """Give the rest."""


class Decoder(Protocol):
    """Turns the stored bytes of one item into what they were made of.

    Raises whatever it likes when they can't have been made by its transform, or with another key.
    """

    def update(self, data: memoryview, most: int) -> bytes | memoryview:
        """Take the next stored bytes, which may not be kept; give what they were made of, as far as it is known.

        Args:
            data: the bytes, in pieces of any length.
            most: how many bytes can be taken; more of them are an error, and best raised before they are made.
        """

    def finish(self, most: int) -> bytes | memoryview:
        """Give the rest; refuse what ends too early."""


@runtime_checkable
class Transform(Protocol):
    """A way to store items other than as they are: compressed, encrypted, or what you like.

    Given as ``transforms=`` to a checkpointer, it is applied to every tensor and object, each by itself. Several
    threads use it at once, each with encoders and decoders of its own. It should be picklable. What describes the
    checkpoint is not transformed: names, shapes, dtypes, sizes, and the facts given as ``metadata`` can be read.

    Attributes:
        descriptor: its name and version, "name/version", which is stored in the checkpoint, and finds it when loading.
    """

    @property
    def descriptor(self) -> str:
        """Its name and version."""

    def encoder(self) -> Encoder:
        """Begin to store an item."""

    def decoder(self) -> Decoder:
        """Begin to read an item."""


def check_transforms(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Copy what a caller gave as transforms.

    Raises:
        TypeError: one of them is none.
        ValueError: a descriptor that can't be stored, or of which there are two.
    """
    checked = tuple(transforms)
    seen: set[str] = set()
    for each in checked:
        if isinstance(each, type) or not isinstance(each, Transform):
            raise TypeError(f"transforms must have a descriptor, encoder() and decoder(), which {each!r} has not")
        descriptor = each.descriptor
        if not isinstance(descriptor, str) or not _DESCRIPTOR.fullmatch(descriptor):
            raise ValueError(f"the descriptor of a transform is {descriptor!r}; it must be 'name/version'")
        if descriptor in seen:
            raise ValueError(f"two transforms are called {descriptor}; give each a name or version of its own")
        seen.add(descriptor)
    return checked
