"""The simulated device itself: what it must do so that the other tests mean something."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tests.sim import device as sim

DEVICE = "sim:0"
POISON = 0xDB


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.ones(3, device="sim:1").device == torch.device("sim", 1)
    assert torch.accelerator.current_device_index() == 0


def test_host_code_can_not_access_its_memory() -> None:
    code = (
        "import ctypes, torch; from tests.sim import device; device.extension();"
        "ctypes.string_at(torch.ones(3, device='sim').data_ptr(), 1)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_kernels_run_when_the_stream_does() -> None:
    stream = torch.Stream(DEVICE)
    with stream:
        tensor = torch.zeros(4, device=DEVICE)
        with sim.held(stream):
            tensor.add_(1)
            event = stream.record_event()
            assert not event.query()
            assert not stream.query()
        event.synchronize()
        assert tensor.tolist() == [1] * 4


def test_streams_have_no_order_but_by_events() -> None:
    one, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    tensor = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    with sim.held(one):
        with one:
            tensor.fill_(1)
        with other:
            unordered = tensor.clone()
        other.synchronize()
        other.wait_stream(one)
        with other:
            ordered = tensor.clone()
    assert unordered.tolist() == [0] * 4
    with other:
        assert ordered.tolist() == [1] * 4


def test_an_event_is_that_of_its_last_record() -> None:
    one, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    event = one.record_event()
    other.wait_event(event)
    with sim.held(one):
        with one:
            torch.zeros(1, device=DEVICE)
            torch.ones(1, device=DEVICE)
        event.record(one)
        other.synchronize()  # waits for the record that was there when it was told to
        assert not event.query()


def test_freed_memory_is_reused_at_once_and_overwritten() -> None:
    """By the next tensor of the same stream; another stream gets other memory."""
    first = torch.ones(1000, dtype=torch.uint8, device=DEVICE)
    address = first.data_ptr()
    reader = torch.Stream(DEVICE)
    reader.wait_stream(torch.accelerator.current_stream(DEVICE))
    target = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    with sim.held(reader):
        with reader:
            target.copy_(first)  # without record_stream
        del first
        torch.accelerator.current_stream(DEVICE).synchronize()
        with torch.Stream(DEVICE):
            assert torch.empty(1000, dtype=torch.uint8, device=DEVICE).data_ptr() != address
        assert torch.empty(1000, dtype=torch.uint8, device=DEVICE).data_ptr() == address
    reader.synchronize()
    assert set(target.tolist()) == {POISON}


def test_recorded_memory_is_freed_when_the_stream_is_past() -> None:
    first = torch.ones(1000, dtype=torch.uint8, device=DEVICE)
    address = first.data_ptr()
    reader = torch.Stream(DEVICE)
    reader.wait_stream(torch.accelerator.current_stream(DEVICE))
    target = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    deferred = sim.statistics()["deferred"]
    with sim.held(reader):
        with reader:
            target.copy_(first)
        first.record_stream(reader)
        del first
        assert sim.statistics()["deferred"] == deferred + 1
        other = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
        assert other.data_ptr() != address
    reader.synchronize()
    assert set(target.tolist()) == {1}
    assert torch.empty(1000, dtype=torch.uint8, device=DEVICE).data_ptr() == address


def test_storages_are_resized() -> None:
    tensor = torch.arange(1000, device=DEVICE)
    address = tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    tensor.untyped_storage().resize_(8000)
    assert tensor.data_ptr() == address
    torch.arange(1000, out=tensor)
    assert tensor.tolist() == list(range(1000))


def test_a_locked_copy_does_not_block() -> None:
    host = torch.zeros(4096, dtype=torch.uint8)
    assert sim.extension().register_host(host.data_ptr(), 4096) == 0
    assert sim.extension().register_host(host.data_ptr(), 4096) == 712
    try:
        source = torch.ones(4096, dtype=torch.uint8, device=DEVICE)
        with sim.held("to_host"):
            host.copy_(source, non_blocking=True)
            assert host.sum() == 0
        torch.accelerator.synchronize()
        assert host.sum() == 4096
    finally:
        assert sim.extension().unregister_host(host.data_ptr()) == 0


def test_memory_that_is_unlocked_too_early_is_noticed() -> None:
    host = torch.zeros(4096, dtype=torch.uint8)
    sim.extension().register_host(host.data_ptr(), 4096)
    source = torch.ones(4096, dtype=torch.uint8, device=DEVICE)
    with sim.held("to_host"):
        host.copy_(source, non_blocking=True)
        sim.extension().unregister_host(host.data_ptr())
    torch.accelerator.synchronize()
    assert sim.misuses() == ["host memory was unlocked while copies used it"]
    sim.reset()


def test_faults() -> None:
    sim.fail_allocations(2)
    torch.empty(8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8, device=DEVICE)
    tensor = torch.ones(8, device=DEVICE)
    torch.accelerator.synchronize()
    sim.fail_task("kernel")
    tensor.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            tensor.cpu()
    sim.reset()
    assert tensor.tolist() == [1] * 8


def test_a_capture_runs_when_it_is_replayed() -> None:
    stream = torch.Stream(DEVICE)
    tensor = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    graph = sim.Graph(stream)
    with graph.capture():
        assert stream.is_capturing()
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            tensor.sum().item()
    assert tensor.tolist() == [0] * 4
    graph.replay()
    graph.replay()
    assert tensor.tolist() == [2] * 4


def test_a_wait_for_an_event_of_a_capture_spoils_it() -> None:
    stream = torch.Stream(DEVICE)
    with pytest.raises(AssertionError, match="crosses the border"), sim.Graph(stream).capture():
        torch.Stream(DEVICE).wait_event(stream.record_event())


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
    assert torch.ones(3, device=DEVICE).to("sim:1").device == torch.device("sim", 1)
