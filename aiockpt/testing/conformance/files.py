"""Tests of storages: what is written is what is read, until it is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import threading
from pathlib import Path

import pytest
from isal.isal_zlib import crc32

from aiockpt.errors import CheckpointNotFoundError, CorruptCheckpointError, DeleteError, LoadError, SaveError
from aiockpt.format.manifest.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.testing.conformance.suite import (
    BLOCK_BYTES,
    DATA,
    METADATA,
    MORE,
    WHOLE,
    WRITE_BYTES,
    StoragePath,
    Suite,
    aligned,
    data_of,
    metadata_of,
    on_a_loop,
    read_all,
    write,
)

_SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, WRITE_BYTES, 3 * WRITE_BYTES + 17]


class FileTests(Suite):
    """Files that are written, read and deleted."""

    @pytest.mark.parametrize("announced", [True, False], ids=["announced", "open-ended"])
    @pytest.mark.parametrize("nbytes", _SIZES)
    @on_a_loop()
    async def test_a_file_is_read_as_it_was_written(self, nbytes: int, announced: bool, place: StoragePath) -> None:
        """Any size, announced or not."""
        data = data_of(nbytes)
        await place.save({DATA: data, METADATA: WHOLE}, announced=announced)
        assert await place.contents() == {DATA: data, METADATA: WHOLE}

    @pytest.mark.parametrize("ends", ["commit", "abort", "copy"])
    @on_a_loop("adopts")
    async def test_files_of_another_checkpoint_are_taken_over(self, ends: str, place: StoragePath) -> None:
        """They are files of both checkpoints: neither deleting nor aborting one changes the other."""
        files = {DATA: data_of(3 * WRITE_BYTES + 5), MORE: data_of(5000, seed=1), METADATA: WHOLE}
        base, facts = place.named("base"), {name: FileFacts(len(data), crc32(data)) for name, data in files.items()}
        whole = {**files, MANIFEST_NAME: encode_manifest(Manifest("", "", files=facts))}
        await base.save(whole)
        taken, other = "__0_7.distcp", FileFacts(5000, facts[MORE].crc ^ 1)
        wanted = {DATA: (taken, facts[DATA]), MORE: (MORE, other), "__9_9.distcp": ("__9_9.distcp", facts[DATA])}
        storage, path, workers = place.storage, place.path, place.workers
        save = storage.resume(path, "0123456789abcdef", workers=workers) if ends == "copy" else place.begin()
        transaction = await save
        assert [*await transaction.adopt(base.path, wanted)] == [DATA]
        assert not await transaction.adopt(place.path_for("absent"), {DATA: ("__0_8.distcp", facts[DATA])})
        await write(transaction, MORE, b"own")
        if ends == "abort":
            await transaction.abort()
            assert (await place.found(), await base.contents()) == (None, whole)
            return
        await transaction.vouch({taken: facts[DATA]})
        documents = {METADATA: metadata_of("new", taken)}
        await transaction.commit(documents)
        both = await place.contents(), await base.contents()
        assert both == ({taken: files[DATA], MORE: b"own", **documents}, whole)
        await base.delete()
        assert await place.contents() == both[0]

    @on_a_loop()
    async def test_files_are_written_at_the_same_time(self, place: StoragePath) -> None:
        """Several sinks of a transaction are open at once, and their writes are interleaved."""
        files = {f"__2_{number}.distcp": data_of(3 * WRITE_BYTES + number, seed=number) for number in range(8)}
        transaction = await place.begin()
        small: dict[str, bytes | bytearray | memoryview] = {
            MORE: bytearray(b"more"),
            "__1_2.distcp": memoryview(data_of(3 * WRITE_BYTES)),
            METADATA: b"",
        }
        await asyncio.gather(transaction.write_files(small), *(write(transaction, *each) for each in files.items()))
        await transaction.commit()
        assert await place.contents() == {**files, **{name: bytes(data) for name, data in small.items()}}

    @pytest.mark.parametrize("announced", [True, False], ids=["announced", "open-ended"])
    @on_a_loop()
    async def test_each_view_is_freed_once(self, announced: bool, place: StoragePath) -> None:
        """On the loop's thread, at the latest by `FileSink.finish`; the memory is used for other things at once."""
        files = {name: data_of(5 * WRITE_BYTES + 99, seed) for seed, name in enumerate((DATA, MORE))}
        transaction, freed = await place.begin(), list[tuple[str, int, int]]()

        async def send(name: str, data: bytes) -> None:
            sink = await transaction.create(name, len(data) if announced else None)
            for start in range(0, len(data), WRITE_BYTES):
                view = aligned(data[start : start + WRITE_BYTES])

                def free(view: memoryview = view, start: int = start) -> None:
                    view[:] = b"\xff" * len(view)
                    freed.append((name, start, threading.get_ident()))

                await sink.write(view, free)
            await sink.finish()
            assert len([each for each in freed if each[0] == name]) == 6, f"views of {name} are still in use"

        await asyncio.gather(*(send(name, data) for name, data in files.items()))
        await transaction.commit({METADATA: WHOLE})
        assert sorted(freed) == [
            (name, start * WRITE_BYTES, threading.get_ident()) for name in sorted(files) for start in range(6)
        ]
        assert await place.contents() == {**files, METADATA: WHOLE}

    @on_a_loop()
    async def test_saves_to_different_paths_do_not_meet(self, place: StoragePath) -> None:
        """Transactions that are open at the same time are independent of each other."""
        one, other = [await place.named(name).begin() for name in "ab"]
        await asyncio.gather(write(one, DATA, b"one"), write(other, DATA, b"other"))
        await other.abort()
        await one.commit({METADATA: WHOLE})
        assert await place.named("a").contents() == {DATA: b"one", METADATA: WHOLE}
        assert await place.named("b").found() is None

    @on_a_loop("single_files")
    async def test_a_checkpoint_may_be_one_file(self, place: StoragePath) -> None:
        """The empty name is the checkpoint itself."""
        place, data = place.named("c.safetensors"), b"\2\0\0\0\0\0\0\0{}"
        await place.save({"": data})
        assert list((await place.contents()).values()) == [data]

    @on_a_loop()
    async def test_what_others_put_into_the_folder_is_a_part(self, place: StoragePath) -> None:
        """If the storage has `Traits.folders`; else none is given."""
        transaction = await place.begin()
        await write(transaction, DATA, b"own")
        if not self.has(place.storage, "folders"):
            with pytest.raises(SaveError):
                await transaction.open_folder()
            await transaction.abort()
            return
        await place.call(Path(await transaction.open_folder(), MORE).write_bytes, b"other")
        facts = await transaction.seal_folder({DATA})
        assert {name: each.nbytes for name, each in facts.items()} == {MORE: 5}
        await transaction.commit({METADATA: WHOLE})
        assert await place.contents() == {DATA: b"own", MORE: b"other", METADATA: WHOLE}

    # --- reading ----------------------------------------------------------------------------------

    @on_a_loop()
    async def test_ranges_are_read(self, place: StoragePath) -> None:
        """Any offset and length, by several threads; ``read`` shows every byte in order, ``read_runs`` reads many."""
        files = {name: data_of(2 * WRITE_BYTES + 123, seed) for seed, name in enumerate((DATA, MORE))}
        await place.save({**files, METADATA: WHOLE})
        nbytes, draw = len(files[DATA]), random.Random(0)
        runs = [(0, 0), (0, nbytes), (nbytes - 1, 1), (BLOCK_BYTES, BLOCK_BYTES)]
        for most in (10, 5000, 1 << 20):
            offsets = [draw.randrange(nbytes) for _ in range(20)]
            runs += [(offset, draw.randint(0, min(most, nbytes - offset))) for offset in offsets]
        async with place.opened() as source:

            def check(name: str, offset: int, length: int) -> None:
                view, seen = memoryview(bytearray(length)), bytearray()
                source.read(name, offset, view, seen.extend)
                assert view == files[name][offset : offset + length], f"{length} bytes at {offset} are others"
                assert seen == view, f"seen was not called with all of {length} bytes at {offset}, in order"

            await asyncio.gather(*(place.call(check, name, *run) for name, run in itertools.product(files, runs)))
            source.share()
            with contextlib.suppress(LoadError), await place.call(source.map, MORE) as mapped:  # on a file system
                assert mapped[:] == files[MORE]
            together = memoryview(bytearray(sum(length for _, length in runs)))
            await place.call(source.read_runs, DATA, runs, together)
            assert together == b"".join(files[DATA][offset : offset + length] for offset, length in runs)

    @on_a_loop()
    async def test_what_is_not_there_is_an_error(self, place: StoragePath) -> None:
        """Bytes behind the end of a file, other files, and names that lead out of the checkpoint."""
        await place.save({DATA: data_of(5000), METADATA: WHOLE})
        async with place.opened() as source:
            outside = f"../{os.path.basename(place.path)}/{DATA}"
            for name, *run in ((DATA, 4000, 1001), (DATA, 5000, 1), (DATA, 1 << 40, 10), (MORE, 0, 1), (outside, 0, 1)):
                with pytest.raises(LoadError if name == outside else CorruptCheckpointError):
                    await place.call(source.read_bytes, name, *run)

    @on_a_loop()
    async def test_a_missing_path_is_an_error(self, place: StoragePath) -> None:
        """It can't be opened, and can't be deleted; it can be saved to."""
        for overwrite in (False, True):
            await place.call(place.storage.check, place.path, overwrite=overwrite)
        with pytest.raises(CheckpointNotFoundError):
            await place.contents()
        with pytest.raises(CheckpointNotFoundError if self.deletes else (CheckpointNotFoundError, DeleteError)):
            await place.delete()

    # --- the end of a checkpoint ------------------------------------------------------------------

    @on_a_loop()
    async def test_an_open_checkpoint_can_be_replaced(self, place: StoragePath) -> None:
        """A source that was opened before reads the old checkpoint."""
        old = {DATA: data_of(3 * WRITE_BYTES, seed=1), METADATA: WHOLE}
        await place.save(old)
        async with place.opened() as source:
            await place.save({DATA: b"new", METADATA: WHOLE}, overwrite=True)
            assert await place.call(read_all, source) == old

    @on_a_loop("deletes")
    async def test_a_checkpoint_is_deleted(self, place: StoragePath) -> None:
        """Only this one, and a source that was opened before goes on reading; its path is free."""
        files = {DATA: data_of(5000), METADATA: WHOLE}
        for each in (place, place.named("d")):
            await each.save(files)
        async with place.opened() as source:
            await place.delete()
            assert await place.found() is None
            assert await place.call(read_all, source) == files
        await place.save({METADATA: metadata_of("again")})
        assert await place.contents() == {METADATA: metadata_of("again")}
        assert await place.named("d").contents() == files

    @on_a_loop()
    async def test_what_is_being_written_is_not_cleaned(self, place: StoragePath) -> None:
        """However old it is: its process lives."""
        transaction = await place.begin()
        await write(transaction, DATA, b"x")
        above, _ = place.storage.split(place.path)
        for older_than_s in (None, 0.0):
            assert await place.storage.clean(above, older_than_s=older_than_s, workers=place.workers) == []
        await transaction.commit({METADATA: WHOLE})
        assert await place.contents() == {DATA: b"x", METADATA: WHOLE}
