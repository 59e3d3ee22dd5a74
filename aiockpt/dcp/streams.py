"""Data files that are written as streams: opened by a function of the caller's, or by multistorageclient."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def multistorage() -> Any:
    """Return the module multistorageclient; raise ImportError if it is not installed."""
    try:
        return importlib.import_module("multistorageclient")
    except ImportError as exc:
        raise ImportError("use_msc needs multistorageclient: pip install multi-storage-client") from exc


class _Counting:
    """A stream for writing that counts its bytes: not every stream tells its position."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.written = 0

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self.written += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: the stream is flushed once, at its end."""


def write_stream(
    open_file: Callable[[str, str], Any], path: str, values: Iterable[torch.Tensor | bytes], *, fsync: bool
) -> list[tuple[int, int]]:
    """Write values to a file, tensors as ``torch.save`` does; return the offset and the length of each. Blocks."""
    places: list[tuple[int, int]] = []
    with open_file(path, "wb") as stream:
        counting: Any = _Counting(stream)
        for value in values:
            offset = counting.written
            if isinstance(value, torch.Tensor):
                # Of a view, torch.save would write the whole storage.
                whole = value.untyped_storage().nbytes() == value.nbytes
                torch.save(value if whole else value.clone(), counting)
            else:
                counting.write(value)
            places.append((offset, counting.written - offset))
        if fsync and hasattr(stream, "fsync"):  # multistorageclient's
            stream.fsync()
        elif fsync:
            stream.flush()
            os.fsync(stream.fileno())
    return places
