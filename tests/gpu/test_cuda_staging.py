"""Staging from a CUDA device: pinned chunks, little device memory, and no blocking of loops and other streams."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.staging.pool import Chunk
from aiockpt.staging.runtime import ALREADY_LOCKED, CudaRuntime, allow_captures
from tests.states import assert_same, random_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

CHUNK = 4 << 20


def _state(mib: int = 32) -> dict[str, torch.Tensor]:
    """Return large, strided, and gathered tensors; none of them is copied at the call."""
    half = mib << 17
    return {
        "large": torch.arange(half, device="cuda", dtype=torch.float32),
        "strided": torch.arange(4 * half, device="cuda", dtype=torch.int32).to(torch.int16).view(-1, 4)[:, ::2],
        "transposed": torch.arange(half, device="cuda", dtype=torch.int32).view(1024, -1).t()[1:],
        **{f"w{i}": torch.full((30_000 + i,), i, device="cuda", dtype=torch.float32) for i in range(100)},
    }


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def _cycles(seconds: float) -> int:
    return int(seconds * 2e9)


def test_chunks_are_pinned_and_fit_for_direct_writes(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=4 * CHUNK) as ckpt:
        ckpt.save(_state(), tmp_path / "c")
        (stager,) = (each for device, each in ckpt._engine.tools.stagers.items() if device.type == "cuda")
        chunks = list(stager._locked.values())
        assert 1 <= len(chunks) <= 4
        assert all(chunk.tensor.is_pinned() and chunk.address % 4096 == 0 for chunk in chunks)
        try:
            file = os.open(tmp_path / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        except OSError as exc:
            assert exc.errno == errno.EINVAL
            pytest.skip("this file system has no direct I/O")
        try:
            chunks[0].tensor.copy_(random_tensor(torch.uint8, (CHUNK,), 5))
            assert os.pwrite(file, chunks[0].view, 0) == CHUNK
        finally:
            os.close(file)
        assert (tmp_path / "direct").read_bytes() == bytes(chunks[0].view)
    assert not any(chunk.tensor.is_pinned() for chunk in chunks)


def _pin_twice() -> None:
    runtime, chunk = CudaRuntime(torch.device("cuda", 0)), Chunk(1 << 20)
    runtime.enter()
    assert runtime.lock(chunk.address, 1 << 20) == 0
    try:
        assert runtime.lock(chunk.address, 1 << 20) == ALREADY_LOCKED
        assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]
    finally:
        runtime.unlock(chunk.address)
        runtime.close()


def test_a_refused_pin_leaves_no_cuda_error_behind() -> None:
    with ThreadPoolExecutor(1) as pool:  # a thread of its own: enter() changes its capture mode for good
        pool.submit(_pin_twice).result()


def test_streams_are_not_shared_with_torch() -> None:
    with ThreadPoolExecutor(1) as pool:
        if not pool.submit(allow_captures).result():
            pytest.skip("this driver allows no streams outside torch's pool")
    device = torch.device("cuda", 0)
    runtimes = [CudaRuntime(device) for _ in range(3)]
    ours = {runtime._stream.cuda_stream for runtime in runtimes}
    assert len(ours) == 3
    assert not ours & {torch.cuda.Stream(device).cuda_stream for _ in range(100)}
    for runtime in runtimes:
        runtime.close()
    again = CudaRuntime(device)
    assert again._stream.cuda_stream in ours
    again.close()


def test_pickled_tensors_are_read_after_the_callers_stream(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with aiockpt.SyncCheckpointer() as ckpt:
        values = torch.zeros(2000, device="cuda")
        indices = torch.arange(2000, device="cuda").expand(2, -1).contiguous()
        sparse = torch.sparse_coo_tensor(indices, values, (2000, 2000), is_coalesced=True, check_invariants=False)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_cycles(0.5))
            sparse._values().fill_(3)
            save = ckpt.submit({"sparse": sparse, "w": torch.ones(300_000, device="cuda")}, tmp_path / "c")
        save.written.result(60)
        loaded = ckpt.load(tmp_path / "c")["sparse"]
        assert (loaded._values() == 3).all()
        stream.synchronize()


def test_saving_takes_little_device_memory(tmp_path: Path) -> None:
    state = _state(64)
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        for name in "ab":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ckpt.save(state, tmp_path / name)
            assert torch.cuda.max_memory_allocated() - before <= 3 * CHUNK
            gc.collect()
            assert torch.cuda.memory_allocated() == before
        assert_same(_on_host(state), ckpt.load(tmp_path / "b"))


def test_a_full_device_can_still_be_saved(tmp_path: Path) -> None:
    """No new segment of 20 MiB can be allocated, so what needs more than 1 MiB is copied in parts or by piece."""
    state = _state() | {f"s{i}": torch.full((1000,), i, device="cuda") for i in range(1000)}
    expected = _on_host(state)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + (8 << 20)
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, tmp_path / "c")
            assert_same(expected, ckpt.load(tmp_path / "c"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_small_tensors_of_host_and_device_lie_side_by_side(tmp_path: Path) -> None:
    """As in optimizer state: pieces gathered on the device must not overwrite the host's tensors."""
    state = {}
    for i in range(400):
        state[f"{i:03}.exp_avg"] = torch.full((i + 1,), i + 0.5, device="cuda")
        state[f"{i:03}.step"] = torch.tensor(float(i))
        state[f"{i:03}.exp_avg_sq"] = torch.full((25_000,), -i - 0.5, device="cuda")
        state[f"{i:03}.z"] = torch.full((20_000,), i)
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        for name in "ab":
            ckpt.save(state, tmp_path / name)
            assert_same(_on_host(state), ckpt.load(tmp_path / name))


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_copies_wait(tmp_path: Path) -> None:
    state = _state()
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        await ckpt.prewarm(state)
        torch.cuda._sleep(_cycles(1.0))
        state["large"].add_(1)
        save = ckpt.save(state, tmp_path / "c")
        ticks = 0
        while not save.staged.done():
            ticks += 1
            await asyncio.sleep(0)
        assert ticks > 100
        await save
        assert_same(_on_host(state), await ckpt.load(tmp_path / "c"))


def test_each_save_follows_the_stream_that_it_was_called_in(tmp_path: Path) -> None:
    tensors = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        saves = []
        for i, tensor in enumerate(tensors):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_cycles(0.2))
                tensor.fill_(i + 1)
                saves.append(ckpt.submit({"w": tensor}, tmp_path / str(i)))
                saves[-1].fence()
                tensor.fill_(-1)  # ordered after the copies
        for i, save in enumerate(saves):
            save.written.result(60)
            assert (ckpt.load(save.path)["w"] == i + 1).all()
    torch.cuda.synchronize()  # the tensors are freed in another stream than they were changed in


def test_a_graph_can_be_captured_while_chunks_are_pinned_and_filled(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        allowed_captures = pool.submit(allow_captures).result()
    if not allowed_captures:
        pytest.skip("this driver can't exempt a thread from captures")
    state = _state()
    expected = _on_host(state)
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    begun = threading.Event()
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        with pytest.raises(aiockpt.CheckpointNotFoundError):  # which starts the loop
            ckpt.load(tmp_path / "none")
        ckpt._engine.loop.post(lambda: begun.wait(60))
        save = ckpt.submit(state, tmp_path / "c")
        with torch.cuda.graph(graph):
            y = x + 1
            begun.set()
            save.staged.result(60)  # until now no chunk was pinned, no memory allocated, nothing copied
            y = y * 2
        save.written.result(60)
        graph.replay()
        assert (y == 2).all()
        assert_same(expected, ckpt.load(tmp_path / "c"))


@pytest.mark.parametrize("regrown", [False, True])
def test_memory_that_is_freed_under_its_tensors_is_no_checkpoint(regrown: bool, tmp_path: Path) -> None:
    """The copies go on reading the old memory, which no kernel gets before they are done."""
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        kept, freed = (torch.ones(64 << 20, device="cuda") for _ in range(2))
        ckpt.prewarm({"kept": kept, "freed": freed})
        torch.cuda._sleep(_cycles(0.5))
        save = ckpt.submit({"kept": kept, "freed": freed}, tmp_path / "c")
        assert save._job.consistency.issued.wait(60)
        freed.untyped_storage().resize_(0)
        others = [torch.zeros(64 << 20, device="cuda") for _ in range(2)]
        if regrown:
            freed.untyped_storage().resize_(256 << 20)
        with pytest.raises(aiockpt.TornSnapshotError, match=r"^freed changed"):
            save.written.result(120)
        assert not others[0].any()


@pytest.mark.parametrize("how", ["save", "load", "read"])
def test_nothing_is_done_in_a_stream_that_captures_a_graph(how: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20, device="cuda")}
    graph = torch.cuda.CUDAGraph()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        with ckpt.open(tmp_path / "c") as reader, torch.cuda.graph(graph):
            state["w"].add_(1)
            if how == "save":
                with pytest.raises(aiockpt.SaveError, match="captures a graph"):
                    ckpt.submit(state, tmp_path / "d")
            elif how == "load":
                with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                    ckpt.load(tmp_path / "c", state)
            else:
                with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                    reader.read("w", out=state["w"])
        graph.replay()
        assert (state["w"] == 2).all()
