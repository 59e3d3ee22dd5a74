"""A checkpoint some of whose bytes are read from another copy of it, as they are damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import CheckpointNotFoundError
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.storage.wrapper import WrapperSource, WrapperStorage

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Source, Storage


Patches = Mapping[str, Sequence[tuple[int, int]] | None]
"""The beginning and the end of damaged runs of bytes, by the names of files; None: all of a file."""


class PatchedStorage(WrapperStorage):
    """Opens a checkpoint of a storage together with its copy at a path of another one, from which patches are read."""

    def __init__(self, inner: Storage, other: Storage, path: str, patches: Patches) -> None:
        super().__init__(inner)
        self._other, self._path, self._patches = other, path, patches

    async def open(self, path: str, *, workers: Workers) -> Source:
        opened = inner = await super().open(path, workers=workers)
        try:
            other = await self._other.open(self._path, workers=workers)
            opened = _PatchedSource(inner, other, self._patches)
            if MANIFEST_NAME not in self._patches and await workers.run(_differ, inner, other):
                raise CheckpointNotFoundError(f"{path}, or its copy {self._path}, was replaced: they differ")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await workers.run(opened.close)
            raise
        return opened


def _differ(*copies: Source) -> bool:
    return len({each.read_bytes(MANIFEST_NAME, 0, each.files.get(MANIFEST_NAME, 0)) for each in copies}) > 1


class _PatchedSource(WrapperSource):
    def __init__(self, inner: Source, other: Source, patches: Patches) -> None:
        super().__init__(inner)
        self._other, self._patches = other, patches

    def _place(self, name: str, runs: Sequence[tuple[int, int]] | None) -> tuple[Source, str]:
        """Return the other source for what has a damaged byte, or more."""
        patches = self._patches.get(name, ())
        is_damaged = patches is None or any(
            runs is None or any(offset < end and begin < offset + length for offset, length in runs)
            for begin, end in patches
        )
        return self._other if is_damaged else self._inner, name

    @property
    def files(self) -> Mapping[str, int]:
        other = self._other.files
        return {**self._inner.files, **{name: other[name] for name in self._patches if name in other}}

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._other.close()
