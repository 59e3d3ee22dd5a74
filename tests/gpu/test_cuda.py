"""Saves from a real device: the values that the caller's stream had computed at `save()`, and nothing later."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aiockpt
from tests.fakecuda import device as fake
from tests.states import assert_same, raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer(chunk_bytes=1 << 20, staging_bytes=64 << 20) as checkpointer:
        yield checkpointer


def _state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    return {
        "large": make(3000, 1001),
        "half": make(700, 999, dtype=torch.bfloat16),
        "transposed": make(800, 900).t(),
        "strided": make(1000, 1000)[::3, 5:700],
        "fp8": make(100_000, dtype=torch.float8_e4m3fn),
        "scalar": make(),
        "empty": make(0, 4),
        "on_host": torch.arange(300_000),
        **{f"small{i}": make(i + 1, 3) for i in range(200)},
    }


def test_round_trip(ckpt, tmp_path: Path) -> None:
    state = _state()
    for name in ("first", "second"):
        ckpt.save(state, tmp_path / name)
        assert_same({k: v.cpu() for k, v in state.items()}, ckpt.load(tmp_path / name))
    target = {name: torch.zeros_like(tensor.float()).to(tensor.dtype) for name, tensor in state.items()}
    ckpt.load(tmp_path / "first", target)
    for name, tensor in state.items():
        assert target[name].device == tensor.device
        assert raw_bytes(target[name]) == raw_bytes(tensor), name
    loaded = ckpt.load(tmp_path / "first", map_location="cuda")
    assert all(tensor.is_cuda for tensor in loaded.values())


def test_the_copy_waits_for_the_callers_stream(ckpt, tmp_path: Path) -> None:
    """Long work is enqueued before the save; the copy must see its result."""
    size = 512 if fake.is_here() else 4096
    a = torch.randn(size, size, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = torch.zeros_like(a)
        for _ in range(50):
            result = result * 0.5 + a @ a * 1e-3
        save = ckpt.submit({"result": result}, tmp_path / "c")
    save.written.result(timeout=120)
    stream.synchronize()
    assert raw_bytes(ckpt.load(tmp_path / "c")["result"]) == raw_bytes(result)


def test_changes_after_staged_or_after_the_fence_do_not_show(ckpt, tmp_path: Path) -> None:
    for use_fence in (False, True):
        state = _state(seed=int(use_fence))
        expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
        save = ckpt.submit(state, tmp_path / f"c{use_fence}")
        if use_fence:
            save.fence(timeout=60)
        else:
            save.staged.result(timeout=60)
        for tensor in state.values():
            tensor.zero_()
        save.written.result(timeout=60)
        assert_same(expected, ckpt.load(tmp_path / f"c{use_fence}"))


def test_small_tensors_may_change_right_after_the_call(ckpt, tmp_path: Path) -> None:
    state = {f"stat{i}": torch.full((100,), float(i), device="cuda") for i in range(50)}
    save = ckpt.submit(state, tmp_path / "c")
    for tensor in state.values():
        tensor.add_(1000)
    save.written.result(timeout=60)
    loaded = ckpt.load(tmp_path / "c")
    assert all(bool((loaded[f"stat{i}"] == i).all()) for i in range(50))


@pytest.mark.unordered
def test_a_change_before_staged_is_detected(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1000, 1000, device="cuda") for i in range(8)}
    with aiockpt.SyncCheckpointer(chunk_bytes=1 << 16, staging_bytes=1 << 16) as ckpt:
        save = ckpt.submit(state, tmp_path / "c")
        state["w7"].mul_(2)
        with pytest.raises(aiockpt.TornSnapshotError, match="w7"):
            save.written.result(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_device_memory_is_freed(tmp_path: Path) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    state = {"w": torch.randn(4000, 1000, device="cuda"), "s": torch.ones(3, device="cuda")}
    own = torch.cuda.memory_allocated()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        gc.collect()
        assert torch.cuda.memory_allocated() == own
    del state
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_several_devices(ckpt, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    state = {f"w{i}": torch.randn(500, 500, device=f"cuda:{i}") for i in range(2)}
    ckpt.save(state, tmp_path / "c")
    assert_same({k: v.cpu() for k, v in state.items()}, ckpt.load(tmp_path / "c"))


LONE_CONTEXT = """
import sys, torch, aiockpt
if sys.argv[2] == "current":
    torch.cuda.set_device(1)
state = {"w": torch.randn(600, 1000, device="cuda:1"), "t": torch.randn(600, 1000, device="cuda:1")[:, ::2]}
state |= {f"s{i}": torch.ones(i, device="cuda:1") for i in range(9)}
with aiockpt.SyncCheckpointer() as ckpt:
    save = ckpt.submit(state, sys.argv[1])
    ckpt.fence()
    save.written.result()
    ckpt.load(sys.argv[1], {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    ckpt.load(sys.argv[1], map_location="cuda:1")
sys.exit(int(torch._C._cuda_hasPrimaryContext(0)))
"""


@pytest.mark.parametrize("how", ["current", "never current"])
def test_no_context_on_an_unused_device(how, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-c", LONE_CONTEXT, str(tmp_path / "c"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
