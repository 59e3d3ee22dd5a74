"""One of several checkpoints that are published together, as a storage of its own.

The checkpoint is a directory, or a file, within a transaction that another object publishes or removes. Its manifest
is kept in memory until then: the last document of the whole lists the files of all parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiockpt.errors import SaveError
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.storage.base import (
    NO_DOCUMENTS,
    Document,
    FileSink,
    PartSink,
    SharedStorage,
    SharedTransaction,
    Source,
    Storage,
)
from aiockpt.storage.wrapper import WrapperStorage, WrapperTransaction

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers


class PartStorage(WrapperStorage):
    """The storage of one part; each of its transactions writes to that part of the whole.

    Args:
        whole: the storage of the whole.
        path: the final path of the whole.
        ticket_of_whole: that of its transaction.
        name: of the directory or the file in it; empty: its top.

    Attributes:
        manifest: that of the part, once this process has committed it.
    """

    check, check_repository = Storage.check, Storage.check_repository  # the path is in that of the whole

    def __init__(self, whole: SharedStorage, path: str, ticket_of_whole: str, name: str) -> None:
        super().__init__(whole)
        self._whole, self._path, self._ticket, self._name = whole, path, ticket_of_whole, name
        self.manifest: bytes | None = None

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        return await self.join(path, self._ticket, workers=workers)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        whole = await self._whole.join(self._path, self._ticket, workers=workers)
        return PartTransaction(self, whole, path, self._name)

    async def open(self, path: str, *, workers: Workers) -> Source:
        raise SaveError(f"{path} can't be read before it is published")


class PartTransaction(WrapperTransaction):
    """One part of a transaction of the whole, which this process has joined; `commit` only makes it durable."""

    revoke = SharedTransaction.revoke

    def __init__(self, storage: PartStorage, whole: SharedTransaction, path: str, name: str) -> None:
        super().__init__(storage, whole, path)
        self._part, self._whole, self._name = storage, whole, name

    def _place(self, name: str) -> str:
        return "/".join(filter(None, (self._name, name)))

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        return await self._whole.create(self._place(name), nbytes)

    async def write_files(self, files: Mapping[str, Document]) -> None:
        await self._whole.write_files({self._place(name): data for name, data in files.items()})

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await self.write_files({name: data for name, data in documents.items() if name != MANIFEST_NAME})
        await self._whole.commit()
        self._refuse_if_revoked(self._path)
        if MANIFEST_NAME in documents:
            self._part.manifest = bytes(documents[MANIFEST_NAME])
        await self._whole.release()

    async def sizes(self) -> Mapping[str, int]:
        start, sizes = f"{self._name}/" if self._name else "", await self._whole.sizes()
        return {name.removeprefix(start): size for name, size in sizes.items() if name.startswith(start)}

    async def reserve(self, name: str, nbytes: int) -> None:
        await self._whole.reserve(self._place(name), nbytes)

    async def open_part(self, name: str) -> PartSink:
        return await self._whole.open_part(self._place(name))
