"""Tests of storages: names, what is found in a directory, and the right to write to it."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import pytest

from aiockpt.errors import AiockptError, DeleteError, RunLockedError, SaveError
from aiockpt.storage.base import LookBudget, RunLease, shared_storage
from aiockpt.testing.conformance.suite import DATA, METADATA, MORE, WHOLE, StoragePath, Suite, data_of, on_a_loop

_FILES = {DATA: data_of(5000), MORE: data_of(300, seed=1), METADATA: WHOLE}
_SIZES = {name: len(data) for name, data in _FILES.items()}


class DirectoryTests(Suite):
    """Paths, directories, and leases of runs."""

    def test_names_are_canonical(self, place: StoragePath) -> None:
        """A resolved path is its own name, and so is what is below it; it is split again where it was joined."""
        storage, below = place.storage, place.below("step-1").below("part").path
        for path in (place.path, below):
            assert storage.resolve(path) == path
            assert storage.below(*storage.split(path)) == path
        assert storage.split(below) == (place.below("step-1").path, "part")

    @on_a_loop()
    async def test_what_an_attribute_excludes_is_refused(self, place: StoragePath) -> None:
        """A test is skipped only for what the storage really lacks."""
        await place.save(_FILES)
        storage, path = place.storage, place.path
        calls = {
            "leases": lambda: storage.lease(path),
            "looks": lambda: storage.look(path),
            "sets_aside": lambda: storage.set_aside(path, ["c.damaged"]),
            "shares": lambda: shared_storage(storage).new_ticket(path),
        }
        for ability, call in calls.items():
            if not self.has(storage, ability):
                with pytest.raises((AiockptError, OSError)):
                    await place.call(call)
        if not self.deletes:
            with pytest.raises(DeleteError):
                await place.delete()
        if self.shares and not self.has(storage, "shared_files"):
            owner = await place.named("d").begin_shared()
            with pytest.raises(SaveError):
                await owner.reserve(DATA, 5000)
            await owner.abort()
        assert await place.contents() == _FILES

    # --- looking ----------------------------------------------------------------------------------

    @on_a_loop("looks")
    async def test_stamps_of_all_change_with_each(self, place: StoragePath) -> None:
        """Those of one that is replaced or deleted do, and no others."""
        storage = place.storage
        for name in ("step-1", "step-2"):
            await place.below(name).save(_FILES)
        before = await place.call(storage.stamps, place.path, 2)
        if before is None:
            pytest.skip("each checkpoint is looked at")
        assert before.keys() == {"step-1", "step-2"}
        await place.below("step-1").save(_FILES, overwrite=True)
        after = await place.call(storage.stamps, place.path, 2)
        assert after is not None
        assert after.keys() == before.keys()
        assert after["step-1"] != before["step-1"]
        assert after["step-2"] == before["step-2"]
        if self.deletes:
            await place.below("step-2").delete()
            assert await place.call(storage.stamps, place.path, 2) in ({"step-1": after["step-1"]}, None)

    @on_a_loop("looks")
    async def test_a_checkpoint_is_looked_at(self, place: StoragePath) -> None:
        """All files, with any of their bytes; fewer where a file ends."""
        await place.save(_FILES)
        with await place.call(place.storage.look, place.path) as listing:
            await place.call(listing.list_below)
            assert (listing.path, listing.is_file, listing.files) == (place.path, False, _SIZES)
            assert sorted(listing.top) == sorted(_FILES)
            assert (listing.folders, listing.others) == ([], [])
            for offset, length in ((0, 5000), (4999, 1), (17, 1000), (4990, 100), (5000, 10), (0, 0)):
                found = await place.call(listing.fetch, DATA, offset, length)
                assert found == _FILES[DATA][offset : offset + length]
            with pytest.raises(OSError):  # noqa: PT011
                await place.call(listing.fetch, "__9_9.distcp", 0, 1)
        listing.close()

    @on_a_loop("looks", "single_files")
    async def test_a_file_is_looked_at(self, place: StoragePath) -> None:
        """Alone, or among the entries of its directory."""
        data = b"\2\0\0\0\0\0\0\0{}"
        single = place.below("c.safetensors")
        await single.save({"": data})
        with await place.call(place.storage.look, single.path) as listing:
            assert (listing.is_file, listing.files) == (True, {"c.safetensors": len(data)})
            assert await place.call(listing.fetch, "c.safetensors", 8, 99) == b"{}"
        with await place.call(place.storage.look, place.path) as listing:
            assert (listing.is_file, listing.files, listing.folders) == (False, {"c.safetensors": len(data)}, [])

    @on_a_loop("looks")
    async def test_a_run_is_looked_at(self, place: StoragePath) -> None:
        """Its checkpoints are its folders; of one that is being written there is nothing."""
        for name in ("step-1", "step-2"):
            await place.below(name).save(_FILES)
        unfinished = [await place.below(name).begin(overwrite=True) for name in ("step-2", "step-3")]
        for each in unfinished:
            await each.write_files({"__5_5.distcp": b"x"})
        below = {f"step-{number}/{name}": size for number in (1, 2) for name, size in _SIZES.items()}
        with await place.call(place.storage.look, place.path) as listing:
            assert (listing.is_file, listing.files) == (False, {})
            # A folder may be listed though nothing is in it yet: then looking into it says so.
            below_it = [place.below(name).path for name in listing.folders if not name.startswith(".")]
            stamps = {path: await place.call(place.storage.stamp, path) for path in below_it}
            there = [place.storage.split(path)[1] for path, stamp in stamps.items() if stamp is not None]
            assert sorted(there) == ["step-1", "step-2"]
            await place.call(listing.list_below)
            assert listing.files == below
        for left in (0, 1):
            budget = LookBudget(left)
            with await place.call(place.storage.look, place.path, budget) as listing:
                await place.call(listing.list_below)
                assert set(listing.files) < set(below)
                assert budget.is_spent
        for each in unfinished:
            await each.abort()

    @on_a_loop("looks")
    async def test_a_stamp_changes_with_the_contents(self, place: StoragePath) -> None:
        """Only then; where nothing is, there is none."""
        stamps = [await place.call(place.storage.stamp, place.path)]
        with pytest.raises(FileNotFoundError):
            await place.call(place.storage.look, place.path)
        began = time.time()
        for overwrite in (False, True, True):
            await place.save(_FILES, overwrite=overwrite)
            stamps.append(await place.call(place.storage.stamp, place.path))
            with await place.call(place.storage.look, place.path) as listing:
                assert listing.stamp == stamps[-1]
                assert abs(listing.changed_s - began) < 86400, "changed_s is a time in seconds, as of time.time()"
        assert stamps[0] is None
        assert len(set(stamps)) == 4, "the stamps of different contents are the same"

    @on_a_loop("sets_aside")
    async def test_a_damaged_checkpoint_is_set_aside(self, place: StoragePath) -> None:
        """It gets the first name that is free, and its own is free then; if none is free, it keeps its own."""
        names, above = ["c.damaged", "c.damaged-1"], place.storage.split(place.path)[0]
        for number in range(3):
            files = {DATA: b"%d" % number, METADATA: WHOLE}
            await place.save(files)
            if number == len(names):
                with pytest.raises(OSError):  # noqa: PT011
                    await place.call(place.storage.set_aside, place.path, names)
                assert await place.contents() == files
            else:
                aside = await place.call(place.storage.set_aside, place.path, names)
                assert aside == place.storage.below(above, names[number])
                assert await place.found() is None
                assert await place.named(names[number]).contents() == files

    # --- leases -----------------------------------------------------------------------------------

    @on_a_loop("leases")
    async def test_a_lease_has_one_owner(self, place: StoragePath) -> None:
        """Others are refused and learn whose it is, until it is released; other runs are free."""
        storage, run, other = place.storage, place.path, place.named("d").path
        for _ in range(2):
            lease = await place.call(storage.lease, run)
            owner = await place.call(storage.owner_of, run)
            assert owner is not None
            assert (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
            assert abs(owner.since - time.time()) < 86400, "it is a time in seconds, as of time.time()"
            with pytest.raises(RunLockedError):
                await place.call(storage.lease, run)
            await place.call(lease.check)
            await place.call((await place.call(storage.lease, other)).release)
            for _ in range(2):
                await place.call(lease.release)
            assert await place.call(storage.owner_of, run) is None

    @on_a_loop("leases")
    async def test_one_of_several_gets_the_lease(self, place: StoragePath) -> None:
        """Though all try at the same time."""
        for number in range(20):
            path = place.named(f"c-{number}").path
            tries = [place.call(place.storage.lease, path) for _ in range(4)]
            ends = await asyncio.gather(*tries, return_exceptions=True)
            (lease,) = [end for end in ends if isinstance(end, RunLease)]
            assert all(isinstance(end, RunLockedError) for end in ends if end is not lease), ends
            await place.call(lease.release)

    @on_a_loop("leases")
    async def test_a_live_manager_does_not_finish_for_a_dead_one(self, place: StoragePath) -> None:
        """No run is being finished by the writer process of a dead trainer, whatever this process writes to it."""
        await place.below("step-1").save(_FILES)
        transaction = await place.below("step-2").begin()
        await transaction.write_files({DATA: b"x"})
        assert not await place.call(place.storage.is_finishing, place.path)
        await transaction.abort()
