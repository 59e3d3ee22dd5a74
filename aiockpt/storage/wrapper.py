"""A storage that passes everything on to another one: the base of those that delay, count or fail."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiockpt.storage.base import (
    NO_DOCUMENTS,
    Document,
    FileSink,
    PartSink,
    Seen,
    SharedStorage,
    SharedTransaction,
    Source,
    Stamp,
    Storage,
    Traits,
    Transaction,
    shared_storage,
    shared_transaction,
)

if TYPE_CHECKING:
    import mmap

    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts


def _of_inner(name: str) -> Any:
    """Return the method of this name, which is passed on."""

    def method(self: WrapperStorage | WrapperTransaction, *args: Any, **options: Any) -> Any:
        inner = self.inner if isinstance(self, WrapperStorage) else self._inner
        return getattr(inner, name)(*args, **options)

    return method


class WrapperStorage(SharedStorage):
    """Passes everything on to ``inner``, which need not be a `SharedStorage` if one process saves alone.

    Override `before`, `before_read`, or any method.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    async def before(self, step: str, name: str) -> None:
        """Run before a step of the checkpoint at a path, or of a file.

        The steps are the names of methods of storages, transactions and sinks, such as "begin", "create" and "write".
        """

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        """Run before each read from a file, in the thread that reads."""

    @property
    def traits(self) -> Traits:  # type: ignore[override] # of an instance, not of the class
        return self.inner.traits

    resolve, below, split, look = map(_of_inner, ("resolve", "below", "split", "look"))
    stamp, stamps, set_aside, lease = map(_of_inner, ("stamp", "stamps", "set_aside", "lease"))
    owner_of, identify, is_finishing = map(_of_inner, ("owner_of", "identify", "is_finishing"))
    check, check_repository = map(_of_inner, ("check", "check_repository"))

    def new_ticket(self, path: str) -> str:
        return shared_storage(self.inner).new_ticket(path)

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        await self.before("begin", path)
        inner: Transaction
        if ticket is None:
            inner = await self.inner.begin(path, overwrite=overwrite, workers=workers)
        else:
            shared = shared_storage(self.inner)
            inner = await shared.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return WrapperTransaction(self, inner, path)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        await self.before("join", path)
        return WrapperTransaction(self, await shared_storage(self.inner).join(path, ticket, workers=workers), path)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        await self.before("take_over", path)
        shared = shared_storage(self.inner)
        inner = await shared.take_over(path, ticket, overwrite=overwrite, workers=workers, stamp=stamp)
        return WrapperTransaction(self, inner, path)

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        await self.before("resume", path)
        return WrapperTransaction(self, await self.inner.resume(path, save_id, workers=workers), path)

    async def delete(self, path: str, *, workers: Workers) -> None:
        await self.before("delete", path)
        await self.inner.delete(path, workers=workers)

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        await self.before("clean", directory)
        return await self.inner.clean(directory, older_than_s=older_than_s, workers=workers)

    async def open(self, path: str, *, workers: Workers) -> Source:
        await self.before("open", path)
        return _WatchedSource(self, await self.inner.open(path, workers=workers))


def _passed_on(step: str, *, named: bool = False) -> Any:
    """Return the method of a step that only `SharedTransaction` has; ``named``: its first argument names a file."""

    async def method(self: WrapperTransaction, *args: Any) -> Any:
        await self._storage.before(step, args[0] if named else self._path)
        return await getattr(self._shared, step)(*args)

    return method


class WrapperTransaction(SharedTransaction):
    """Passes everything on to the transaction of another storage."""

    def __init__(self, storage: WrapperStorage, inner: Transaction, path: str) -> None:
        self._storage = storage
        self._inner = inner
        self._path = path

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        await self._storage.before("create", name)
        return _WrapperSink(self._storage, await self._inner.create(name, nbytes), name)

    open_folder, seal_folder, vouch = map(_of_inner, ("open_folder", "seal_folder", "vouch"))
    whole_files, suspend, revoke = map(_of_inner, ("whole_files", "suspend", "revoke"))

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await self.write_files(documents)  # so that each step of a document is met
        await self._storage.before("commit", self._path)
        await self._inner.commit()

    async def adopt(self, path: str, files: Mapping[str, tuple[str, FileFacts]]) -> Collection[str]:
        await self._storage.before("adopt", path)
        return await self._inner.adopt(path, files)

    async def abort(self) -> None:
        try:
            await self._storage.before("abort", self._path)
        finally:
            await self._inner.abort()

    @property
    def _shared(self) -> SharedTransaction:
        return shared_transaction(self._inner)

    @property
    def ticket(self) -> str:
        return self._shared.ticket

    @property
    def stamp(self) -> Stamp | None:
        return self._shared.stamp

    async def open_part(self, name: str) -> PartSink:
        await self._storage.before("open_part", name)
        return _WrapperSink(self._storage, await self._shared.open_part(name), name)

    async def release(self) -> None:
        await self._shared.release()

    reserve = _passed_on("reserve", named=True)
    sizes = _passed_on("sizes")
    status = _passed_on("status")
    finalize = _passed_on("finalize")
    discard_all = _passed_on("discard_all")


class _WrapperSink(FileSink, PartSink):
    def __init__(self, storage: WrapperStorage, inner: FileSink | PartSink, name: str) -> None:
        self._storage = storage
        self._inner: Any = inner
        self._name = name

    async def write(self, view: memoryview, *more: Any) -> None:
        await self._storage.before("write", self._name)
        await self._inner.write(view, *more)

    async def finish(self) -> None:
        await self._storage.before("finish", self._name)
        await self._inner.finish()


class WrapperSource(Source):
    """Passes everything on to another source."""

    def __init__(self, inner: Source) -> None:
        self.gap_bytes, self.most_reads, self.is_remote = inner.gap_bytes, inner.most_reads, inner.is_remote
        self._inner = inner

    @property
    def files(self) -> Mapping[str, int]:
        return self._inner.files

    def _place(self, name: str, runs: Sequence[tuple[int, int]] | None) -> tuple[Source, str]:
        """Return the source of runs of a file, and the name there; None: of all of it. Override it to choose."""
        return self._inner, name

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        source, place = self._place(name, [(offset, len(view))])
        source.read(place, offset, view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        source, place = self._place(name, runs)
        source.read_runs(place, runs, view)

    def map(self, name: str) -> mmap.mmap:
        source, place = self._place(name, None)
        return source.map(place)

    def share(self) -> None:
        self._inner.share()

    def close(self) -> None:
        self._inner.close()


class _WatchedSource(WrapperSource):
    def __init__(self, storage: WrapperStorage, inner: Source) -> None:
        super().__init__(inner)
        self._before = storage.before_read

    def _place(self, name: str, runs: Sequence[tuple[int, int]] | None) -> tuple[Source, str]:
        for offset, length in runs or ():
            self._before(name, offset, length)
        return self._inner, name
