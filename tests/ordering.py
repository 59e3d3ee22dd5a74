"""Prove for each access to a device's memory that streams and events order it behind those it conflicts with.

The race need not happen. The bookkeeping is that of torch's CUDA sanitizer; in addition

- every thread is watched, among them those of the engine;
- freeing memory counts as a write in the stream that it was allocated in, as the allocator gives it to the next kernels
  of that stream, unless `record_stream` has named the streams that use it;
- so does allocating it, as earlier work of that stream may still use the memory.

`PosingDevice` is an accelerator of numbered streams and events over host memory. `watch_cuda` watches a real device.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace
from torch.cuda._sanitizer import (
    FACTORY_FUNCTION_REGEX,
    Access,
    ArgumentHandler,
    EventHandler,
    SynchronizationError,
)
from torch.utils._python_dispatch import TorchDispatchMode

from aiockpt.planning.specs import lazy_bits
from aiockpt.snapshot import sampling
from aiockpt.staging import cuda, runtime

aten = torch.ops.aten
DEFAULT_STREAM = 0
_SYNCHRONISING = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}


class OrderChecker:
    """Follows kernels, streams, events and memory; ``errors`` gets a text for each two accesses without an order."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.errors: list[str] = []
        self.trace = EventHandler()
        self._owners: dict[int, int] = {}  # memory -> the stream that allocated it
        self._users: defaultdict[int, set[int]] = defaultdict(set)  # memory -> the streams of `record_stream`
        self._of_thread = threading.local()

    # --- what a source of the trace provides --------------------------------------------------------

    def memory_of(self, tensor: torch.Tensor, *, is_new: bool = False) -> int | None:
        """Return the identity of a tensor's memory on the device; None if it has none there.

        ``is_new``: a kernel has made the tensor.
        """
        raise NotImplementedError

    def stream_of(self, tensor: torch.Tensor) -> int | None:
        """Return this thread's current stream of a tensor's device; None if no kernel would run in it."""
        raise NotImplementedError

    def is_synchronising(self, kernel: Any) -> bool:
        """Return whether the host waits for a kernel, and no callback tells so."""
        return False

    # --- the trace ----------------------------------------------------------------------------------

    def run(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a kernel in this thread's current stream, and check its accesses."""
        if kernel is aten.record_stream.default:
            self.record_stream(*args)
            return kernel(*args, **options)
        found = _Accesses(self)
        is_factory = FACTORY_FUNCTION_REGEX.match(kernel._schema.name) is not None  # it reads no value of its arguments
        found.parse_inputs(kernel._schema, args, options, is_factory=is_factory)
        self.waited = set()
        result = kernel(*args, **options)
        found.parse_outputs(kernel._schema, result, is_factory=is_factory)
        read, written = found.dataptrs_read - found.dataptrs_written, found.dataptrs_written
        if found.stream is not None and (read or written):  # else it only makes a view
            self.launch(found.stream, read, written, str(kernel))
            if self.is_synchronising(kernel) or found.stream in self.waited:
                with self.lock:
                    self.trace._handle_stream_synchronization(found.stream)
        return result

    @property
    def waited(self) -> set[int]:
        """The streams that this thread has waited for within the kernel that it runs, as a copy to the host does."""
        return getattr(self._of_thread, "waited", set())

    @waited.setter
    def waited(self, streams: set[int]) -> None:
        self._of_thread.waited = streams

    def launch(self, stream: int, read: set[int], written: set[int], what: str) -> None:
        name = f"{what} in {threading.current_thread().name}"
        with self.lock:
            aliases = {memory: [] for memory in read | written}
            self._add(self.trace._handle_kernel_launch(stream, read, written, set(), name, aliases))

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        assert lazy_bits(tensor) == (False, False), "torch's fallback for lazy bits corrupts the heap here"
        memory = self.memory_of(tensor)
        if memory is not None:
            with self.lock:
                self._users[memory].add(number_of(stream))

    def allocate(self, memory: int, stream: int) -> None:
        self._owners[memory] = stream
        self.launch(stream, set(), {memory}, "the allocation")

    def free(self, memory: int) -> None:
        """Check that whatever accessed the memory is ordered before its reuse."""
        with self.lock:
            info = self.trace.tensors_accessed.accesses.get(memory)
            owner, users = self._owners.pop(memory, None), self._users.pop(memory, set())
            if info is None:
                return
            del self.trace.tensors_accessed.accesses[memory]
            if owner is None:  # allocated while nobody watched, or the host's
                return
            for access in [*info.reads, *filter(None, [info.write])]:
                ordered = self.trace.syncs.is_ordered_after(owner, access.seq_num, access.stream)
                if not ordered and access.stream not in users:
                    self.errors.append(
                        f"memory of stream {owner} was freed while {access.operator}, in stream {access.stream}, may "
                        f"still be {access.type} it:\n{_lines_of(access)}"
                    )

    def _add(self, found: list[SynchronizationError]) -> None:
        for error in found:
            one, other = error.current_access, error.previous_access
            self.errors.append(
                f"{one.operator} is {one.type} memory in stream {one.stream} without an order behind {other.operator}, "
                f"{other.type} it in stream {other.stream}:\n{_lines_of(one)}behind\n{_lines_of(other)}"
            )

    # --- threads ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and all that start meanwhile."""
        run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with _Kernels(self):
                run(thread)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "run", watched)
            with _Kernels(self):
                yield

    def check(self) -> None:
        assert not self.errors, "\n\n".join(dict.fromkeys(self.errors))


def _lines_of(access: Access) -> str:
    """Return the lines of the package and of the tests that led to an access."""
    frames = [
        frame for frame in access.stack_trace if frame.filename != __file__ and "site-packages" not in frame.filename
    ]
    return "".join(f"  {frame.filename}:{frame.lineno} {frame.name}: {frame.line}\n" for frame in frames[-6:])


class _Kernels(TorchDispatchMode):
    def __init__(self, checker: OrderChecker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._checker.run(func, args, kwargs or {})


class _Accesses(ArgumentHandler):
    """The memory that one kernel reads and writes."""

    def __init__(self, checker: OrderChecker) -> None:
        super().__init__()
        self._checker = checker
        self.stream: int | None = None

    def _handle_argument(self, value, is_write, metadata_only, name=None, is_output=False) -> None:
        if not isinstance(value, torch.Tensor):
            return
        if (memory := self._checker.memory_of(value, is_new=is_output and is_write)) is None:
            return
        if self.stream is None:
            self.stream = self._checker.stream_of(value)
        if is_write:
            self.dataptrs_written.add(memory)
        elif not metadata_only:
            self.dataptrs_read.add(memory)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper: its parts are seen by other kernels
        return None


def number_of(stream: Any) -> int:
    if isinstance(stream, PosingStream):
        return stream.number
    if not isinstance(stream, torch.cuda.Stream):  # as torch.accelerator returns them
        stream = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
    return stream.cuda_stream


# --- a real device --------------------------------------------------------------------------------


class _CudaChecker(OrderChecker):
    def memory_of(self, tensor: torch.Tensor, *, is_new: bool = False) -> int | None:
        storage = _storage_of(tensor) if tensor.is_cuda else None
        return None if storage is None else storage.data_ptr() or None

    def stream_of(self, tensor: torch.Tensor) -> int | None:
        with torch.cuda.device(tensor.device):  # a kernel that is captured does not run
            is_captured = torch.cuda.is_current_stream_capturing()
        return None if is_captured else torch.cuda.current_stream(tensor.device).cuda_stream

    def allocate_in_current_stream(self, memory: int) -> None:
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not is_captured:  # else it is used in the streams that the graph is replayed in
            self.allocate(memory, torch.cuda.current_stream().cuda_stream)


@contextlib.contextmanager
def watch_cuda() -> Iterator[OrderChecker]:
    """Watch the CUDA devices."""
    checker = _CudaChecker()
    trace = checker.trace

    def locked(function: Callable[..., object]) -> Callable[..., None]:
        def call(*args: int) -> None:
            with checker.lock:
                function(*args)

        return call

    callbacks = {
        _gpu_trace.EventCreationCallbacks: trace._handle_event_creation,
        _gpu_trace.EventDeletionCallbacks: trace._handle_event_deletion,
        _gpu_trace.EventRecordCallbacks: trace._handle_event_record,
        _gpu_trace.EventWaitCallbacks: trace._handle_event_wait,
        _gpu_trace.StreamCreationCallbacks: trace._handle_stream_creation,
        _gpu_trace.DeviceSynchronizationCallbacks: trace._handle_device_synchronization,
        _gpu_trace.EventSynchronizationCallbacks: trace._handle_event_synchronization,
        _gpu_trace.MemoryAllocationCallbacks: checker.allocate_in_current_stream,
        _gpu_trace.MemoryDeallocationCallbacks: checker.free,
    }
    callbacks[_gpu_trace.StreamSynchronizationCallbacks] = lambda stream: (
        trace._handle_stream_synchronization(stream),
        checker.waited.add(stream),
    )
    calls = {registry: locked(function) for registry, function in callbacks.items()}

    def copy(staging: runtime.CudaRuntime, copies: list[runtime.Copy]) -> None:  # the driver's copies: torch sees none
        read = {checker.memory_of(each.source) for each in copies} - {None}
        checker.launch(staging._stream.cuda_stream, read, set(), "the copies to a chunk")
        copy_batch(staging, copies)

    copy_batch = runtime.CudaRuntime.copy
    torch._C._activate_gpu_trace()
    for registry, call in calls.items():
        registry.add_callback(call)
    try:
        with pytest.MonkeyPatch.context() as patch, checker.watching():
            patch.setattr(runtime.CudaRuntime, "copy", copy)
            for module in (cuda, sampling):  # memory is known by the address of its storage
                patch.setattr(module, "by_address", lambda tensor: tensor)
            yield checker
    finally:
        for registry, call in calls.items():
            registry.callback_list.remove(call)


# --- host memory that poses as a device's -----------------------------------------------------------


class PosingStream:
    def __init__(self, device: torch.device | int | None = None, number: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.number = self.stream_id = next(_numbers) if number is None else number

    def wait_event(self, event: PosingEvent) -> None:
        with _posing[-1].lock:
            _posing[-1].trace._handle_event_wait(event.number, self.number)

    def record_event(self) -> PosingEvent:
        event = PosingEvent()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return self.number in _posing[-1].capturing


class PosingEvent:
    def __init__(self, device: torch.device | None = None) -> None:
        self.number = next(_numbers)

    def record(self, stream: PosingStream) -> None:
        with _posing[-1].lock:
            _posing[-1].trace._handle_event_record(self.number, stream.number)

    def synchronize(self) -> None:
        _posing[-1].await_copies()
        with _posing[-1].lock:
            _posing[-1].trace._handle_event_synchronization(self.number)


_numbers = itertools.count(DEFAULT_STREAM + 1)
_posing: list[PosingDevice] = []


class PosingDevice(OrderChecker):
    """Host memory as that of an accelerator: `torch.accelerator`, streams and events are numbers, kernels run at once.

    Between `hold` and `proceed` the device is slow: no event is reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capturing: set[int] = set()  # streams that capture a graph
        self.waited_for = threading.Event()  # a thread sleeps on an event
        self._running = threading.Event()
        self._running.set()
        self._memory: dict[int, int] = {}  # address of a storage object -> its number
        self._current = threading.local()

    def hold(self) -> None:
        self.waited_for.clear()
        self._running.clear()

    def proceed(self) -> None:
        self._running.set()

    def await_copies(self) -> None:
        self.waited_for.set()
        assert self._running.wait(60), "the device was held and never went on"

    def memory_of(self, tensor: torch.Tensor, *, is_new: bool = False) -> int | None:
        storage = _storage_of(tensor)
        if storage is None or not storage.nbytes():
            return None
        with self.lock:
            if storage._cdata not in self._memory:
                number = self._memory[storage._cdata] = next(_numbers)
                if is_new:
                    self.allocate(number, self.current_stream().number)
                weakref.finalize(storage, self._forget, storage._cdata).atexit = False
            return self._memory[storage._cdata]

    def _forget(self, storage: int) -> None:
        with self.lock:
            self.free(self._memory.pop(storage))

    def stream_of(self, tensor: torch.Tensor) -> int:
        return self.current_stream().number

    def is_synchronising(self, kernel: Any) -> bool:
        return kernel in _SYNCHRONISING

    def current_stream(self, device: torch.device | None = None) -> PosingStream:
        if not hasattr(self._current, "stream"):
            self._current.stream = PosingStream(number=DEFAULT_STREAM)
        return self._current.stream

    def set_stream(self, stream: PosingStream) -> None:
        self._current.stream = stream

    @contextlib.contextmanager
    def stream(self) -> Iterator[PosingStream]:
        """Make a new stream current, which waits for the one before."""
        before, stream = self.current_stream(), PosingStream()
        stream.wait_event(before.record_event())
        self.set_stream(stream)
        try:
            yield stream
        finally:
            self.set_stream(before)

    @contextlib.contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[PosingDevice]:
        device, resize = self, torch.UntypedStorage.resize_

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.clone()
            with device.lock:
                device.trace._handle_stream_synchronization(device.current_stream().number)
            return copy

        def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> Any:
            """Free the memory and allocate other, as devices do."""
            with device.lock:
                known = device._memory.get(storage._cdata)
                if known is not None:
                    device.free(known)
                    device.allocate(known, device.current_stream().number)
            return resize(storage, nbytes)

        patch.setattr(torch, "Stream", PosingStream)
        patch.setattr(torch, "Event", PosingEvent)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        patch.setattr(torch.accelerator, "current_stream", device.current_stream)
        patch.setattr(torch.accelerator, "set_stream", device.set_stream)
        patch.setattr(torch.Tensor, "cpu", to_host)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream))
        patch.setattr(runtime, "_devices", lambda _: [torch.device("cpu")])
        patch.setattr(torch.UntypedStorage, "resize_", resize_storage)
        patch.setattr(runtime, "HOST_KINDS", frozenset())
        runtime._has_streams.cache_clear()
        _posing.append(device)
        try:
            with device.watching():
                yield device
        finally:
            device.proceed()
            _posing.pop()
            runtime._has_streams.cache_clear()
