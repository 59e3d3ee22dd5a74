"""A storage that passes everything on to another: the base for those that delay, count or fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.storage.base import FileSink, Identity, Source, Status, Storage, Transaction

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping, Sequence

    from aiockpt.core.threads import Workers


class WrapperStorage(Storage):
    """Passes everything on to ``inner``.

    Override `before`, which is awaited before each step of a save, `before_read`, or any method.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    async def before(self, step: str, name: str) -> None:
        """Come before a step, of a file or path.

        The steps are "begin", "join", "create", "write", "finish", "commit", "abort", "delete" and "clean".
        """

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        """Come before each read from a file, in the thread that reads."""

    def resolve(self, path: str) -> str:
        """See `Storage.resolve`."""
        return self.inner.resolve(path)

    def check(self, path: str, *, overwrite: bool) -> None:
        """See `Storage.check`."""
        self.inner.check(path, overwrite=overwrite)

    def new_ticket(self, path: str) -> str | None:
        """See `Storage.new_ticket`."""
        return self.inner.new_ticket(path)

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        """See `Storage.begin`."""
        await self.before("begin", path)
        inner = await self.inner.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return _WrapperTransaction(self, inner, path)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> Transaction:
        """See `Storage.join`."""
        await self.before("join", path)
        return _WrapperTransaction(self, await self.inner.join(path, ticket, workers=workers), path)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> Transaction:
        """See `Storage.take_over`."""
        inner = await self.inner.take_over(path, ticket, overwrite=overwrite, workers=workers, identity=identity)
        return _WrapperTransaction(self, inner, path)

    async def delete(self, path: str, *, workers: Workers) -> None:
        """See `Storage.delete`."""
        await self.before("delete", path)
        await self.inner.delete(path, workers=workers)

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        """See `Storage.clean`."""
        await self.before("clean", directory)
        return await self.inner.clean(directory, older_than_s=older_than_s, workers=workers)

    async def open(self, path: str, *, workers: Workers) -> Source:
        """See `Storage.open`."""
        return _WrapperSource(self, await self.inner.open(path, workers=workers))


class _WrapperTransaction(Transaction):
    def __init__(self, storage: WrapperStorage, inner: Transaction, path: str) -> None:
        self._storage = storage
        self._inner = inner
        self._path = path

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        await self._storage.before("create", name)
        return _WrapperSink(self._storage, await self._inner.create(name, nbytes), name)

    async def commit(self) -> None:
        await self._storage.before("commit", self._path)
        await self._inner.commit()

    def revoke(self) -> None:
        self._inner.revoke()

    async def abort(self) -> None:
        try:
            await self._storage.before("abort", self._path)
        finally:
            await self._inner.abort()

    @property
    def ticket(self) -> str:
        return self._inner.ticket

    async def sizes(self) -> Mapping[str, int]:
        return await self._inner.sizes()

    @property
    def identity(self) -> Identity | None:
        return self._inner.identity

    async def put_sidecar(self, name: str, data: bytes) -> None:
        await self._inner.put_sidecar(name, data)

    async def get_sidecar(self, name: str) -> bytes | None:
        return await self._inner.get_sidecar(name)

    async def delete_sidecar(self, name: str) -> None:
        await self._inner.delete_sidecar(name)

    async def release(self) -> None:
        await self._inner.release()

    async def finalize(self) -> None:
        await self._inner.finalize()

    async def delete_file(self, name: str) -> None:
        await self._inner.delete_file(name)

    async def status(self) -> Status:
        return await self._inner.status()

    async def discard_all(self) -> None:
        await self._inner.discard_all()


class _WrapperSink(FileSink):
    def __init__(self, storage: WrapperStorage, inner: FileSink, name: str) -> None:
        self._storage = storage
        self._inner = inner
        self._name = name

    async def write(self, view: memoryview) -> None:
        await self._storage.before("write", self._name)
        await self._inner.write(view)

    async def finish(self) -> None:
        await self._storage.before("finish", self._name)
        await self._inner.finish()


class _WrapperSource(Source):
    def __init__(self, storage: WrapperStorage, inner: Source) -> None:
        self._storage = storage
        self._inner = inner

    @property
    def files(self) -> Mapping[str, int]:
        return self._inner.files

    def read(
        self, name: str, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        self._storage.before_read(name, offset, len(view))
        self._inner.read(name, offset, view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        for offset, length in runs:
            self._storage.before_read(name, offset, length)
        self._inner.read_runs(name, runs, view)

    def map(self, name: str) -> mmap.mmap:
        return self._inner.map(name)

    def share(self) -> None:
        self._inner.share()

    def close(self) -> None:
        self._inner.close()
