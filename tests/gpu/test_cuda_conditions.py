"""Saves under conditions of their own: other allocators, broken contexts, shards, shared memory, very large tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aiockpt
from tests.ranks.world import World
from tests.states import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

CHUNK = 1 << 20
LIMIT_S = 120.0


def _run(program: str, *arguments: object, **variables: str) -> None:
    """Run a program in a process of its own, because it sets up or breaks CUDA for the whole process."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr


STEPS_BEHIND_FENCES = """
import sys, torch, aiockpt
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept, saves = [], []
with aiockpt.SyncCheckpointer(chunk_bytes=1 << 20) as ckpt, ckpt.guard(optimizer):
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(64, 600, device="cuda")).square().mean().backward()
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        kept.append({name: value.clone() for name, value in state["model"].items()})
        saves.append(ckpt.submit(state, f"{sys.argv[1]}/{step}"))
        optimizer.step()
        del state
        torch.cuda.empty_cache()
    for step, expected in enumerate(kept):
        saves[step].written.result(60)
        loaded = ckpt.load(f"{sys.argv[1]}/{step}", map_location="cuda")["model"]
        assert all(torch.equal(loaded[name], value) for name, value in expected.items()), step
"""


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_steps_behind_copies_with_another_allocator(allocator: str, tmp_path: Path) -> None:
    _run(STEPS_BEHIND_FENCES, tmp_path, PYTORCH_CUDA_ALLOC_CONF=allocator)


BROKEN_CONTEXT = """
import sys, torch, aiockpt
state = {f"w{i}": torch.ones(600, 600, device="cuda") for i in range(4)}
with aiockpt.SyncCheckpointer() as ckpt:
    ckpt.save(state, sys.argv[1] + "/whole")
    torch.ones(3, device="cuda")[torch.tensor([5], device="cuda")]  # an assertion on the device, for good
    try:
        ckpt.save(state, sys.argv[1] + "/lost")
    except aiockpt.SaveError as error:
        assert "device-side assert" in str(error), error
    else:
        raise AssertionError("a save from a broken device succeeded")
    host = {"step": 3, "host": torch.arange(300_000)}
    ckpt.save(host, sys.argv[1] + "/host")  # what needs no device can still be saved
"""


def test_an_error_that_breaks_the_context_fails_the_save(tmp_path: Path) -> None:
    _run(BROKEN_CONTEXT, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host", "whole"]
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same({f"w{i}": torch.ones(600, 600) for i in range(4)}, ckpt.load(tmp_path / "whole"))
        assert ckpt.load(tmp_path / "host")["step"] == 3


def test_a_writer_process_maps_memory_that_this_one_has_pinned(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(500, 700 + i, device="cuda") for i in range(8)}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    with aiockpt.SyncCheckpointer(writer="process", chunk_bytes=CHUNK) as ckpt:
        save = ckpt.submit(state, tmp_path / "c")
        save.fence()
        for tensor in state.values():
            tensor.zero_()
        save.written.result(LIMIT_S)
        (stager,) = (each for device, each in ckpt._engine.tools.stagers.items() if device.type == "cuda")
        assert stager._locked
        assert all(chunk.tensor.is_pinned() for chunk in stager._locked.values())
        assert_same(expected, ckpt.load(tmp_path / "c"))


def test_a_tensor_above_4_gib(tmp_path: Path) -> None:
    """Its offsets need more than 32 bits."""
    nbytes, period = (4 << 30) + 12_345, 251  # a prime: what lies 2**32 bytes apart differs
    large = torch.arange(period, device="cuda", dtype=torch.uint8).repeat(nbytes // period + 1)[:nbytes].clone()
    with aiockpt.SyncCheckpointer(staging_bytes=256 << 20) as ckpt:
        ckpt.save({"large": large}, tmp_path / "c")
        target = torch.zeros_like(large)
        ckpt.load(tmp_path / "c", {"large": target})
        assert torch.equal(target, large)
        with ckpt.open(tmp_path / "c") as reader:
            assert torch.equal(reader.read("large", slice((4 << 30) + 5, None)), large[(4 << 30) + 5 :].cpu())


def test_the_call_synchronises_nothing(tmp_path: Path) -> None:
    """With 10,000 small tensors, and Adam's numbers of steps on the device."""
    parameters = [torch.nn.Parameter(torch.full((i % 50 + 1,), float(i), device="cuda")) for i in range(2500)]
    optimizer = torch.optim.Adam(parameters, capturable=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"w": dict(enumerate(parameters)), "optim": optimizer}
    expected = {number: parameter.detach().cpu() for number, parameter in enumerate(parameters)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "warm")
        torch.cuda._sleep(500_000_000)
        torch.cuda.set_sync_debug_mode("error")
        try:
            save = ckpt.submit(state, tmp_path / "c")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()  # small tensors were copied at the call
        save.written.result(LIMIT_S)
        loaded = ckpt.load(tmp_path / "c")
        assert_same(expected, loaded["w"])
        assert all(entry["step"] == 1 for entry in loaded["optim"]["state"].values())


def test_the_first_fence_without_prewarm(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(16)}
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(state, tmp_path / "c")
        save.fence()
        for tensor in state.values():
            tensor.fill_(-1)
        save.written.result(LIMIT_S)
        assert all(bool((tensor == int(name[1:])).all()) for name, tensor in ckpt.load(tmp_path / "c").items())


# --- FSDP2 ----------------------------------------------------------------------------------------


def _sharded(rank: int, world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and an optimizer that has made a step; no collective of a device is needed."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 301) for _ in range(3)]).cuda()
    fully_shard(model, mesh=DeviceMesh("cuda", torch.arange(world_size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _local(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.to_local().cpu().clone() for name, value in model.state_dict().items()}


def _train_and_save(rank: int, world_size: int, path: Path) -> None:
    model, optimizer = _sharded(rank, world_size)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.guard(optimizer):
        save = ckpt.submit({"model": model, "optim": optimizer}, path)
        _step(model, optimizer)  # ordered behind the copies
        save.written.result(LIMIT_S)


def _resume(rank: int, world_size: int, path: Path) -> bool:
    expected, expected_optimizer = _sharded(rank, world_size)
    model, optimizer = _sharded(rank, world_size)
    _step(model, optimizer)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"model": model, "optim": optimizer})
    moments = [
        torch.equal(mine["exp_avg"].to_local(), theirs["exp_avg"].to_local())
        for mine, theirs in zip(optimizer.state.values(), expected_optimizer.state.values(), strict=True)
    ]
    found, wanted = _local(model), _local(expected)
    return len(moments) == 6 and all(moments) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("resumes", [1, 2])
def test_fsdp2_of_two_ranks_resumes_on(resumes: int, tmp_path: Path) -> None:
    with World(2) as world:
        world.results(_train_and_save, tmp_path / "c")
    with World(resumes) as world:
        assert world.results(_resume, tmp_path / "c") == [True] * resumes
