"""The interface of transforms of stored items, which users may implement."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

_DESCRIPTOR = re.compile(r"[^/\s\0]{1,200}/[^/\s\0]{1,50}")


class Encoder(Protocol):
    """Encodes the bytes of one item into those that are stored."""

    def update(self, data: memoryview) -> bytes | memoryview:
        """Consume the next bytes of the item; return the output that is available by now.

        Args:
            data: valid only during the call; copy what must be kept.
        """

    def finish(self) -> bytes | memoryview:
        """Return the rest of the output."""


class Decoder(Protocol):
    """Decodes the stored bytes of one item into the bytes of the item.

    May raise any exception if the stored bytes were not made by its transform, or were made with another key.
    """

    def update(self, data: memoryview, most: int) -> bytes | memoryview:
        """Consume the next stored bytes; return the output that is available by now.

        Args:
            data: pieces of any length, valid only during the call.
            most: the most bytes that may be returned. More are an error, best raised before they are produced.
        """

    def finish(self, most: int) -> bytes | memoryview:
        """Return the rest of the output, at most ``most`` bytes; raise if the stored bytes end too early."""


@runtime_checkable
class Transform(Protocol):
    """Encodes items before they are stored: compression, encryption, or anything else.

    Passed as ``transforms=`` to a checkpointer, it is applied to every tensor and object, each by itself. Several
    threads use it at once, each with encoders and decoders of its own. It should be picklable. The description of the
    checkpoint is not transformed: names, shapes, dtypes, sizes, and the user's ``metadata`` stay readable.

    Attributes:
        descriptor: name and version, "name/version"; stored in the checkpoint, it identifies the transform on load.
    """

    @property
    def descriptor(self) -> str:
        """Name and version, "name/version"."""

    def encoder(self) -> Encoder:
        """Return a new encoder for one item."""

    def decoder(self) -> Decoder:
        """Return a new decoder for one item."""


def check_transforms(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Return a caller's transforms as a tuple; raise TypeError or ValueError if they can't be used."""
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
