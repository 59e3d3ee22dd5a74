"""What is asked of the CUDA driver itself, for torch has no way to."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_NON_BLOCKING = 1
_THREAD_LOCAL = 1

_spare: defaultdict[int, list[Any]] = defaultdict(list)
_spare_lock = threading.Lock()


def take_stream(device: torch.device) -> Any:
    """Give a stream that nobody else has, to be given back with `give_stream_back`.

    Torch gives its streams out in turn, from a few: one of them may be a stream that the program uses, and may
    capture a graph in. Where the driver can't be asked, it is one of these all the same.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _spare_lock:
        if _spare[index]:
            return _spare[index].pop()
    address = _new_stream(index)
    if address is None:
        return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return torch.cuda.ExternalStream(address, device=index)  # type: ignore[no-untyped-call]


def give_stream_back(stream: Any) -> None:
    """Let a stream be used again.

    It is never destroyed: torch's allocator keeps memory for each stream, which would be of use to none after that.
    """
    if isinstance(stream, torch.cuda.ExternalStream):
        with _spare_lock:
            _spare[stream.device.index].append(stream)


def allow_captures() -> bool:
    """Let this thread allocate, lock memory and wait while another thread captures a CUDA graph; for good.

    Otherwise such calls fail, and the capture with them; see cuThreadExchangeStreamCaptureMode in CUDA's driver API.
    """
    return _exchange(ctypes.c_int(_THREAD_LOCAL))


def _new_stream(index: int) -> int | None:
    """Make a stream in the context that torch uses, which is kept as long as the process lives."""
    driver = _driver()
    if driver is None or driver.cuInit(0) != 0:
        return None
    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    with _captures_allowed():
        if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
            return None
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != 0:
            return None
        if driver.cuCtxPushCurrent_v2(context) != 0:
            driver.cuDevicePrimaryCtxRelease_v2(device)
            return None
        try:
            if driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING) == 0 and stream.value:
                return stream.value
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(device)
    return None


@contextlib.contextmanager
def _captures_allowed() -> Iterator[None]:
    """The same for a moment, in a thread that may be anybody's."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchanged = _exchange(mode)
    try:
        yield
    finally:
        if exchanged:
            _exchange(mode)


def _exchange(mode: ctypes.c_int) -> bool:
    """Set this thread's mode, and give the one that it had in its place."""
    driver = _driver()
    return driver is not None and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0


@cache
def _driver() -> Any:
    """Load the driver; None on another system, or with HIP."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in (
            "cuThreadExchangeStreamCaptureMode",
            *("cuInit", "cuDeviceGet", "cuStreamCreate"),
            *("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
        ):
            getattr(driver, name)
    except (OSError, AttributeError):
        return None
    return driver
