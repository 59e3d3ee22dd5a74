"""Checkpoints that are read over a network: listings, which take requests, and the files of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aiockpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    UnsafeCheckpointError,
)
from aiockpt.storage.base import Document, Listing, LookBudget, Seen, Source
from aiockpt.storage.faults import errors

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

_STEP_BYTES = 1 << 20


class RemoteListing(Listing):
    """A checkpoint, or a directory, that is looked at by requests."""

    def __init__(self, path: str, budget: LookBudget) -> None:
        self.path, self._budget = path, budget
        self.files, self.folders, self.others = {}, [], []
        self.is_file, self.changed_s, self.stamp = False, 0.0, ""

    @abstractmethod
    def read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> int:
        """Fill a view with runs of a file's bytes; return how many there are. Raise OSError."""

    @abstractmethod
    def is_replaced(self, exc: OSError) -> bool:
        """Return whether reading has failed since something else is there than what was listed. Blocks."""

    @abstractmethod
    def list_folder(self, name: str) -> None:
        """Add the files directly below one of the folders. Raise OSError."""

    def list_below(self) -> None:
        for name in [] if self.is_file else self.folders:
            if self._budget.is_spent:
                return
            before = len(self.files)
            self.list_folder(name)
            self._budget.left -= max(1, len(self.files) - before)

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(f"{self.path}/{name} is not there")
        data = bytearray(max(0, min(length, self.files[name] - offset)))
        return bytes(data[: self.read(name, [(offset, len(data))], memoryview(data))]) if data else b""


class RemoteSource(Source):
    """The files of a listing. What has replaced them meanwhile is never read."""

    gap_bytes = 1 << 20  # a request takes as long as so many bytes
    most_reads = 32  # each waits for an answer most of the time
    is_remote = True

    def __init__(self, listing: RemoteListing) -> None:
        self._listing, self._is_closed = listing, False

    @property
    def files(self) -> Mapping[str, int]:
        return self._listing.files

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._read(name, [(offset, len(view))], view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read(name, runs, view)

    def _read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> None:
        path, nbytes = self._listing.path, self._listing.files.get(name)
        if self._is_closed:
            raise LoadError(f"{path}/{name} was closed before it was read")
        if name.startswith("/") or ".." in name.split("/"):
            raise UnsafeCheckpointError(f"{path}: {name} leads out of the checkpoint")
        runs = [run for run in runs if run[1]]
        end = max((offset + length for offset, length in runs), default=0)
        if nbytes is None or end > nbytes:
            raise CorruptCheckpointError(f"{path}/{name} has {nbytes or 0} bytes, but {end} are needed")
        with errors(LoadError, f"read {path}/{name}"):
            try:
                if (self._listing.read(name, runs, view, seen) if runs else 0) < len(view):
                    raise CorruptCheckpointError(f"{path}/{name} ends too early: it was truncated by other means")
            except OSError as exc:
                if self._listing.is_replaced(exc):
                    raise CheckpointNotFoundError(f"{path} was replaced or deleted while it was read") from exc
                if isinstance(exc, FileNotFoundError):
                    raise CorruptCheckpointError(f"{path}/{name} is missing: it was removed by other means") from exc
                raise

    def close(self) -> None:
        self._is_closed = True


async def open_remote(look: Callable[[str], RemoteListing], path: str, workers: Workers) -> Source:
    """Open what is at a path, which ``look`` lists in a thread."""

    def open_listed() -> Source:
        listing = look(path)
        listing.list_below()
        return RemoteSource(listing)

    with errors(LoadError, f"open {path}"):
        try:
            return await workers.run(open_listed)
        except FileNotFoundError as exc:
            raise CheckpointNotFoundError(f"there is no checkpoint at {path}") from exc


def put_into(view: memoryview, data: Document, seen: Seen | None) -> int:
    """Copy bytes to the beginning of a view; return how many.

    In steps that fit in the processor's cache, in which ``seen`` then finds them. Not by assigning to slices of the
    view: that holds the GIL while the kernel clears the pages of new memory.
    """
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(view, np.uint8)
    for begin in range(0, len(source), _STEP_BYTES):
        step = slice(begin, min(begin + _STEP_BYTES, len(source)))
        np.copyto(target[step], source[step])
        if seen is not None:
            seen(view[step])
    return len(source)
