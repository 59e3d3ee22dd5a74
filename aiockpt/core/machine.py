"""Facts about the machine: block size, memory, CPUs, its C library, and its Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from aiockpt.errors import AiockptError

BLOCK_BYTES = 4096
"""The unit of direct I/O: offsets, lengths and addresses are multiples of it."""


def available_memory_bytes() -> int:
    """Return the memory that is available without swapping, in the machine and in the control group."""
    available = 1 << 40  # where there is no /proc
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, max(0, limit - used))
    return available


def memory_share_bytes() -> int:
    """Return how much memory one rank may take: its share of half of what is available.

    The ranks of a machine ask at the same moment, and locked memory can't be swapped out.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun, and by others that follow it
    return available_memory_bytes() // 2 // max(1, int(ranks) if ranks.isdecimal() else 1)


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_program() -> str:
    """Return the path of a Python that can run a process beside this one; AiockptError if none is known.

    In a frozen program ``sys.executable`` is that program: started as a Python, it would do all that it does again.
    """
    import multiprocessing.spawn  # the writer process does without it

    # As multiprocessing does: a program that embeds Python names its interpreter with set_executable.
    path = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable or "")
    names = " ".join(map(os.path.basename, (path, os.path.realpath(path))))
    if getattr(sys, "frozen", False) or not re.search("python|pypy|graalpy", names, re.IGNORECASE):
        what = "is a frozen program" if getattr(sys, "frozen", False) else "is no Python by its name"
        raise AiockptError(
            f"no process can be started beside this one: {path or 'sys.executable, which is not set,'} {what}. Save "
            "with writer='thread'; if this program only embeds Python, name one by multiprocessing.set_executable"
        )
    return path


@cache
def libc() -> Any:
    """Return the C library. Its errno is in `ctypes.get_errno`, since the interpreter changes the real one."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
