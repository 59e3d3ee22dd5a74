"""Decoding of transformed items, piece by piece."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiockpt.format.transforms.zstd import ZSTD_DESCRIPTOR, ZSTD_NAME, Zstd, ZstdDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from aiockpt.format.transforms.base import Decoder, Transform

_SLACK_BYTES = 1 << 20


class TransformFailedError(Exception):
    """A transform can't decode its input; the message says why, the cause is the exception it raised."""

    def __init__(self, descriptor: str, reason: str) -> None:
        super().__init__(f"{descriptor} says: {reason}")
        self.descriptor = descriptor


def find_transforms(descriptors: Sequence[str], given: Mapping[str, Transform]) -> list[Transform | Zstd] | str:
    """Return the transforms that decode an item, in that order; or the first descriptor that is unknown."""
    found: list[Transform | Zstd] = []
    for descriptor in descriptors:
        transform = given.get(descriptor)
        if transform is None:
            name, _, version = descriptor.partition("/")
            if name != ZSTD_NAME or version.partition(".")[0] != ZSTD_DESCRIPTOR.rpartition("/")[2]:
                return descriptor
            transform = Zstd()
        found.append(transform)
    return found


def decode_item(
    transforms: Sequence[Transform | Zstd], pieces: Iterable[memoryview], stored_bytes: int, most: int
) -> Iterator[memoryview]:
    """Decode the stored bytes of an item with its transforms, the last applied first; yield at most ``most`` bytes."""
    for number, transform in enumerate(transforms, 1):
        # The bytes between two transforms are not much longer than the stored or the final ones.
        limit = most if number == len(transforms) else max(stored_bytes, most) * 2 + _SLACK_BYTES
        pieces = _decode_once(transform, pieces, limit)
    yield from pieces


def _decode_once(transform: Transform | Zstd, pieces: Iterable[memoryview], most: int) -> Iterator[memoryview]:
    name, left = transform.descriptor, most
    with _translated(name):
        decoder = transform.decoder()
    for data in pieces:
        parts = _updates(decoder, data, left)
        while True:
            with _translated(name):
                part = next(parts, None)
            if part is None:
                break
            left = _subtract(left, part, name, most)
            yield part
    with _translated(name):
        part = memoryview(decoder.finish(left)).cast("B")
    _subtract(left, part, name, most)
    yield part


def _updates(decoder: Decoder, data: memoryview, most: int) -> Iterator[memoryview]:
    made = decoder.parts(data) if isinstance(decoder, ZstdDecoder) else (decoder.update(data, most),)
    for part in made:
        yield memoryview(part).cast("B")


def _subtract(left: int, part: memoryview, descriptor: str, most: int) -> int:
    if len(part) > left:
        raise TransformFailedError(descriptor, f"they stand for more than the {most} bytes that they should")
    return left - len(part)


@contextlib.contextmanager
def _translated(descriptor: str) -> Iterator[None]:
    """Translate exceptions of a transform."""
    try:
        yield
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:
        raise TransformFailedError(descriptor, f"{type(exc).__name__}: {exc}") from exc
