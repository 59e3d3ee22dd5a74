"""The operations of a device that staging needs, whatever its kind: streams, events and pinned host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# --- calls of the CUDA driver that torch does not expose ------------------------------------------


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: copies must not wait for work in the legacy default stream, nor hold it up
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_spare: defaultdict[int, list[Any]] = defaultdict(list)
_spare_lock = threading.Lock()


def take_stream(device: torch.device) -> Any:
    """Return a stream that nothing else in the process uses; return it with `give_stream_back`.

    Torch hands out its few streams in turn: the program may use the same one, and capture a graph in it. If the driver
    can't be loaded, the result is one of torch's streams all the same.
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
    """Do the same as `allow_captures` within this context only, because the thread is the caller's."""
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


# --- devices --------------------------------------------------------------------------------------


class Runtime:
    """A device without streams: copies block, in order with its other work. `runtime_of` makes those of all kinds."""

    non_blocking = False  # copies may be in flight until an event behind them is reached

    def enter(self) -> None:
        """Make the device current in this thread, if the current device is per thread."""

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        """Make the staging stream wait for an event."""

    def record(self) -> torch.Event:
        """Record an event in the staging stream."""
        return _PAST

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""
        return _PAST

    def order_behind(self, event: torch.Event) -> None:
        """Make this thread's current stream of the device wait for an event. Does not block."""

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event is reached."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory so that the device copies to it directly; return False if that is not possible."""
        return False

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def close(self) -> None:
        """Release the staging stream, whose work is done."""


def current_streams() -> dict[torch.device, Any]:
    """Return this thread's current stream of each device whose allocator assigns new tensors to a stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {device: torch.cuda.current_stream(device) for device in devices}


def making_in(stream: Any) -> AbstractContextManager[object]:
    """Allocate new tensors in a stream of `current_streams`; None changes nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def reading_behind(device: torch.device, event: torch.Event) -> Iterator[None]:
    """Make this thread's blocking operators on a device run behind an event."""
    runtime = runtime_of(device)
    try:
        runtime.enter()
        with runtime.stream():
            runtime.wait_for(event)
            yield
    finally:
        runtime.close()


def runtime_of(device: torch.device) -> Runtime:
    """Return the runtime of a device, with a new staging stream."""
    if device.type == "cuda":
        return CudaRuntime(device)
    return _StreamRuntime(device) if _has_streams(device.type) else Runtime()


def ready_event(device: torch.device) -> torch.Event | None:
    """Record an event in this thread's current stream of a device; None if such devices have no events."""
    return _recorded(device, _current_stream(device)) if has_events(device) else None


def has_events(device: torch.device) -> bool:
    """Return whether copies from a device may be in flight until an event is reached."""
    return device.type == "cuda" or _has_streams(device.type)


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's current stream of a device is capturing a graph."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    if not _has_streams(device.type):
        return False
    asked = getattr(_current_stream(device), "is_capturing", None)
    return bool(asked()) if asked is not None else False


class _StreamRuntime(Runtime):
    """A device with streams and events, through ``torch.accelerator``, which can't register memory."""

    non_blocking = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = self._new_stream()

    def _new_stream(self) -> Any:
        return torch.Stream(self._device)

    def enter(self) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)

    def stream(self) -> AbstractContextManager[object]:
        # Not restored: the thread belongs to staging.
        torch.accelerator.set_stream(self._stream)
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        return _recorded(self._device, self._stream)

    def record_current(self) -> torch.Event:
        return _recorded(self._device, _current_stream(self._device))

    def order_behind(self, event: torch.Event) -> None:
        _current_stream(self._device).wait_event(event)

    def sleep_until(self, event: torch.Event) -> None:
        self.enter()  # for a thread that only waits: without it, device 0 would get a context, and a capture would fail
        event.synchronize()


class CudaRuntime(_StreamRuntime):
    """A CUDA device."""

    def _new_stream(self) -> Any:
        return take_stream(self._device)

    def enter(self) -> None:
        """Make the device current in this thread; otherwise device 0 would get a context."""
        torch.cuda.set_device(self._device)
        if not hasattr(_thread, "allows_captures"):
            _thread.allows_captures = allow_captures()

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> torch.Event:
        """Record an event in the staging stream; a wait for it sleeps."""
        return _recorded(self._device, self._stream, blocking=True)

    def pin(self, address: int, nbytes: int) -> bool:
        """Register the memory with the CUDA driver, for all devices."""
        portable = 1
        if int(_cudart().cudaHostRegister(address, nbytes, portable)) == 0:
            return True
        # The failure stays the thread's last error, and torch would report it for the next kernel: clear it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        return False

    def unpin(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)

    def close(self) -> None:
        give_stream_back(self._stream)


_PAST = cast("torch.Event", object())  # stands for an event that was reached, where copies block
_thread = threading.local()


def _current_stream(device: torch.device) -> Any:
    return (torch.cuda if device.type == "cuda" else torch.accelerator).current_stream(device)


def _recorded(device: torch.device, stream: Any, *, blocking: bool = False) -> torch.Event:
    """Return an event that is recorded in a stream; a wait for a CUDA event spins, unless it is ``blocking``."""
    # Not torch.Event for CUDA: it ignores `blocking`; and it restores the thread's device in a way that creates a
    # context there, even if that device is never used.
    event: Any = torch.cuda.Event(blocking=blocking) if device.type == "cuda" else torch.Event(device)  # type: ignore[no-untyped-call]
    event.record(stream)
    return cast("torch.Event", event)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _has_streams(kind: str) -> bool:
    """Return whether devices of a kind have streams and events."""
    device = torch.device(kind)
    try:
        event = torch.Event(device)
        event.record(torch.Stream(device))
        torch.accelerator.current_stream(device).wait_event(event)
    except (RuntimeError, AttributeError):
        return False
    return True
