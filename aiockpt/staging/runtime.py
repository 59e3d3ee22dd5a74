"""The operations of a device that staging needs, whatever its kind: streams, events and pinned host memory."""

from __future__ import annotations

import contextlib
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from aiockpt.staging.cuda_driver import allow_captures, give_stream_back, take_stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class Runtime(Protocol):
    """A device and a staging stream on it; created by `runtime_of`."""

    non_blocking: bool  # copies may be in flight until an event behind them is reached

    def enter(self) -> None:
        """Make the device current in this thread, if the current device is per thread."""

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""

    def wait_for(self, event: torch.Event) -> None:
        """Make the staging stream wait for an event."""

    def record(self) -> torch.Event:
        """Record an event in the staging stream."""

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""

    def order_behind(self, event: torch.Event) -> None:
        """Make this thread's current stream of the device wait for an event. Does not block."""

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event is reached."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory so that the device copies to it directly; return False if that is not possible."""

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
    return _StreamRuntime(device) if _has_streams(device.type) else _PlainRuntime()


def ready_event(device: torch.device) -> torch.Event | None:
    """Record an event in this thread's current stream of a device; None if such devices have no events."""
    if device.type == "cuda":
        return _cuda_event(torch.cuda.current_stream(device))
    return _event(device, torch.accelerator.current_stream(device)) if _has_streams(device.type) else None


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
    asked = getattr(torch.accelerator.current_stream(device), "is_capturing", None)
    return bool(asked()) if asked is not None else False


class CudaRuntime:
    """A CUDA device."""

    non_blocking = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = take_stream(device)

    def enter(self) -> None:
        """Make the device current in this thread; otherwise device 0 would get a context."""
        torch.cuda.set_device(self._device)
        if not hasattr(_thread, "allows_captures"):
            _thread.allows_captures = allow_captures()

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""
        return torch.cuda.stream(self._stream)

    def wait_for(self, event: torch.Event) -> None:
        """Make the staging stream wait for an event."""
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        """Record an event in the staging stream; a wait for it sleeps."""
        return _cuda_event(self._stream, blocking=True)

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""
        return _cuda_event(torch.cuda.current_stream(self._device))

    def order_behind(self, event: torch.Event) -> None:
        """Make this thread's current stream of the device wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event is reached."""
        self.enter()
        event.synchronize()

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
        """Undo `pin`."""
        _cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Return the stream for reuse."""
        give_stream_back(self._stream)


class _StreamRuntime:
    """A device of another kind with streams and events, through ``torch.accelerator``."""

    non_blocking = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def enter(self) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)

    def stream(self) -> AbstractContextManager[object]:
        # For good: the thread belongs to staging.
        torch.accelerator.set_stream(self._stream)
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        return _event(self._device, self._stream)

    def record_current(self) -> torch.Event:
        return _event(self._device, torch.accelerator.current_stream(self._device))

    def order_behind(self, event: torch.Event) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)

    def sleep_until(self, event: torch.Event) -> None:
        self.enter()
        event.synchronize()

    def pin(self, address: int, nbytes: int) -> bool:  # there is no portable way to register memory
        return False

    def unpin(self, address: int) -> None:
        pass

    def close(self) -> None:
        pass


class _PlainRuntime:
    """A device without streams: copies block, in order with its other work."""

    non_blocking = False

    def enter(self) -> None:
        pass  # the tensors of a copy determine its device

    def stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        pass  # the device works in order

    def record(self) -> torch.Event:
        return _PAST

    def record_current(self) -> torch.Event:
        return _PAST

    def order_behind(self, event: torch.Event) -> None:
        pass  # copies block

    def sleep_until(self, event: torch.Event) -> None:
        pass  # copies block

    def pin(self, address: int, nbytes: int) -> bool:  # there is no portable way to register memory
        return False

    def unpin(self, address: int) -> None:
        pass

    def close(self) -> None:
        pass


_PAST = cast("torch.Event", object())  # stands for an event that was reached
_thread = threading.local()


def _event(device: torch.device, stream: torch.Stream) -> torch.Event:
    event = torch.Event(device)
    event.record(stream)
    return event


def _cuda_event(stream: Any, *, blocking: bool = False) -> torch.Event:
    # Not torch.Event: it ignores `blocking`, so that a waiter spins; and it restores the thread's device in a way that
    # creates a context there, even if that device is never used.
    event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
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
