"""The course of a save: its stages, order, threads and loops, and the effect of mutations."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._flat_param import FlatParameter

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.states import assert_same, large_state, training_state

pytestmark = pytest.mark.both_loops

CHUNK = 64 << 10


def small_pool(chunks: int = 1) -> aiockpt.AsyncCheckpointer:
    return aiockpt.AsyncCheckpointer(staging_bytes=chunks * CHUNK, chunk_bytes=CHUNK)


def clone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.asyncio
async def test_a_handle_has_a_future_for_each_stage(tmp_path: Path) -> None:
    state = training_state()
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(state, tmp_path / "runs" / "a" / "c", metadata={"step": 7, "loss": 0.25, "tags": ["x", None]})
        stage, write = save
        assert (stage, write) == (save.staged, save.written)
        assert await stage is None
        result = await save
        assert result is await write
        assert result.path == str(tmp_path / "runs" / "a" / "c")
        assert result.files["__0_0.distcp"] == (tmp_path / "runs" / "a" / "c" / "__0_0.distcp").stat().st_size
        assert 0 < result.captured_s <= result.staged_s <= result.written_s
        assert 0 < result.planned_s < result.staged_s
        assert "written" in repr(save)
        assert await save.cancel() is False
        assert_same(state, await ckpt.load(result.path))
    manifest = json.loads((tmp_path / "runs" / "a" / "c" / ".aiockpt.json").read_text())
    assert manifest["metadata"] == {"step": 7, "loss": 0.25, "tags": ["x", None]}
    assert manifest["files"]["__0_0.distcp"]["bytes"] == result.files["__0_0.distcp"]
    assert sorted(p.name for p in (tmp_path / "runs" / "a").iterdir()) == ["c"]


@pytest.mark.asyncio
async def test_crcs_in_the_manifest_match_the_files(tmp_path: Path) -> None:
    import zlib

    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=4 * CHUNK) as ckpt:
        await ckpt.save({**training_state(), **large_state(40)}, tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / ".aiockpt.json").read_text())
    assert len(manifest["files"]) == 1 + 2  # two buckets for 20 MiB
    for name, facts in manifest["files"].items():
        data = (tmp_path / "c" / name).read_bytes()
        assert (len(data), f"{zlib.crc32(data):08x}") == (facts["bytes"], facts["crc32"]), name


@pytest.mark.asyncio
async def test_progress_reports_every_event_in_order(tmp_path: Path) -> None:
    state = large_state()
    async with small_pool(2) as ckpt:
        save = ckpt.save(state, tmp_path / "c")
        live = [event async for event in save.progress()]
        replay = [event async for event in save.progress()]
    assert live == replay
    phases = [event.phase for event in live]
    assert phases[0] == "planned"
    assert phases[-2:] == ["written", "committed"]
    assert phases.index("staged") < phases.index("written")
    assert [e.done_bytes for e in live] == sorted(e.done_bytes for e in live)
    assert live[-1].staged_bytes == live[-1].done_bytes == live[-1].total_bytes > 6 * 512 * 1024


@pytest.mark.asyncio
async def test_changes_after_staged_never_show(tmp_path: Path) -> None:
    """The first save writes nothing until all tensors have been overwritten."""
    state = large_state() | {"stats": torch.ones(8)}
    expected = clone(state)
    storage = GatedStorage(LocalStorage(), ["create"])
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        for number in range(3):
            save = ckpt.save(state, tmp_path / str(number), storage=storage if number == 0 else None)
            await save.staged
            for tensor in state.values():
                tensor.add_(1)
            storage.open("create")
            await save
            assert_same(expected, await ckpt.load(tmp_path / str(number)))
            expected = {name: tensor + 1 for name, tensor in expected.items()}


@pytest.mark.asyncio
async def test_objects_and_small_tensors_may_change_right_after_the_call(tmp_path: Path) -> None:
    """BatchNorm's statistics change in forward; counters and lists in the training loop."""
    state = {
        "stats": torch.zeros(100),
        "strided": torch.zeros(10, 10).t()[::2],
        "log": [1, 2],
        "n": {"k": {"deep": [0]}},
    }
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(state, tmp_path / "c")
        state["stats"] += 1
        state["strided"] += 1
        state["log"].append(3)
        state["n"]["k"]["deep"][0] = 9
        state["n"]["new"] = 1
        await save
        loaded = await ckpt.load(tmp_path / "c")
    assert not loaded["stats"].any()
    assert not loaded["strided"].any()
    assert loaded["log"] == [1, 2]
    assert loaded["n"] == {"k": {"deep": [0]}}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["tensor", "parameter", "view", "no_grad", "optimizer"])
async def test_a_tensor_changed_before_staged_is_detected(kind: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(400, 400)
    base = torch.zeros(3, 90_000)
    state = {"a": torch.zeros(90_000), "victim": base[1] if kind == "view" else base, "w": layer.weight}
    storage = GatedStorage(LocalStorage(), ["write"])
    async with small_pool() as ckpt:
        save = ckpt.save(state, tmp_path / "c", storage=storage)
        await storage.reached["write"]  # one chunk is staged; the rest waits for it
        if kind in ("parameter", "optimizer"):
            layer(torch.ones(400)).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=1.0).step()
        elif kind == "no_grad":
            with torch.no_grad():
                base.fill_(7)
        else:
            base[1].mul_(2)
        storage.open("write")
        with pytest.raises(
            aiockpt.TornSnapshotError, match="w changed" if kind in ("parameter", "optimizer") else "victim"
        ):
            await save.staged
        with pytest.raises(aiockpt.TornSnapshotError, match="Await `staged`"):
            await save
        assert list(tmp_path.iterdir()) == []
        await ckpt.save(state, tmp_path / "c")
        assert_same(dict(state), await ckpt.load(tmp_path / "c"))


@pytest.mark.asyncio
async def test_documented_exceptions_to_torn_snapshots(tmp_path: Path) -> None:
    """Writes through `.data` and to inference tensors bump no version counter; small tensors are copied at the call."""
    with torch.inference_mode():
        inference = torch.zeros(90_000)
    state = {"a": torch.zeros(90_000), "data": torch.zeros(90_000), "inference": inference, "small": torch.zeros(5)}
    storage = GatedStorage(LocalStorage(), ["write"])
    async with small_pool() as ckpt:
        save = ckpt.save(state, tmp_path / "c", storage=storage)
        await storage.reached["write"]
        state["data"].data.add_(1)
        with torch.inference_mode():
            inference.add_(1)
        state["small"].add_(1)
        storage.open("write")
        await save
        loaded = await ckpt.load(tmp_path / "c")
    assert not loaded["small"].any()


@pytest.mark.asyncio
async def test_replacing_the_data_of_a_parameter_is_harmless(tmp_path: Path) -> None:
    layer = torch.nn.Linear(500, 500)
    before = layer.weight.detach().clone()
    storage = GatedStorage(LocalStorage(), ["write"])
    async with small_pool() as ckpt:
        save = ckpt.save({"a": torch.zeros(90_000), "w": layer.weight}, tmp_path / "c", storage=storage)
        await storage.reached["write"]
        layer.weight.data = torch.zeros(500, 500)
        storage.open("write")
        await save
        assert_same(before, (await ckpt.load(tmp_path / "c"))["w"])


@pytest.mark.asyncio
async def test_fence_orders_and_checks(tmp_path: Path) -> None:
    """For host tensors the fence blocks until they are copied."""
    state = large_state()
    expected = clone(state)
    gated = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(state, tmp_path / "1", storage=gated)
        await asyncio.get_running_loop().run_in_executor(None, save.fence)
        for tensor in state.values():
            tensor.zero_()
        gated.open("commit")
        await save
        assert_same(expected, await ckpt.load(tmp_path / "1"))
    async with small_pool() as ckpt:
        gated = GatedStorage(LocalStorage(), ["write"])
        save = ckpt.save(state, tmp_path / "2", storage=gated)
        await gated.reached["write"]
        with pytest.raises(TimeoutError, match="the save goes on"):
            save.fence(timeout=0.001)
        state["w5"].add_(1)
        gated.open("write")
        with pytest.raises(aiockpt.TornSnapshotError):
            await asyncio.get_running_loop().run_in_executor(None, save.fence)
        with pytest.raises(aiockpt.TornSnapshotError):
            await save


@pytest.mark.asyncio
async def test_saves_are_published_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """A later save is staged while an earlier one is written, and published after it."""
    storage = GatedStorage(LocalStorage(), ["commit"])
    order: list[str] = []

    async def note(name: str, save: aiockpt.SaveHandle) -> None:
        await save
        order.append(name)

    async with aiockpt.AsyncCheckpointer() as ckpt, anyio.create_task_group() as tasks:
        saves = [ckpt.save(large_state(), tmp_path / str(i), storage=storage if i == 0 else None) for i in range(4)]
        for i, save in enumerate(saves):
            tasks.start_soon(note, str(i), save)
        await saves[3].staged
        assert not any((tmp_path / str(i)).exists() for i in range(4))
        storage.open("commit")
    assert order == ["0", "1", "2", "3"]
    assert all((tmp_path / str(i) / ".metadata").exists() for i in range(4))


@pytest.mark.asyncio
async def test_several_saves_share_a_pool_smaller_than_one_save(tmp_path: Path) -> None:
    states = [{name: tensor + i for name, tensor in large_state().items()} for i in range(4)]
    async with small_pool(2) as ckpt:
        saves = [ckpt.save(state, tmp_path / str(i)) for i, state in enumerate(states)]
        for i, save in enumerate(saves):
            await save
            assert_same(states[i], await ckpt.load(tmp_path / str(i)))


@pytest.mark.asyncio
async def test_the_caller_may_drop_state_and_handle(tmp_path: Path) -> None:
    """The save keeps the tensors alive while it needs them, and releases them once staged."""
    state = large_state()
    expected = clone(state)
    witness = weakref.ref(state["w3"])
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", storage=storage)
        del state
        await storage.reached["commit"]
        gc.collect()
        assert witness() is None
        storage.open("commit")
    async with aiockpt.AsyncCheckpointer() as ckpt:
        assert_same(expected, await ckpt.load(tmp_path / "c"))


@pytest.mark.asyncio
async def test_two_loops_and_a_thread_use_one_checkpointer(tmp_path: Path) -> None:
    state = large_state()
    async with aiockpt.AsyncCheckpointer() as ckpt:
        mine = ckpt.save(state, tmp_path / "mine")
        results: dict[str, aiockpt.SaveResult] = {}

        def other_loop() -> None:
            async def main() -> None:
                theirs = ckpt.save(state, tmp_path / "theirs")
                results["theirs"] = await theirs
                results["mine"] = await mine  # made in another loop

            asyncio.run(main())

        def no_loop() -> None:
            results["plain"] = ckpt.save(state, tmp_path / "plain").written.result(timeout=60)

        threads = [threading.Thread(target=target) for target in (other_loop, no_loop)]
        for thread in threads:
            thread.start()
        await mine
        for thread in threads:
            await asyncio.get_running_loop().run_in_executor(None, thread.join)
        assert sorted(results) == ["mine", "plain", "theirs"]
        for name in results:
            assert_same(state, await ckpt.load(tmp_path / name))


@pytest.mark.asyncio
async def test_cancelling_a_waiter_never_cancels_the_save(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(large_state(), tmp_path / "c", storage=storage)
        await storage.reached["commit"]

        async def wait() -> None:
            await save

        waiters = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await save.written
        with anyio.move_on_after(0.001) as scope:
            await save
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError, match="the work goes on"):
            save.written.result(timeout=0.001)
        storage.open("commit")
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [None, None]
        assert (await save).nbytes > 0


@pytest.mark.asyncio
async def test_a_waiters_loop_may_be_closed(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(large_state(), tmp_path / "c", storage=storage)

        def give_up() -> None:
            async def main() -> None:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await save

            asyncio.run(main())

        await asyncio.get_running_loop().run_in_executor(None, give_up)
        storage.open("commit")
        await save


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
async def test_cancel_leaves_nothing(step: str, tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), [step])
    state = large_state()
    async with small_pool(2) as ckpt:
        save = ckpt.save(state, tmp_path / "c", storage=storage)
        await storage.reached[step]
        cancelled = save.cancel()
        storage.open(step)
        if step == "commit":  # too late: the commit completes
            assert await cancelled is False
            await save
            assert_same(state, await ckpt.load(tmp_path / "c"))
        else:
            assert await cancelled is True
            with pytest.raises(aiockpt.SaveCancelledError):
                await save
            assert list(tmp_path.iterdir()) == []
        await ckpt.save(state, tmp_path / "next")  # does not raise the error of the cancelled save
        assert_same(state, await ckpt.load(tmp_path / "next"))


@pytest.mark.asyncio
async def test_cancelling_a_queued_save(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        first = ckpt.save(large_state(), tmp_path / "1", storage=storage)
        second = ckpt.save(large_state(), tmp_path / "2")
        third = ckpt.save(large_state(), tmp_path / "3")
        assert await second.cancel() is True
        storage.open("commit")
        await first
        await third
        with pytest.raises(aiockpt.SaveCancelledError):
            await second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "3"]


@pytest.mark.asyncio
async def test_aclose_finishes_saves_in_flight(tmp_path: Path) -> None:
    ckpt = aiockpt.AsyncCheckpointer()
    saves = [ckpt.save(large_state(), tmp_path / str(i)) for i in range(3)]
    await ckpt.aclose()
    assert all(save.written.done() for save in saves)
    await ckpt.aclose()
    with pytest.raises(aiockpt.CheckpointerClosedError, match="make a new one"):
        ckpt.save({"x": torch.ones(1)}, tmp_path / "late")
    with pytest.raises(aiockpt.CheckpointerClosedError):
        await ckpt.load(tmp_path / "0")
    async with aiockpt.AsyncCheckpointer() as again:
        for i in range(3):
            assert_same(large_state(), await again.load(tmp_path / str(i)))


@pytest.mark.asyncio
async def test_closing_gives_up_after_the_drain_timeout(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    ckpt = aiockpt.AsyncCheckpointer(drain_timeout=0.05)
    save = ckpt.save(large_state(), tmp_path / "c", storage=storage)
    with pytest.raises(aiockpt.SaveCancelledError, match="drain_timeout"):
        await ckpt.aclose()
    with pytest.raises(aiockpt.SaveCancelledError):
        await save
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_cancelling_aclose_does_not_stop_closing(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    ckpt = aiockpt.AsyncCheckpointer()
    save = ckpt.save(large_state(), tmp_path / "c", storage=storage)
    await storage.reached["commit"]
    with anyio.move_on_after(0.001):
        await ckpt.aclose()
    storage.open("commit")
    await save
    await ckpt.aclose()


@pytest.mark.asyncio
async def test_an_unawaited_failure_is_raised_by_the_next_call(tmp_path: Path) -> None:
    fault = FaultyStorage(LocalStorage(), "write", OSError(28, "No space left on device"))
    async with aiockpt.AsyncCheckpointer() as ckpt:
        lost = ckpt.save(large_state(), tmp_path / "1", storage=fault)
        async for _ in lost.progress():
            pass
        with pytest.raises(aiockpt.WriteError, match="No space left") as caught:
            ckpt.save(large_state(), tmp_path / "2")
        assert "which nobody awaited" in caught.value.__notes__[0]
        await ckpt.save(large_state(), tmp_path / "2")
    ckpt = aiockpt.AsyncCheckpointer()
    fault = FaultyStorage(LocalStorage(), "commit", OSError(5, "Input/output error"))
    ckpt.save(large_state(), tmp_path / "3", storage=fault)
    with pytest.raises(aiockpt.CommitError, match="Input/output error"):
        await ckpt.aclose()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2"]


@pytest.mark.asyncio
async def test_an_error_in_the_body_is_not_hidden(tmp_path: Path) -> None:
    fault = FaultyStorage(LocalStorage(), "write", OSError(28, "No space left on device"))
    with pytest.raises(KeyError, match="mine") as caught:
        async with aiockpt.AsyncCheckpointer() as ckpt:
            ckpt.save(large_state(), tmp_path / "1", storage=fault)
            raise KeyError("mine")
    assert "No space left" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_prewarm_makes_the_pool(tmp_path: Path) -> None:
    state = large_state(16)
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        await ckpt.prewarm(state)
        made = ckpt.statistics().staging_bytes
        assert made >= 8 << 20
        await ckpt.save(state, tmp_path / "c")
        assert ckpt.statistics().staging_bytes == made
        assert_same(state, await ckpt.load(tmp_path / "c"))


def test_sync_facade(tmp_path: Path) -> None:
    state = training_state()
    with aiockpt.SyncCheckpointer() as ckpt:
        result = ckpt.save(state, tmp_path / "1", metadata={"step": 1})
        stage, write = ckpt.submit(state, tmp_path / "2")
        assert stage.result(timeout=60) is None
        assert write.result().nbytes == result.nbytes
        assert write.exception() is None
        assert_same(state, ckpt.load(tmp_path / "2"))
        ckpt.prewarm(state)
    ckpt.close()
    with pytest.raises(aiockpt.CheckpointerClosedError):
        ckpt.save(state, tmp_path / "3")


def test_options_are_checked() -> None:
    for options in (
        {"staging_bytes": 100},
        {"chunk_bytes": 0},
        {"io_threads": 0},
        {"io_threads": 2.5},
        {"drain_timeout": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            aiockpt.AsyncCheckpointer(**options)


def test_no_dependence_on_user_settings(tmp_path: Path) -> None:
    """Default dtype, default device and CRC options of the process change nothing."""
    state = training_state() | {"of a shape that no other test has": torch.rand(3, 1, 41, 43)}
    torch.serialization.set_crc32_options(False)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, tmp_path / "c")
            loaded = ckpt.load(tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(True)
        torch.set_default_dtype(torch.float32)
    assert_same(state, loaded)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam"])
async def test_steps_of_fused_optimizers_are_detected(name: str, tmp_path: Path) -> None:
    """Fused kernels change tensors without bumping their version counters."""
    layer = torch.nn.Linear(400, 400)
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1, fused=True)
    layer(torch.ones(400)).sum().backward()
    optimizer.step()
    storage = GatedStorage(LocalStorage(), ["write"])
    async with small_pool() as ckpt:
        state = {"a": torch.zeros(90_000), "m": layer.state_dict(), "o": optimizer.state_dict()}
        save = ckpt.save(state, tmp_path / "c", storage=storage)
        await storage.reached["write"]
        optimizer.step()
        storage.open("write")
        with pytest.raises(aiockpt.TornSnapshotError, match=r"m\.weight"):
            await save


@pytest.mark.asyncio
async def test_small_tensors_keep_the_shape_and_dtype_of_the_call(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    state = {"t": torch.arange(15.0).reshape(3, 5), "r": torch.arange(6), "d": torch.ones(4)}
    expected = clone(state)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        first = ckpt.save({"x": torch.ones(1)}, tmp_path / "0", storage=storage)
        save = ckpt.save(state, tmp_path / "c")
        state["t"].t_()
        state["r"].resize_(2)
        state["d"].data = torch.zeros(7, dtype=torch.int32)
        storage.open("commit")
        await first
        await save
        assert_same(expected, await ckpt.load(tmp_path / "c"))


@pytest.mark.asyncio
async def test_a_load_into_tensors_that_are_being_saved_is_detected(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    async with small_pool() as ckpt:
        await ckpt.save({"w": torch.ones(90_000)}, tmp_path / "old")
        state = {"a": torch.zeros(90_000), "w": torch.zeros(90_000)}
        save = ckpt.save(state, tmp_path / "c", storage=storage)
        await storage.reached["write"]
        await ckpt.load(tmp_path / "old", {"w": state["w"]})
        storage.open("write")
        with pytest.raises(aiockpt.TornSnapshotError, match="w changed"):
            await save


@pytest.mark.asyncio
async def test_freed_memory_is_refused(tmp_path: Path) -> None:
    small, large = torch.ones(10), torch.ones(90_000)
    async with small_pool() as ckpt:
        await ckpt.save({"w": large}, tmp_path / "good")
        storage = GatedStorage(LocalStorage(), ["write"])
        late = torch.ones(90_000)
        save = ckpt.save({"a": torch.zeros(90_000), "late": late}, tmp_path / "c", storage=storage)
        await storage.reached["write"]
        late.untyped_storage().resize_(0)
        storage.open("write")
        with pytest.raises(aiockpt.SaveError, match="late was freed"):
            await save
        for name, tensor in (("small", small), ("large", large)):
            tensor.untyped_storage().resize_(0)
            with pytest.raises(aiockpt.SaveError, match=f"{name} was freed"):
                ckpt.save({name: tensor}, tmp_path / "c")
        with pytest.raises(aiockpt.ShapeMismatchError, match="w in the target was freed"):
            await ckpt.load(tmp_path / "good", {"w": large})
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


@pytest.mark.asyncio
async def test_every_failure_is_raised_once(tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["write"])
    async with small_pool() as ckpt:
        first = ckpt.save(large_state(), tmp_path / "first", storage=gate)  # blocks the saves behind it
        handles = []
        for number in range(2):
            fault = FaultyStorage(LocalStorage(), "begin", OSError(5, f"fault {number}"))
            handles.append(ckpt.save(large_state(), tmp_path / str(number), storage=fault))
        gate.open("write")
        await first
        for handle in handles:
            async for _ in handle.progress():
                pass
        for number in range(2):
            with pytest.raises(aiockpt.WriteError, match=f"fault {number}"):
                ckpt.save({"x": 1}, tmp_path / "c")
        await ckpt.save({"x": 1}, tmp_path / "c")


@pytest.mark.asyncio
async def test_an_awaited_failure_is_not_raised_elsewhere(tmp_path: Path) -> None:
    """Even while the blocked loop has not resumed the waiter yet."""
    fault = FaultyStorage(LocalStorage(), "write", OSError(28, "No space left on device"))
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(large_state(), tmp_path / "1", storage=fault)

        async def watch() -> str:
            with pytest.raises(aiockpt.WriteError):
                await save
            return "raised"

        watcher = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        with save.written._condition:  # hold the loop until the save has failed
            assert save.written._condition.wait_for(save.written.done, 60)
        await ckpt.save({"x": 1}, tmp_path / "2")
        assert await watcher == "raised"


@pytest.mark.asyncio
async def test_a_large_pool_grows_only_as_far_as_a_state_needs(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(io_threads=2, chunk_bytes=CHUNK, staging_bytes=4096 * CHUNK) as ckpt:
        for number in range(3):
            await ckpt.save({"x": torch.ones(3)}, tmp_path / str(number))
        assert ckpt.statistics().staging_bytes == CHUNK


def test_odd_timeouts(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(drain_timeout=float("inf")) as ckpt:
        ckpt.save({"x": 1}, tmp_path / ("n" * 250))
    with pytest.raises(ValueError, match="drain_timeout"):
        aiockpt.SyncCheckpointer(drain_timeout=float("nan"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones([1] * 65), "k has 65 dimensions, and torch can't copy one of more than 64; reshape it"),
        (torch.ones(8, dtype=torch.int8).view(torch.qint8), "k has the dtype torch.qint8 but no scale"),
        (torch.ones(8, dtype=torch.int8).view(torch.quint4x2), "k has the dtype torch.quint4x2 but no scale"),
    ],
    ids=["dimensions", "qint8", "quint4x2"],
)
def test_tensors_that_could_not_be_loaded_are_refused(tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=message):
            ckpt.submit({"k": tensor}, tmp_path / "c")
        with pytest.raises(aiockpt.SaveError, match=message):
            ckpt.save({f"{n}": torch.ones(1) for n in range(30_000)} | {"k": tensor}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [[1] * 64, [2] * 12 + [1] * 52])
def test_the_maximum_number_of_dimensions(shape: list[int], tmp_path: Path) -> None:
    tensor = torch.rand(shape)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"k": tensor, "t": tensor.transpose(0, 5)}, tmp_path / "c")
        found, target = ckpt.load(tmp_path / "c"), {"t": torch.zeros(shape)}
        ckpt.load(tmp_path / "c", target)
    assert torch.equal(found["k"], tensor)
    assert torch.equal(target["t"], tensor.transpose(0, 5))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_values_that_share_bytes(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.rand(31), 0.1, 0, torch.quint4x2)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"k": tensor}, tmp_path / "c")
        assert torch.equal(ckpt.load(tmp_path / "c")["k"].dequantize(), tensor.dequantize())


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _local_tensor() -> torch.Tensor:
    module = pytest.importorskip("torch.distributed._local_tensor")
    return module.LocalTensor({0: torch.ones(3), 1: torch.ones(3)})


@dataclass
class Sharded:
    """A stand-in for Megatron's ShardedTensor: data, and the part of a tensor that it is."""

    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_nested, r"k is a nested tensor of the strided layout; make it one of layout=torch\.jagged"),
        (_fake, "k is a FakeTensor, which has no values"),
        (torch.nn.UninitializedParameter, "k is not initialised: run a batch through its lazy module"),
        (torch.nn.UninitializedBuffer, "k is not initialised: run a batch through its lazy module"),
        (lambda: torch._to_functional_tensor(torch.ones(3)), "k stands for a value within a function that torch"),
        (lambda: torch._to_functional_tensor(torch.ones(100_000)), "k stands for a value within a function that torch"),
        (lambda: FlatParameter(torch.ones(3)), "k is a .*Parameter, which stands for a part of a tensor"),
        (lambda: AsyncCollectiveTensor(torch.ones(3)), "k is a .*AsyncCollectiveTensor, which stands for a part"),
        (_local_tensor, "k is a .*LocalTensor, which stands for a part"),
        (lambda: Sharded(torch.ones(3), (6,), (3,)), "k is a .*Sharded, which stands for a part of a tensor"),
    ],
)
@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_stand_ins_are_refused(make: Callable[[], Any], message: str, validate: Any, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=message):
        ckpt.submit({"a": torch.ones(2), "k": make()}, tmp_path / "c", validate=validate)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_values_of_transformed_functions_are_refused(transform: Callable[..., Any], tmp_path: Path) -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        ckpt.submit({"k": value}, tmp_path / "c")
        return value.sum()

    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match="k stands for a value within"):
        transform(function)(torch.ones(3))


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_jagged_tensors(tmp_path: Path) -> None:
    tensor = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"k": tensor}, tmp_path / "c")
        found = ckpt.load(tmp_path / "c", trust=True)["k"]  # up to 2.15, torch does not list them as safe
    assert all(map(torch.equal, found.unbind(), tensor.unbind()))


@pytest.mark.asyncio
async def test_tensors_are_released_when_they_are_staged(tmp_path: Path) -> None:
    array = np.arange(100_000)
    memory = weakref.ref(array)
    storage = GatedStorage(LocalStorage(), ["write"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save({"w": torch.from_numpy(array)}, tmp_path / "c", storage=storage)
        del array
        await save.staged
        await storage.reached["write"]
        gc.collect()
        kept = memory()
        storage.open("write")
        await save.written
    assert kept is None


def test_a_save_that_is_prepared_meanwhile_changes_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Both have one layout, so what they have in common is made once."""
    weights = torch.randn(4000)
    states = [{"w": weights, "o": "s" * (50 * n + 1), "z": "q" * (100 * n + 3)} for n in range(3)]
    gates = [GatedStorage(LocalStorage(), ["commit"]) for _ in states]
    with aiockpt.SyncCheckpointer(max_in_flight=3) as ckpt:
        ckpt.save(states[2], tmp_path / "warm")
        saves = []
        for number, (state, gate) in enumerate(zip(states, gates, strict=True)):
            saves.append(ckpt.submit(state, tmp_path / f"{number}", storage=gate))
            saves[-1].staged.result(60)
        for gate in gates:
            gate.open("commit")
        for save in saves:
            save.written.result(60)
    for number, state in enumerate(states):
        (tmp_path / f"{number}" / ".aiockpt.json").unlink()  # so that `.metadata` is read
        assert_same(state, aiockpt.load(tmp_path / f"{number}"))


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_document_that_would_be_too_large_to_be_read_is_refused(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.writing.commit.DOCUMENT_BYTES", 300)  # really 2 GiB
    with (
        aiockpt.SyncCheckpointer(process_group=None) as ckpt,
        pytest.raises(aiockpt.SaveError, match=r"would have \d+ bytes.*save fewer keys"),
    ):
        ckpt.save({"w": torch.ones(2)}, tmp_path / "c", format=format)
    assert not any(tmp_path.iterdir())
