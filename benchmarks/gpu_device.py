"""The device that is measured, and what it and the pinned memory hold; a CPU stands in for it in a dry run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks import raw


class Device:
    """A device of torch: a GPU, or the CPU for a dry run, where nothing is pinned and nothing runs ahead.

    Attributes:
        type: "cuda" or "cpu".
    """

    def __init__(self, kind: str) -> None:
        self.type = kind

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    def describe(self) -> dict[str, object]:
        """Give what figures depend on."""
        if not self.is_gpu:
            return {"device": "cpu, a dry run"}
        facts = torch.cuda.get_device_properties(0)
        return {"device": facts.name, "device_bytes": facts.total_memory, "cuda": torch.version.cuda}

    def synchronize(self) -> None:
        """Wait for all that is enqueued."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def stream(self) -> Any:
        """Make a stream of its own; None where there are none."""
        return torch.cuda.Stream() if self.is_gpu else None

    def mark(self) -> Callable[[], object]:
        """Mark this place in the current stream; give what waits until it is reached."""
        if not self.is_gpu:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def held_bytes(self) -> int:
        """Give the device memory that tensors take now."""
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    def most_held_bytes(self) -> int:
        """Give the most device memory that tensors took since `forget_peak`."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def forget_peak(self) -> None:
        """Let the high-water mark begin at what is held now."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()


class PinnedArena:
    """Touched host memory that the device copies to directly.

    Attributes:
        tensor: its bytes.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._arena = device, raw.Arena(nbytes, touched=False)
        self.tensor = torch.frombuffer(self._arena.view, dtype=torch.uint8)
        self.tensor.zero_()
        if device.is_gpu and int(torch.cuda.cudart().cudaHostRegister(self._arena.address, nbytes, 0)):
            raise MemoryError(f"{nbytes} bytes can't be pinned")

    def close(self) -> None:
        """Give the memory back."""
        if self._device.is_gpu:
            torch.cuda.cudart().cudaHostUnregister(self._arena.address)


class Pinned:
    """Counts the memory that this process pins: by registering its own, or by torch's allocator of such memory.

    Memory of another process isn't seen; nobody here pins any there.
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.is_gpu:
            runtime = torch.cuda.cudart()
            runtime.cudaHostRegister, runtime.cudaHostUnregister = self._register, self._unregister

    def _add(self, address: int, nbytes: int, flags: int) -> Any:
        result = self._register(address, nbytes, flags)
        if int(result) == 0:
            with self._lock:
                self._sizes[address] = nbytes
                self._most = max(self._most, sum(self._sizes.values()))
        return result

    def _remove(self, address: int) -> Any:
        with self._lock:
            self._sizes.pop(address, None)
        return self._unregister(address)

    def held_bytes(self) -> int:
        """Give what is pinned now."""
        with self._lock:
            return sum(self._sizes.values()) + self._of_torch("current")

    def most_bytes(self) -> int:
        """Give the most that was pinned since `forget_peak`."""
        with self._lock:
            return self._most + self._of_torch("peak")

    def forget_peak(self) -> None:
        """Let the high-water mark begin at what is pinned now."""
        with self._lock:
            self._most = sum(self._sizes.values())
        if self._device.is_gpu:
            torch.cuda.memory.reset_peak_host_memory_stats()

    def _of_torch(self, which: str) -> int:
        return torch.cuda.memory.host_memory_stats().get(f"allocated_bytes.{which}", 0) if self._device.is_gpu else 0
