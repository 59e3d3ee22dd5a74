"""The calls of the CUDA driver API, against a driver that records them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from aiockpt.staging import runtime
from aiockpt.staging.pool import Chunk
from aiockpt.staging.runtime import Copy


class FakeDriver:
    """A driver of one device; the calls named in ``failing`` return an error."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[str] = []
        self.mode = 0
        self.modes: list[int] = []

    def __getattr__(self, name: str):
        def call(*args) -> int:
            self.calls.append(name.removeprefix("cu"))
            if name == "cuDevicePrimaryCtxRetain":
                args[0]._obj.value = 0x70
            elif name == "cuStreamCreate":
                self.modes.append(self.mode)
                assert args[1] == 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
                args[0]._obj.value = 0x5000
            elif name == "cuThreadExchangeStreamCaptureMode":
                self.calls.pop()
                args[0]._obj.value, self.mode = self.mode, args[0]._obj.value
            return 999 if name in self.failing else 0

        return call


MADE = ["Init", "DeviceGet", "DevicePrimaryCtxRetain", "CtxPushCurrent_v2", "StreamCreate", "CtxPopCurrent_v2"]


@pytest.mark.parametrize(
    ("failing", "address", "calls"),
    [
        (None, 0x5000, MADE),
        ("cuInit", None, MADE[:1]),
        ("cuDeviceGet", None, MADE[:2]),
        ("cuDevicePrimaryCtxRetain", None, MADE[:3]),
        ("cuCtxPushCurrent_v2", None, MADE[:4]),
        ("cuStreamCreate", None, MADE),
    ],
)
def test_a_stream_is_made_or_nothing_is_left(failing, address, calls, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(*[failing] if failing else [])
    driver = runtime._Cuda(fake)
    monkeypatch.setattr(runtime, "_driver", lambda: driver)
    assert runtime._new_stream(0) == address
    assert fake.calls == calls
    assert fake.mode == 0  # the thread's own mode, restored
    assert set(fake.modes) <= {1}


def test_a_stream_has_one_user_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, address: int, device: int) -> None:
            self.address = address
            self.device = torch.device("cuda", device)

    addresses = iter(range(0x1000, 0x9000, 0x1000))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(runtime, "_new_stream", lambda index: next(addresses))
    monkeypatch.setattr(runtime, "_spare", runtime.defaultdict(list))
    first, second = (torch.device("cuda", index) for index in range(2))
    one, two = runtime.take_stream(first), runtime.take_stream(first)
    runtime.give_stream_back(one)
    assert runtime.take_stream(second).address == 0x3000
    assert runtime.take_stream(first) is one
    assert runtime.take_stream(first).address == 0x4000
    monkeypatch.setattr(runtime, "_new_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: f"one of torch's, on {index}")
    assert runtime.take_stream(first) == "one of torch's, on 0"
    runtime.give_stream_back("one of torch's")
    assert [two.address] == [0x2000]


def test_without_a_driver_there_is_no_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_driver", lambda: None)
    assert runtime._new_stream(0) is None
    assert not runtime.allow_captures()


def test_memory_is_locked_in_the_current_device_and_errors_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for failing, error in ((None, 0), ("cuMemHostRegister_v2", 999)):
        fake = FakeDriver(*[failing] if failing else [])
        driver = runtime._Cuda(fake)
        monkeypatch.setattr(runtime, "_driver", lambda driver=driver: driver)
        device = runtime.CudaRuntime.__new__(runtime.CudaRuntime)
        assert device.lock(4096, 4096) == error
        device.unlock(4096)
        pushed = ["CtxPushCurrent_v2", "MemHostRegister_v2", "CtxPopCurrent_v2"]
        assert fake.calls == [*MADE[:3], *pushed, pushed[0], "MemHostUnregister", pushed[2]]
    monkeypatch.setattr(runtime, "_driver", lambda: None)
    assert device.lock(4096, 4096) is None


def test_hip_has_calls_of_its_own_and_its_last_error_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Library:
        def __getattr__(self, name: str):
            def call(*args) -> int:
                calls.append(name)
                if name == "hipStreamCreateWithFlags":
                    args[0]._obj.value = 0x5000
                return 712 if name == "hipHostRegister" else 0

            return call

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = iter([OSError(), Library()])

    def load(name: str) -> Library:
        calls.append(name)
        library = next(found)
        if isinstance(library, OSError):
            raise library
        return library

    monkeypatch.setattr(runtime.ctypes, "CDLL", load)
    runtime._driver.cache_clear()
    try:
        assert runtime._new_stream(0) == 0x5000
        assert runtime.allow_captures()
        assert runtime.CudaRuntime.__new__(runtime.CudaRuntime).lock(4096, 4096) == runtime.ALREADY_LOCKED
    finally:
        runtime._driver.cache_clear()
    mode = "hipThreadExchangeStreamCaptureMode"
    loaded = ["libamdhip64.so", "libamdhip64.so.7"]
    assert calls == [*loaded, mode, "hipStreamCreateWithFlags", mode, mode, "hipHostRegister", "hipGetLastError"]


def test_copies_are_passed_in_one_call_until_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that it can't copy is copied piece by piece, now and from then on."""
    calls: list[tuple[list[int], ...]] = []
    refuses = False

    def batch(targets, sources, sizes, count, attributes, starts, kinds, failed, stream) -> int:
        assert (count.value, kinds.value, stream.value) == (2, 1, 0x5000)
        assert attributes._obj.source_order == 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        assert starts._obj.value == 0
        calls.append((list(targets), list(sources), list(sizes)))
        return 1 if refuses else 0

    fake = FakeDriver()
    fake.cuMemcpyBatchAsync = batch
    driver = runtime._Cuda(fake)
    monkeypatch.setattr(runtime, "_driver", lambda: driver)
    staging = runtime.CudaRuntime.__new__(runtime.CudaRuntime)
    staging._stream = SimpleNamespace(cuda_stream=0x5000)
    chunk, source = Chunk(4096), torch.arange(1000, dtype=torch.int32)[10:]
    copies = [Copy(chunk, at, 8, source, at, source.data_ptr() + at) for at in (0, 16)]
    staging.copy(copies)
    wanted = [chunk.address, chunk.address + 16], [source.data_ptr(), source.data_ptr() + 16], [8, 8]
    assert calls == [wanted]
    refuses = True
    for _ in range(2):
        chunk.tensor.zero_()
        staging.copy(copies)
        assert chunk.tensor[:24].view(torch.int32).tolist() == [10, 11, 0, 0, 14, 15]
    assert calls == [wanted, wanted]


def test_a_driver_without_batches_copies_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in (None, runtime._Hip(FakeDriver())):
        monkeypatch.setattr(runtime, "_driver", lambda driver=driver: driver)
        staging = runtime.CudaRuntime.__new__(runtime.CudaRuntime)
        staging._stream = SimpleNamespace(cuda_stream=0x5000)
        chunk, source = Chunk(4096), torch.arange(1000, dtype=torch.int32)
        staging.copy([Copy(chunk, at, 8, source, at, source.data_ptr() + at) for at in (0, 16)])
        assert chunk.tensor[:24].view(torch.int32).tolist() == [0, 1, 0, 0, 4, 5]
