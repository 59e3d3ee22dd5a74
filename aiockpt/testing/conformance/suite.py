"""The base of the tests of storages: a place in a storage, tests on one event loop, and calls that are interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import mmap
import os
import pickle
import random
import socket
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from aiockpt.core.threads import Workers
from aiockpt.errors import CheckpointNotFoundError
from aiockpt.storage.base import shared_storage, shared_transaction

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from aiockpt.storage.base import SharedTransaction, Source, Storage, Transaction

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_BYTES = 4096
WRITE_BYTES = 1 << 20
# Names of DCP checkpoints: a storage may refuse to replace or delete anything that is no checkpoint.
DATA, MORE, METADATA = "__0_0.distcp", "__0_1.distcp", ".metadata"


def metadata_of(text: str, *names: str) -> bytes:
    """Return a `.metadata` with a text, that names data files: no other files need to be replaced or deleted."""
    places = {MetadataIndex(text): _StorageInfo(DATA, 0, 1)}
    places |= {MetadataIndex(name): _StorageInfo(name, 0, 1) for name in (DATA, MORE, *names)}
    return pickle.dumps(Metadata({index.fqn: BytesStorageMetadata() for index in places}, storage_data=places))


WHOLE = metadata_of("whole")


def on_a_loop(*abilities: str) -> Callable[[Callable[P, Awaitable[None]]], Callable[P, None]]:
    """Run an async test on an event loop of its own, without a plugin; skip it if the storage lacks an ability."""

    def decorate(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            suite, place = args[0], kwargs["place"]
            assert isinstance(suite, Suite)
            assert isinstance(place, StoragePath)
            for ability in abilities:
                if not suite.has(place.storage, ability):
                    pytest.skip(f"{type(place.storage).__name__} lacks `{ability}`")

            async def main() -> None:
                await test(*args, **kwargs)

            asyncio.run(main())

        return run

    return decorate


class Suite:
    """The storage under test; see `aiockpt.testing.StorageConformance`."""

    deletes = True
    leases = True
    looks = True
    revokes = True
    sets_aside = True
    shares = True

    def make_storage(self, tmp_path: Path) -> Storage:
        """Return a storage that holds nothing at the paths of `path_for`; called for each test."""
        raise NotImplementedError(f"{type(self).__name__} must define make_storage")

    def path_for(self, tmp_path: Path, name: str) -> str:
        """Return a path in the storage; a path in ``tmp_path`` unless this is overridden."""
        return str(tmp_path / name)

    def left_in(self, tmp_path: Path) -> list[str]:
        """Return the names of what unfinished saves have left; those in ``tmp_path`` that begin with a dot."""
        return [name for name in os.listdir(tmp_path) if name.startswith(".")]

    def has(self, storage: Storage, ability: str) -> bool:
        """Return whether a storage has one of its `Traits`, or of the abilities that are attributes of this class."""
        return bool(getattr(storage.traits if hasattr(storage.traits, ability) else self, ability))

    @contextlib.contextmanager
    def free_place(self, tmp_path: Path) -> Iterator[StoragePath]:
        """Return a path where nothing is, in a storage; afterwards nothing unfinished may be left."""
        workers = CountingWorkers(4, "aiockpt-conformance")
        yield StoragePath(self.make_storage(tmp_path), workers, lambda name: self.path_for(tmp_path, name))
        workers.close()
        assert self.left_in(tmp_path) == []

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[StoragePath]:
        """The `free_place` of a test."""
        with self.free_place(tmp_path) as place:
            yield place


class CountingWorkers(Workers):
    """Threads that know what they have not finished."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self.busy: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Workers`."""
        future = super().submit(fn, *args, **kwargs)
        self.busy.add(future)
        future.add_done_callback(self.busy.discard)  # in the thread, before the loop learns of it
        return future


@dataclass(frozen=True, slots=True)
class StoragePath:
    """A path in a storage, and the threads that the storage gets for blocking work."""

    storage: Storage
    workers: CountingWorkers
    path_for: Callable[[str], str]
    name: str = "c"

    @property
    def path(self) -> str:
        """The canonical name of the path."""
        return self.storage.resolve(self.path_for(self.name))

    def named(self, name: str) -> StoragePath:
        """Return the place of another name."""
        return StoragePath(self.storage, self.workers, self.path_for, name)

    def below(self, name: str) -> StoragePath:
        """Return the place of a name below this one."""
        return StoragePath(self.storage, self.workers, lambda _: self.storage.below(self.path, name), name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking method in a thread."""
        return await self.workers.run(function, *args, **kwargs)

    async def begin(self, *, overwrite: bool = False) -> Transaction:
        """Begin a transaction."""
        return await self.storage.begin(self.path, overwrite=overwrite, workers=self.workers)

    async def begin_shared(self, *, overwrite: bool = False) -> SharedTransaction:
        """Begin a transaction that others can join."""
        return shared_transaction(await self.begin(overwrite=overwrite))

    async def join(self, owner: SharedTransaction) -> SharedTransaction:
        """Join a transaction as another process does."""
        return await shared_storage(self.storage).join(self.path, owner.ticket, workers=self.workers)

    async def take_over(
        self, owner: SharedTransaction, *, overwrite: bool = False, stamp: str | None = None
    ) -> SharedTransaction:
        """Take over the transaction of an owner who is dead, by its stamp or by another one."""
        return await shared_storage(self.storage).take_over(
            self.path, owner.ticket, overwrite=overwrite, workers=self.workers, stamp=stamp or owner.stamp
        )

    async def save(self, files: Mapping[str, bytes], *, overwrite: bool = False, announced: bool = True) -> None:
        """Write and commit files."""
        transaction = await self.begin(overwrite=overwrite)
        try:
            for name, data in files.items():
                await write(transaction, name, data, announced=announced)
            await transaction.commit()
        except BaseException:
            await transaction.abort()
            raise

    async def save_old(self, overwrite: bool) -> dict[str, bytes] | None:
        """Save what a test will overwrite, if it does; return its files."""
        old = {DATA: b"old", "__9_9.distcp": b"old", METADATA: metadata_of("old", "__9_9.distcp")}
        if overwrite:
            await self.save(old)
        return old if overwrite else None

    async def delete(self) -> None:
        """Delete the checkpoint."""
        await self.storage.delete(self.path, workers=self.workers)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Source]:
        """Open the checkpoint within the context."""
        source = await self.storage.open(self.path, workers=self.workers)
        try:
            yield source
        finally:
            for _ in range(2):  # idempotent
                await self.call(source.close)

    async def contents(self) -> dict[str, bytes]:
        """Return all files of the checkpoint."""
        async with self.opened() as source:
            return await self.call(read_all, source)

    async def found(self) -> dict[str, bytes] | None:
        """Return all files of the checkpoint; None if there is none."""
        with contextlib.suppress(CheckpointNotFoundError):
            return await self.contents()
        return None


# --- bytes ----------------------------------------------------------------------------------------------


def data_of(nbytes: int, seed: int = 0) -> bytes:
    """Return random bytes."""
    return random.Random(seed).randbytes(nbytes)


def aligned(data: bytes) -> memoryview:
    """Return bytes in memory as the engine has it, at the beginning of a page."""
    if not data:
        return memoryview(b"")
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


async def write(transaction: Transaction, name: str, data: bytes, *, announced: bool = True) -> None:
    """Write a file in several pieces."""
    sink = await transaction.create(name, len(data) if announced else None)
    view = aligned(data)
    for start in range(0, len(view), WRITE_BYTES):
        await sink.write(view[start : start + WRITE_BYTES])
    await sink.finish()


def read_all(source: Source) -> dict[str, bytes]:
    """Return all files of a checkpoint; blocks."""
    return {name: source.read_bytes(name, 0, nbytes) for name, nbytes in source.files.items()}


# --- interruptions --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Interruption:
    """Acts once, when a call waits for the ``nth`` time, counted from 0; sets ``is_done`` then.

    If ``is_late``, it acts when that wait is over, though the waiting task has not run since. If it acts by a
    coroutine, the call goes on only after that.
    """

    nth: int
    act: Callable[[], object]
    is_late: bool = False
    is_done: bool = False

    async def during(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call."""
        result: T = await self._step(call)
        return result

    @types.coroutine
    def _step(self, call: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        error: BaseException | None = None
        for number in itertools.count():
            try:
                waits_for = call.send(None) if error is None else call.throw(error)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if number == self.nth and self.is_late and asyncio.isfuture(waits_for):
                waits_for.add_done_callback(self._act)  # before that of the task
            elif number == self.nth and asyncio.iscoroutine(pause := self._act()):
                yield from pause.__await__()
            try:
                error = yield waits_for
            except BaseException as exc:
                error = exc
        raise AssertionError("the call ends or raises")

    def _act(self, _: object = None) -> object:
        self.is_done = True
        return self.act()


ROUNDS = 20


async def race(number: int, one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, T]) -> list[T | BaseException]:
    """Await two calls at once; in the first rounds, the other one ends while the first waits for the nth time."""
    if number >= ROUNDS // 2:
        return [*await asyncio.gather(one, other, return_exceptions=True)]
    others: list[asyncio.Future[T]] = []

    async def run() -> None:
        others.append(asyncio.ensure_future(other))
        await asyncio.wait(others, timeout=1)  # it may have to wait for the first one

    (end,) = await asyncio.gather(Interruption(number, run).during(one), return_exceptions=True)
    if not others:  # the first one waits less often
        await run()
    return [end, *await asyncio.gather(*others, return_exceptions=True)]


# --- calls on the loop's thread ---------------------------------------------------------------------------

_OF_FILES = (
    *("open", "read", "pread", "preadv", "readv", "write", "pwrite", "pwritev", "writev", "fsync", "fdatasync"),
    *("stat", "lstat", "fstat", "listdir", "scandir", "readlink", "mkdir", "rmdir", "link", "symlink", "rename"),
    *("replace", "unlink", "remove", "truncate", "ftruncate", "posix_fallocate"),
)
_BLOCKING = {"posix": _OF_FILES, "_io": ("open",), "fcntl": ("flock",), "time": ("sleep",)}
_OF_SOCKETS = ("connect", "send", "sendall", "recv", "recv_into", "accept")


@contextlib.contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """Collect the functions that this thread calls within the context and that wait for a disk, a peer or the time."""
    found: list[str] = []

    def look(frame: types.FrameType, event: str, called: Any) -> None:
        if event != "c_call" or frame.f_globals.get("__name__", "").endswith("importlib._bootstrap_external"):
            return
        owner, name = getattr(called, "__self__", None), called.__name__
        waits = isinstance(owner, socket.socket) and owner.gettimeout() != 0 and name in _OF_SOCKETS
        if waits or name in _BLOCKING.get(called.__module__, ()):
            found.append(f"{name} in {frame.f_code.co_filename}:{frame.f_lineno}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)
