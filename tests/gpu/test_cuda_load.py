"""Loading to a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aiockpt
from tests.states import assert_same, large_state, random_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def _state() -> dict[str, torch.Tensor]:
    return large_state(6, kib=9000) | {
        "t": random_tensor(torch.float32, (1600, 1500), 3).t(),
        "small": random_tensor(torch.int16, (30, 7), 4),
        "tied": random_tensor(torch.bfloat16, (900, 800), 5),
        "scalar": torch.tensor(5.0),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(_state(), tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("staging_bytes", [None, 1 << 20])
def test_new_tensors_on_the_device(staging_bytes, saved: Path) -> None:
    with aiockpt.SyncCheckpointer(staging_bytes=staging_bytes) as ckpt:
        for where in ("cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}):
            loaded = ckpt.load(saved, map_location=where)
            assert all(tensor.device == torch.device("cuda", 0) for tensor in loaded.values())
            assert_same(_state(), {name: tensor.cpu() for name, tensor in loaded.items()})


def test_into_tensors_on_the_device(saved: Path) -> None:
    state = _state()
    with aiockpt.SyncCheckpointer() as ckpt:
        target = {name: torch.zeros_like(value, device="cuda") for name, value in state.items()}
        target["t"] = torch.zeros(1600, 3000, device="cuda")[:, ::2].t()
        target["small"] = torch.zeros(30, 7, dtype=torch.int16)  # one on the host as well
        ckpt.load(saved, target)
        assert_same(state, {name: tensor.cpu() for name, tensor in target.items()})
        cast = {"t": torch.zeros(1500, 1600, dtype=torch.float64, device="cuda")}
        ckpt.load(saved, cast, dtype=torch.float64)
        assert torch.equal(cast["t"].cpu().nan_to_num(), state["t"].double().nan_to_num())


def test_parts_to_the_device(saved: Path) -> None:
    state = _state()
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(saved) as reader:
        part = reader.read("t", (slice(100, 300), slice(7, 900, 3)), device="cuda")
        assert part.device.type == "cuda"
        assert torch.equal(part.cpu().view(torch.int32), state["t"][100:300, 7:900:3].view(torch.int32))
        for key, tensor in reader.stream(device="cuda"):
            assert_same(state[key], tensor.cpu())


def test_work_on_the_targets_comes_before_the_load(saved: Path) -> None:
    """Work on a target in the caller's stream ends before the target is filled."""
    state = _state()
    stream = torch.cuda.Stream()
    with aiockpt.SyncCheckpointer() as ckpt, torch.cuda.stream(stream):
        ckpt.load(saved, {"w0": torch.zeros_like(state["w0"], device="cuda")})
        target = torch.zeros_like(state["w0"], device="cuda")
        torch.cuda._sleep(300_000_000)
        before = target.clone()
        target.fill_(-1)
        ckpt.load(saved, {"w0": target})
        torch.cuda.synchronize()
        assert not before.any()
        assert torch.equal(target.cpu(), state["w0"])
        with ckpt.open(saved) as reader:
            torch.cuda._sleep(300_000_000)
            target.fill_(-1)
            reader.read("w0", out=target)
            torch.cuda.synchronize()
        assert torch.equal(target.cpu(), state["w0"])


def test_loaded_tensors_belong_to_the_stream_of_the_call(saved: Path) -> None:
    """Memory that is freed while a side stream still reads it is reused by that stream only."""
    state, stream = _state(), torch.cuda.Stream()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(saved, map_location="cuda")
        with torch.cuda.stream(stream):
            loaded = ckpt.load(saved, map_location="cuda")
            torch.cuda._sleep(300_000_000)
            copies = {name: tensor.clone() for name, tensor in loaded.items()}
            del loaded
        others = [torch.full_like(copy, -1) for copy in copies.values()]  # in another stream, at once
        stream.synchronize()
        assert_same(state, {name: copy.cpu() for name, copy in copies.items()})
        assert len(others) == len(copies)
        with ckpt.open(saved) as reader, torch.cuda.stream(stream):
            part = reader.read("w0", device="cuda")
            torch.cuda._sleep(300_000_000)
            copy = part.clone()
            del part
        torch.full_like(copy, -1)
        stream.synchronize()
        assert_same(state["w0"], copy.cpu())


def test_host_memory_is_bounded_by_the_pool(saved: Path) -> None:
    with aiockpt.SyncCheckpointer(staging_bytes=8 << 20, chunk_bytes=1 << 20) as ckpt:
        ckpt.load(saved, map_location="cuda")
        assert ckpt._engine.tools.pool.made <= 8
        assert ckpt._engine.tools.pool.leased == 0


def test_loading_takes_little_device_memory_beyond_the_state(tmp_path: Path) -> None:
    state = {f"w{i}": random_tensor(torch.float32, (2000, 1000 + i), i) for i in range(12)}
    chunk = 1 << 20
    with aiockpt.SyncCheckpointer(chunk_bytes=chunk) as ckpt:
        ckpt.save(state, tmp_path / "c")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loaded = ckpt.load(tmp_path / "c", map_location="cuda")
        own = torch.cuda.memory_allocated() - before
        assert torch.cuda.max_memory_allocated() - before <= own + 8 * chunk
        assert_same(state, {name: tensor.cpu() for name, tensor in loaded.items()})
        # Strided targets and casts need extra memory of the size of a chunk.
        target = {name: torch.zeros(1000 + i, 2000, device="cuda").t() for i, name in enumerate(state)}
        cast = {name: torch.zeros(2000, 1000 + i, dtype=torch.float64, device="cuda") for i, name in enumerate(state)}
        for goal, options in ((target, {}), (cast, {"dtype": torch.float64})):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            ckpt.load(tmp_path / "c", goal, **options)
            assert torch.cuda.max_memory_allocated() - before <= 16 * chunk
        assert_same(state, {name: tensor.cpu() for name, tensor in target.items()})
        assert all(torch.equal(cast[name].cpu().nan_to_num(), state[name].double().nan_to_num()) for name in state)
