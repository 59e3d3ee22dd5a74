"""The tests that every storage has to pass, for pytest."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import mmap
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiockpt.core.threads import Workers
from aiockpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeleteError,
    LoadError,
    SaveError,
)
from aiockpt.storage.base import shared_storage, shared_transaction
from aiockpt.sync_checkpointer import SyncCheckpointer
from aiockpt.testing.storages import FaultyStorage

if TYPE_CHECKING:
    from pathlib import Path
    from typing import ParamSpec, TypeVar

    from aiockpt.storage.base import FileSink, PartSink, SharedTransaction, Source, Storage, Transaction

    P = ParamSpec("P")
    T = TypeVar("T")

_BLOCK_BYTES = 4096
_WRITE_BYTES = 1 << 20
_SIZES = [0, 1, _BLOCK_BYTES - 1, _BLOCK_BYTES, _BLOCK_BYTES + 1, _WRITE_BYTES, 3 * _WRITE_BYTES + 17]
# Names of DCP checkpoints: a storage may refuse to replace or delete anything that is no checkpoint.
_DATA, _MORE, _METADATA = "__0_0.distcp", "__0_1.distcp", ".metadata"


def _on_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test on an event loop of its own, without a plugin."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        _run(test(*args, **kwargs))

    return run


def _run(awaitable: Awaitable[T]) -> T:
    async def main() -> T:
        return await awaitable

    return asyncio.run(main())


class StorageConformance:
    """Tests of a storage: derive a class of tests from it, and make a storage.

    ::

        from aiockpt.testing import StorageConformance

        class TestMyStorage(StorageConformance):
            def make_storage(self, tmp_path):
                return MyStorage(tmp_path)

    It needs pytest alone, no plugin: each test runs its own event loop. If a storage can't do everything, set the
    attributes.

    Attributes:
        single_files: a checkpoint may be one file, which is created by the empty name; False skips its tests.
        deletes: `Storage.delete` is implemented; False skips its tests.
    """

    single_files = True
    deletes = True

    def make_storage(self, tmp_path: Path) -> Storage:
        """Return a storage that holds nothing at the paths of `path_for`; called for each test."""
        raise NotImplementedError(f"{type(self).__name__} must define make_storage")

    def path_for(self, tmp_path: Path, name: str) -> str:
        """Return a path in the storage; a path in ``tmp_path`` unless this is overridden."""
        return str(tmp_path / name)

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """The storage of a test."""
        return self.make_storage(tmp_path)

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        """A path where nothing is."""
        return self.path_for(tmp_path, "c")

    @pytest.fixture
    def place(self, storage: Storage, tmp_path: Path) -> Iterator[_Place]:
        """The path in the storage, with threads for blocking work."""
        workers = Workers(2, "aiockpt-conformance")
        yield _Place(storage, workers, lambda name: self.path_for(tmp_path, name))
        workers.close()

    # --- writing ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("announced", [True, False], ids=["announced", "open-ended"])
    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_a_file_is_read_as_it_was_written(self, nbytes: int, announced: bool, place: _Place) -> None:
        """Any size, announced or not."""
        data = _data(nbytes)
        _run(place.save({_DATA: data, _METADATA: b"m"}, announced=announced))
        assert place.load() == {_DATA: data, _METADATA: b"m"}

    @_on_a_loop
    async def test_files_are_written_at_the_same_time(self, place: _Place) -> None:
        """Several sinks of a transaction are open at once, and their writes are interleaved."""
        files = {f"__0_{number}.distcp": _data(3 * _WRITE_BYTES + number, seed=number) for number in range(8)}
        transaction = await place.begin()
        await asyncio.gather(*(_write(transaction, name, data) for name, data in files.items()))
        await _write(transaction, _METADATA, b"m")
        await transaction.commit()
        assert await place.contents() == {**files, _METADATA: b"m"}

    @_on_a_loop
    async def test_saves_to_different_paths_do_not_meet(self, place: _Place) -> None:
        """Transactions that are open at the same time are independent of each other."""
        places = [place.named(name) for name in ("a", "b")]
        one, other = [await each.begin() for each in places]
        await asyncio.gather(_write_all(one, {_DATA: b"one"}), _write_all(other, {_DATA: b"other"}))
        await other.abort()
        await one.commit()
        assert (await places[0].contents())[_DATA] == b"one"
        await places[1].assert_missing()

    def test_a_checkpoint_may_be_one_file(self, place: _Place) -> None:
        """The empty name is the checkpoint itself."""
        if not self.single_files:
            pytest.skip("this storage has no checkpoints of one file")
        place, data = place.named("c.safetensors"), b"\2\0\0\0\0\0\0\0{}"
        _run(place.save({"": data}))
        assert list(place.load().values()) == [data]

    # --- files of several processes ---------------------------------------------------------------

    @pytest.mark.parametrize("is_single_file", [False, True], ids=["in a directory", "single file"])
    @_on_a_loop
    async def test_several_processes_write_parts_of_a_file(self, is_single_file: bool, place: _Place) -> None:
        """Each its own bytes, in turns, which meet in blocks; skipped for a storage without `open_part`."""
        if is_single_file and not self.single_files:
            pytest.skip("this storage has no checkpoints of one file")
        place = place.named("c.safetensors" if is_single_file else "c")
        name, data = "" if is_single_file else _DATA, b"\2\0\0\0\0\0\0\0{}" + _data(2 * _WRITE_BYTES + 77)
        owner = await place.reserve(name, len(data))
        assert list((await owner.sizes()).values()) == [len(data)], "a reserved file must have its final size"
        others = [await place.join(owner) for _ in range(2)]
        sinks = [await each.open_part(name) for each in (owner, *others)]
        for runs in zip(*(_parts(len(data), number, len(sinks)) for number in range(len(sinks))), strict=True):
            await asyncio.gather(*(_write_runs(*each, data) for each in zip(sinks, runs, strict=True)))
        for sink in sinks:
            await sink.finish()
        for each in others:
            await each.commit()
            await each.release()
        assert list((await owner.sizes()).values()) == [len(data)]
        if not is_single_file:
            await _write(owner, _METADATA, b"m")
        await owner.commit()
        found = await place.contents()
        assert found.pop(_METADATA, b"m") == b"m"
        assert list(found.values()) == [data]

    @_on_a_loop
    async def test_an_abort_of_the_owner_removes_the_parts_of_all(self, place: _Place) -> None:
        """An abort by a joined process closes only its own parts; skipped for a storage without `open_part`."""
        owner = await place.reserve(_DATA, 5000)
        other = await place.join(owner)
        for each in (owner, other):
            sink = await each.open_part(_DATA)
            await sink.write(_aligned(b"x" * 100), [(4950, 50, 50)])
        await other.abort()
        await other.abort()
        assert (await owner.sizes())[_DATA] == 5000, "a process that has joined must not remove what is the owner's"
        await owner.abort()
        await owner.abort()
        await place.assert_missing()
        await place.save({_DATA: b"x", _METADATA: b"m"})

    # --- commit and abort -------------------------------------------------------------------------

    @_on_a_loop
    async def test_nothing_is_visible_before_the_commit(self, place: _Place) -> None:
        """All files are finished, and still the path is free for readers; after the commit all of them are there."""
        transaction = await place.begin()
        await _write_all(transaction, {_DATA: _data(5000)})
        with pytest.raises(LoadError):
            (await place.open()).close()
        await transaction.commit()
        (await place.open()).close()

    def test_a_taken_path_is_refused(self, place: _Place) -> None:
        """Without overwrite=True, at the latest by the commit; the checkpoint stays as it is."""
        _run(place.save({_DATA: b"old", _METADATA: b"m"}))

        async def save() -> None:
            place.storage.check(place.path, overwrite=False)
            await place.save({_DATA: b"new", _METADATA: b"m"})

        with pytest.raises(CheckpointExistsError):
            _run(save())
        assert place.load()[_DATA] == b"old"

    @_on_a_loop
    async def test_a_path_that_is_taken_during_the_save_is_refused(self, place: _Place) -> None:
        """Of two transactions for one path, the second commit fails, and the first checkpoint stays."""
        late = await place.begin()
        await _write_all(late, {_DATA: b"late"})
        await place.save({_DATA: b"first", _METADATA: b"m"})
        with pytest.raises(CheckpointExistsError):
            await late.commit()
        await late.abort()
        assert (await place.contents())[_DATA] == b"first"

    @_on_a_loop
    async def test_a_checkpoint_is_replaced_by_the_commit(self, place: _Place) -> None:
        """With overwrite=True: before it the old one is read, after it the new one, with no file of the old one."""
        await place.save({_DATA: b"old", _MORE: b"old", _METADATA: b"m"})
        place.storage.check(place.path, overwrite=True)
        transaction = await place.begin(overwrite=True)
        await _write_all(transaction, {_DATA: b"new"})
        assert (await place.contents())[_DATA] == b"old", "the old checkpoint vanished too early"
        await transaction.commit()
        assert await place.contents() == {_DATA: b"new", _METADATA: b"m"}

    @_on_a_loop
    async def test_an_abort_leaves_nothing(self, place: _Place) -> None:
        """With one file finished and one not; again it does nothing, and the path is free."""
        transaction = await place.begin()
        await _write(transaction, _DATA, _data(5000))
        sink = await transaction.create(_MORE, 2 * _BLOCK_BYTES)
        await sink.write(_aligned(_data(_BLOCK_BYTES)))
        await transaction.abort()
        await transaction.abort()
        await place.assert_missing()
        await place.save({_DATA: b"x", _METADATA: b"m"})

    @_on_a_loop
    async def test_an_abort_keeps_what_was_to_be_replaced(self, place: _Place) -> None:
        """The old checkpoint is there, whole."""
        await place.save({_DATA: b"old", _METADATA: b"m"})
        transaction = await place.begin(overwrite=True)
        await _write(transaction, _DATA, b"new")
        await transaction.abort()
        assert await place.contents() == {_DATA: b"old", _METADATA: b"m"}

    @_on_a_loop
    async def test_an_abort_after_the_commit_does_nothing(self, place: _Place) -> None:
        """The checkpoint stays."""
        transaction = await place.begin()
        await _write_all(transaction, {_DATA: b"x"})
        await transaction.commit()
        await transaction.abort()
        assert (await place.contents())[_DATA] == b"x"

    # --- reading ----------------------------------------------------------------------------------

    def test_ranges_are_read(self, place: _Place) -> None:
        """Any offset and length; by ``read``, with every byte seen in order, and many of them by ``read_runs``."""
        data, draw = _data(2 * _WRITE_BYTES + 123), random.Random(0)
        _run(place.save({_DATA: data, _METADATA: b"m"}))
        runs = [(0, 0), (0, len(data)), (len(data) - 1, 1), (_BLOCK_BYTES, _BLOCK_BYTES)]
        for most in (10, 5000, 1 << 20):
            offsets = [draw.randrange(len(data)) for _ in range(20)]
            runs += [(offset, draw.randint(0, min(most, len(data) - offset))) for offset in offsets]
        with place.opened() as source:
            for offset, length in runs:
                seen: list[bytes] = []
                got = memoryview(bytearray(length))
                source.read(_DATA, offset, got, lambda piece, seen=seen: seen.append(bytes(piece)))  # type: ignore[misc]
                assert got == data[offset : offset + length], f"{length} bytes at {offset} are others"
                assert b"".join(seen) == got, f"seen was not called with all of {length} bytes at {offset}, in order"
            together = memoryview(bytearray(sum(length for _, length in runs)))
            source.read_runs(_DATA, runs, together)
            assert together == b"".join(data[offset : offset + length] for offset, length in runs)

    def test_threads_read_at_the_same_time(self, place: _Place) -> None:
        """From one file, and from several."""
        files = {_DATA: _data(_WRITE_BYTES, seed=1), _MORE: _data(_WRITE_BYTES, seed=2), _METADATA: b"m"}
        _run(place.save(files))
        with place.opened() as source, ThreadPoolExecutor(4) as threads:

            def is_same(number: int) -> bool:
                name, offset = (_DATA, _MORE)[number % 2], number * 12_345
                view = memoryview(bytearray(100_000))
                source.read(name, offset, view)
                return view == files[name][offset : offset + len(view)]

            assert all(threads.map(is_same, range(64)))

    def test_what_is_not_there_is_an_error(self, place: _Place) -> None:
        """Bytes behind the end of a file, other files, and names that lead out of the checkpoint."""
        _run(place.save({_DATA: _data(5000), _METADATA: b"m"}))
        with place.opened() as source:
            for offset, length in ((4000, 1001), (5000, 1), (1 << 40, 10)):
                with pytest.raises(CorruptCheckpointError):
                    source.read(_DATA, offset, memoryview(bytearray(length)))
            with pytest.raises(CorruptCheckpointError):
                source.read("__9_9.distcp", 0, memoryview(bytearray(1)))
            with pytest.raises(LoadError):
                source.read(f"../{os.path.basename(place.path)}/{_DATA}", 0, memoryview(bytearray(1)))

    def test_a_missing_path_is_an_error(self, place: _Place) -> None:
        """It can't be opened, and can't be deleted; it can be saved to."""
        place.storage.check(place.path, overwrite=False)
        place.storage.check(place.path, overwrite=True)
        _run(place.assert_missing())
        with pytest.raises(CheckpointNotFoundError if self.deletes else (CheckpointNotFoundError, DeleteError)):
            _run(place.delete())

    def test_an_open_checkpoint_can_be_replaced(self, place: _Place) -> None:
        """A source that was opened before reads the old checkpoint."""
        old = {_DATA: _data(3 * _WRITE_BYTES, seed=1), _METADATA: b"m"}
        _run(place.save(old))
        with place.opened() as source:
            _run(place.save({_DATA: b"new", _METADATA: b"m"}, overwrite=True))
            assert _read(source) == old

    def test_a_name_is_resolved_once(self, storage: Storage, path: str) -> None:
        """A resolved path is its own name."""
        resolved = storage.resolve(path)
        assert storage.resolve(resolved) == resolved

    # --- deleting ---------------------------------------------------------------------------------

    def test_a_checkpoint_is_deleted(self, place: _Place) -> None:
        """Only this one, and a source that was opened before goes on reading."""
        if not self.deletes:
            pytest.skip("this storage can't delete")
        place, other = (place.named(name) for name in ("a", "b"))
        files = {_DATA: _data(5000), _METADATA: b"m"}
        for each in (place, other):
            _run(each.save(files))
        with place.opened() as source:
            _run(place.delete())
            _run(place.assert_missing())
            assert _read(source) == files
        assert other.load() == files

    # --- with a checkpointer ----------------------------------------------------------------------

    def test_a_state_comes_back_bit_for_bit(self, storage: Storage, path: str) -> None:
        """Tensors of several dtypes and sizes, and other values."""
        state = _state(1)
        with SyncCheckpointer() as checkpointer:
            checkpointer.save(state, path, storage=storage)
            _assert_same(checkpointer.load(path, storage=storage), state)
            report = checkpointer.verify(path, storage=storage)
        assert report.ok, f"verify found {report}"

    def test_a_state_is_overwritten(self, storage: Storage, path: str) -> None:
        """Only where the caller says so."""
        with SyncCheckpointer() as checkpointer:
            checkpointer.save(_state(1), path, storage=storage)
            with pytest.raises(CheckpointExistsError):
                checkpointer.save(_state(2), path, storage=storage)
            _assert_same(checkpointer.load(path, storage=storage), _state(1))
            checkpointer.save(_state(2), path, storage=storage, overwrite=True)
            _assert_same(checkpointer.load(path, storage=storage), _state(2))

    @pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
    @pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
    def test_a_failed_save_leaves_nothing(self, step: str, overwrite: bool, storage: Storage, path: str) -> None:
        """Wherever it fails, the path shows what was there before; the next save succeeds."""
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with SyncCheckpointer() as checkpointer:
            if overwrite:
                checkpointer.save(_state(1), path, storage=storage)
            with pytest.raises(SaveError):
                checkpointer.save(_state(2), path, storage=FaultyStorage(storage, step, error), overwrite=overwrite)
            if overwrite:
                _assert_same(checkpointer.load(path, storage=storage), _state(1))
            else:
                with pytest.raises(CheckpointNotFoundError):
                    checkpointer.load(path, storage=storage)
            checkpointer.save(_state(3), path, storage=storage, overwrite=overwrite)
            _assert_same(checkpointer.load(path, storage=storage), _state(3))


def _data(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def _aligned(data: bytes) -> memoryview:
    """Return bytes in memory as the engine has it, at the beginning of a page."""
    if not data:
        return memoryview(b"")
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


class _Place:
    """A path in a storage, and the threads that the storage gets for blocking work."""

    def __init__(self, storage: Storage, workers: Workers, path_for: Callable[[str], str], name: str = "c") -> None:
        self.storage = storage
        self.path = path_for(name)
        self._workers = workers
        self._path_for = path_for

    def named(self, name: str) -> _Place:
        """Return the place of another name."""
        return _Place(self.storage, self._workers, self._path_for, name)

    def begin(self, *, overwrite: bool = False) -> Awaitable[Transaction]:
        return self.storage.begin(self.path, overwrite=overwrite, workers=self._workers)

    def open(self) -> Awaitable[Source]:
        return self.storage.open(self.path, workers=self._workers)

    def delete(self) -> Awaitable[None]:
        return self.storage.delete(self.path, workers=self._workers)

    def join(self, owner: SharedTransaction) -> Awaitable[SharedTransaction]:
        """Join a transaction as another process does."""
        return shared_storage(self.storage).join(self.path, owner.ticket, workers=self._workers)

    async def reserve(self, name: str, nbytes: int) -> SharedTransaction:
        """Begin a checkpoint with a file for several processes; skip the test if the storage has no such files."""
        transaction = await self.begin()
        try:
            shared = shared_transaction(transaction)
            await shared.reserve(name, nbytes)
        except SaveError as exc:
            await transaction.abort()
            if type(exc) is SaveError:  # a failure is one of its subclasses
                pytest.skip(str(exc))
            raise
        return shared

    async def save(self, files: dict[str, bytes], *, overwrite: bool = False, announced: bool = True) -> None:
        """Write and commit files."""
        transaction = await self.begin(overwrite=overwrite)
        try:
            for name, data in files.items():
                await _write(transaction, name, data, announced=announced)
            await transaction.commit()
        except BaseException:
            await transaction.abort()
            raise

    @contextlib.contextmanager
    def opened(self) -> Iterator[Source]:
        """Open the checkpoint within the context, outside of any loop."""
        source = _run(self.open())
        try:
            yield source
        finally:
            source.close()
            source.close()  # idempotent

    async def contents(self) -> dict[str, bytes]:
        source = await self.open()
        try:
            return await self._workers.run(_read, source)
        finally:
            source.close()

    def load(self) -> dict[str, bytes]:
        """Return all files, outside of any loop."""
        return _run(self.contents())

    async def assert_missing(self) -> None:
        """Check that there is no checkpoint."""
        with pytest.raises(CheckpointNotFoundError):
            await self.contents()


async def _write_all(transaction: Transaction, files: dict[str, bytes]) -> None:
    for name, data in {**files, _METADATA: b"m"}.items():
        await _write(transaction, name, data)


async def _write(transaction: Transaction, name: str, data: bytes, *, announced: bool = True) -> None:
    sink: FileSink = await transaction.create(name, len(data) if announced else None)
    view = _aligned(data)
    for start in range(0, len(view), _WRITE_BYTES):
        await sink.write(view[start : start + _WRITE_BYTES])
    await sink.finish()


def _parts(nbytes: int, number: int, of: int) -> list[list[tuple[int, int]]]:
    """Return the runs of one of several processes, as begin and end, for each of its writes."""
    lengths = (1, 700, _BLOCK_BYTES - 1, _BLOCK_BYTES, 3 * _BLOCK_BYTES + 5, 200_001)
    ends = list(itertools.accumulate(itertools.chain([0], itertools.islice(itertools.cycle(lengths), 18 * of))))
    runs = [(min(begin, nbytes), min(end, nbytes)) for begin, end in itertools.pairwise([*ends, nbytes])]
    mine = runs[number::of]
    return [mine[at::6] for at in range(6)]


async def _write_runs(sink: PartSink, runs: list[tuple[int, int]], data: bytes) -> None:
    """Write runs of the data from a buffer that holds nothing else."""
    placed, view = [], b""
    for begin, end in runs:
        placed.append((begin, len(view), end - begin))
        view += data[begin:end]
    await sink.write(_aligned(view), placed)


def _read(source: Source) -> dict[str, bytes]:
    found = {}
    for name, nbytes in source.files.items():
        view = memoryview(bytearray(nbytes))
        source.read(name, 0, view)
        found[name] = bytes(view)
    return found


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8, generator=generator)
    return {
        "model": {
            "weight": torch.randn(1000, 777, generator=generator),
            "half": torch.randn(333, generator=generator).to(torch.bfloat16),
            "transposed": torch.randn(30, 40, generator=generator).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(seed, dtype=torch.int64),
            "large": large,
        },
        "step": seed,
        "notes": ["text", 1.5, None, (True, b"bytes")],
    }


def _assert_same(found: Any, expected: Any, where: str = "the state") -> None:
    assert type(found) is type(expected), f"{where} is a {type(found).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(_bits(found), _bits(expected)), f"{where} has other bits"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{where} has other keys"
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            _assert_same(found[number], value, f"{where}[{number}]")
    else:
        assert found == expected, f"{where} is {found!r}, not {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
