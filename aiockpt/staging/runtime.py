"""The operations of a device that staging needs, whatever its kind: streams, events and pinned host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from aiockpt.core import pages
from aiockpt.core.extent import address_of, plain_memory
from aiockpt.errors import AiockptError
from aiockpt.planning.specs import lazy_bits

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from aiockpt.staging.pool import Chunk

# --- calls of the driver that torch does not expose -----------------------------------------------

# These have the same values in CUDA and HIP.
_NON_BLOCKING = 1  # a stream: copies must not wait for work in the legacy default stream, nor hold it up
_THREAD_LOCAL = 1  # a mode of captures
_PORTABLE = 1  # locked memory: for all devices
_IN_STREAM_ORDER = 1  # of a copy: its source is read when the stream has come to it, not at the call
ALREADY_LOCKED = 712  # an error

_spare: defaultdict[int | torch.device, list[Any]] = defaultdict(list)  # of CUDA by index, of others by device
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
    """Create a stream in torch's context of a device."""
    driver, stream = _driver(), ctypes.c_void_p()
    if driver is None:
        return None
    with _captures_allowed(), driver.current(index) as is_current:
        if is_current and driver.create_stream(ctypes.byref(stream), _NON_BLOCKING) == 0:
            return stream.value or None
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
    return driver is not None and driver.exchange_mode(ctypes.byref(mode)) == 0


class _Cuda:
    """CUDA's driver API. Its errors do not become the thread's last error, as those of the runtime API do."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.exchange_mode = library.cuThreadExchangeStreamCaptureMode
        self.create_stream = library.cuStreamCreate
        self._register, self.unregister = library.cuMemHostRegister_v2, library.cuMemHostUnregister
        self._copy_batch = getattr(library, "cuMemcpyBatchAsync", None)

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[bool]:
        """Make torch's context of a device current in this thread; the value is whether that was possible."""
        context = self._context(index)
        if context is None or self._library.cuCtxPushCurrent_v2(context) != 0:
            yield False
            return
        try:
            yield True
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _context(self, index: int) -> ctypes.c_void_p | None:
        """Return torch's primary context, which is retained as long as the process lives."""
        if index not in self._contexts:
            library, device, context = self._library, ctypes.c_int(), ctypes.c_void_p()
            if (
                library.cuInit(0) != 0
                or library.cuDeviceGet(ctypes.byref(device), index) != 0
                or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != 0
            ):
                return None
            self._contexts[index] = context
        return self._contexts[index]

    def register(self, address: ctypes.c_void_p, nbytes: int) -> int:
        return int(self._register(address, ctypes.c_size_t(nbytes), _PORTABLE))

    def copy(self, targets: list[int], sources: list[int], sizes: list[int], stream: int) -> bool:
        """Enqueue copies in a stream, whatever order they are made in; return whether they are.

        If not, some may be all the same. The driver of CUDA 12.8 and later can do it.
        """
        if self._copy_batch is None:
            return False
        count, places, where = len(sizes), ctypes.c_uint64 * len(sizes), ctypes.c_size_t(0)
        lengths = (ctypes.c_size_t * count)(*sizes)
        begin, failed = ctypes.byref(where), ctypes.byref(ctypes.c_size_t())
        error = self._copy_batch(
            places(*targets),
            places(*sources),
            *(lengths, ctypes.c_size_t(count), ctypes.byref(_InStreamOrder(_IN_STREAM_ORDER)), begin),
            *(ctypes.c_size_t(1), failed, ctypes.c_void_p(stream)),
        )
        if error:  # not tried again: it may be a kind of memory that the driver copies one by one only
            self._copy_batch = None
        return not error


class _InStreamOrder(ctypes.Structure):
    """CUmemcpyAttributes: sources are read in the order of the stream; no hints where memory is."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _Hip:
    """HIP's runtime API: the same calls, with a current device instead of a context."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.exchange_mode = library.hipThreadExchangeStreamCaptureMode
        self.create_stream = library.hipStreamCreateWithFlags
        self._register, self.unregister = library.hipHostRegister, library.hipHostUnregister

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[bool]:
        with torch.cuda.device(index):
            yield True

    def register(self, address: ctypes.c_void_p, nbytes: int) -> int:
        error = int(self._register(address, ctypes.c_size_t(nbytes), _PORTABLE))
        if error:
            self._library.hipGetLastError()  # clears it: torch would report it for the next kernel
        return error

    def copy(self, targets: list[int], sources: list[int], sizes: list[int], stream: int) -> bool:
        return False


@cache
def _driver() -> _Cuda | _Hip | None:
    """Return the loaded driver; None on another system."""
    kind: type[_Cuda | _Hip] = _Hip if torch.version.hip else _Cuda
    # ROCm's wheels of torch bring their library without a version in its name.
    names = [f"libamdhip64.so{version}" for version in ("", ".7", ".6")] if kind is _Hip else ["libcuda.so.1"]
    for name in names:
        with contextlib.suppress(OSError, AttributeError):
            return kind(ctypes.CDLL(name))
    return None


# --- devices --------------------------------------------------------------------------------------


HOST_KINDS = frozenset({"cpu"})
CAPTURING = "the current stream of {} captures a graph, of which copies would become a part: do this before or after it"
UNORDERED = "torch has no streams and events for {}, so copies have no order with other work there: use host memory"


def is_host(device: torch.device) -> bool:
    """Return whether a device's memory is the host's, so that any thread may read and write it at once."""
    return device.type in HOST_KINDS


def _is_cuda(device: torch.device) -> bool:
    """Return whether a device has CUDA's calls, or ROCm's; all others are used by ``torch.accelerator`` only."""
    return device.type == "cuda"


def has_events(device: torch.device) -> bool:
    """Return whether copies from a device may be in flight until an event is reached."""
    return _is_cuda(device) or _has_streams(device.type)


def ready_event(device: torch.device) -> torch.Event | None:
    """Record an event in this thread's current stream of a device; None if such devices have no events."""
    return _recorded(device, _current_stream(device)) if has_events(device) else None


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's current stream of a device is capturing a graph."""
    if _is_cuda(device):
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    asked = getattr(_current_stream(device), "is_capturing", None) if has_events(device) else None
    return asked is not None and bool(asked())


def in_default_stream(device: torch.device) -> bool:
    """Return whether this thread's current stream of a device is the device's default stream."""
    return bool(_current_stream(device).stream_id == 0)


def current_streams() -> dict[torch.device, Any]:
    """Return this thread's current stream of each device whose allocator assigns new tensors to a stream."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return {}  # asking for a stream would initialise it
    return {device: _current_stream(device) for device in _devices(kind.type)} if has_events(kind) else {}


@contextlib.contextmanager
def running_in(stream: Any) -> Iterator[None]:
    """Make a stream current in this thread: for kernels, and for the memory of new tensors. None changes nothing."""
    if stream is None:
        yield
    elif isinstance(stream, torch.cuda.Stream):
        with torch.cuda.stream(stream):
            yield
    else:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def use_in(stream: Any, tensor: torch.Tensor) -> None:
    """Keep a tensor's memory, even if it is freed, until the work in a stream is done. None: in the current stream."""
    if not is_host(tensor.device):
        if any(lazy_bits(tensor)):  # torch's fallback for them expects a result of the call, and corrupts the heap
            tensor = plain_memory(tensor)
        with contextlib.suppress(NotImplementedError):  # an allocator that never reuses memory at once
            tensor.record_stream(_current_stream(tensor.device) if stream is None else stream)


def by_address(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without lazy bits by its address, which stays if the program frees the memory under the original.

    None if it has: a kernel without an address would break the context for good. Of other kinds than CUDA: the tensor.
    """
    if not tensor.is_cuda:  # not each kind can be exported
        return tensor
    same: torch.Tensor = torch._C._from_dlpack(torch._C._to_dlpack(tensor))
    return same if address_of(same) else None


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


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory behind this thread's current stream; on CUDA, sleep until that is done."""
    if not _is_cuda(tensor.device):  # others may have no allocator of pinned memory
        return tensor.cpu()
    copy = tensor.to("cpu", non_blocking=True)
    _recorded(tensor.device, _current_stream(tensor.device), blocking=True).synchronize()
    return copy


def runtime_of(device: torch.device) -> Runtime:
    """Return the runtime of a device, with a new staging stream; raise AiockptError if it has no streams."""
    if not has_events(device):
        raise AiockptError(UNORDERED.format(device))
    return CudaRuntime(device) if _is_cuda(device) else Runtime(device)


class Copy(NamedTuple):
    """A copy of bytes ``start`` to ``start + nbytes`` of a dense tensor on a device to ``at`` of a chunk."""

    chunk: Chunk
    at: int
    nbytes: int
    source: torch.Tensor
    start: int
    address: int  # of the bytes on the device, as it was when the tensor was looked at


def bytes_of(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a dense tensor, in the order in which they are in memory."""
    # Not reshape(-1), which would copy a dense tensor whose dimensions are in another order in memory.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat if nbytes == flat.numel() else flat[start : start + nbytes]


class Runtime:
    """The operations of a device, and a staging stream; through ``torch.accelerator``, which can't lock memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = self._new_stream()

    def _new_stream(self) -> Any:
        # Torch hands out its few streams in turn, also to the program: so each one that was taken is used again.
        with _spare_lock:
            return _spare[self._device].pop() if _spare[self._device] else torch.Stream(self._device)

    def enter(self) -> None:
        """Make the device current in this thread, if the current device is per thread."""
        torch.get_device_module(self._device).set_device(self._device.index or 0)

    def stream(self) -> AbstractContextManager[object]:
        """Make the staging stream current in this thread."""
        return running_in(self._stream)

    def use(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, even if it is freed, until the copies are made; see `use_in`."""
        use_in(self._stream, tensor)

    def wait_for(self, event: torch.Event) -> None:
        """Make the staging stream wait for an event."""
        self._stream.wait_event(event)

    def record(self) -> torch.Event:
        """Record an event in the staging stream."""
        return _recorded(self._device, self._stream)

    def record_current(self) -> torch.Event:
        """Record an event in this thread's current stream of the device."""
        return _recorded(self._device, _current_stream(self._device))

    def order_behind(self, event: torch.Event) -> None:
        """Make this thread's current stream of the device wait for an event. Does not block."""
        _current_stream(self._device).wait_event(event)

    def sleep_until(self, event: torch.Event) -> None:
        """Block until an event is reached."""
        try:
            self.enter()  # for a thread that only waits: else device 0 would get a context, and a capture would fail
        finally:  # copies may be in flight even if the device can't be entered any more
            event.synchronize()

    def drain(self) -> None:
        """Block until nothing is in flight in the staging stream, also if the device has failed for good."""
        with contextlib.suppress(RuntimeError):
            self.sleep_until(self.record())
            return
        with contextlib.suppress(RuntimeError):  # no event could be recorded, or the wait for it failed
            self._stream.synchronize()

    def node(self) -> int | None:
        """Return the NUMA node that the device is at; None if it is unknown, or if there is only one."""
        return None

    def lock(self, address: int, nbytes: int) -> int | None:
        """Lock host memory so that the device copies to it directly; return 0, an error, or None if none can."""
        return None

    def unlock(self, address: int) -> None:
        """Undo `lock`."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue copies to host memory in the staging stream, which is this thread's current one."""
        for chunk, at, nbytes, source, start, _ in copies:
            chunk.tensor[at : at + nbytes].copy_(bytes_of(source, start, nbytes), non_blocking=True)

    def close(self) -> None:
        """Release the staging stream, whose work is done."""
        with _spare_lock:
            _spare[self._device].append(self._stream)


class CudaRuntime(Runtime):
    """A CUDA device, or one of ROCm."""

    def _new_stream(self) -> Any:
        return take_stream(self._device)

    def enter(self) -> None:
        """Make the device current in this thread; otherwise device 0 would get a context."""
        torch.cuda.set_device(self._device)
        if not hasattr(_thread, "allows_captures"):
            _thread.allows_captures = allow_captures()

    def record(self) -> torch.Event:
        """Record an event in the staging stream; a wait for it sleeps."""
        return _recorded(self._device, self._stream, blocking=True)

    def node(self) -> int | None:
        facts: Any = torch.cuda.get_device_properties(self._device)  # its stub lacks some
        if not hasattr(facts, "pci_bus_id"):  # torch before 2.7
            return None
        return pages.node_of_pci(f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0")

    def lock(self, address: int, nbytes: int) -> int | None:
        """Register the memory with the driver, for all devices."""
        driver = _driver()
        if driver is None:
            return None
        with driver.current(torch.cuda.current_device()) as is_current:
            return driver.register(ctypes.c_void_p(address), nbytes) if is_current else None

    def unlock(self, address: int) -> None:
        driver = _driver()
        if driver is not None:
            with driver.current(torch.cuda.current_device()):
                driver.unregister(ctypes.c_void_p(address))

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue all copies by one call of the driver, if it can: each of torch's gives the GIL away several times."""
        driver = _driver()
        if len(copies) > 1 and driver is not None:
            targets, sources = [each.chunk.address + each.at for each in copies], [each.address for each in copies]
            if driver.copy(targets, sources, [each.nbytes for each in copies], self._stream.cuda_stream):
                return
        super().copy(copies)

    def close(self) -> None:
        give_stream_back(self._stream)


_thread = threading.local()


def _devices(kind: str) -> list[torch.device]:
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def _current_stream(device: torch.device) -> Any:
    return (torch.cuda if _is_cuda(device) else torch.accelerator).current_stream(device)


def _recorded(device: torch.device, stream: Any, *, blocking: bool = False) -> torch.Event:
    """Return an event that is recorded in a stream; a wait for a CUDA event spins, unless it is ``blocking``."""
    # Not torch.Event for CUDA: it ignores `blocking`; and it restores the thread's device in a way that creates a
    # context there, even if that device is never used.
    event: Any = torch.cuda.Event(blocking=blocking) if _is_cuda(device) else torch.Event(device)  # type: ignore[no-untyped-call]
    event.record(stream)
    return cast("torch.Event", event)


@cache
def _has_streams(kind: str) -> bool:
    """Return whether devices of a kind have streams and events."""
    device = torch.device(kind)
    try:
        event, stream = torch.Event(device), torch.Stream(device)
        event.record(stream)
        stream.wait_event(event)  # not the current stream: if it captures a graph, that would spoil the capture
        torch.accelerator.current_stream(device)
    except (RuntimeError, AttributeError):
        return False
    return True
