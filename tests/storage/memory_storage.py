"""A storage in the memory of this process: the smallest complete storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from aiockpt.core.threads import Workers
from aiockpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, WriteError
from aiockpt.storage.base import Document, FileSink, Source, Storage, Transaction


class MemoryStorage(Storage):
    """Checkpoints as dictionaries of bytes, by path. A committed checkpoint is immutable."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, Mapping[str, bytes]] = {}

    def check(self, path: str, *, overwrite: bool) -> None:
        """Raise if the path is taken."""
        if path in self.checkpoints and not overwrite:
            raise CheckpointExistsError(f"{path} exists already; pass overwrite=True to replace it")

    async def begin(self, path: str, *, overwrite: bool, workers: Workers) -> Transaction:
        """Begin a transaction if the path is free."""
        self.check(path, overwrite=overwrite)
        return _MemoryTransaction(self, path, overwrite)

    async def open(self, path: str, *, workers: Workers) -> Source:
        """Return the checkpoint as it is now. One that replaces it is another dictionary."""
        try:
            return _MemorySource(path, self.checkpoints[path])
        except KeyError:
            raise CheckpointNotFoundError(f"there is no checkpoint at {path}") from None

    async def delete(self, path: str, *, workers: Workers) -> None:
        """Remove a checkpoint; open sources keep its bytes."""
        if self.checkpoints.pop(path, None) is None:
            raise CheckpointNotFoundError(f"there is no checkpoint at {path}")


class _MemoryTransaction(Transaction):
    def __init__(self, storage: MemoryStorage, path: str, overwrite: bool) -> None:
        self._storage, self._path, self._overwrite = storage, path, overwrite
        self.files: dict[str, bytes] = {}

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        name = name or self._path.rpartition("/")[2]  # an empty name: the checkpoint is this one file
        return _MemorySink(self.files, name, nbytes)

    async def commit(self, documents: Mapping[str, Document] = MappingProxyType({})) -> None:
        await self.write_files(documents)
        self._storage.check(self._path, overwrite=self._overwrite)  # the path may have been taken since `begin`
        self._storage.checkpoints[self._path] = self.files  # one assignment: all files become visible at once

    async def abort(self) -> None:
        self.files = {}  # not clear(): after a commit the dictionary belongs to the checkpoint


class _MemorySink(FileSink):
    def __init__(self, files: dict[str, bytes], name: str, nbytes: int | None) -> None:
        if name in files:
            raise WriteError(f"{name} was created already")
        self._files, self._name = files, name
        self._data = bytearray()

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        self._data += view  # a copy: the caller reuses the buffer
        free()

    async def finish(self) -> None:
        self._files[self._name] = bytes(self._data)


class _MemorySource(Source):
    def __init__(self, path: str, files: Mapping[str, bytes]) -> None:
        self._path, self._files = path, files

    @property
    def files(self) -> Mapping[str, int]:
        return {name: len(data) for name, data in self._files.items()}

    def read(
        self, name: str, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        data = self._files.get(name, b"")[offset : offset + len(view)]
        if name not in self._files or len(data) < len(view):
            raise CorruptCheckpointError(f"{self._path}/{name} is missing or ends too early")
        view[:] = data
        if seen is not None:
            seen(view)

    def close(self) -> None:
        pass
