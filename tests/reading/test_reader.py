"""Readers of open checkpoints: their contents, reads and streams."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage.base import Source, Storage
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.wrapper import WrapperSource, WrapperStorage
from tests.counting import CountingStorage
from tests.places import storage_of
from tests.states import assert_same, large_state, random_tensor, training_state

pytestmark = pytest.mark.asyncio


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:offset] + data + whole[offset + len(data) :])


async def _saved(ckpt: aiockpt.AsyncCheckpointer, path: Path, **more):
    state = {
        "model": {"w": random_tensor(torch.float32, (300, 400), 1), "n": torch.tensor(3)},
        "big": torch.arange(3_000_000),
        "opt": {"lr": 0.1, "betas": [0.9, 0.99]},
    }
    await ckpt.save(state, path, **more)
    return state


async def test_contents_of_an_open_checkpoint(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await _saved(ckpt, anywhere / "c", metadata={"step": 3, "note": "<b>"})
        reader = ckpt.open(anywhere / "c")
        assert repr(reader) == f"<CheckpointReader of {anywhere}/c, not open>"
        async with reader:
            assert list(reader.keys()) == ["model.w", "model.n", "big", "opt.lr", "opt.betas"]
            assert (len(reader), "big" in reader, "bag" in reader) == (5, True, False)
            assert reader.metadata == {"step": 3, "note": "<b>"}
            assert reader.format == "aiockpt"
            info = reader["model.w"]
            assert isinstance(info, aiockpt.TensorInfo)
            assert (info.key, info.dtype, info.shape, info.nbytes) == ("model.w", torch.float32, (300, 400), 480_000)
            (chunk,) = info.chunks
            assert (chunk.offsets, chunk.sizes, chunk.file) == ((0, 0), (300, 400), info.file)
            stored = (anywhere / "c" / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
            assert random_tensor(torch.float32, (300, 400), 1).numpy().tobytes() in stored
            other = reader["opt.lr"]
            assert isinstance(other, aiockpt.ObjectInfo)
            assert other.nbytes > 0
            assert reader.nbytes == 480_000 + 8 + 24_000_000
            with pytest.raises(KeyError, match="has no 'bag'; keys"):
                reader["bag"]


async def test_repr_and_html(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await _saved(ckpt, tmp_path / "c")
        async with ckpt.open(tmp_path / "c") as reader:
            assert repr(reader).splitlines()[2].split()[3] == "8"  # bytes: reading the value would block this loop
            lines = (await asyncio.to_thread(repr, reader)).splitlines()
            assert lines[0] == f"<CheckpointReader {tmp_path}/c (aiockpt): 3 tensors, 23.3 MiB; 2 objects"
            assert lines[1].split() == ["model.w", "float32", "300x400", "468.8", "KiB", reader["model.w"].file]
            assert lines[2].split()[:4] == ["model.n", "int64", "scalar", "3"]
            assert lines[4].split()[:3] == ["opt.lr", "float", "0.1"]
            shown = reader._repr_html_()
            assert shown.count("<tr>") == 6
            assert "<td>300x400</td>" in shown
        await ckpt.save({f"<{i}>": torch.ones(1) for i in range(50)}, tmp_path / "many")
        async with ckpt.open(tmp_path / "many") as reader:
            assert repr(reader).endswith("... and 30 more>")
            assert "&lt;7&gt;" in reader._repr_html_()
            assert "<7>" not in reader._repr_html_()


async def test_read_and_read_many(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        state = await _saved(ckpt, anywhere / "c")
        async with ckpt.open(anywhere / "c") as reader:
            assert_same(state["model"]["w"], await reader.read("model.w"))
            assert await reader.read("opt.betas") == [0.9, 0.99]
            assert (await reader.read("big", -1)).item() == 2_999_999
            many = await reader.read_many(["opt.*", "model"])
            assert_same(
                {"opt.lr": 0.1, "opt.betas": [0.9, 0.99], "model.w": state["model"]["w"], "model.n": torch.tensor(3)},
                many,
            )
            everything = await reader.read_many()
            assert list(everything) == list(reader)
            assert (await reader.read("model.w", device="meta")).is_meta
            results = await asyncio.gather(*(reader.read("big", slice(i, i + 5)) for i in range(0, 2_000_000, 100_000)))
            assert [int(part[0]) for part in results] == list(range(0, 2_000_000, 100_000))


async def test_open_without_a_checkpointer(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        state = await _saved(ckpt, anywhere / "c")
    async with aiockpt.open(anywhere / "c") as reader:
        assert_same(state["big"], await reader.read("big"))
    reader = await aiockpt.open(anywhere / "c")
    assert_same(state["big"][:4], await reader.read("big", slice(4)))
    await reader.aclose()
    await reader.aclose()
    with pytest.raises(aiockpt.LoadError, match="is not open"):
        await reader.read("big")
    with pytest.raises(aiockpt.CheckpointNotFoundError):
        async with aiockpt.open(anywhere / "none"):
            pass


@pytest.mark.slow
async def test_stream_yields_each_key_once(anywhere: Path) -> None:
    state = large_state(9, kib=5000) | {f"s{i}": torch.full((i,), i) for i in range(30)} | {"o": "text"}
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        async with ckpt.open(anywhere / "c") as reader:
            for order in ("file", "keys"):
                seen = [pair async for pair in reader.stream(order=order)]
                assert_same(dict(sorted(state.items())), dict(sorted(seen)))
                assert len(seen) == len(state)
                if order == "keys":
                    assert [key for key, _ in seen] == list(state)
                else:
                    places = [
                        (info.file, info.offset if isinstance(info, aiockpt.ObjectInfo) else info.chunks[0].offset)
                        for info in (reader[key] for key, _ in seen)
                    ]
                    assert places == sorted(places)
            picked = [key async for key, _ in reader.stream(["w3", "s?", "o"], order="keys")]
            assert picked == ["w3", *(f"s{i}" for i in range(10)), "o"]
            parts = {key: value async for key, value in reader.stream({"w2": slice(5), "w0": (slice(1, 3),)})}
            assert_same({"w0": state["w0"][1:3], "w2": state["w2"][:5]}, dict(sorted(parts.items())))


@pytest.mark.slow
async def test_stream_reads_ahead_within_its_buffer(anywhere: Path) -> None:
    state = large_state(12, kib=8192)
    storage = CountingStorage(storage_of(anywhere))
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        async with ckpt.open(anywhere / "c", storage=storage) as reader:
            opened = storage.nbytes
            stream = reader.stream(buffer_bytes=64 << 20)
            taken = 0
            async for _, tensor in stream:
                taken += tensor.nbytes
                # Bytes that were read and not yet yielded are within the bound, with the group that is being yielded.
                assert storage.nbytes - opened <= taken + (64 << 20) + (8 << 20)
            assert taken == 12 * (8 << 20)
            # Each tensor is larger than the buffer, so they are read one at a time.
            storage.reads.clear()
            taken = 0
            async for _, tensor in reader.stream(order="keys", buffer_bytes=1):
                taken += tensor.nbytes
                assert storage.nbytes == taken


async def test_read_ahead_counts_memory_of_small_tensors_casts_and_views(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({f"s{i}": torch.full((8192,), float(i)) for i in range(256)}, tmp_path / "c")
        storage = CountingStorage()
        for dtype, factor in ((None, 1), (torch.float64, 2)):
            async with ckpt.open(tmp_path / "c", storage=storage) as reader:
                storage.reads.clear()
                taken = 0
                async for _, tensor in reader.stream(buffer_bytes=1 << 20, dtype=dtype):
                    taken += tensor.nbytes
                    # At most the group that is being yielded, and as much again read ahead, with their framing.
                    assert factor * storage.nbytes <= 1.3 * (taken + (2 << 20))
                assert taken == factor * (8 << 20)
        torch.save({"view": torch.zeros(1_000_000)[:4]}, tmp_path / "v.pt")
        async with ckpt.open(tmp_path / "v.pt") as reader:
            (wanted,) = reader._wanted(None)
            assert wanted.nbytes() == 4_000_000


@pytest.mark.slow
async def test_stream_of_20_000_tensors(tmp_path: Path) -> None:
    state = {f"t{i}": torch.tensor([i]) for i in range(20_000)}
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "c")
        async with ckpt.open(tmp_path / "c") as reader:
            assert [int(value) async for _, value in reader.stream(order="keys")] == list(range(20_000))


async def test_invalid_arguments_raise_at_the_call(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await _saved(ckpt, tmp_path / "c")
        async with ckpt.open(tmp_path / "c") as reader:
            with pytest.raises(ValueError, match="order must be 'file' or 'keys'"):
                reader.stream(order="size")
            for wrong in (-1, 0, "x", 1.5):
                with pytest.raises(ValueError, match="buffer_bytes must be"):
                    reader.stream(buffer_bytes=wrong)
            with pytest.raises(aiockpt.MissingKeysError):
                reader.stream(["nothing"])
            with pytest.raises(TypeError, match="device must be"):
                await reader.read("big", device=lambda storage, where: storage)
            with pytest.raises(TypeError, match="out must be a tensor"):
                await reader.read("big", out=[1])
        with pytest.raises(TypeError, match="safe_globals must be a list"):
            ckpt.open(tmp_path / "c", safe_globals="Custom")
        with pytest.raises(TypeError, match="path must be text"):
            ckpt.open(b"/x")
        with pytest.raises(aiockpt.AiockptError, match="the path is empty"):
            ckpt.open("")


@pytest.mark.slow
async def test_close_during_a_read(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        for i in range(2):
            await ckpt.save({"w": torch.full((2_000_000,), i)}, anywhere / str(i))
        for _ in range(10):
            reader = await ckpt.open(anywhere / "0")
            task = asyncio.ensure_future(reader.read("w"))
            await asyncio.sleep(0)
            await reader.aclose()
            async with ckpt.open(anywhere / "1") as other:
                assert (await other.read("w")).eq(1).all()
            try:
                assert (await task).eq(0).all()
            except aiockpt.LoadError as exc:
                assert "was closed before it was read" in str(exc)


class _StoppingSource(WrapperSource):
    """Stops in each read of a tensor: before it, or when its first bytes are there."""

    def __init__(self, inner: Source, before: bool) -> None:
        super().__init__(inner)
        self._before = before
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.reached.set()
        self.goes_on.wait(60)

    def read(self, name, offset, view, seen=None) -> None:
        def stop_and_see(piece: memoryview) -> None:
            self.stop()
            seen(piece)

        is_document = not name.endswith(".distcp")
        if self._before and not is_document:
            self.stop()
        super().read(name, offset, view, seen if is_document else stop_and_see)


class _StoppingStorage(WrapperStorage):
    def __init__(self, inner: Storage, before: bool) -> None:
        super().__init__(inner)
        self._before = before
        self.sources: list[_StoppingSource] = []

    async def open(self, path: str, *, workers) -> Source:
        self.sources.append(_StoppingSource(await self.inner.open(path, workers=workers), self._before))
        return self.sources[-1]


@pytest.mark.parametrize("before", [False, True])
async def test_a_read_that_has_begun_outlives_the_reader(before: bool, anywhere: Path) -> None:
    storage = _StoppingStorage(storage_of(anywhere), before)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"w": torch.full((2_000_000,), 1)}, anywhere / "c")
        reader = await ckpt.open(anywhere / "c", storage=storage)
        (source,) = storage.sources
        task = asyncio.ensure_future(reader.read("w"))
        try:
            assert await asyncio.to_thread(source.reached.wait, 60)
            await reader.aclose()
        finally:
            source.goes_on.set()
        if before:
            with pytest.raises(aiockpt.LoadError, match="was closed before it was read"):
                await task
        else:
            assert (await task).eq(1).all()


async def test_reader_outlives_a_replaced_checkpoint_and_its_checkpointer(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"w": torch.full((500_000,), 1.0), "v": torch.zeros(3)}, anywhere / "c")
        reader = await ckpt.open(anywhere / "c")
        await ckpt.save({"w": torch.full((500_000,), 2.0), "v": torch.ones(3)}, anywhere / "c", overwrite=True)
        assert (await reader.read("w", slice(0, 5))).tolist() == [1] * 5
        assert (await reader.read("w")).eq(1).all()
        async with reader:  # entering again has no effect
            assert (await reader.read("v")).tolist() == [0, 0, 0]
        left = await ckpt.open(anywhere / "c")
    await left.aclose()


async def test_plain_with_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": torch.arange(5)}, tmp_path / "c")
        with ckpt.open(tmp_path / "c") as reader:
            assert "1 tensor, 40 B; 0 objects" in str(reader)
        with pytest.raises(aiockpt.LoadError, match="use it within its `with` block"):
            reader.metadata  # noqa: B018
    reader = aiockpt.open(tmp_path / "c")
    with pytest.raises(TypeError, match="write `async with`, or use `open` of a SyncCheckpointer"):
        reader.__enter__()
    with pytest.raises(aiockpt.LoadError, match="use it within its `async with` block"):
        reader["a"]


async def test_concurrent_opens_of_one_reader(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"a": torch.arange(5)}, anywhere / "c")
        reader = ckpt.open(anywhere / "c")
        await asyncio.gather(*(reader.__aenter__() for _ in range(4)))
        assert torch.equal(await reader.read("a"), torch.arange(5))
        await reader.aclose()
    lone = aiockpt.open(anywhere / "c")
    first, second = asyncio.ensure_future(lone.__aenter__()), asyncio.ensure_future(lone.__aenter__())
    await asyncio.sleep(0)
    second.cancel()
    await first
    assert torch.equal(await lone.read("a"), torch.arange(5))
    await lone.aclose()


async def test_cancelled_open_leaves_nothing_open(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await _saved(ckpt, anywhere / "c")
        for turns in range(60):
            reader = ckpt.open(anywhere / "c")
            task = asyncio.ensure_future(reader.__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await reader.aclose()


@pytest.mark.slow
async def test_closed_stream_stops_reading(anywhere: Path) -> None:
    state = large_state(12, kib=8192)
    storage = CountingStorage(storage_of(anywhere))
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        async with ckpt.open(anywhere / "c", storage=storage) as reader:
            stream = reader.stream(buffer_bytes=40 << 20)
            await anext(stream)
            await stream.aclose()
            reads = len(storage.reads)
            assert_same(state["w0"], await reader.read("w0"))
            assert len(storage.reads) <= reads + 1
            task = asyncio.ensure_future(anext(reader.stream()))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_cancelled_stream_waits_for_its_threads(anywhere: Path) -> None:
    state = large_state(12, kib=8192)
    held = threading.Event()
    arrived = threading.Event()

    class Holding(CountingStorage):
        holds = False

        def before_read(self, name: str, offset: int, nbytes: int) -> None:
            super().before_read(name, offset, nbytes)
            if self.holds:
                arrived.set()
                held.wait(60)

    storage = Holding(storage_of(anywhere))
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        async with ckpt.open(anywhere / "c", storage=storage) as reader:
            stream = reader.stream(buffer_bytes=16 << 20, order="keys")
            for _ in range(2):  # takes the whole first group, so the next tensor is still to be read
                await anext(stream)
            storage.holds = True
            third = asyncio.ensure_future(anext(stream))
            assert await asyncio.to_thread(arrived.wait, 60)
            for _ in range(5):
                third.cancel()
                await asyncio.sleep(0)
            assert not third.done()  # its threads still read
            held.set()
            with pytest.raises(asyncio.CancelledError):
                await third


async def test_damaged_tensor_ends_a_stream(anywhere: Path) -> None:
    state = large_state(6, kib=8192)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        async with ckpt.open(anywhere / "c") as reader:
            chunk = reader["w4"].chunks[0]
            _overwrite(anywhere / "c" / chunk.file, chunk.offset + 4_000_000, b"\x7f\x3c")
            with pytest.raises(aiockpt.CorruptCheckpointError, match="the bytes of w4"):
                async for _ in reader.stream():
                    pass
            assert len([key async for key, _ in reader.stream(verify=False)]) == 6


async def test_training_state_through_a_reader(anywhere: Path) -> None:
    state = training_state()
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        async with ckpt.open(anywhere / "c") as reader:
            values = await reader.read_many(["model", "step"])
            assert_same(dict(state["model"]), {k.removeprefix("model."): v for k, v in values.items() if k != "step"})
            assert values["step"] == 2


async def test_sync_reader(anywhere: Path) -> None:
    def work() -> None:
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save({"w": torch.arange(10).view(5, 2), "o": 5}, anywhere / "c")
            with ckpt.open(anywhere / "c") as reader:
                assert reader.read("w", (slice(1, 3), 0)).tolist() == [2, 4]
                assert_same({"w": torch.arange(10).view(5, 2), "o": 5}, reader.read_many())
                assert dict(reader.stream(["o"])) == {"o": 5}
                assert "SyncCheckpointReader" in repr(reader)
            reader.close()

    await asyncio.to_thread(work)


@pytest.mark.parametrize("wrapped", [False, True])
async def test_close_closes_the_files_of_a_reader_that_is_still_referenced(wrapped: bool, tmp_path: Path) -> None:
    storage = WrapperStorage(LocalStorage()) if wrapped else None
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"w": torch.arange(1000)}, tmp_path / "c")
        opened = len(os.listdir("/proc/self/fd"))
        async with ckpt.open(tmp_path / "c", storage=storage) as reader:
            source = reader._opened.source
            assert torch.equal(await reader.read("w"), torch.arange(1000))
            assert len(os.listdir("/proc/self/fd")) > opened
        assert len(os.listdir("/proc/self/fd")) == opened
        assert list(source.files)
