"""A checkpoint some of whose files are read from another copy of it, as they are damaged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio

from aiockpt.storage.base import Seen, Source, Storage
from aiockpt.storage.wrapper import WrapperStorage

if TYPE_CHECKING:
    import mmap

    from aiockpt.core.threads import Workers


class PatchedStorage(WrapperStorage):
    """Opens a checkpoint of a storage together with its copy in another one.

    Args:
        inner: where the checkpoint is.
        other: where the copy is.
        path: its path there.
        names: the files that are read from there.
    """

    def __init__(self, inner: Storage, other: Storage, path: str, names: Collection[str]) -> None:
        super().__init__(inner)
        self._other, self._path, self._names = other, path, frozenset(names)

    async def open(self, path: str, *, workers: Workers) -> Source:
        inner = await super().open(path, workers=workers)
        try:
            return _PatchedSource(inner, await self._other.open(self._path, workers=workers), self._names)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await workers.run(inner.close)
            raise


class _PatchedSource(Source):
    def __init__(self, inner: Source, other: Source, names: frozenset[str]) -> None:
        self._inner, self._other, self._names = inner, other, names
        self.gap_bytes, self.most_reads, self.is_remote = inner.gap_bytes, inner.most_reads, inner.is_remote

    def _source_of(self, name: str) -> Source:
        return self._other if name in self._names else self._inner

    @property
    def files(self) -> Mapping[str, int]:
        return {**self._inner.files, **{name: size for name, size in self._other.files.items() if name in self._names}}

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._source_of(name).read(name, offset, view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._source_of(name).read_runs(name, runs, view)

    def map(self, name: str) -> mmap.mmap:
        return self._source_of(name).map(name)

    def share(self) -> None:
        self._inner.share()

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._other.close()
