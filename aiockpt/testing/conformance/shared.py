"""Tests of storages: several processes write one checkpoint, and one finishes what another has begun.

The processes are transactions of one process; one that is dead has released its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle

import pytest

from aiockpt.errors import AiockptError, WriteError
from aiockpt.storage.base import PartSink, SharedTransaction, shared_storage
from aiockpt.testing.conformance.suite import (
    BLOCK_BYTES,
    DATA,
    METADATA,
    MORE,
    ROUNDS,
    WHOLE,
    WRITE_BYTES,
    StoragePath,
    Suite,
    aligned,
    data_of,
    metadata_of,
    on_a_loop,
    race,
    write,
)

_WHOLE = {DATA: b"of the owner", MORE: b"of another", METADATA: WHOLE}


class SharedTests(Suite):
    """Transactions of several processes."""

    async def _begin(
        self, place: StoragePath, *, overwrite: bool = False
    ) -> tuple[SharedTransaction, SharedTransaction]:
        """Return a transaction with a file of its owner, and one that has joined it, with another file."""
        owner = await place.begin_shared(overwrite=overwrite)
        other = await place.join(owner)
        for each, name in ((owner, DATA), (other, MORE)):
            await write(each, name, _WHOLE[name])
        await other.commit()
        return owner, other

    @on_a_loop("shares")
    async def test_the_files_of_all_are_published(self, place: StoragePath) -> None:
        """All see their sizes, and the status; a process that stops taking part leaves its files to the others."""
        owner, other = await self._begin(place)
        sizes = {name: len(data) for name, data in _WHOLE.items() if name != METADATA}
        for each in (owner, other):
            assert dict(await each.sizes()) == sizes
        watcher = await place.join(owner)
        for _ in range(2):
            await other.release()
        assert await watcher.status() == "open"
        await owner.commit({METADATA: _WHOLE[METADATA]})
        assert await watcher.status() == "published"
        for _ in range(2):
            await watcher.finalize()
        assert await place.contents() == _WHOLE

    @on_a_loop("shares")
    async def test_what_all_have_written_is_removed(self, place: StoragePath) -> None:
        """By the owner's abort, of which the others learn; theirs does nothing after their commit."""
        owner, other = await self._begin(place)
        watcher = await place.join(owner)
        if parts := self.has(place.storage, "shared_files"):
            await owner.reserve("__2_0.distcp", 5000)
            for each in (owner, watcher):
                sink = await each.open_part("__2_0.distcp")
                await sink.write(aligned(b"x" * 100), [(4950, 50, 50)])
        for _ in range(2):
            await other.abort()
        assert len(await owner.sizes()) == (3 if parts else 2), "it has removed what is the owner's"
        for _ in range(2):
            await owner.abort()
        await watcher.abort()
        assert await watcher.status() == "gone"
        assert await place.found() is None
        with pytest.raises(WriteError):
            await place.join(owner)

    @on_a_loop("shares")
    async def test_a_ticket_is_chosen_before(self, place: StoragePath) -> None:
        """By ``new_ticket``; no two are the same, nor have two transactions the same stamp."""
        storage = shared_storage(place.storage)
        tickets = [storage.new_ticket(place.path) for _ in range(2)]
        begun = [
            await storage.begin(place.path, overwrite=False, workers=place.workers, ticket=ticket) for ticket in tickets
        ]
        assert [each.ticket for each in begun] == tickets
        assert len(set(tickets)) == len({each.stamp for each in begun}) == 2
        for each in begun:
            assert (await place.join(each)).stamp == each.stamp
        for each in begun:
            await each.abort()

    @on_a_loop("shares")
    async def test_documents_are_written_in_order(self, place: StoragePath) -> None:
        """None is there before those ahead of it: the last one makes the checkpoint."""
        owner, other = await self._begin(place)
        names = [f"{chr(ord('z') - number)}.distcp" for number in range(12)]  # a listing may be made in their order
        committing = asyncio.ensure_future(owner.commit(dict.fromkeys(names, bytes(3 * WRITE_BYTES))))
        while not committing.done():
            with contextlib.suppress(WriteError):  # it has just been published
                sizes = await other.sizes()
                there = [name in sizes for name in names]
                assert there == sorted(there, reverse=True)
        await committing
        await other.release()

    @on_a_loop("shares")
    async def test_pickled_it_is_the_same_storage(self, place: StoragePath) -> None:
        """As for a writer process: it joins what the first one has begun, and finds its checkpoints."""
        there = StoragePath(pickle.loads(pickle.dumps(place.storage)), place.workers, place.path_for)
        owner = await place.begin_shared()
        other = await there.join(owner)
        await write(other, MORE, b"more")
        await other.commit()
        await other.release()
        await owner.commit({METADATA: WHOLE})
        assert await there.contents() == await place.contents() == {MORE: b"more", METADATA: WHOLE}

    # --- a dead owner -----------------------------------------------------------------------------

    @pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
    @on_a_loop("shares")
    async def test_what_a_dead_owner_has_begun_is_published(self, overwrite: bool, place: StoragePath) -> None:
        """By the commit of who takes it over, whose documents replace those that the owner has written."""
        await place.save_old(overwrite)
        owner, other = await self._begin(place, overwrite=overwrite)
        await owner.write_files({METADATA: metadata_of("the longer document of the owner")})
        await owner.release()
        taker = await place.take_over(owner, overwrite=overwrite)
        assert await taker.status() == "open"
        await taker.commit({METADATA: _WHOLE[METADATA]})
        assert await place.contents() == _WHOLE
        assert await other.status() == "published"
        await other.finalize()
        assert await place.contents() == _WHOLE

    @pytest.mark.parametrize("by", ["abort", "discard_all"])
    @on_a_loop("shares")
    async def test_what_a_dead_owner_has_begun_is_removed(self, by: str, place: StoragePath) -> None:
        """By the abort of who takes it over, or by a process that has joined; then nothing can publish it."""
        owner, other = await self._begin(place)
        late = await place.take_over(owner)
        await owner.release()
        if by == "abort":
            await other.release()
            taker = await place.take_over(owner)
            await taker.abort()
        else:
            await other.discard_all()
        assert await late.status() == "gone"
        with pytest.raises(AiockptError):
            await late.commit({METADATA: WHOLE})
        await late.abort()
        assert await place.found() is None
        await place.save({METADATA: metadata_of("again")})

    @pytest.mark.parametrize("published", [True, False], ids=["published", "removed"])
    @on_a_loop("shares")
    async def test_what_the_dead_owner_has_ended_stays_so(self, published: bool, place: StoragePath) -> None:
        """Who takes it over learns what has become of it, and completes it."""
        old = await place.save_old(True)
        owner, other = await self._begin(place, overwrite=True)
        await other.release()
        await (owner.commit({METADATA: _WHOLE[METADATA]}) if published else owner.abort())
        taker = await place.take_over(owner, overwrite=True)
        assert await taker.status() == ("published" if published else "gone")
        await (taker.finalize() if published else taker.abort())
        assert await place.contents() == (_WHOLE if published else old)

    @pytest.mark.parametrize("by", ["abort", "commit"])
    @on_a_loop("shares")
    async def test_a_stamp_of_another_transaction_takes_nothing_over(self, by: str, place: StoragePath) -> None:
        """It is refused, or what goes by the same name now is left as it is."""
        owner, other = await self._begin(place)
        stranger = await place.named("d").begin_shared()
        await owner.write_files({METADATA: _WHOLE[METADATA]})
        with contextlib.suppress(AiockptError):
            taker = await place.take_over(owner, stamp=stranger.stamp)
            assert await taker.status() == "gone"
            if by == "commit":
                with pytest.raises(AiockptError):
                    await taker.commit({METADATA: metadata_of("of the taker")})
            await taker.abort()
        await owner.commit()
        assert await place.contents() == _WHOLE
        await other.release()
        await stranger.abort()

    @pytest.mark.parametrize("owner_lives", [True, False], ids=["owner", "taken over"])
    @on_a_loop("shares")
    async def test_one_of_a_publisher_and_a_discarder_wins(self, owner_lives: bool, place: StoragePath) -> None:
        """Everything is published, or nothing is and the publisher learns that."""
        for number in range(2 * ROUNDS):
            here, order = place.named(f"c-{number}"), 1 if number % 2 else -1
            owner, other = await self._begin(here)
            if not owner_lives:
                await owner.release()
            publisher = owner if owner_lives else await here.take_over(owner)
            calls = [publisher.commit({METADATA: _WHOLE[METADATA]}), other.discard_all()][::order]
            problem, discarded = (await race(number // 2, *calls))[::order]
            assert discarded is None, discarded
            assert problem is None or isinstance(problem, AiockptError), problem
            await publisher.abort()
            assert await here.found() == (_WHOLE if problem is None else None)

    # --- parts of a file --------------------------------------------------------------------------

    @pytest.mark.parametrize("is_single_file", [False, True], ids=["in a directory", "single file"])
    @on_a_loop("shares", "shared_files")
    async def test_several_processes_write_parts_of_a_file(self, is_single_file: bool, place: StoragePath) -> None:
        """Each its own bytes, in turns, which meet in blocks."""
        if is_single_file and not self.has(place.storage, "single_files"):
            pytest.skip("this storage has no checkpoints of one file")
        place = place.named("c.safetensors" if is_single_file else "c")
        name, data = "" if is_single_file else DATA, b"\2\0\0\0\0\0\0\0{}" + data_of(2 * WRITE_BYTES + 77)
        owner = await place.begin_shared()
        await owner.reserve(name, len(data))
        assert list((await owner.sizes()).values()) == [len(data)], "a reserved file must have its final size"
        others = [await place.join(owner) for _ in range(2)]
        sinks = [await each.open_part(name) for each in (owner, *others)]
        lengths = itertools.cycle((1, 700, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, 200_001))
        ends = itertools.takewhile(lambda end: end < len(data), itertools.accumulate(lengths))
        runs = list(itertools.pairwise([0, *ends, len(data)]))

        async def send(sink: PartSink, mine: list[tuple[int, int]]) -> None:
            for some in (mine[at : at + 4] for at in range(0, len(mine), 4)):
                placed, view = [], b""  # a buffer that holds nothing else
                for begin, end in some:
                    placed.append((begin, len(view), end - begin))
                    view += data[begin:end]
                await sink.write(aligned(view), placed)

        await asyncio.gather(*(send(sink, runs[number::3]) for number, sink in enumerate(sinks)))
        for sink in sinks:
            await sink.finish()
        for each in others:
            await each.commit()
            await each.release()
        assert list((await owner.sizes()).values()) == [len(data)]
        await owner.commit({} if is_single_file else {METADATA: WHOLE})
        found = await place.contents()
        assert is_single_file or found.pop(METADATA) == WHOLE
        assert list(found.values()) == [data]
