"""The fake device itself: what it must do so that the other tests mean something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from aiockpt.staging import runtime
from tests.fakecuda import device as fake

DEVICE = "cuda:0"


def test_it_is_cuda() -> None:
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name(1) == "Fake CUDA device 1"
    assert torch.ones(3, device="cuda:1").device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


def test_the_engine_finds_its_driver() -> None:
    assert isinstance(runtime._driver(), runtime._Cuda)


def test_host_code_can_not_access_its_memory() -> None:
    code = "import ctypes, torch; ctypes.string_at(torch.ones(3, device='cuda').data_ptr(), 1)"
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_kernels_run_when_the_stream_does() -> None:
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        tensor = torch.zeros(4, device=DEVICE)
        with fake.held(stream):
            tensor.add_(1)
            event = stream.record_event()
            assert not event.query()
            assert not stream.query()
        event.synchronize()
        assert tensor.tolist() == [1] * 4


def test_streams_have_no_order_but_by_events() -> None:
    one, other = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    tensor = torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    with fake.held(one):
        with torch.cuda.stream(one):
            tensor.fill_(1)
        with torch.cuda.stream(other):
            unordered = tensor.clone()
        other.synchronize()
        other.wait_stream(one)
        with torch.cuda.stream(other):
            ordered = tensor.clone()
    assert unordered.tolist() == [0] * 4
    other.synchronize()
    assert ordered.tolist() == [1] * 4


def test_the_default_stream_is_ordered_with_blocking_streams_only() -> None:
    """Torch's streams do not block, and the engine's must not."""
    tensor = torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    stream = runtime.take_stream(torch.device(DEVICE))
    try:
        for side in (stream, torch.cuda.Stream(DEVICE)):
            with fake.held(side):
                with torch.cuda.stream(side):
                    torch.ones(4, device=DEVICE)
                assert tensor.sum().item() == 0
    finally:
        runtime.give_stream_back(stream)


def test_an_event_is_that_of_its_last_record() -> None:
    one, other = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    event = one.record_event()
    other.wait_event(event)
    with fake.held(one):
        with torch.cuda.stream(one):
            torch.ones(1, device=DEVICE)
        event.record(one)
        other.synchronize()  # waits for the record that was there when it was told to
        assert not event.query()


def _read_late(*, recorded: bool) -> tuple[torch.Tensor, int, int]:
    """Free memory that another stream has yet to read; return what it reads, and the address before and after."""
    first = torch.ones(1000, dtype=torch.uint8, device=DEVICE)
    before = first.data_ptr()
    reader = torch.cuda.Stream(DEVICE)
    reader.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(reader):
        target = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    with fake.held(reader):
        with torch.cuda.stream(reader):
            target.copy_(first)
        if recorded:
            first.record_stream(reader)
        del first
        torch.cuda.current_stream(DEVICE).synchronize()
        other = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
        after = other.data_ptr()
    reader.synchronize()
    return target, before, after


def test_freed_memory_is_reused_at_once_and_overwritten() -> None:
    """By the next tensor of the same stream; without a tensor, too."""
    target, before, after = _read_late(recorded=False)
    assert before == after
    assert set(target.tolist()) == {fake.POISON}


def test_recorded_memory_is_freed_when_the_stream_is_past() -> None:
    target, before, after = _read_late(recorded=True)
    assert before != after
    assert set(target.tolist()) == {1}


def test_storages_are_resized() -> None:
    tensor = torch.arange(1000, device=DEVICE)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    tensor.untyped_storage().resize_(8000)
    torch.arange(1000, out=tensor)
    assert tensor.tolist() == list(range(1000))


def test_a_copy_to_locked_memory_does_not_block() -> None:
    host = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    source = torch.ones(4096, dtype=torch.uint8, device=DEVICE)
    with fake.held("to_host"):
        host.copy_(source, non_blocking=True)
        assert host.sum() == 0
    torch.cuda.synchronize()
    assert host.sum() == 4096


def test_memory_is_locked_once() -> None:
    device = runtime.CudaRuntime(torch.device(DEVICE))
    host = torch.zeros(8192, dtype=torch.uint8)
    address = (host.data_ptr() + 4095) // 4096 * 4096
    try:
        assert device.lock(address, 4096) == 0
        assert device.lock(address, 4096) == fake.ALREADY_LOCKED
        device.unlock(address)
    finally:
        device.close()


def test_memory_that_is_unlocked_too_early_is_noticed() -> None:
    device = runtime.CudaRuntime(torch.device(DEVICE))
    host = torch.zeros(4096, dtype=torch.uint8)
    source = torch.ones(4096, dtype=torch.uint8, device=DEVICE)
    try:
        assert device.lock(host.data_ptr(), 4096) == 0
        with fake.held("to_host"):
            host.copy_(source, non_blocking=True)
            device.unlock(host.data_ptr())
        torch.cuda.synchronize()
    finally:
        device.close()
    assert fake.misuses() == ["host memory was unlocked while copies used it"]


def test_a_call_of_a_library_that_is_not_here_ends_the_process() -> None:
    """With its name: here the compiler of kernels."""
    code = (
        "import torch; f = torch.cuda.jiterator._create_jit_fn('template <typename T> T f(T x) { return x; }');"
        "f(torch.ones(3, device='cuda'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT
    assert "fakecuda: there is no nvrtc" in ended.stderr


def test_faults() -> None:
    fake.refuse("tensor", fake.OUT_OF_MEMORY, after=1)
    torch.empty(8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8, device=DEVICE)
    fake.refuse("tensor", 0)
    tensor = torch.ones(8, device=DEVICE)
    torch.cuda.synchronize()
    fake.fail_task("kernel")
    tensor.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            tensor.cpu()
    fake.reset()
    assert tensor.tolist() == [1] * 8


def test_calls_are_refused_and_counted() -> None:
    torch.cuda.empty_cache()
    fake.refuse("cudaMalloc", fake.OUT_OF_MEMORY, count=2)  # torch tries once more
    before = fake.calls()["cudaMalloc"]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 << 20, device=DEVICE)
    assert fake.calls()["cudaMalloc"] == before + 2
    assert torch.empty(64 << 20, device=DEVICE).numel()


def test_a_capture_runs_when_it_is_replayed() -> None:
    tensor = torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    assert tensor.tolist() == [0] * 4
    graph.replay()
    graph.replay()
    assert tensor.tolist() == [2] * 4


def test_what_is_unsafe_during_a_capture_spoils_it() -> None:
    tensor = torch.zeros(4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"previous error during capture|not permitted when stream is capturing"):
        _capture_item(tensor)
    assert tensor.tolist() == [0] * 4


def _capture_item(tensor: torch.Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.sum().item()


def test_a_forked_child_can_not_use_the_device() -> None:
    child = os.fork()
    if not child:
        try:
            torch.ones(1, device=DEVICE)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_results_of_every_kind() -> None:
    """Of kernels with results in place, of known shapes, of shapes that depend on values, and in host memory."""
    numbers = torch.arange(12, device=DEVICE)
    assert numbers.tolist() == list(range(12))
    assert torch.take(numbers, torch.tensor([3, 5], device=DEVICE)).tolist() == [3, 5]
    assert numbers.nonzero().shape == (11, 1)
    assert numbers.equal(numbers.clone())
    assert torch.cat([numbers, numbers]).sum().item() == 132
    complex_ = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE).conj()
    assert complex_.tolist() == [1 - 2j, 3 + 1j]
    assert torch.ones(3, device=DEVICE).to("cuda:1").device == torch.device("cuda", 1)
