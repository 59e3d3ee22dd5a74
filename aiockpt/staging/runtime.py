"""What staging asks of a device, whatever its kind: streams, events, and host memory that it copies to directly."""

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
    """A device, and a stream of our own on it; `runtime_of` gives the one that fits.

    Attributes:
        non_blocking: whether copies may be left under way until an event behind them comes.
    """

    non_blocking: bool

    def enter(self) -> None:
        """Make the device current in this thread, where that is kept for each thread."""

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""

    def wait_for(self, event: torch.Event) -> None:
        """Let the staging stream wait for an event."""

    def record(self) -> torch.Event:
        """Record an event in the staging stream."""

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""

    def order_behind(self, event: torch.Event) -> None:
        """Let this thread's current stream of the device wait for an event. Does not block."""

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event has come."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory so that the device copies to it directly; False where that can't be done."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def close(self) -> None:
        """Let go of the staging stream, whose work is done."""


def current_streams() -> dict[torch.device, Any]:
    """Give this thread's current stream of each device, where new tensors belong to one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {device: torch.cuda.current_stream(device) for device in devices}


def making_in(stream: Any) -> AbstractContextManager[object]:
    """Let new tensors belong to a stream that `current_streams` gave; None changes nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def reading_behind(device: torch.device, event: torch.Event) -> Iterator[None]:
    """Let this thread read tensors of a device once an event has come; with operators that block."""
    runtime = runtime_of(device)
    try:
        runtime.enter()
        with runtime.stream():
            runtime.wait_for(event)
            yield
    finally:
        runtime.close()


def runtime_of(device: torch.device) -> Runtime:
    """Give the way to reach a device, with a new stream."""
    if device.type == "cuda":
        return CudaRuntime(device)
    return StreamRuntime(device) if _has_streams(device.type) else PlainRuntime(device)


def ready_event(device: torch.device) -> torch.Event | None:
    """Record where this thread's current stream of a device is; None where devices have no events."""
    if device.type == "cuda":
        return _cuda_event(torch.cuda.current_stream(device))
    return _event(device, torch.accelerator.current_stream(device)) if _has_streams(device.type) else None


def has_events(device: torch.device) -> bool:
    """Tell whether copies from a device may be left under way until an event comes."""
    return device.type == "cuda" or _has_streams(device.type)


def is_capturing(device: torch.device) -> bool:
    """Tell whether this thread's current stream of a device is capturing a graph."""
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
        """Make the device current in this thread: device 0 would get a context otherwise."""
        torch.cuda.set_device(self._device)
        if not hasattr(_thread, "allows_captures"):
            _thread.allows_captures = allow_captures()

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""
        return torch.cuda.stream(self._stream)

    def wait_for(self, event: torch.Event) -> None:
        """Let the staging stream wait for an event."""
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        """Record an event in the staging stream; waiting for it sleeps."""
        return _cuda_event(self._stream, blocking=True)

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""
        return _cuda_event(torch.cuda.current_stream(self._device))

    def order_behind(self, event: torch.Event) -> None:
        """Let this thread's current stream of the device wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event has come."""
        self.enter()
        event.synchronize()

    def pin(self, address: int, nbytes: int) -> bool:
        """Register the memory with the CUDA driver: for all devices, at its own size."""
        portable = 1
        if int(_cudart().cudaHostRegister(address, nbytes, portable)) == 0:
            return True
        # The failure stays the thread's last error, and the next kernel would be blamed for it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        return False

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        _cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Let the stream be used by another."""
        give_stream_back(self._stream)


class StreamRuntime:
    """A device of another kind that has streams and events, through ``torch.accelerator``."""

    non_blocking = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def enter(self) -> None:
        """Make the device current in this thread."""
        torch.accelerator.set_device_index(self._device.index or 0)

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread, which is staging's own, for good."""
        torch.accelerator.set_stream(self._stream)
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        """Let the staging stream wait for an event."""
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        """Record an event in the staging stream."""
        return _event(self._device, self._stream)

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""
        return _event(self._device, torch.accelerator.current_stream(self._device))

    def order_behind(self, event: torch.Event) -> None:
        """Let this thread's current stream of the device wait for an event."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event has come."""
        self.enter()
        event.synchronize()

    def pin(self, address: int, nbytes: int) -> bool:
        """Do nothing: there is no common way to register memory."""
        return False

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainRuntime:
    """A device without streams: copies block, in order with whatever else it was given to do."""

    non_blocking = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        """Do nothing: copies find their device by their tensors."""

    def stream(self) -> AbstractContextManager[object]:
        """Keep the only stream there is."""
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        """Do nothing: the device works in order."""

    def record(self) -> torch.Event:
        """Give an event that has come: copies block."""
        return _PAST

    def record_current(self) -> torch.Event:
        """Give an event that has come: the device works in order."""
        return _PAST

    def order_behind(self, event: torch.Event) -> None:
        """Do nothing: copies block."""

    def sleep_until(self, event: torch.Event) -> None:
        """Do nothing: copies block."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Do nothing: there is no common way to register memory."""
        return False

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


_PAST = cast("torch.Event", object())
_thread = threading.local()


def _event(device: torch.device, stream: torch.Stream) -> torch.Event:
    event = torch.Event(device)
    event.record(stream)
    return event


def _cuda_event(stream: Any, *, blocking: bool = False) -> torch.Event:
    # Not torch.Event: that one leaves `blocking` aside, so that who waits for it spins; and it goes back to the
    # thread's device by a way that makes a context there, be it never used.
    event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
    event.record(stream)
    return cast("torch.Event", event)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _has_streams(kind: str) -> bool:
    """Tell whether devices of a kind have streams and events of their own."""
    device = torch.device(kind)
    try:
        event = torch.Event(device)
        event.record(torch.Stream(device))
        torch.accelerator.current_stream(device).wait_event(event)
    except (RuntimeError, AttributeError):
        return False
    return True
