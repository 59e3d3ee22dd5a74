"""The memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path


def peak_growth(call: Callable[[], object]) -> int:
    """Run a call; return by how many bytes the peak of the resident memory exceeded its size before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def settled_bytes() -> int:
    """Return the size of the resident memory, without what was freed and is kept for later by glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{name}:"))
