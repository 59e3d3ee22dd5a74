"""A directory below a checkpoint, as a checkpoint of its own: for storages that know only the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError
from aiockpt.storage.wrapper import WrapperSource

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Source, Storage


async def open_below(storage: Storage, path: str, *, workers: Workers) -> Source:
    """Open a checkpoint, or a part of one that was published together with others; see `Storage.open`."""
    try:
        return await storage.open(path, workers=workers)
    except CheckpointNotFoundError:
        above, name = storage.split(path)
        if storage.traits.folders or not above or not name:
            raise
        try:
            whole = await storage.open(above, workers=workers)
        except CheckpointNotFoundError:
            whole = None
        if whole is None:
            raise
        if name in whole.files or any(each.startswith(f"{name}/") for each in whole.files):
            return FolderSource(whole, name)
        await workers.run(whole.close)
        raise


class FolderSource(WrapperSource):
    """The files in a directory of another source, or one of its files."""

    def __init__(self, whole: Source, name: str) -> None:
        super().__init__(whole)
        self._places = {each.removeprefix(f"{name}/"): each for each in whole.files if each.startswith(f"{name}/")}
        if name in whole.files:
            self._places = {name: name}

    @property
    def files(self) -> Mapping[str, int]:
        return {name: self._inner.files[place] for name, place in self._places.items()}

    def _place(self, name: str, runs: Sequence[tuple[int, int]] | None) -> tuple[Source, str]:
        return self._inner, self._places.get(name, name)
