"""Calls of the CUDA driver API that torch does not expose."""

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
    """Return a stream that nothing else in the process uses; return it with `give_stream_back`.

    Torch hands out its few streams in turn: the program may use the same one, and capture a graph in it. Without a
    driver, the result is such a stream all the same.
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
    """Keep a stream for the next caller.

    It is never destroyed: torch's allocator keeps memory for each stream, which would be lost with it.
    """
    if isinstance(stream, torch.cuda.ExternalStream):
        with _spare_lock:
            _spare[stream.device.index].append(stream)


def allow_captures() -> bool:
    """Allow this thread, for good, to allocate, lock memory and wait while another thread captures a CUDA graph.

    Otherwise such calls fail, and the capture with them; see cuThreadExchangeStreamCaptureMode in CUDA's driver API.
    """
    return _exchange(ctypes.c_int(_THREAD_LOCAL))


def _new_stream(index: int) -> int | None:
    """Create a stream in torch's primary context, which is retained as long as the process lives."""
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
    """Do the same as `allow_captures` for a moment, in a thread of the caller's."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchanged = _exchange(mode)
    try:
        yield
    finally:
        if exchanged:
            _exchange(mode)


def _exchange(mode: ctypes.c_int) -> bool:
    """Set this thread's capture mode, and store its previous mode in ``mode``."""
    driver = _driver()
    return driver is not None and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0


@cache
def _driver() -> Any:
    """Return the loaded driver; None on another system, or with HIP."""
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
