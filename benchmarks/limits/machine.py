"""The machine: facts about it, and functions that bring it into a known state before a measurement."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import psutil
import torch

_PACKAGES = (
    "aiockpt",
    "torch",
    "safetensors",
    "torch_checkpointing",
    "runai-model-streamer",
    "fastsafetensors",
    "torchsnapshot",
    "orbax-checkpoint",
    "uvloop",
    "numpy",
)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def facts(directory: Path) -> dict[str, object]:
    """Return the facts that figures depend on: hardware, kernel, file system, versions, and the load average."""
    return {
        "cpu": _cpu(),
        "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "file_system": file_system(directory),
        "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else None,
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def file_system(directory: Path) -> str:
    """Return the type of the file system that holds a directory."""
    path = directory.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Others:
    """The load on the cores by other processes, which shows how far the figures can be trusted.

    Attributes:
        share: the share of all cores that other processes used while the context was open.
    """

    def __enter__(self) -> Self:
        self._started, self._used = time.monotonic(), self._used_s()
        return self

    def __exit__(self, *_error: object) -> None:
        passed = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        self.share = max(0.0, self._used_s() - self._used) / passed

    @staticmethod
    def _used_s() -> float:
        """Return the CPU seconds of all but this process and its children, with interrupts and stolen time."""
        whole = psutil.cpu_times()
        busy = sum(getattr(whole, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        process = psutil.Process()
        ours = [*process.cpu_times()[:4]]  # user, system, and both of children that have ended
        for child in process.children(recursive=True):
            ours += child.cpu_times()[:4]
        return busy - sum(ours)


def settle() -> None:
    """Collect garbage, return malloc's free memory to the kernel, and write dirty pages to the disk."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    os.sync()


def remove(path: Path) -> None:
    """Remove a file or a directory, and sync."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def files_under(path: Path) -> list[Path]:
    """Return all files under a directory; for a file, the file itself."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def sync_files(paths: Iterable[Path]) -> None:
    """Sync files that their writer did not sync."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_from_cache(paths: Iterable[Path]) -> str:
    """Drop files from the page cache; files must not be mapped.

    Returns:
        The means that this process is permitted to use.
    """
    paths = list(paths)
    sync_files(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        DROP_CACHES.write_text("1")
    except OSError:
        return "posix_fadvise"
    return "posix_fadvise and drop_caches"


def bring_into_cache(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    buffer = bytearray(16 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
