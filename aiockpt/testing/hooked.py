"""The base of storages for tests: a word comes before every step, those of transactions and of loads as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from aiockpt.storage.wrapper import WrapperStorage, _WrapperTransaction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Fate, Identity, Source, Transaction

Step = Literal[
    "begin",
    "join",
    "adopt",
    "create",
    "write",
    "finish",
    "commit",
    "abort",
    "sizes",
    "leave_word",
    "word",
    "take_back",
    "discard",
    "fate",
    "tidy",
    "sweep",
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

    async def adopt(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> Transaction:
        """See `Storage.adopt`."""
        await self.before("adopt", path)
        inner = await self.inner.adopt(path, ticket, overwrite=overwrite, workers=workers, identity=identity)
        return _SteppedTransaction(self, inner, path)

    async def open(self, path: str, *, workers: Workers) -> Source:
        """See `Storage.open`."""
        await self.before("open", path)
        return await super().open(path, workers=workers)


class _SteppedTransaction(_WrapperTransaction):
    async def sizes(self) -> Mapping[str, int]:
        await self._storage.before("sizes", self._path)
        return await super().sizes()

    async def leave_word(self, name: str, data: bytes) -> None:
        await self._storage.before("leave_word", name)
        await super().leave_word(name, data)

    async def word(self, name: str) -> bytes | None:
        await self._storage.before("word", name)
        return await super().word(name)

    async def take_back(self, name: str) -> None:
        await self._storage.before("take_back", name)
        await super().take_back(name)

    async def discard(self, name: str) -> None:
        await self._storage.before("discard", name)
        await super().discard(name)

    async def fate(self) -> Fate:
        await self._storage.before("fate", self._path)
        return await super().fate()

    async def tidy(self) -> None:
        await self._storage.before("tidy", self._path)
        await super().tidy()

    async def sweep(self) -> None:
        await self._storage.before("sweep", self._path)
        await super().sweep()
