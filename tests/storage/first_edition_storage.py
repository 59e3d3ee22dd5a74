"""A storage as it was written for aiockpt 0.1 and 0.2, around that of the file system, with the methods of then."""

from __future__ import annotations

import os
from collections.abc import Mapping

from aiockpt.core.threads import Workers
from aiockpt.storage.base import FileSink, SharedStorage, SharedTransaction, Source, Status
from aiockpt.storage.local.storage import LocalStorage

Identity = tuple[int, int]


class FirstEditionStorage(SharedStorage):
    def __init__(self) -> None:
        self._inner = LocalStorage()

    def check(self, path: str, *, overwrite: bool) -> None:
        self._inner.check(path, overwrite=overwrite)

    def new_ticket(self, path: str) -> str:
        return self._inner.new_ticket(path)

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        inner = await self._inner.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return FirstEditionTransaction(inner)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        return FirstEditionTransaction(await self._inner.join(path, ticket, workers=workers))

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> SharedTransaction:
        assert identity is None or (isinstance(identity, tuple) and len(identity) == 2)
        stamp = None if identity is None else f"{identity[0]}:{identity[1]}"
        inner = await self._inner.take_over(path, ticket, overwrite=overwrite, workers=workers, stamp=stamp)
        return FirstEditionTransaction(inner)

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await self._inner.open(path, workers=workers)

    async def delete(self, path: str, *, workers: Workers) -> None:
        await self._inner.delete(path, workers=workers)


class DerivedStorage(FirstEditionStorage):
    """One that calls the methods that it overrides."""

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> SharedTransaction:
        return await super().take_over(path, ticket, overwrite=overwrite, workers=workers, identity=identity)


class FirstEditionTransaction(SharedTransaction):
    def __init__(self, inner: SharedTransaction) -> None:
        self._inner = inner

    @property
    def ticket(self) -> str:
        return self._inner.ticket

    @property
    def identity(self) -> Identity | None:
        device, inode = (self._inner.stamp or "").split(":")
        return int(device), int(inode)

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        return FirstEditionSink(await self._inner.create(name, nbytes))

    async def write_files(self, files: Mapping[str, bytes | bytearray | memoryview]) -> None:
        await self._inner.write_files(files)

    async def commit(self) -> None:
        await self._inner.commit()

    async def abort(self) -> None:
        await self._inner.abort()

    async def sizes(self) -> Mapping[str, int]:
        return await self._inner.sizes()

    async def put_sidecar(self, name: str, data: bytes) -> None:
        await self._inner.put_sidecar(name, data)

    async def get_sidecar(self, name: str) -> bytes | None:
        return await self._inner.get_sidecar(name)

    async def delete_sidecar(self, name: str) -> None:
        await self._inner.delete_sidecar(name)

    async def delete_file(self, name: str) -> None:
        if await self._inner.status() == "open":
            await self._inner._remove(os.path.join(self._inner._hidden, name))

    async def status(self) -> Status:
        return await self._inner.status()

    async def finalize(self) -> None:
        await self._inner.finalize()

    async def release(self) -> None:
        await self._inner.release()

    async def discard_all(self) -> None:
        await self._inner.discard_all()


class FirstEditionSink(FileSink):
    def __init__(self, inner: FileSink) -> None:
        self._inner = inner

    async def write(self, view: memoryview) -> None:
        await self._inner.write(view)

    async def finish(self) -> None:
        await self._inner.finish()
