"""The base of storages for tests: a word comes before every step, those of transactions and of loads as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from aiockpt.storage.wrapper import WrapperStorage, _WrapperTransaction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Identity, Source, Status, Transaction

Step = Literal[
    "begin",
    "join",
    "take_over",
    "create",
    "write",
    "finish",
    "commit",
    "abort",
    "sizes",
    "put_sidecar",
    "get_sidecar",
    "delete_sidecar",
    "delete_file",
    "status",
    "finalize",
    "discard_all",
    "delete",
    "open",
    "read",
]


class SteppedStorage(WrapperStorage):
    """Passes everything on to ``inner``; `before` is awaited before each `Step` but "read", which has `before_read`."""

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        """See `Storage.begin`."""
        await self.before("begin", path)
        inner = await self.inner.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return _SteppedTransaction(self, inner, path)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> Transaction:
        """See `Storage.join`."""
        await self.before("join", path)
        return _SteppedTransaction(self, await self.inner.join(path, ticket, workers=workers), path)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> Transaction:
        """See `Storage.take_over`."""
        await self.before("take_over", path)
        inner = await self.inner.take_over(path, ticket, overwrite=overwrite, workers=workers, identity=identity)
        return _SteppedTransaction(self, inner, path)

    async def open(self, path: str, *, workers: Workers) -> Source:
        """See `Storage.open`."""
        await self.before("open", path)
        return await super().open(path, workers=workers)


class _SteppedTransaction(_WrapperTransaction):
    async def sizes(self) -> Mapping[str, int]:
        await self._storage.before("sizes", self._path)
        return await super().sizes()

    async def put_sidecar(self, name: str, data: bytes) -> None:
        await self._storage.before("put_sidecar", name)
        await super().put_sidecar(name, data)

    async def get_sidecar(self, name: str) -> bytes | None:
        await self._storage.before("get_sidecar", name)
        return await super().get_sidecar(name)

    async def delete_sidecar(self, name: str) -> None:
        await self._storage.before("delete_sidecar", name)
        await super().delete_sidecar(name)

    async def delete_file(self, name: str) -> None:
        await self._storage.before("delete_file", name)
        await super().delete_file(name)

    async def status(self) -> Status:
        await self._storage.before("status", self._path)
        return await super().status()

    async def finalize(self) -> None:
        await self._storage.before("finalize", self._path)
        await super().finalize()

    async def discard_all(self) -> None:
        await self._storage.before("discard_all", self._path)
        await super().discard_all()
