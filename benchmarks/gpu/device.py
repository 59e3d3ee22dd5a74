"""The device that is measured, with its memory and the pinned memory; the CPU replaces it in a dry run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from aiockpt.staging.runtime import CudaRuntime
from benchmarks.limits import raw


class Device:
    """A GPU, or the CPU for a dry run, where nothing is pinned and nothing runs asynchronously.

    Attributes:
        type: "cuda" or "cpu".
    """

    def __init__(self, kind: str) -> None:
        self.type = kind

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    def describe(self) -> dict[str, object]:
        """Return the facts about the device that figures depend on."""
        if not self.is_gpu:
            return {"device": "cpu, a dry run"}
        facts = torch.cuda.get_device_properties(0)
        return {"device": facts.name, "device_bytes": facts.total_memory, "cuda": torch.version.cuda}

    def synchronize(self) -> None:
        """Wait for all enqueued work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def stream(self) -> Any:
        """Return a new stream; None on the CPU."""
        return torch.cuda.Stream() if self.is_gpu else None

    def mark(self) -> Callable[[], object]:
        """Record an event in the current stream; return a function that waits for it."""
        if not self.is_gpu:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def held_bytes(self) -> int:
        """Return the device memory that tensors take now."""
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    def most_held_bytes(self) -> int:
        """Return the most device memory that tensors took since `forget_peak`."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def forget_peak(self) -> None:
        """Reset the high-water mark to the memory held now."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()


class PinnedArena:
    """Pinned host memory, already touched.

    Attributes:
        tensor: the memory as a tensor of bytes.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._arena = device, raw.Arena(nbytes, touched=False)
        self.tensor = torch.frombuffer(self._arena.view, dtype=torch.uint8)
        self.tensor.zero_()
        if device.is_gpu and int(torch.cuda.cudart().cudaHostRegister(self._arena.address, nbytes, 0)):
            raise MemoryError(f"{nbytes} bytes can't be pinned")

    def close(self) -> None:
        """Unpin the memory."""
        if self._device.is_gpu:
            torch.cuda.cudart().cudaHostUnregister(self._arena.address)


class Pinned:
    """Counts the memory that this process pins: by the driver, with cudaHostRegister, and by torch's allocator.

    Other processes are not counted; no contender pins memory in one.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._sizes: dict[int, int] = {}
        self._most = 0

    def __enter__(self) -> Self:
        if self._device.is_gpu:
            runtime = torch.cuda.cudart()
            self._register, self._unregister = runtime.cudaHostRegister, runtime.cudaHostUnregister
            runtime.cudaHostRegister, runtime.cudaHostUnregister = self._add, self._remove
            self._lock_ours, self._unlock_ours = CudaRuntime.lock, CudaRuntime.unlock
            CudaRuntime.lock, CudaRuntime.unlock = self._add_ours(), self._remove_ours()  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.is_gpu:
            runtime = torch.cuda.cudart()
            runtime.cudaHostRegister, runtime.cudaHostUnregister = self._register, self._unregister
            CudaRuntime.lock, CudaRuntime.unlock = self._lock_ours, self._unlock_ours  # type: ignore[method-assign]

    def _add(self, address: int, nbytes: int, flags: int) -> Any:
        result = self._register(address, nbytes, flags)
        self._count(address, nbytes, int(result))
        return result

    def _remove(self, address: int) -> Any:
        self._forget(address)
        return self._unregister(address)

    def _add_ours(self) -> Callable[[CudaRuntime, int, int], int | None]:
        def lock(runtime: CudaRuntime, address: int, nbytes: int) -> int | None:
            error = self._lock_ours(runtime, address, nbytes)
            self._count(address, nbytes, error)
            return error

        return lock

    def _remove_ours(self) -> Callable[[CudaRuntime, int], None]:
        def unlock(runtime: CudaRuntime, address: int) -> None:
            self._forget(address)
            self._unlock_ours(runtime, address)

        return unlock

    def _count(self, address: int, nbytes: int, error: int | None) -> None:
        if error == 0:
            with self._lock:
                self._sizes[address] = nbytes
                self._most = max(self._most, sum(self._sizes.values()))

    def _forget(self, address: int) -> None:
        with self._lock:
            self._sizes.pop(address, None)

    def held_bytes(self) -> int:
        """Return the bytes that are pinned now."""
        with self._lock:
            return sum(self._sizes.values()) + self._of_torch("current")

    def most_bytes(self) -> int:
        """Return the most bytes that were pinned since `forget_peak`."""
        with self._lock:
            return self._most + self._of_torch("peak")

    def forget_peak(self) -> None:
        """Reset the high-water mark to the bytes pinned now."""
        with self._lock:
            self._most = sum(self._sizes.values())
        if self._device.is_gpu:
            torch.cuda.memory.reset_peak_host_memory_stats()

    def _of_torch(self, which: str) -> int:
        return torch.cuda.memory.host_memory_stats().get(f"allocated_bytes.{which}", 0) if self._device.is_gpu else 0
