"""Shared by the readers and writers: a checkpointer to work with, finished futures, and torch's stream transforms."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.futures import Future

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.errors import ShapeMismatchError
from aiockpt.format.transforms.zstd import ZSTD_NAME
from aiockpt.reading.targets import check_memory
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from aiockpt.format.transforms.base import Transform

AnyCheckpointer = SyncCheckpointer | AsyncCheckpointer
T = TypeVar("T")


@contextmanager
def borrowed(checkpointer: AnyCheckpointer | None, **settings: Any) -> Iterator[AnyCheckpointer]:
    """Yield the caller's checkpointer, or if there is none, a new one that is closed afterwards."""
    if checkpointer is not None:
        yield checkpointer
        return
    with SyncCheckpointer(process_group=None, **settings) as own:
        yield own


def finished(value: T) -> Future[T]:
    """Return a future that is done: the methods of readers and writers block, but torch waits on their results."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def resolved_target(planner: LoadPlanner, item: ReadItem, path: str) -> torch.Tensor:
    """Return the planner's tensor for a part of what is at a path; raise ShapeMismatchError if it can't be filled."""
    target = planner.resolve_tensor(item)
    # A copy into a quantized tensor sets its scales too, which a detached one has for itself.
    target = target if target.is_quantized else target.detach()
    if tuple(target.size()) != tuple(item.lengths):
        raise ShapeMismatchError(
            f"{item.dest_index.fqn}: the planner gave a tensor of the shape {tuple(target.size())} for a part of "
            f"{path} of the shape {tuple(item.lengths)}"
        )
    check_memory(item.dest_index.fqn, target)
    return target


# --- stream transforms of torch.distributed.checkpoint (its extensions), as transforms of the engine ---------


_STEP_BYTES = 1 << 20


class ExtensionTransform:
    """A `Transform` that applies an extension."""

    def __init__(self, extension: StreamTransformExtension, descriptor: str | None = None) -> None:
        self._extension = extension
        self.descriptor = extension.get_descriptor() if descriptor is None else descriptor

    def encoder(self) -> _ExtensionEncoder:
        """Return a new encoder for one item."""
        return _ExtensionEncoder(self._extension)

    def decoder(self) -> _ExtensionDecoder:
        """Return a new decoder for one item."""
        return _ExtensionDecoder(self._extension)


def registered(registry: ExtensionRegistry, descriptors: Iterable[str]) -> list[Transform]:
    """Return transforms for those of the descriptors whose names are registered; zstd is decoded without."""
    names = registry.extensions.keys() - {ZSTD_NAME}
    known = [descriptor for descriptor in descriptors if descriptor.partition("/")[0] in names]
    extensions: Sequence[Any] = registry.from_descriptor_list(known)
    return [ExtensionTransform(*pair) for pair in zip(extensions, known, strict=True)]


class _Output(io.RawIOBase):
    """Collects the bytes that an extension writes."""

    def __init__(self) -> None:
        self._written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        before = len(self._written)
        self._written += data
        return len(self._written) - before

    def take(self) -> bytearray:
        """Return the bytes since the last call; the extension may have closed the stream."""
        taken, self._written = self._written, bytearray()
        return taken


class _ExtensionEncoder:
    def __init__(self, extension: StreamTransformExtension) -> None:
        self._output = _Output()
        self._input = extension.transform_to(self._output)  # type: ignore[arg-type]

    def update(self, data: memoryview) -> memoryview:
        """Encode the next bytes of the item."""
        self._input.write(data.toreadonly())
        return memoryview(self._output.take())

    def finish(self) -> memoryview:
        """Return the rest of the output."""
        self._input.close()
        return memoryview(self._output.take())


class _ExtensionDecoder:
    """Decodes an item when all of it has come: an extension reads its input whenever it wants."""

    def __init__(self, extension: StreamTransformExtension) -> None:
        self._extension = extension
        self._stored = io.BytesIO()

    def update(self, data: memoryview, most: int) -> bytes:
        """Keep the next stored bytes."""
        self._stored.write(data)
        return b""

    def finish(self, most: int) -> bytes:
        """Decode the stored bytes, to one more than ``most`` if there are so many."""
        self._stored.seek(0)
        decoded = io.BytesIO()
        stream = self._extension.transform_from(self._stored)
        while part := stream.read(min(most + 1 - decoded.tell(), _STEP_BYTES)):
            decoded.write(part)
        return decoded.getvalue()
